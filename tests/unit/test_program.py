"""What tracing would lose is kept, noted or refused, in one sentence that says where.

Each module is a few lines, and the line that is to blame is the one that the sentence must show.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from oracles.interpreter import loss_and_gradients, tensors_of
from torch import Tensor, nn
from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from soapstone.errors import CaptureError
from soapstone.frontends.capture import Captured, capture
from soapstone.frontends.losses import WithLoss

X = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3)


class Formula(nn.Module):
    """A function of a 3 x 4 weight and an input."""

    def __init__(self, formula: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4))
        self.formula = formula

    def forward(self, x: Tensor) -> Any:
        return self.formula(self.weight, x)


def refusal(module: nn.Module, *inputs: Tensor) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(module, inputs or (X,), "net")
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def agrees(module: nn.Module, *inputs: Tensor) -> Captured:
    """The graph's loss and gradients are the module's own."""
    given = inputs or (X,)
    captured = capture(module, given, "net")
    loss, gradients = loss_and_gradients(captured.graph, tensors_of(captured, module, given))
    expected = module(*given)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    return captured


# -- gradients as the module means them ------------------------------------------------------------


def under_no_grad(w: Tensor, x: Tensor) -> Tensor:
    h = x @ w
    with torch.no_grad():
        scale = h.abs().amax()
        values, _ = h.max(-1, keepdim=True)
        parts = h.split(2, dim=1)
    return ((h - values) * parts[0].sum() / scale).square().sum()


@torch.no_grad()
def statistics(h: Tensor) -> Tensor:
    return h.mean(0)


def written_into_a_copy(w: Tensor, x: Tensor) -> Tensor:
    h = x @ w
    seen = torch.zeros(4, 4, dtype=x.dtype)
    with torch.no_grad():
        seen[0] = h[0]
        seen.add_(h, alpha=0.5)
        seen[:, 1:].copy_(h[:, 1:].T.contiguous().T)
    cut = h.detach().clone()
    cut[0] = 0
    return (h * seen * cut).sum()


def reenabled(w: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        cut = x @ w
        with torch.enable_grad():
            h = x @ w
    return (h * cut).sum()


@pytest.mark.parametrize(
    "formula",
    [
        under_no_grad,
        reenabled,
        written_into_a_copy,
        lambda w, x: ((x @ w) * statistics(x @ w)).sum(),
        lambda w, x: ((x @ w) * (x @ w).detach()).sum(),
        lambda w, x: ((x @ w) * (x @ w.data)).sum(),
        lambda w, x: (x @ w + ((x @ w).round() - x @ w).detach()).square().sum(),
    ],
)
def test_what_is_cut_off_takes_no_gradient(formula: Callable[[Tensor, Tensor], Tensor]) -> None:
    agrees(Formula(formula))


def test_capturing_under_no_grad_is_the_same() -> None:
    module = Formula(under_no_grad)
    plain = capture(module, (X,)).graph
    with torch.no_grad():
        assert capture(module, (X,)).graph == plain


def test_gradient_taken_in_the_forward_pass() -> None:
    """As a penalty; torch can trace it where a derivative follows from an operator's inputs alone."""

    def penalty(inner: Callable[[Tensor], Tensor], w: Tensor, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(inner(x @ w).sum(), w, create_graph=True)
        return gradient.square().sum()

    agrees(Formula(partial(penalty, torch.square)))
    sentence = refusal(Formula(partial(penalty, torch.tanh)))
    assert sentence.startswith("model 'net' takes a gradient in its forward pass at test_program.py:")
    assert "(gradient,) = torch.autograd.grad(" in sentence


def test_spectral_norm_keeps_its_vectors() -> None:
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4).double())

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).square().sum()

    module = Normed()
    captured = agrees(module)
    assert sorted(captured.graph.updates) == [
        "linear.parametrizations.weight.0._u",
        "linear.parametrizations.weight.0._v",
    ]


def test_instance_norm_updates_its_running_statistics() -> None:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True, momentum=0.3).double()
    module = nn.Sequential(nn.Conv1d(2, 4, 3).double(), norm, nn.Flatten(0), nn.Softmax(0))
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    captured = capture(module, (x,))
    assert sorted(captured.graph.updates) == ["1.running_mean", "1.running_var"]
    assert norm.running_mean is not None
    assert not norm.running_mean.any(), "tracing changes nothing in the module"


def test_distributions_check_no_arguments() -> None:
    def sampled(w: Tensor, x: Tensor) -> Tensor:
        return torch.distributions.Normal(x @ w, F.softplus(x @ w)).rsample().sum()

    assert capture(Formula(sampled), (X,)).graph.loss is not None


# -- what is refused ---------------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    """A gradient's sign, turned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        del ctx
        return -gradient


reversed_gradient = Reversed.apply


