"""Small modules, each with something that a capture may get wrong, by what it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracles.capturing import Made, agrees, formula, ids, score, scored, x
from soapstone.frontends.capture import Captured

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
