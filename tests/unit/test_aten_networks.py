"""ATen calls of network layers, read by the operators that claim them, compute what ATen computes:
one by one, and as torch records them for the layers of `torch.nn`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracles.interpreter import at_random, interpreted, tensors_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from soapstone.errors import OpError
from soapstone.frontends.capture import capture
from soapstone.ops import Call, Op, Shard, claimants, lookup

SHORT = {torch.float64: "f64", torch.int64: "i64", torch.bool: "bool"}


@dataclass(frozen=True, eq=False)
class Handle:
    """What a capture function sees of a tensor."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        return SHORT[self.tensor.dtype]


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def chance(*shape: int) -> Tensor:
    return real(*shape).sigmoid()


def label(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(sum(shape)))


def handled(item: Any) -> Any:
    return Handle(item) if isinstance(item, Tensor) else item


def claimed(overload: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Op, Call]:
    """The operator that stands for a call, and how it reads the call."""
    given = [handled(item) for item in args]
    for op in claimants(overload):
        capture = op.aten[overload]
        call = Call(tuple(given)) if capture is None else capture(*given, **kwargs)
        if call is not None:
            return op, call
    raise AssertionError(f"nobody claims {overload}")


def computed(op: Op, call: Call, seed: int = 0) -> tuple[Tensor, ...]:
    shapes = [None if o is None else tuple(getattr(o, "shape", ())) for o in call.operands]
    signature = op.signature(shapes, call.attrs)
    shard = Shard(signature, signature.points, seed)
    operands = [o.tensor if isinstance(o, Handle) else o for o in call.operands]
    return op.run(op.slices(operands, shard), call.attrs, shard)


X1, X2, X3 = real(2, 4, 9), real(2, 4, 8, 7), real(2, 4, 4, 5, 6)
Q, K, V = real(2, 4, 6, 8), real(2, 2, 5, 8), real(2, 2, 5, 8)
W2, B4, B6 = real(6, 2, 3, 3), real(4), real(6)
UP = real(5).abs() + 0.1

