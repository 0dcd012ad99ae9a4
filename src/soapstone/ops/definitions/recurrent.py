"""Recurrent cells and layers.

A cell's weights are seen as (gates, hidden units, inputs), so that a part of the hidden units is a
box of them: `o` runs over the units that a cell computes, `k` over the same units as they were a
step before, all of which every unit reads. A layer is one direction of one layer over a whole
sequence, run by torch in one call; only its batch can be split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from soapstone.ops.examples import example
from soapstone.ops.lazy import F, torch
from soapstone.ops.op import Attrs, NotationOf, Op
from soapstone.ops.registry import register
from soapstone.ops.signature import Shape

if TYPE_CHECKING:
    from torch import Tensor


def _flat(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.flatten()


def _gates(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """What one input contributes to all gates, one gate after the other: (batch, gates * units)."""
    return F.linear(x, w.flatten(0, 1), _flat(bias))


def _cell_flops(sizes: Mapping[str, int]) -> float:
    """The two matrix products of a cell; what follows is small against them."""
    return 2.0 * sizes["b"] * sizes.get("f", 1) * sizes["o"] * (sizes["i"] + sizes["k"])


def _lstm_cell(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        if b_ih is None or b_hh is None:
            from_x, from_h = _gates(x, w_ih, b_ih), _gates(h, w_hh, b_hh)
            h, c, _ = torch.ops.aten._thnn_fused_lstm_cell(from_x, from_h, c)
            return h, c
        # The kernel's gradients of two biases are one tensor. Seen through two views it would become the
        # gradient of both parameters, and what is added to one would be added to the other: hence the
        # product. Biases are not given to the matrix products, whose kernels are slower with them.
        biases = b_ih.flatten(), 1.0 * b_hh.flatten()
        h, c, _ = torch.ops.aten._thnn_fused_lstm_cell(_gates(x, w_ih), _gates(h, w_hh), c, *biases)
        return h, c
    if h.shape[1] == c.shape[1]:  # all hidden units: torch's own, in one call
        made: tuple[Tensor, Tensor] = torch.lstm_cell(
            x, (h, c), w_ih.flatten(0, 1), w_hh.flatten(0, 1), _flat(b_ih), _flat(b_hh)
        )
        return made
    gates = _gates(x, w_ih, b_ih) + _gates(h, w_hh, b_hh)
    entering, forgetting, candidate, leaving = gates.chunk(4, 1)
    c = forgetting.sigmoid() * c + entering.sigmoid() * candidate.tanh()
    return leaving.sigmoid() * c.tanh(), c


lstm_cell = register(
    Op(
        "lstm_cell",
        "b i!, b k!, b o, f!:4 o i!, f! o k!, [f! o], [f! o] -> b o, b o",
        torch=_lstm_cell,
        weights=("w_ih", "w_hh", "b_ih", "b_hh"),
        flops=_cell_flops,
        examples=(
            example((4, 3), (4, 6), (4, 6), (4, 6, 3), (4, 6, 6), (4, 6), (4, 6)),
            example((2, 3), (2, 4), (2, 4), (4, 4, 3), (4, 4, 4), None, None),
        ),
    )
)


def _gru_cell(
    x: Tensor,
    h: Tensor,
    own: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    if x.is_cuda:
        b_ih, b_hh = _flat(b_ih), _flat(b_hh)
        h, _ = torch.ops.aten._thnn_fused_gru_cell(_gates(x, w_ih), _gates(h, w_hh), own, b_ih, b_hh)
        return h
    x_reset, x_update, x_candidate = _gates(x, w_ih, b_ih).chunk(3, 1)
    h_reset, h_update, h_candidate = _gates(h, w_hh, b_hh).chunk(3, 1)
    update = (x_update + h_update).sigmoid()
    candidate = (x_candidate + (x_reset + h_reset).sigmoid() * h_candidate).tanh()
    return candidate + update * (own - candidate)


# `h` and `own` are the same tensor: the cell reads all of it for its gates, and of its own units
# the state that it updates.
gru_cell = register(
    Op(
        "gru_cell",
        "b i!, b k!, b o, f!:3 o i!, f! o k!, [f! o], [f! o] -> b o",
        torch=_gru_cell,
        weights=("w_ih", "w_hh", "b_ih", "b_hh"),
        flops=_cell_flops,
        examples=(
            example((4, 3), (4, 6), (4, 6), (3, 6, 3), (3, 6, 6), (3, 6), (3, 6)),
            example((2, 3), (2, 4), (2, 4), (3, 4, 3), (3, 4, 4), None, None),
        ),
    )
)


def _rnn_cell(activation: str) -> Callable[..., Tensor]:
    def cell(
        x: Tensor,
        h: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor:
        result: Tensor = getattr(torch, activation)(F.linear(x, w_ih, b_ih) + F.linear(h, w_hh, b_hh))
        return result

    return cell


rnn_tanh_cell, rnn_relu_cell = (
    register(
        Op(
            f"rnn_{activation}_cell",
            "b i!, b k!, o i!, o k!, [o], [o] -> b o",
            torch=_rnn_cell(activation),
            weights=("w_ih", "w_hh", "b_ih", "b_hh"),
            flops=_cell_flops,
            aten={f"rnn_{activation}_cell.default": None},
            examples=(
                example((4, 3), (4, 6), (6, 3), (6, 6), (6,), (6,)),
                example((4, 3), (4, 6), (6, 3), (6, 6), None, None),
            ),
        )
    )
    for activation in ("tanh", "relu")
)


def _layer_notation(states: int) -> NotationOf:
    """The notation of a layer that carries so many states from step to step."""

    def notation(_: Sequence[Shape | None], attrs: Attrs) -> str:
        steps = "b t!" if attrs["batch_first"] else "t! b"
        carried = ", b o!" * states
        return f"{steps} i!{carried}, f! i!, f! o!, [f!], [f!] -> {steps} o!{carried}"

    return notation


def _layer_flops(sizes: Mapping[str, int]) -> float:
    return 2.0 * sizes["t"] * sizes["b"] * sizes["f"] * (sizes["i"] + sizes["o"])


def _over_sequence(
    kind: str, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor | None], attrs: Attrs
) -> tuple[Tensor, ...]:
    """One layer of torch's own, in one direction: the outputs at every step, and the last states."""
    batch_first, reverse = bool(attrs["batch_first"]), attrs["reverse"]
    time = 1 if batch_first else 0
    given = [weight for weight in weights if weight is not None]
    state = [part.unsqueeze(0) for part in states]
    y, *last = getattr(torch, kind)(
        x.flip(time) if reverse else x,
        tuple(state) if len(state) > 1 else state[0],
        given,
        len(given) == len(weights),
        1,
        0.0,
        torch.is_grad_enabled(),
        False,
        batch_first,
    )
    return (y.flip(time) if reverse else y, *(part.squeeze(0) for part in last))


