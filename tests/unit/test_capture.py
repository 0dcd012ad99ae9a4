"""What a module means is what its graph computes.

Each case is a small module in double precision. Its graph, interpreted with the module's own tensors,
whole and with every node cut at random, gives the module's loss, the gradient of every parameter and
the buffers after the step; and both of its written forms read back as the same graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracles.interpreter import Split, at_random, interpreted, loss_and_gradients, tensors_of, whole
from torch import Tensor, nn

from soapstone.errors import CaptureError
from soapstone.frontends.capture import Captured, capture
from soapstone.frontends.losses import INNER, LOSSES, WithLoss
from soapstone.graph import Graph, Role, Value, from_document, parsed, printed, to_document

CLOSE = {"rtol": 1e-8, "atol": 1e-10}
SPLITS: list[Split] = [whole, at_random(seed=1)]


def x(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ids(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape)


def score(output: Any) -> Tensor:
    """A loss that depends differently on every element of every output."""
    if output is None:
        return torch.zeros((), dtype=torch.float64)
    if isinstance(output, Tensor):
        slopes = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
        return (output.tanh() * slopes).sum()
    parts = output.values() if isinstance(output, dict) else output
    return sum((score(part) for part in parts), torch.zeros((), dtype=torch.float64))


class Formula(nn.Module):
    """The score of a function of some parameters and the inputs."""

    def __init__(self, formula: Callable[..., Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.formula = formula
        self.p = nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()})

    def forward(self, *inputs: Tensor) -> Tensor:
        return score(self.formula(self.p, *inputs))


class Scored(nn.Module):
    """The score of another module's output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Tensor:
        return score(self.inner(*inputs))


@dataclass(frozen=True)
class Made:
    """A module to be captured."""

    module: nn.Module
    inputs: tuple[Tensor, ...]


def formula(function: Callable[..., Any], *inputs: Tensor, **shapes: tuple[int, ...]) -> Made:
    return Made(Formula(function, **shapes), inputs)


def scored(module: nn.Module, *inputs: Tensor) -> Made:
    return Made(Scored(module), inputs)


def agrees(made: Made) -> Captured:
    """The captured graph, after it has shown that it computes what the module computes."""
    module, inputs = made.module.double(), made.inputs
    captured = capture(module, inputs)
    graph = captured.graph
    assert parsed(printed(graph)) == graph
    assert from_document(to_document(graph)) == graph
    given = {name: tensor.clone() for name, tensor in tensors_of(captured, module, inputs).items()}
    runs = [loss_and_gradients(graph, given, split) for split in SPLITS]
    values = interpreted(graph, given, at_random(seed=3)) if graph.updates else {}
    before = {name: tensor.clone() for name, tensor in kept(module)}
    expected = module(*(tensor.clone() for tensor in inputs))
    expected.backward()
    for loss, gradients in runs:
        torch.testing.assert_close(loss, expected.detach(), **CLOSE)
        _check_gradients(graph, module, gradients)
    _check_buffers(graph, module, before, values)
    return captured


def kept(module: nn.Module) -> list[tuple[str, Tensor]]:
    """What a module keeps from step to step without training it."""
    frozen = [(name, tensor) for name, tensor in module.named_parameters() if not tensor.requires_grad]
    return [*module.named_buffers(), *frozen]


def _check_gradients(graph: Graph, module: nn.Module, gradients: dict[str, Tensor | None]) -> None:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert {name for value in graph.with_role(Role.WEIGHT) for name in value.sources} == trained
    for name, found in gradients.items():
        value = graph.value(name)
        separate = {id(parameters[source]): parameters[source].grad for source in value.sources}
        known = [gradient for gradient in separate.values() if gradient is not None]
        if not known:
            assert found is None or not found.any(), name
            continue
        assert found is not None, name
        torch.testing.assert_close(found, sum(known).reshape(value.shape), **CLOSE)


def _check_buffers(
    graph: Graph, module: nn.Module, before: dict[str, Tensor], values: dict[str, Tensor]
) -> None:
    after = dict(kept(module))
    for name, value in graph.updates.items():
        torch.testing.assert_close(values[value], after[name], **CLOSE)
    for name, step in graph.counters.items():
        assert int(after[name]) == int(before[name]) + step
    changed = {name for name, buffer in after.items() if not torch.equal(buffer, before[name])}
    assert changed == set(graph.updates) | set(graph.counters)