CALLS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("conv1d", "conv1d.default", (X1, real(6, 2, 3), B6, [2], [1], [2], 2)),
    ("conv1d", "conv1d.padding", (X1, real(6, 4, 3), B6, [1], "same")),
    ("conv1d", "convolution.default", (X1, real(6, 4, 3), None, [1], [1], [1], False, [0], 1)),
    ("conv2d", "conv2d.default", (X2, real(6, 4, 3, 3))),
    ("conv2d", "conv2d.default", (X2, W2, B6, [2, 1], [1, 0], [1, 2], 2)),
    ("conv2d", "conv2d.padding", (X2, real(6, 4, 3, 1), None, [1, 2], "valid")),
    ("conv2d", "conv2d.padding", (X2, real(6, 4, 3, 5), B6, [1, 1], "same", [1, 1])),
    ("conv_same", "conv2d.padding", (X2, real(6, 4, 4, 3), B6, [1, 1], "same")),
    ("conv2d", "convolution.default", (X2, W2, B6, [1, 1], [1, 1], [1, 1], False, [0, 0], 2)),
    ("conv3d", "conv3d.default", (X3, real(6, 4, 2, 3, 1), B6, [1, 2, 1], [1, 1, 0])),
    ("conv_transpose1d", "conv_transpose1d.default", (X1, real(4, 3, 3), None, [2], [1], [1], 2, [2])),
    ("conv_transpose2d", "conv_transpose2d.input", (X2, real(4, 3, 3, 2), B6, [2, 1], [1, 0], [1, 0], 2)),
    (
        "conv_transpose2d",
        "convolution.default",
        (X2, real(4, 6, 2, 2), B6, [2, 2], [0, 0], [1, 1], True, [0, 0], 1),
    ),
    ("max_pool1d", "max_pool1d.default", (X1, [2], [2])),
    ("max_pool2d", "max_pool2d.default", (X2, [3, 3], [2, 2], [1, 1], [1, 1], True)),
    ("max_pool2d", "max_pool2d.default", (X2, [2, 2])),
    ("max_pool2d", "max_pool2d_with_indices.default", (X2, [3, 2], [2, 1], [1, 1], [2, 1])),
    ("max_pool3d", "max_pool3d.default", (X3, [2, 2, 2])),
    ("avg_pool1d", "avg_pool1d.default", (X1, [3], [2], [1])),
    ("avg_pool2d", "avg_pool2d.default", (X2, [3, 3], [2, 2], [1, 1], True)),
    ("avg_pool2d", "avg_pool2d.default", (X2, [3, 3], [2, 2], [1, 1], True, False)),
    ("avg_pool2d", "avg_pool2d.default", (X2, [2, 3], [], [0, 0], False, True, 4)),
    ("avg_pool3d", "avg_pool3d.default", (X3, [2, 2, 2], [1, 2, 2], [1, 0, 1], False, False)),
    ("adaptive_avg_pool", "adaptive_avg_pool2d.default", (X2, [4, 7])),
    ("adaptive_avg_pool", "adaptive_avg_pool2d.default", (X2, [1, 1])),
    ("adaptive_avg_pool_uneven", "adaptive_avg_pool2d.default", (X2, [3, 9])),
    ("adaptive_avg_pool_uneven", "adaptive_avg_pool1d.default", (X1, [2])),
    ("adaptive_max_pool", "adaptive_max_pool2d.default", (X2, [2, 1])),
    ("adaptive_max_pool_uneven", "adaptive_max_pool1d.default", (X1, [4])),
    ("softmax", "softmax.int", (X2, 1)),
    ("softmax", "_softmax.default", (X2, -1, False)),
    ("log_softmax", "log_softmax.int", (X2, 2, torch.float64)),
    ("layer_norm", "layer_norm.default", (X2, [8, 7], real(8, 7), real(8, 7), 1e-3)),
    ("layer_norm", "native_layer_norm.default", (X1, [9], None, None, 1e-5)),
    ("rms_norm", "rms_norm.default", (X1, [9], real(9))),
    ("rms_norm", "_fused_rms_norm.default", (X1, [9], real(9), 1e-3)),
    ("group_norm", "group_norm.default", (X2, 2, B4, B4, 1e-3, False)),
    ("group_norm", "native_group_norm.default", (X2, B4, None, 2, 4, 56, 2, 1e-5)),
    ("group_norm", "instance_norm.default", (X2, B4, B4, None, None, True, 0.1, 1e-5, False)),
    (
        "batch_norm",
        "_native_batch_norm_legit_functional.default",
        (X2, B4, B4, B4, B4.abs(), True, 0.2, 1e-3),
    ),
    ("batch_norm", "_native_batch_norm_legit.no_stats", (X2, B4, B4, True, 0.1, 1e-5)),
    (
        "batch_norm_inference",
        "_native_batch_norm_legit_no_training.default",
        (X2, B4, B4, B4, B4.abs(), 0.1, 1e-5),
    ),
    ("batch_norm_inference", "batch_norm.default", (X1, None, None, B4, B4.abs(), False, 0.1, 1e-5, False)),
    ("cross_entropy_sum", "cross_entropy_loss.default", (real(6, 5), label(6, below=5), UP, 2, 1, 0.1)),
    ("cross_entropy_each", "cross_entropy_loss.default", (real(6, 5, 4), label(6, 4, below=5), None, 0)),
    ("soft_cross_entropy", "cross_entropy_loss.default", (real(6, 5, 3), chance(6, 5, 3), UP, 1, -100, 0.1)),
    ("nll_sum", "nll_loss_nd.default", (real(6, 5, 2, 2), label(6, 2, 2, below=5), UP, 2, 3)),
    ("nll_each", "nll_loss_nd.default", (real(6, 5, 4), label(6, 4, below=5), None, 0)),
    ("nll_sum", "nll_loss_forward.default", (real(6, 5), label(6, below=5), UP, 2, -100)),
    ("mse_loss", "mse_loss.default", (real(6, 5), real(6, 5))),
    ("l1_loss", "l1_loss.default", (real(6, 5), real(5, 6).T, 2)),
    ("smooth_l1_loss", "smooth_l1_loss.default", (real(6, 5), real(5, 6).T, 0, 0.5)),
    ("huber_loss", "huber_loss.default", (real(6, 5), real(5, 6).T, 1, 0.5)),
    (
        "binary_cross_entropy_with_logits",
        "binary_cross_entropy_with_logits.default",
        (real(6, 5), chance(6, 5), UP, UP),
    ),
    ("binary_cross_entropy", "binary_cross_entropy.default", (chance(6, 5), chance(6, 5), UP, 2)),
    ("poisson_nll_loss", "poisson_nll_loss.default", (real(6, 5), chance(6, 5), True, True, 1e-8, 1)),
    ("hinge_embedding_loss", "hinge_embedding_loss.default", (real(6, 5), real(6, 5).sign(), 0.5)),
    ("soft_margin_loss", "soft_margin_loss.default", (real(6, 5), real(6, 5).sign(), 2)),
    ("kl_div", "kl_div.default", (real(6, 5), chance(6, 5), 2)),
    (
        "rnn_tanh_cell",
        "rnn_tanh_cell.default",
        (real(4, 3), real(4, 5), real(5, 3), real(5, 5), real(5), real(5)),
    ),
    ("sdpa", "scaled_dot_product_attention.default", (Q, Q, Q, None, 0.0, True)),
    ("sdpa", "scaled_dot_product_attention.default", (Q, Q, Q, real(6, 6) > 0)),
    ("embedding", "embedding.default", (real(9, 4), label(2, 3, below=9), 1)),
    (
        "embedding_bag_offsets",
        "embedding_bag.padding_idx",
        (real(9, 4), label(7, below=9), torch.tensor([0, 3, 3]), False, 1, False, None, False, None),
    ),
    (
        "embedding_bag_offsets",
        "embedding_bag.default",
        (real(9, 4), label(7, below=9), torch.tensor([0, 3, 7]), False, 0, False, real(7), True),
    ),
    ("dropout", "native_dropout.default", (X1, 0.5, False)),
]


