"""The machine-readable form of a graph: plain data that JSON can hold.

`from_document(to_document(graph)) == graph`. The document also carries what follows from the
graph (kinds of dims, flops, bytes), for readers that have no operators of their own; reading
ignores those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from soapstone.errors import GraphError
from soapstone.graph.graph import Graph, Node, Role, Value
from soapstone.graph.verify import verify

VERSION = 1


def to_document(graph: Graph) -> dict[str, Any]:
    """The graph as nested dicts and lists."""
    return {
        "format": "soapstone-graph",
        "version": VERSION,
        "name": graph.name,
        "parameters": graph.parameter_count,
        "forward_flops": graph.forward_flops,
        "samples": graph.sample_count,
        "values": [_value_document(value) for value in graph.values.values()],
        "nodes": [_node_document(graph, node) for node in graph.nodes],
        "loss": graph.loss,
        "outputs": list(graph.outputs),
        "updates": dict(graph.updates),
        "counters": dict(graph.counters),
    }


def _value_document(value: Value) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": value.name,
        "role": value.role.value,
        "dtype": value.dtype,
        "shape": list(value.shape),
        "bytes": value.size_bytes,
    }
    if value.sources:
        document["sources"] = list(value.sources)
    if value.stored_shape is not None:
        document["stored_shape"] = list(value.stored_shape)
    if value.samples is not None:
        document["samples"] = value.samples
    if value.fill is not None:
        document["fill"] = _plain(value.fill)
    return document


def _node_document(graph: Graph, node: Node) -> dict[str, Any]:
    signature = graph.signature(node)
    return {
        "name": node.name,
        "op": node.op_name,
        "scope": node.scope,
        "operands": [{"value": o} if isinstance(o, str) else _plain(o) for o in node.operands],
        "attrs": {key: _plain(value) for key, value in node.attrs.items()},
        "outputs": list(node.outputs),
        "notation": signature.notation.text,
        "dims": dict(signature.sizes),
        "kinds": {dim: kind.value for dim, kind in graph.kinds(node).items()},
        "flops": node.op.flop_count(signature),
    }


def _plain(value: Any) -> Any:
    """An attribute as JSON holds it: tuples as lists, numbers that JSON lacks by name."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    return value


def _attr(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_attr(item) for item in value)
    return float(value["number"]) if isinstance(value, dict) else value


def from_document(document: Any, origin: str = "graph document") -> Graph:
    """The graph that a document holds, verified; `origin` is named in errors."""
    if not isinstance(document, Mapping) or document.get("format") != "soapstone-graph":
        raise GraphError(f"{origin} is not a Soapstone graph: write one with `soapstone graph MODEL --json`")
    if document.get("version") != VERSION:
        raise GraphError(
            f"{origin} has version {document.get('version')!r}; this Soapstone reads version {VERSION}"
        )
    try:
        values = {entry["name"]: _value(entry) for entry in document["values"]}
        nodes = tuple(_node(entry) for entry in document["nodes"])
        graph = Graph(
            name=str(document["name"]),
            values=values,
            nodes=nodes,
            loss=document["loss"],
            outputs=tuple(document["outputs"]),
            updates=dict(document["updates"]),
            counters=dict(document["counters"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GraphError(f"{origin} is damaged: {type(error).__name__} at {error}") from error
    return verify(graph)


def _value(entry: Mapping[str, Any]) -> Value:
    stored = entry.get("stored_shape")
    return Value(
        name=entry["name"],
        shape=tuple(int(size) for size in entry["shape"]),
        dtype=entry["dtype"],
        role=Role(entry["role"]),
        sources=tuple(entry.get("sources", ())),
        stored_shape=None if stored is None else tuple(stored),
        samples=entry.get("samples"),
        fill=_attr(entry.get("fill")),
    )


def _node(entry: Mapping[str, Any]) -> Node:
    return Node(
        name=entry["name"],
        op_name=entry["op"],
        operands=tuple(
            o["value"] if isinstance(o, dict) and "value" in o else _attr(o) for o in entry["operands"]
        ),
        outputs=tuple(entry["outputs"]),
        attrs={key: _attr(value) for key, value in entry["attrs"].items()},
        scope=entry["scope"],
    )