@pytest.mark.parametrize("bound_early", [False, True])
def test_custom_function_is_refused(bound_early: bool) -> None:
    """Also where its `apply` got another name long ago."""

    def formula(w: Tensor, x: Tensor) -> Tensor:
        return reversed_gradient(x @ w).sum() if bound_early else Reversed.apply(x @ w).sum()

    sentence = refusal(Formula(formula))
    assert "model 'net' calls the custom autograd.Function Reversed at test_program.py:" in sentence
    assert "whose backward would be lost" in sentence
    assert "torch.library" in sentence


def branch(w: Tensor, x: Tensor) -> Tensor:
    h = x @ w
    if h.sum() > 0:
        h = h * 2
    return h.sum()


def sized_by_value(w: Tensor, x: Tensor) -> Tensor:
    count = int(x.max().item())
    return (x @ w)[:count].sum()


def nonzero(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w)[x.nonzero()[:, 0]].sum()


def hooked(w: Tensor, x: Tensor) -> Tensor:
    h = x @ w
    h.register_hook(lambda gradient: gradient * 0.1)
    return h.sum()


def backward_within(w: Tensor, x: Tensor) -> Tensor:
    loss = (x @ w).sum()
    loss.backward()
    return loss


def written_under_no_grad(w: Tensor, x: Tensor) -> Tensor:
    h = x @ w
    with torch.no_grad():
        h[0] = 0
    return h.sum()


def written_as_data(w: Tensor, x: Tensor) -> Tensor:
    h = x @ w
    h.data.mul_(2)
    return h.sum()


def replaced_data(w: Tensor, x: Tensor) -> Tensor:
    h = x @ w
    h.data = x @ w * 2
    return h.sum()


def clamped_weight(w: Tensor, x: Tensor) -> Tensor:
    w.data.clamp_(-0.5, 0.5)
    return (x @ w).sum()


def failing(w: Tensor, x: Tensor) -> Tensor:
    if x.shape[0] != w.shape[1] + 1:
        raise ValueError(f"expected {w.shape[1] + 1} rows.\nNot {x.shape[0]}.")
    return x.sum()


REFUSED: list[tuple[Callable[..., Any], str, str, str]] = [
    (branch, "decides something from the values of a tensor", "(if h.sum() > 0:)", "torch.where"),
    (sized_by_value, "takes a number out of a tensor", "(count = int(x.max().item()))", "shapes"),
    (lambda w, x: (x @ w).sum() * float(x.mean()), "a number out of a tensor", "float(x.mean())", "itself"),
    (lambda w, x: (x @ w)[x[:, 0] > 0].sum(), "shape depends on values", "(x @ w)[x[:, 0] > 0]", "mask"),
    (nonzero, "shape depends on values", "(return (x @ w)[x.nonzero()[:, 0]].sum())", "torch.where"),
    (hooked, "registers a gradient hook", "(h.register_hook(lambda", "torch operators"),
    (backward_within, "runs a backward pass within its forward pass", "(loss.backward())", "autograd.grad"),
    (written_under_no_grad, "writes unseen by autograd into a tensor", "(h[0] = 0)", "detach().clone()"),
    (written_as_data, "writes unseen by autograd into a tensor", "(h.data.mul_(2))", "detach().clone()"),
    (replaced_data, "writes unseen by autograd into a tensor", "(h.data = x @ w * 2)", "detach().clone()"),
    (failing, "ValueError", "(raise ValueError(f", "expected 5 rows (does it run on them by itself?)"),
    (lambda w, x: (x @ w.T).sum(), "RuntimeError", "(x @ w.T).sum()", "does it run"),
]


@pytest.mark.parametrize(("formula", "what", "where", "remedy"), REFUSED)
def test_refused_with_one_sentence(
    formula: Callable[..., Any], what: str, where: str, remedy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    sentence = refusal(Formula(formula))
    assert sentence.startswith("model 'net' ")
    assert what in sentence
    assert " at test_program.py:" in sentence
    assert where in sentence
    assert remedy in sentence
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", ""), "torch prints graphs of failed traces"


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).sum()


class Strided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.T.as_strided((2, 2), (1, 2)).sum()


def test_what_only_the_finished_program_shows_is_refused_with_its_place() -> None:
    sentence = refusal(Conditional())
    assert "holds a graph within its graph at test_program.py:" in sentence
    assert "(return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).sum())" in sentence
    sentence = refusal(Strided())
    assert "calls as_strided at test_program.py:" in sentence
    assert "(return x.T.as_strided((2, 2), (1, 2)).sum()) on a tensor that is not contiguous" in sentence


def test_parameter_changed_in_the_forward_pass_is_refused() -> None:
    assert "changes its parameter 'weight' in its forward pass" in refusal(Formula(clamped_weight))
    embedding = nn.Embedding(5, 3, max_norm=1.0)
    assert "max_norm" in refusal(embedding, torch.tensor([1, 2]))