@pytest.mark.parametrize(
    ("name", "overload", "args"), [pytest.param(*c, id=f"{i}-{c[1]}") for i, c in enumerate(CALLS)]
)
def test_claimed_and_computed_alike(name: str, overload: str, args: tuple[Any, ...]) -> None:
    op, call = claimed(overload, args, {})
    assert op.name == name
    packet, _, variant = overload.partition(".")
    expected = getattr(getattr(torch.ops.aten, packet), variant)(*args)
    expected = tuple(expected) if isinstance(expected, tuple | list) else (expected,)
    outputs = computed(op, call)
    for i, out in enumerate(outputs):
        torch.testing.assert_close(out, expected[call.outputs[i] if call.outputs else i])


@pytest.mark.parametrize(
    ("overload", "args"),
    [
        ("conv2d.default", (real(4, 8, 8), real(6, 4, 3, 3))),
        ("cross_entropy_loss.default", (real(6, 5), label(6, below=5))),
        ("instance_norm.default", (X2, B4, B4, B4, B4.abs(), True, 0.1, 1e-5, False)),
        ("embedding.default", (real(9, 4), label(2, 3, below=9), -1, True)),
        ("scaled_dot_product_attention.default", (Q, K, V)),
    ],
)
def test_what_nobody_claims(overload: str, args: tuple[Any, ...]) -> None:
    """No batch, a mean that depends on the data, hidden state, other gradients: not our operators."""
    with pytest.raises(AssertionError, match="nobody claims"):
        claimed(overload, args, {})


