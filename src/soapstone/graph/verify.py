"""The laws of a graph, one function each, and `verify`, which holds a graph to all of them."""

from __future__ import annotations

from collections.abc import Iterator

from soapstone.errors import GraphError
from soapstone.graph.graph import ITEM_BYTES, Graph, Role


def verify(graph: Graph) -> Graph:
    """The graph itself, if it obeys every law; otherwise an error that says which node breaks one."""
    for law in LAWS:
        for complaint in law(graph):
            raise GraphError(f"graph '{graph.name}': {complaint}")
    return graph


def values_are_known_types(graph: Graph) -> Iterator[str]:
    """Every value has a known dtype and no negative size."""
    for value in graph.values.values():
        if value.dtype not in ITEM_BYTES:
            yield f"value '{value.name}' has the unknown dtype '{value.dtype}'"
        if any(size < 0 for size in value.shape):
            yield f"value '{value.name}' has a negative size in its shape {list(value.shape)}"


def names_are_unique(graph: Graph) -> Iterator[str]:
    """No two nodes share a name, and a value's name is its key."""
    seen: set[str] = set()
    for node in graph.nodes:
        if node.name in seen:
            yield f"two nodes are called '{node.name}'"
        seen.add(node.name)
    for name, value in graph.values.items():
        if name != value.name:
            yield f"value '{value.name}' is filed under '{name}'"


def values_are_written_once(graph: Graph) -> Iterator[str]:
    """A computed value has exactly one writer; any other value has none."""
    writer: dict[str, str] = {}
    for node in graph.nodes:
        for name in node.outputs:
            if name not in graph.values:
                yield f"node '{node.name}' writes the undeclared value '{name}'"
            elif graph.values[name].role is not Role.COMPUTED:
                yield f"node '{node.name}' writes the {graph.values[name].role} '{name}'"
            elif name in writer:
                yield f"nodes '{writer[name]}' and '{node.name}' both write '{name}'"
            writer[name] = node.name
    for value in graph.with_role(Role.COMPUTED):
        if value.name not in writer:
            yield f"no node writes the computed value '{value.name}'"


def values_are_written_before_read(graph: Graph) -> Iterator[str]:
    """Nodes stand in an order in which they can run."""
    ready = {value.name for value in graph.values.values() if value.role is not Role.COMPUTED}
    for node in graph.nodes:
        for name in node.reads:
            if name not in ready:
                state = "before it is written" if name in graph.values else "which is not declared"
                yield f"node '{node.name}' reads '{name}' {state}"
        ready.update(node.outputs)


def shapes_follow_from_operators(graph: Graph) -> Iterator[str]:
    """A node's outputs have the shapes that its operator gives them."""
    for node in graph.nodes:
        derived = graph.signature(node).output_shapes
        stated = tuple(graph.values[name].shape for name in node.outputs)
        if derived != stated:
            node_name = f"node '{node.name}' ({node.op_name})"
            yield f"{node_name} states shapes {_show(stated)} where its operator gives {_show(derived)}"


def weights_come_from_the_module(graph: Graph) -> Iterator[str]:
    """Weights and buffers carry the module's names, and a source belongs to one value."""
    owner: dict[str, str] = {}
    for value in graph.values.values():
        if value.role in (Role.WEIGHT, Role.BUFFER) and not value.sources:
            yield f"{value.role} '{value.name}' has no name in the module"
        for source in value.sources:
            if source in owner:
                yield f"values '{owner[source]}' and '{value.name}' both stand for '{source}' of the module"
            owner[source] = value.name


def ends_exist(graph: Graph) -> Iterator[str]:
    """The loss is a scalar float that exists; outputs exist; updates take a value to a buffer."""
    for name in [*graph.outputs, *graph.updates, *graph.updates.values(), *graph.counters]:
        if name not in graph.values:
            yield f"it ends in '{name}', which is not declared"
    if graph.loss is not None:
        if graph.loss not in graph.values:
            yield f"its loss '{graph.loss}' is not declared"
        elif graph.values[graph.loss].shape != () or not graph.values[graph.loss].is_float:
            yield f"its loss '{graph.loss}' is not a floating-point scalar"
    for name in [*graph.updates, *graph.counters]:
        if name in graph.values and graph.values[name].role is not Role.BUFFER:
            yield f"it updates '{name}', which is a {graph.values[name].role} and not a buffer"


def samples_agree(graph: Graph) -> Iterator[str]:
    """All inputs that count samples count the same number."""
    counted = [v for v in graph.with_role(Role.INPUT) if v.samples is not None]
    for value in counted:
        axis = value.samples
        if axis is None or not 0 <= axis < len(value.shape):
            yield f"input '{value.name}' has no axis {axis} to count samples"
        elif value.shape[axis] != graph.sample_count:
            first = f"'{counted[0].name}' has {graph.sample_count}"
            yield f"input '{value.name}' has {value.shape[axis]} samples where {first}"


def _show(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)


LAWS = (
    values_are_known_types,
    names_are_unique,
    values_are_written_once,
    values_are_written_before_read,
    shapes_follow_from_operators,
    weights_come_from_the_module,
    ends_exist,
    samples_agree,
)