def _lstm_layer(  # noqa: PLR0913
    x: Tensor,
    h: Tensor,
    c: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    *,
    batch_first: bool,
    reverse: bool,
) -> tuple[Tensor, ...]:
    attrs = {"batch_first": batch_first, "reverse": reverse}
    return _over_sequence("lstm", x, (h, c), (w_ih, w_hh, b_ih, b_hh), attrs)


lstm_layer = register(
    Op(
        "lstm_layer",
        _layer_notation(2),
        torch=_lstm_layer,
        attrs={"batch_first": False, "reverse": False},
        weights=("w_ih", "w_hh", "b_ih", "b_hh"),
        flops=_layer_flops,
        examples=(
            example((3, 4, 2), (4, 5), (4, 5), (20, 2), (20, 5), (20,), (20,)),
            example((4, 3, 2), (4, 5), (4, 5), (20, 2), (20, 5), None, None, batch_first=True, reverse=True),
        ),
    )
)


def _one_state_layer(kind: str) -> Callable[..., tuple[Tensor, ...]]:
    def layer(
        x: Tensor,
        h: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
        *,
        batch_first: bool,
        reverse: bool,
    ) -> tuple[Tensor, ...]:
        attrs = {"batch_first": batch_first, "reverse": reverse}
        return _over_sequence(kind, x, (h,), (w_ih, w_hh, b_ih, b_hh), attrs)

    return layer


gru_layer, rnn_tanh_layer, rnn_relu_layer = (
    register(
        Op(
            f"{kind}_layer",
            _layer_notation(1),
            torch=_one_state_layer(kind),
            attrs={"batch_first": False, "reverse": False},
            weights=("w_ih", "w_hh", "b_ih", "b_hh"),
            flops=_layer_flops,
            examples=(
                example((3, 4, 2), (4, 5), (5 * gates, 2), (5 * gates, 5), (5 * gates,), (5 * gates,)),
                example(
                    (4, 3, 2),
                    (4, 5),
                    (5 * gates, 2),
                    (5 * gates, 5),
                    None,
                    None,
                    batch_first=True,
                    reverse=True,
                ),
            ),
        )
    )
    for kind, gates in (("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))
)
