"""Random graphs: linear, branching, unrolled with shared weights, turned around, and convolutional."""

from __future__ import annotations

from hypothesis import strategies as st

from soapstone.graph import Graph, GraphBuilder

SIZES = st.sampled_from([2, 4, 6, 8])


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A small training graph: an input, a body of one of five forms, and a loss that is a sum, perhaps
    divided."""
    build = GraphBuilder(draw(st.sampled_from(["net", "a b", 'quo"te'])))
    form = draw(st.sampled_from([_linear, _branching, _unrolled, _turned, _convolutional]))
    top = form(draw, build)
    (loss,) = build.add("sum", [top], {"dim": tuple(range(len(build.values[top].shape)))}, name="loss")
    if draw(st.booleans()):
        by = build.input("count", (), samples=None) if draw(st.booleans()) else 3.0
        (loss,) = build.add("div", [loss, by], name="mean")
    return build.graph(loss=loss)


def _rows(draw: st.DrawFn, build: GraphBuilder) -> tuple[str, int]:
    """An input of samples that are rows, and their width."""
    batch, width = draw(SIZES), draw(SIZES)
    return build.input("x", (batch, width)), width


def _layer(build: GraphBuilder, x: str, wide: int, out: int, name: str, weight: str | None = None) -> str:
    shared = weight or build.weight(f"{name}.weight", (out, wide))
    (y,) = build.add("linear", [x, shared, None], name=name, scope=name)
    return y


def _linear(draw: st.DrawFn, build: GraphBuilder) -> str:
    x, width = _rows(draw, build)
    for i in range(draw(st.integers(1, 4))):
        out = draw(SIZES)
        (x,) = build.add("relu", [_layer(build, x, width, out, f"fc{i}")], name=f"relu{i}")
        width = out
    return x


def _branching(draw: st.DrawFn, build: GraphBuilder) -> str:
    x, width = _rows(draw, build)
    branches = [_layer(build, x, width, draw(SIZES), f"branch{i}") for i in range(draw(st.integers(2, 3)))]
    (joined,) = build.add("concat", branches, {"dim": 1}, name="joined")
    (scaled,) = build.add("mul", [joined, draw(st.sampled_from([0.5, 2, -1.0]))], name="scaled")
    (added,) = build.add("add", [scaled, joined], name="added")
    return added


def _unrolled(draw: st.DrawFn, build: GraphBuilder) -> str:
    x, width = _rows(draw, build)
    weight = build.weight("shared", (width, width))
    for i in range(draw(st.integers(2, 4))):
        step = _layer(build, x, width, width, f"step{i}", weight)
        (x,) = build.add("add", [step, x], name=f"sum{i}")
    return x


def _turned(draw: st.DrawFn, build: GraphBuilder) -> str:
    """Features in groups, turned around by views as attention does with its heads."""
    x, width = _rows(draw, build)
    batch, out = build.values[x].shape[0], draw(st.sampled_from([4, 8]))
    y = _layer(build, x, width, out, "fc0")
    groups = draw(st.sampled_from([2, 4]))
    (y,) = build.add("reshape", [y], {"shape": (batch, groups, out // groups)}, name="apart")
    order = draw(st.sampled_from([(0, 2, 1), (1, 0, 2), (2, 1, 0), (0, 1, 2)]))
    (y,) = build.add("permute", [y], {"dims": order}, name="turned")
    (y,) = build.add(draw(st.sampled_from(["relu", "softmax"])), [y], name="inside")
    if draw(st.booleans()):
        (y,) = build.add("permute", [y], {"dims": tuple(order.index(i) for i in range(3))}, name="back")
        (y,) = build.add("reshape", [y], {"shape": (batch, out)}, name="together")
        y = _layer(build, y, out, draw(SIZES), "fc1")
    return y


def _convolutional(draw: st.DrawFn, build: GraphBuilder) -> str:
    """Convolutions with halos, some with batch norm or a residual connection, perhaps a pool."""
    channels, size = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([4, 6]))
    x = build.input("x", (draw(st.sampled_from([2, 4])), channels, size, size))
    for i in range(draw(st.integers(1, 3))):
        out, window = draw(st.sampled_from([2, 4])), draw(st.sampled_from([1, 3]))
        weight = build.weight(f"conv{i}.weight", (out, channels, window, window))
        bias = build.weight(f"conv{i}.bias", (out,)) if draw(st.booleans()) else None
        pads = {"ph": window // 2, "pw": window // 2}
        (y,) = build.add("conv2d", [x, weight, bias], pads, name=f"conv{i}")
        if draw(st.booleans()):
            scale, shift = build.weight(f"bn{i}.scale", (out,)), build.weight(f"bn{i}.shift", (out,))
            (y,) = build.add("batch_norm", [y, scale, shift, None, None], name=f"bn{i}")
        if i and out == channels and draw(st.booleans()):
            (y,) = build.add("add", [y, x], name=f"residual{i}")
        x, channels = y, out
    if draw(st.booleans()):
        (x,) = build.add("max_pool2d", [x], name="pool")
    return x


def layers(count: int, width: int = 2048, batch: int = 4096) -> Graph:
    """One linear layer after the other."""
    b = GraphBuilder("layers")
    y = b.input("x", (batch, width), samples=0)
    for i in range(count):
        (y,) = b.add("linear", [y, b.weight(f"{i}.weight", (width, width)), None], name=f"layer{i}")
    (loss,) = b.add("sum", [y], {"dim": (0, 1)}, name="loss")
    return b.graph(loss=loss)