# -- writes in place ---------------------------------------------------------------------------------


def written_in_place(p: Any, a: Tensor) -> Tensor:
    h = a @ p.w
    h.add_(1)
    h[:, 0] = 0
    h[1] = h[0] * 2
    h[:, 1:3] += 1.5
    h[torch.tensor([2, 3])] = h[torch.tensor([3, 2])]
    h.masked_fill_(a[:, :1] > 0.5, -2.0)
    return F.relu_(h)


def written_through_views(p: Any, a: Tensor) -> Tensor:
    h = a @ p.w
    blocks = h.view(4, 2, 2)
    blocks[:, 1].mul_(3)
    blocks.transpose(0, 1)[0] = 1
    square = torch.zeros_like(h)
    square.copy_(h)
    square[0].zero_()
    square.fill_diagonal_(2)
    return square + h


def writes_its_input(p: Any, a: Tensor) -> Tensor:
    a.mul_(2)
    a[:, 0] = 0
    return a @ p.w


def strided(p: Any, a: Tensor) -> Tensor:
    return torch.stack(
        [(a @ p.w).as_strided((3, 4), (2, 1)), (a @ p.w).T.contiguous().as_strided((3, 4), (1, 1))]
    )


# -- modules that share and keep ---------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is also the head, and a third name that nobody calls."""

    def __init__(self, by_storage: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4).double()
        self.head = nn.Linear(4, 10, bias=False).double()
        weight = self.embedding.weight
        self.head.weight = nn.Parameter(weight.data) if by_storage else weight
        self.spare = self.head

    def forward(self, words: Tensor, next_words: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(words)).flatten(0, 1), next_words.flatten())


class Shared(nn.Module):
    """One layer called twice, with the statistics of both calls; and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(5, 5)
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=0.3)

    def forward(self, a: Tensor) -> Tensor:
        return score(self.norm(self.layer(self.norm(self.layer(a)))))


class Frozen(nn.Module):
    """A matrix and a cell that do not train, before a layer that does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(3, 3), nn.LSTMCell(3, 3), nn.Linear(3, 2)
        self.first.weight.requires_grad_(False)
        self.cell.requires_grad_(False)

    def forward(self, a: Tensor) -> Tensor:
        return score(self.last(self.cell(self.first(a))[0]))


class Kept(nn.Module):
    """Buffers of all kinds: tables, a moving average, counters; saved and not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("table", x(3))
        self.register_buffer("hidden_table", x(3), persistent=False)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("assigned", torch.zeros(3))
        self.register_buffer("hidden_state", torch.ones(3), persistent=False)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("vector_steps", torch.zeros(2, dtype=torch.int64))

    def forward(self, a: Tensor) -> Tensor:
        h = self.layer(a) * self.table + self.hidden_table
        self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        self.assigned = 0.5 * self.assigned + h.detach().amax(0)
        self.hidden_state.copy_(h.detach().amin(0))
        self.steps += 1
        self.vector_steps += 2
        return score(h + self.average + self.assigned)


class Follower(nn.Module):
    """A frozen copy that follows its leader, and is compared with it."""

    def __init__(self) -> None:
        super().__init__()
        self.leader, self.follower = nn.Linear(3, 4), nn.Linear(3, 4).requires_grad_(False)

    def forward(self, a: Tensor) -> Tensor:
        with torch.no_grad():
            self.follower.weight.lerp_(self.leader.weight, 0.1)
            self.follower.bias.data = self.follower.bias.data * 0.9 + self.leader.bias.data * 0.1
        return score(self.leader(a) - self.follower(a))


class Codebook(nn.Module):
    """Vector quantisation: the nearest of a table's rows, which move towards what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.register_buffer("rows", x(5, 4))

    def forward(self, a: Tensor) -> Tensor:
        h = self.encoder(a)
        nearest = (h[:, None] - self.rows).square().sum(-1).argmin(-1)
        found = self.rows[nearest]
        with torch.no_grad():
            self.rows.lerp_(F.one_hot(nearest, 5).to(h.dtype).T @ h, 0.1)
        return score(h + (found - h).detach()) + F.mse_loss(h, found.detach())