def test_grouped_attention() -> None:
    op, call = claimed("scaled_dot_product_attention.default", (Q, K, V), {"scale": 0.3, "enable_gqa": True})
    expected = torch.ops.aten.scaled_dot_product_attention(Q, K, V, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(computed(op, call)[0], expected)


def test_attention_with_dropout_keeps_its_mean() -> None:
    """Averaged over seeds, dropout leaves attention as it was."""
    op, call = claimed("scaled_dot_product_attention.default", (Q, Q, Q, None, 0.25, True), {})
    assert op.name == "sdpa_dropout"
    mean = sum(computed(op, call, seed)[0] for seed in range(200)) / 200
    expected = torch.ops.aten.scaled_dot_product_attention(Q, Q, Q, is_causal=True)
    assert (mean - expected).abs().max() < 0.4
    assert torch.equal(computed(op, call, 5)[0], computed(op, call, 5)[0])


@pytest.mark.parametrize("weight", [None, UP])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_mean_cross_entropy_is_a_sum_over_a_count(weight: Tensor | None, label_smoothing: float) -> None:
    """Also where labels are ignored: the mean that a graph writes as three nodes."""
    x, target = real(6, 5, 4), label(6, 4, below=5)
    attrs: dict[str, Any] = {"ignore_index": 2, "label_smoothing": label_smoothing}
    operands = tuple(handled(o) for o in (x, target, weight))
    (total,) = computed(lookup("cross_entropy_sum"), Call(operands, attrs))
    (count,) = computed(lookup("label_count"), Call(operands[1:], {"ignore_index": 2}))
    expected = torch.nn.functional.cross_entropy(x, target, weight, **attrs)
    torch.testing.assert_close(total / count, expected)


def test_generators_draw_from_their_distributions() -> None:
    size = (60, 70)
    uniform = computed(lookup("rand"), Call((), {"size": size}))[0]
    assert 0 <= uniform.min() < 0.01
    assert 0.99 < uniform.max() < 1
    normal = computed(lookup("randn"), Call((), {"size": size}))[0]
    assert abs(normal.mean()) < 0.06
    assert abs(normal.std() - 1) < 0.05
    flips = computed(*claimed("bernoulli.p", (real(*size), 0.3), {}))[0]
    assert set(flips.unique().tolist()) == {0.0, 1.0}
    assert abs(flips.mean() - 0.3) < 0.03
    chosen = computed(*claimed("bernoulli.default", (chance(*size),), {}))[0]
    assert abs((chosen - chance(*size)).mean()) < 0.03


def cell_weights(gates: int) -> list[Tensor]:
    return [real(gates * 5, 3), real(gates * 5, 5), real(gates * 5), real(gates * 5)]


def test_lstm_cell_is_torchs() -> None:
    weights = cell_weights(4)
    viewed = [w.view(4, 5, *w.shape[1:]) for w in weights]
    x, h, c = real(2, 3), real(2, 5), chance(2, 5)
    outputs = computed(lookup("lstm_cell"), Call(tuple(handled(o) for o in (x, h, c, *viewed))))
    torch.testing.assert_close(outputs, torch.lstm_cell(x, (h, c), *weights))


def test_gru_cell_is_torchs() -> None:
    weights = cell_weights(3)
    viewed = [w.view(3, 5, *w.shape[1:]) for w in weights]
    x, h = real(2, 3), real(2, 5)
    outputs = computed(lookup("gru_cell"), Call(tuple(handled(o) for o in (x, h, h, *viewed))))
    torch.testing.assert_close(outputs[0], torch.gru_cell(x, h, *weights))


@pytest.mark.parametrize(("kind", "gates"), [("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)])
def test_two_layers_are_one_bidirectional_torch_layer(kind: str, gates: int) -> None:
    forth, back = cell_weights(gates), [w.flip(0) for w in cell_weights(gates)]
    x, h, c = real(4, 2, 3), real(2, 2, 5), chance(2, 2, 5)
    state = (h, c) if kind == "lstm" else h
    y, *last = getattr(torch, kind)(x, state, [*forth, *back], True, 1, 0.0, False, True, False)
    for i, weights in enumerate((forth, back)):
        states = [h[i], c[i]] if kind == "lstm" else [h[i]]
        call = Call(tuple(handled(o) for o in (x, *states, *weights)), {"reverse": i == 1})
        outputs = computed(lookup(f"{kind}_layer"), call)
        torch.testing.assert_close(outputs[0], y[..., i * 5 : (i + 1) * 5])
        for out, want in zip(outputs[1:], last, strict=True):
            torch.testing.assert_close(out, want[i])


def split_batch_norm(x: Tensor, parts: int, **attrs: Any) -> list[tuple[Tensor, ...]]:
    """Batch norm over a batch split into parts, as the runtime runs it."""
    op = lookup("batch_norm")
    channels = x.shape[1]
    operands = (x, torch.ones(channels), torch.zeros(channels), torch.zeros(channels), torch.ones(channels))
    signature = op.signature([tuple(o.shape) for o in operands], attrs)
    shards = [Shard(signature, box) for box in signature.shards({"b": parts})]
    pieces = [op.slices(operands, shard) for shard in shards]
    assert op.statistics is not None
    stats = (
        op.statistics.merge([op.statistics.local(*piece) for piece in pieces])
        if attrs.get("sync", True)
        else None
    )
    return [op.run(piece, attrs, shard, stats) for piece, shard in zip(pieces, shards, strict=True)]


def test_batch_norm_statistics_keep_their_digits() -> None:
    """In single precision, with a mean a hundred times the deviation."""
    x = (real(64, 3, 4, 4) + 100).float()
    running = split_batch_norm(x, 8, momentum=1.0)[0][2]
    torch.testing.assert_close(running, x.double().var((0, 2, 3)).float(), rtol=1e-5, atol=0)


def test_batch_norm_without_sync_is_every_shards_own() -> None:
    x = real(8, 3, 2, 2).float()
    parts = split_batch_norm(x, 2, sync=False)
    for part, own in zip(parts, x.chunk(2), strict=True):
        torch.testing.assert_close(part[0], torch.nn.functional.batch_norm(own, None, None, training=True))


def test_batch_norm_of_one_value_per_channel_is_refused() -> None:
    """torch's own operator would give a running variance of nan."""
    with pytest.raises(OpError, match="one value per channel"):
        split_batch_norm(real(2, 3).float(), 2, sync=False)
    assert len(split_batch_norm(real(2, 3).float(), 2)) == 2


class Layers(nn.Module):
    """Layers beside each other, all of one input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf for layer in self.layers for leaf in tree_leaves(layer(x)))


OF_IMAGES = Layers(
    nn.Conv2d(4, 4, (4, 3), padding="same"),
    nn.Conv2d(4, 4, 3, groups=4, stride=2, padding=1),
    nn.ConvTranspose2d(4, 6, 3, padding=1, stride=2, output_padding=1, groups=2),
    nn.MaxPool2d(3, 2, 1),
    nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    nn.AdaptiveAvgPool2d(1),
    nn.AdaptiveAvgPool2d((3, 2)),
    nn.AdaptiveMaxPool2d((4, 2)),
    nn.LPPool2d(2, 2),
    nn.BatchNorm2d(4),
    nn.BatchNorm2d(4, affine=False, track_running_stats=False),
    nn.InstanceNorm2d(4, affine=True),
    nn.GroupNorm(2, 4),
    nn.LocalResponseNorm(3),
    nn.Softmax2d(),
)
OF_SEQUENCES = Layers(
    nn.Conv1d(6, 4, 3, padding=1, padding_mode="reflect"),
    nn.ConvTranspose1d(6, 4, 2, stride=2),
    nn.MaxPool1d(2),
    nn.AvgPool1d(2),
    nn.BatchNorm1d(6),
    nn.LayerNorm([6, 8]),
    nn.RMSNorm(8),
    nn.LogSoftmax(1),
    nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
)
OF_VECTORS = Layers(nn.LSTMCell(8, 4), nn.GRUCell(8, 4), nn.RNNCell(8, 4), nn.BatchNorm1d(8), nn.Softmin(1))
RECURRENT = Layers(nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True), nn.GRU(8, 4, 2))
OUT_OF_TRAINING = Layers(nn.BatchNorm2d(4).eval(), nn.Dropout2d(0.5).eval()).eval()


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        pytest.param(OF_IMAGES, (4, 4, 8, 6), id="images"),
        pytest.param(OF_SEQUENCES, (4, 6, 8), id="sequences"),
        pytest.param(OF_VECTORS, (4, 8), id="vectors"),
        pytest.param(RECURRENT, (4, 6, 8), id="recurrent"),
        pytest.param(OUT_OF_TRAINING, (4, 4, 8, 6), id="out of training"),
    ],
)
def test_layers_as_torch_records_them(layers: nn.Module, shape: tuple[int, ...]) -> None:
    """Captured without a call left to torch alone, and computed in random shards."""
    layers, x = layers.double(), real(*shape)
    captured = capture(layers, (x,), train=layers.training)
    assert not captured.notes
    given = {name: t.detach().clone() for name, t in tensors_of(captured, layers, (x,)).items()}
    expected = layers(x)
    for seed in range(3):
        values = interpreted(captured.graph, given, at_random(seed))
        for name, want in zip(captured.graph.outputs, expected, strict=True):
            torch.testing.assert_close(values[name], want, msg=lambda text, n=name: f"{n}: {text}")
