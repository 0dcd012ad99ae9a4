"""Random graphs: linear, branching, and unrolled with shared weights."""

from __future__ import annotations

from hypothesis import strategies as st

from soapstone.graph import Graph, GraphBuilder

SIZES = st.sampled_from([2, 4, 6, 8])


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A small training graph: a stem, a body of one of three forms, and a summed loss."""
    build = GraphBuilder(draw(st.sampled_from(["net", "a b", 'quo"te'])))
    batch, width = draw(SIZES), draw(SIZES)
    x = build.input("x", (batch, width))
    form = draw(st.sampled_from([_linear, _branching, _unrolled]))
    top = form(draw, build, x, width)
    (loss,) = build.add("sum", [top], {"dim": (0, 1)}, name="loss")
    return build.graph(loss=loss)


def _layer(build: GraphBuilder, x: str, wide: int, out: int, name: str, weight: str | None = None) -> str:
    shared = weight or build.weight(f"{name}.weight", (out, wide))
    (y,) = build.add("linear", [x, shared, None], name=name, scope=name)
    return y


def _linear(draw: st.DrawFn, build: GraphBuilder, x: str, width: int) -> str:
    for i in range(draw(st.integers(1, 4))):
        out = draw(SIZES)
        (x,) = build.add("relu", [_layer(build, x, width, out, f"fc{i}")], name=f"relu{i}")
        width = out
    return x


def _branching(draw: st.DrawFn, build: GraphBuilder, x: str, width: int) -> str:
    branches = [_layer(build, x, width, draw(SIZES), f"branch{i}") for i in range(draw(st.integers(2, 3)))]
    (joined,) = build.add("concat", branches, {"dim": 1}, name="joined")
    (scaled,) = build.add("mul", [joined, draw(st.sampled_from([0.5, 2, -1.0]))], name="scaled")
    (added,) = build.add("add", [scaled, joined], name="added")
    return added


def _unrolled(draw: st.DrawFn, build: GraphBuilder, x: str, width: int) -> str:
    weight = build.weight("shared", (width, width))
    for i in range(draw(st.integers(2, 4))):
        step = _layer(build, x, width, width, f"step{i}", weight)
        (x,) = build.add("add", [step, x], name=f"sum{i}")
    return x