class Cells(nn.Module):
    """A recurrent cell over three steps; `also` uses one of its weights elsewhere."""

    def __init__(self, cell: nn.Module, also: bool = False) -> None:
        super().__init__()
        self.cell, self.also = cell, also

    def forward(self, a: Tensor) -> Tensor:
        state = None
        for step in range(3):
            state = self.cell(a[:, step], state)
        elsewhere = F.linear(a[:, 0], self.cell.weight_ih) if self.also else torch.zeros(1)
        return score([elsewhere, *state] if isinstance(state, tuple) else state)


class LastStates(nn.Module):
    """An LSTM that is given its first states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)

    def forward(self, a: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return score(self.lstm(a, (h, c)))


class Attends(nn.Module):
    """nn.MultiheadAttention as callers use it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padded: Tensor | None = None) -> Tensor:
        return score(self.attention(q, k, v, key_padding_mask=padded, need_weights=padded is None))


def attended(p: Any, q: Tensor, kept: Tensor) -> list[Tensor]:
    attention = F.scaled_dot_product_attention
    return [
        attention(q @ p.w, q, q, is_causal=True),
        attention(q, q @ p.w, q, attn_mask=kept[:, None, None]),
        attention(q, q, q @ p.w, attn_mask=p.bias, scale=0.3),
        attention(q @ p.w, q[:, :1], q[:, :1], enable_gqa=True),
    ]


def weighted_bags(p: Any, words: Tensor, weights: Tensor) -> Tensor:
    return F.embedding_bag(words, p.w, per_sample_weights=weights, mode="sum")


