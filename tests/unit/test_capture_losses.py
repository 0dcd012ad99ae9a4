"""Losses in captured graphs are torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracles.capturing import Made, agrees, ids, x
from torch import Tensor, nn

from soapstone.errors import CaptureError
from soapstone.frontends.losses import LOSSES, WithLoss

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