def test_torchs_own_layer_is_named() -> None:
    sentence = refusal(nn.Sequential(nn.BatchNorm1d(3, momentum=None).double()))
    assert sentence.startswith("model 'net' takes a number out of a tensor, which no graph can hold")
    sentence = refusal(Formula(lambda w, x: F.gaussian_nll_loss(x @ w, x @ w, torch.ones_like(x @ w))))
    assert "inside torch's gaussian_nll_loss, which no graph can hold" in sentence


def test_hooks_on_modules_and_parameters_are_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 3).double())
    handle = module[0].register_full_backward_hook(lambda *_: None)
    assert "has a backward hook on '0', which would be lost: remove it first" in refusal(module)
    handle.remove()
    handle = module[0].weight.register_hook(lambda gradient: gradient)
    assert "has a gradient hook on its parameter '0.weight'" in refusal(module)
    handle.remove()
    assert capture(module, (X,)).graph.nodes


def test_lazy_parameters_are_refused() -> None:
    assert "has the lazy parameter 'weight'" in refusal(nn.LazyLinear(4))


def test_a_generator_of_its_own_is_left_out() -> None:
    def noisy(w: Tensor, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return (x @ w + torch.randn(4, 4, generator=generator, dtype=x.dtype)).sum()

    captured = capture(Formula(noisy), (X,))
    assert captured.notes == (
        "the model's own random generators are not used: Soapstone draws random numbers by itself",
    )
    assert [node.op_name for node in captured.graph.nodes] == ["matmul", "randn", "add", "sum"]


def test_parameters_and_inputs_on_two_devices() -> None:
    sentence = refusal(nn.Linear(3, 4, device="meta"))
    assert sentence == (
        "model 'net' has its parameters on meta and example inputs on cpu: put both on one device"
    )


def test_wrong_number_of_inputs() -> None:
    assert "required" in refusal(nn.Bilinear(3, 3, 2).double())


# -- checkpointing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recomputed",
    [
        lambda w, x: checkpoint(torch.mm, x, w, use_reentrant=False).square().sum(),
        lambda w, x: checkpoint(torch.mm, x, w, use_reentrant=True).square().sum(),
        lambda w, x: torch.utils.checkpoint.checkpoint(torch.mm, x, w, use_reentrant=False).square().sum(),
        lambda w, x: checkpoint_sequential([lambda h: h @ w, torch.tanh], 2, x, use_reentrant=False).sum(),
    ],
)
def test_checkpointing_is_captured_with_a_note(recomputed: Callable[[Tensor, Tensor], Tensor]) -> None:
    captured = agrees(Formula(recomputed))
    assert captured.notes == (
        "activation checkpointing (torch.utils.checkpoint) is not kept: activations are stored",
    )


# -- nothing is left behind --------------------------------------------------------------------------


def torch_as_it_is() -> list[object]:
    return [
        vars(_SingleLevelFunction).get("apply"),
        torch.utils.checkpoint._checkpoint_without_reentrant_generator,
        torch.distributions.Distribution._validate_args,
        vars(torch.export._trace).get("print"),
        torch.is_grad_enabled(),
        torch.overrides._get_current_function_mode(),
        logging.root.manager.disable,
        warnings.filters[:],
    ]


@pytest.mark.parametrize("formula", [branch, hooked, failing, lambda w, x: Reversed.apply(x @ w).sum()])
def test_torch_is_left_as_it_was_after_a_failure(formula: Callable[..., Any]) -> None:
    capture(Formula(lambda w, x: (x @ w).sum()), (X,))
    before = torch_as_it_is()
    refusal(Formula(formula))
    assert torch_as_it_is() == before
    agrees(Formula(lambda w, x: (x @ w).sum()))
    h = (X @ Formula(hooked).weight).sum()
    assert Reversed.apply(h).requires_grad


def test_module_is_left_as_it_was() -> None:
    """Modes, buffers, parameters and random numbers."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)).double()
    module.eval()
    module[3].train()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    capture(module, (X,))
    assert torch.equal(torch.rand(3), drawn)
    assert [part.training for part in module.modules()] == [False, False, False, False, True]
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_parts_in_evaluation_mode_stay_so() -> None:
    """A frozen batch norm in a model that trains; a model in evaluation mode is trained whole."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout()).double()
    module[1].eval()
    names = [node.op_name for node in capture(module, (X,)).graph.nodes]
    assert names == ["linear", "batch_norm_inference", "dropout"]
    module.eval()
    names = [node.op_name for node in capture(module, (X,)).graph.nodes]
    assert names == ["linear", "batch_norm", "dropout"]
    wrapped = WithLoss(module, lambda output, target: (output * target).sum())
    names = [node.op_name for node in capture(wrapped, (X, torch.ones(4, 4))).graph.nodes]
    assert names[:3] == ["linear", "batch_norm", "dropout"]
    names = [node.op_name for node in capture(module, (X,), train=False).graph.nodes]
    assert names == ["linear", "batch_norm_inference", "copy"]