class Named(nn.Module):
    """Names that are no identifiers, and names that operators have too."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.ParameterDict({"a-b": x(3), "c d": x(3), "x:y;%é": x(3)})
        self.m = nn.ModuleDict({"k/é": nn.Linear(3, 3)})
        self.add = nn.Parameter(x(3))
        self.register_buffer("arange", x(3))

    def forward(self, mul: Tensor) -> Tensor:
        steps = torch.arange(3)
        h = self.m["k/é"](mul * self.p["a-b"] + self.p["c d"]) * self.p["x:y;%é"]
        return score(h * steps + self.add + self.arange * steps)


def pieces(p: Any, a: Tensor) -> list[Tensor]:
    h = a @ p.w
    parts = [*h.split(3, 1), *h.split([1, 2, 1], 1), *h.chunk(3, -1), *h.unbind(1), *h.tensor_split(3, -1)]
    joined = torch.cat([torch.stack([h, h * 2], 1), torch.zeros(2, 1, 4, dtype=h.dtype)], 1)
    return [*(part * i for i, part in enumerate(parts)), joined, torch.cat([h, a], -1)]


def contractions(p: Any, a: Tensor) -> list[Tensor]:
    return [
        torch.einsum("bij,kj->bik", a, p.w),
        torch.einsum("bij,bkj,lj->bikl", a, a, p.w),
        torch.einsum("...d,ed->...e", a, p.w),
        torch.einsum("bij->b", a @ p.w.T),
        torch.einsum("bii->bi", a @ p.w[:3].T),
    ]


def spectral(p: Any, a: Tensor) -> Tensor:
    return (torch.view_as_complex((a @ p.w).reshape(2, 2, 2)) * 1j + (0.5 + 2j)).abs()


def constants(p: Any, a: Tensor) -> Tensor:
    allowed = torch.arange(4)[None] <= torch.arange(2)[:, None]
    h = (a @ p.w).masked_fill(~allowed, 0) + torch.eye(4, dtype=a.dtype)[:2]
    middle = torch.arange(4.0, dtype=a.dtype).median(0).values * torch.arange(5.0).median()
    return h + torch.tensor([1.0, 2, 3, 4], dtype=a.dtype) * middle


def indexed(p: Any, rows: Tensor, scale: Tensor, unused: Tensor) -> Tensor:
    del unused
    return p.w[rows] * scale + rows[:, None]


IMAGES = (2, 4, 6, 6)
CASES: dict[str, Callable[[], Made]] = {
    "written in place": lambda: formula(written_in_place, x(4, 3), w=(3, 4)),
    "written through views": lambda: formula(written_through_views, x(4, 3), w=(3, 4)),
    "writes its input": lambda: formula(writes_its_input, x(4, 3), w=(3, 4)),
    "strided": lambda: formula(strided, x(2, 3), w=(3, 4)),
    "in-place layers": lambda: scored(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Hardtanh(inplace=True)),
        x(4, 3),
    ),
    "tied": lambda: Made(Tied(), (ids(2, 3, below=10), ids(2, 3, below=10))),
    "tied by storage": lambda: Made(Tied(by_storage=True), (ids(2, 3, below=10), ids(2, 3, below=10))),
    "shared": lambda: Made(Shared(), (x(4, 3),)),
    "frozen": lambda: Made(Frozen(), (x(4, 3),)),
    "follower": lambda: Made(Follower(), (x(4, 3),)),
    "codebook": lambda: Made(Codebook(), (x(6, 3),)),
    "buffers": lambda: Made(Kept(), (x(4, 3),)),
    "batch norm": lambda: scored(
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=0.3, eps=1e-3)), x(*IMAGES)
    ),
    "batch norm without state": lambda: scored(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False, track_running_stats=False)), x(4, 3)
    ),
    "instance norm with state": lambda: scored(
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True), x(*IMAGES)
    ),
    "lstm": lambda: scored(nn.LSTM(3, 4, num_layers=2), x(5, 2, 3)),
    "lstm, both directions": lambda: scored(
        nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True, bias=False), x(2, 5, 3)
    ),
    "lstm, first states": lambda: Made(LastStates(), (x(5, 2, 3), x(1, 2, 4), x(1, 2, 4))),
    "lstm, projected": lambda: scored(nn.LSTM(3, 4, proj_size=2), x(5, 2, 3)),
    "gru": lambda: scored(nn.GRU(3, 4, num_layers=2, bidirectional=True, batch_first=True), x(2, 5, 3)),
    "rnn": lambda: scored(nn.RNN(3, 4, nonlinearity="relu"), x(5, 2, 3)),
    "lstm cell": lambda: Made(Cells(nn.LSTMCell(3, 4)), (x(2, 3, 3),)),
    "lstm cell, weight used twice": lambda: Made(Cells(nn.LSTMCell(3, 4), also=True), (x(2, 3, 3),)),
    "gru cell": lambda: Made(Cells(nn.GRUCell(3, 4)), (x(2, 3, 3),)),
    "rnn cell": lambda: Made(Cells(nn.RNNCell(3, 4, bias=False)), (x(2, 3, 3),)),
    "attention layer": lambda: Made(Attends(batch_first=True), (x(2, 5, 8), x(2, 4, 8), x(2, 4, 8))),
    "attention layer, masked": lambda: Made(
        Attends(kdim=6, vdim=4), (x(5, 2, 8), x(3, 2, 6), x(3, 2, 4), torch.eye(2, 3).bool())
    ),
    "encoder layer": lambda: scored(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="gelu"), x(2, 5, 8)
    ),
    "attention": lambda: formula(
        attended, x(2, 2, 5, 4), torch.ones(2, 5).tril(2).bool(), w=(4, 4), bias=(2, 5, 5)
    ),
    "bags": lambda: scored(nn.EmbeddingBag(9, 4, mode="sum"), ids(3, 5, below=9)),
    "bags by offsets": lambda: scored(nn.EmbeddingBag(9, 4), ids(7, below=9), torch.tensor([0, 3, 3])),
    "bags with weights": lambda: formula(weighted_bags, ids(3, 5, below=9), x(3, 5), w=(9, 4)),
    "pieces": lambda: formula(pieces, x(2, 3), w=(3, 4)),
    "contractions": lambda: formula(contractions, x(2, 3, 4), w=(5, 4)),
    "group and instance norm": lambda: scored(
        nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm([6, 6]), nn.RMSNorm(6)),
        x(*IMAGES),
    ),
    "shuffled and upsampled": lambda: scored(
        nn.Sequential(nn.Conv2d(4, 8, 1), nn.PixelShuffle(2), nn.Upsample(scale_factor=2)), x(2, 4, 3, 3)
    ),
    "convolutions of one axis": lambda: scored(
        nn.Sequential(
            nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"),
            nn.ConvTranspose1d(6, 4, 3, stride=2, output_padding=1),
        ),
        x(2, 4, 7),
    ),
    "transposed convolution": lambda: scored(nn.ConvTranspose2d(4, 6, 4, 2, 1, groups=2), x(2, 4, 3, 3)),
    "names": lambda: Made(Named(), (x(4, 3),)),
    "complex numbers": lambda: formula(spectral, x(2, 3), w=(3, 4)),
    "no elements": lambda: formula(lambda p, a: [a[:0] @ p.w, a @ p.w], x(2, 3), w=(3, 4)),
    "constants": lambda: formula(constants, x(2, 3), w=(3, 4)),
    "integers, a scalar, an unused input": lambda: formula(
        indexed, torch.tensor([0, 2, 1]), x(), x(7, 7), w=(3, 4)
    ),
    "vmap": lambda: formula(lambda p, a: torch.vmap(lambda row: row @ p.w)(a), x(2, 3), w=(3, 4)),
}


@cache
def shown(case: str) -> Captured:
    torch.manual_seed(0)
    return agrees(CASES[case]())


@pytest.mark.parametrize("case", CASES)
def test_graph_computes_what_the_module_computes(case: str) -> None:
    shown(case)


# -- losses ------------------------------------------------------------------------------------------

LABELS = torch.tensor([1, 2, 3, 0])
Criterion = Callable[..., Tensor]
CRITERIA: dict[str, tuple[Criterion, Callable[[], Tensor]]] = {
    "ignored labels": (F.cross_entropy, lambda: torch.tensor([1, -100, 3, -100])),
    "another label ignored": (
        lambda y, t: F.cross_entropy(y, t, ignore_index=2, label_smoothing=0.1),
        lambda: LABELS,
    ),
    "weighted classes": (
        lambda y, t: F.cross_entropy(y, t, weight=torch.arange(1.0, 6, dtype=y.dtype)),
        lambda: LABELS,
    ),
    "soft labels": (F.cross_entropy, lambda: x(4, 5).softmax(-1)),
    "nll": (lambda y, t: F.nll_loss(y.log_softmax(-1), t, ignore_index=1), lambda: LABELS),
    "bce": (lambda y, t: F.binary_cross_entropy(y.sigmoid(), t), lambda: x(4, 5).sigmoid()),
    "bce with logits": (
        lambda y, t: F.binary_cross_entropy_with_logits(y, t, pos_weight=torch.tensor(2.0, dtype=y.dtype)),
        lambda: x(4, 5).sigmoid(),
    ),
    "mse": (F.mse_loss, lambda: x(4, 5)),
    "kl": (lambda y, t: F.kl_div(y.log_softmax(-1), t, reduction="batchmean"), lambda: x(4, 5).softmax(-1)),
    "masked": (
        lambda y, t: (y.square().mean(-1) * t).sum() / t.sum().clamp(min=1),
        lambda: torch.tensor([1.0, 0, 1, 1], dtype=torch.float64),
    ),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_losses(name: str) -> None:
    torch.manual_seed(0)
    criterion, target = CRITERIA[name]
    given = target()
    captured = agrees(Made(WithLoss(nn.Linear(3, 5), criterion), (x(4, 3), given)))
    assert not captured.notes
    assert captured.graph.loss is not None


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (2, 5, 3, 3)])
def test_named_losses_are_torchs(name: str, shape: tuple[int, ...]) -> None:
    """Classes are on the last axis, of images on axis 1."""
    torch.manual_seed(0)
    output = x(*shape)
    function = {
        "cross_entropy": F.cross_entropy, "nll": F.nll_loss, "mse": F.mse_loss, "l1": F.l1_loss,
        "smooth_l1": F.smooth_l1_loss, "bce_with_logits": F.binary_cross_entropy_with_logits,
    }[name]  # fmt: skip
    if name not in ("cross_entropy", "nll"):
        target = x(*shape).sigmoid()
        torch.testing.assert_close(LOSSES[name](output, target), function(output, target))
        with pytest.raises(CaptureError, match="needs a target of shape"):
            LOSSES[name](output, target[:1])
        return
    labels = ids(shape[0], *shape[2:], below=5) if len(shape) == 4 else ids(*shape[:-1], below=5)
    expected = function(output.movedim(-1, 1) if len(shape) == 3 else output, labels)
    torch.testing.assert_close(LOSSES[name](output, labels), expected)


# -- what is kept of a module ------------------------------------------------------------------------


def test_tied_weights_keep_all_their_names() -> None:
    for case in "tied", "tied by storage":
        (weight,) = shown(case).graph.with_role(Role.WEIGHT)
        assert weight.name == "embedding.weight"
        assert weight.sources == ("embedding.weight", "head.weight", "spare.weight")


def test_unused_parameter_is_still_a_weight() -> None:
    weights = {value.name for value in shown("shared").graph.with_role(Role.WEIGHT)}
    assert {"unused.weight", "unused.bias"} <= weights


def test_frozen_parameter_is_a_buffer() -> None:
    graph = shown("frozen").graph
    assert [value.name for value in graph.with_role(Role.WEIGHT)] == [
        "first.bias",
        "last.weight",
        "last.bias",
    ]
    assert graph.value("first.weight").role is Role.BUFFER
    assert graph.value("cell.weight_ih").shape == (12, 3)
    assert not graph.updates


def test_cell_weights_are_seen_by_gate_and_stored_as_they_are() -> None:
    graph = shown("lstm cell").graph
    weight = graph.value("cell.weight_ih")
    assert (weight.shape, weight.stored_shape) == ((4, 4, 3), (16, 3))
    graph = shown("lstm cell, weight used twice").graph
    weight = graph.value("cell.weight_ih")
    assert (weight.shape, weight.stored_shape) == ((16, 3), None), "another reader wants it as it is"
    assert graph.value("cell.weight_hh").shape == (4, 4, 4)


def test_counters_are_no_nodes() -> None:
    graph = shown("shared").graph
    assert graph.counters == {"norm.num_batches_tracked": 2}
    assert set(graph.updates) == {"norm.running_mean", "norm.running_var"}
    assert sum(node.op_name == "batch_norm" for node in graph.nodes) == 2


def test_what_depends_on_no_input_is_a_constant() -> None:
    captured = shown("constants")
    names = [node.op_name for node in captured.graph.nodes]
    assert not {"arange", "eye", "le", "median", "opaque"} & set(names)
    constant = {value.name: value for value in captured.graph.with_role(Role.CONSTANT)}
    assert set(constant) == set(captured.constants)
    filled = [value for value in constant.values() if value.fill is not None]
    assert all(bool((captured.constants[v.name] == v.fill).all()) for v in filled)


def test_table_that_is_not_saved_is_no_parameter_of_the_graph() -> None:
    graph = shown("buffers").graph
    assert graph.value("hidden_table").role is Role.BUFFER
    assert graph.counters == {"steps": 1}
    assert set(graph.updates) == {"average", "assigned", "hidden_state", "vector_steps"}


def test_odd_names_survive_both_written_forms() -> None:
    graph = shown("names").graph
    assert {"p.a-b", "p.c d", "p.x:y;%é", "m.k/é.weight", "add"} <= set(graph.values)
    assert parsed(printed(graph)) == graph
    assert 'weight %"p.x:y;%\\u00e9": f64[3] from "p.x:y;%\\u00e9"' in printed(graph)


def test_names_of_a_wrapped_module_are_its_own() -> None:
    made = WithLoss(nn.Sequential(nn.Linear(3, 5)), LOSSES["mse"])
    captured = capture(
        made, (torch.randn(4, 3), torch.randn(4, 5)), prefix=INNER, input_names=made.input_names(2)
    )
    graph = captured.graph
    assert [value.name for value in graph.values.values() if value.role is not Role.COMPUTED] == [
        "0.weight",
        "0.bias",
        "input",
        "target",
    ]
    assert graph.nodes[0].scope == "0"


# -- inputs and outputs ------------------------------------------------------------------------------


def declared(graph: Graph) -> list[Value]:
    return list(graph.with_role(Role.INPUT))


def test_inputs_count_samples_along_their_first_axis() -> None:
    graph = shown("integers, a scalar, an unused input").graph
    assert [(v.shape, v.dtype, v.samples) for v in declared(graph)] == [
        ((3,), "i64", 0),
        ((), "f64", None),
        ((7, 7), "f64", None),
    ]
    assert graph.sample_count == 3


@pytest.mark.parametrize(
    ("samples", "axes"), [(None, [0, None]), (5, [0, None]), (2, [1, 0]), (9, [None, None])]
)
def test_samples_along_another_axis(samples: int | None, axes: list[int | None]) -> None:
    """Said how many there are, an input counts them along the only axis of that size."""
    graph = capture(
        Formula(lambda p, a, b: (a @ p.w) * b[:, None], w=(3, 4)),
        (torch.randn(5, 2, 3), torch.randn(2)),
        samples=samples,
    ).graph
    assert [value.samples for value in declared(graph)] == axes


@pytest.mark.parametrize(
    "output",
    [
        lambda h: (h, h.sum(0), {"more": [h * 2]}),
        lambda h: {"logits": h, "hidden": h.tanh()},
        lambda h: h,
    ],
)
def test_outputs_without_a_loss(output: Callable[[Tensor], Any]) -> None:
    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, a: Tensor) -> Any:
            return output(self.layer(a))

    module, a = Outputs().double(), x(2, 3)
    captured = capture(module, (a,))
    assert captured.graph.loss is None
    values = interpreted(captured.graph, tensors_of(captured, module, (a,)), at_random(seed=1))
    expected = torch.utils._pytree.tree_leaves(module(a))
    assert len(captured.graph.outputs) == len(expected)
    for name, tensor in zip(captured.graph.outputs, expected, strict=True):
        torch.testing.assert_close(values[name], tensor)


# -- precision, chance, and what nobody knows --------------------------------------------------------


def test_autocast_region_becomes_casts() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, a: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                h = self.second(self.first(a).relu())
            return h.float().square().sum()

    torch.manual_seed(0)
    module, a = Mixed(), torch.randn(4, 8)
    captured = capture(module, (a,))
    graph = captured.graph
    assert [graph.value(n.outputs[0]).dtype for n in graph.nodes if n.op_name == "linear"] == ["bf16", "bf16"]
    assert all(value.dtype == "f32" for value in graph.with_role(Role.WEIGHT))
    expected = module(a)
    expected.backward()
    loss, gradients = loss_and_gradients(graph, tensors_of(captured, module, (a,)))
    assert torch.equal(loss, expected.detach())
    assert torch.equal(gradients["first.weight"], module.first.weight.grad)  # type: ignore[arg-type]


def test_dropout_masks_are_the_graphs_own() -> None:
    """They keep the right part, and do not depend on how nodes are cut."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.25), nn.Flatten(0)).double()
    a = x(128, 64)
    captured = capture(module, (a,))
    given = tensors_of(captured, module, (a,))
    (output,) = captured.graph.outputs
    runs = [interpreted(captured.graph, given, split)[output].detach() for split in SPLITS]
    torch.testing.assert_close(runs[0], runs[1], **CLOSE)
    kept = runs[0] != 0
    assert abs(kept.double().mean() - 0.75) < 0.02
    undropped = module[0](a).flatten().detach()
    torch.testing.assert_close(runs[0][kept], undropped[kept] / 0.75)


def test_unknown_operators_stay_whole_and_right() -> None:
    def unknown(p: Any, a: Tensor) -> list[Tensor]:
        factor = torch.linalg.cholesky(p.w @ p.w.T + torch.eye(3, dtype=a.dtype))
        return [
            factor @ torch.special.bessel_j0(torch.special.bessel_j0(a)),
            torch.fft.rfft(a @ p.w[:2]).abs(),
        ]

    torch.manual_seed(0)
    captured = agrees(formula(unknown, x(3, 2), w=(3, 4)))
    assert len(captured.graph.opaque_nodes) == 4
    assert all(not captured.graph.kinds(node) for node in captured.graph.opaque_nodes)
    assert captured.notes == tuple(
        f"operator {name} is not known to Soapstone: it will run whole, on one device"
        for name in (
            "aten.linalg_cholesky.default",
            "aten.special_bessel_j0.default (2 times)",
            "aten.fft_rfft.default",
        )
    )


def test_a_persons_own_operator_keeps_its_backward() -> None:
    """Registered with torch.library, unlike a plain autograd.Function."""

    @torch.library.custom_op("soapstone_tests::scaled", mutates_args=())
    def scaled(a: Tensor, by: float) -> Tensor:
        return a * by

    @scaled.register_fake
    def _(a: Tensor, by: float) -> Tensor:
        del by
        return torch.empty_like(a)

    scaled.register_autograd(lambda _, gradient: (gradient * 3, None))
    torch.manual_seed(0)
    captured = agrees(formula(lambda p, a: scaled(a @ p.w, 2.0), x(2, 3), w=(3, 4)))
    assert "soapstone_tests.scaled.default" in captured.notes[0]
