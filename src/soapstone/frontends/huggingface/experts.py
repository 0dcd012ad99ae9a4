"""Mixtures of experts: the product of each token with the weights of its own expert.

transformers sorts tokens by expert and multiplies group by group, or copies an expert's weights for
every token; the first ties all tokens of a batch together, the second is not what anyone would run. Here
it is one operator of fixed shapes, `soapstone::expert_linear`, which a planner can split over tokens,
experts or features; everything around it stays as it was.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

EXPERTS = "soapstone"
"""The name under which transformers knows the implementation."""


@torch.library.custom_op("soapstone::expert_linear", mutates_args=())
def expert_linear(x: Tensor, expert: Tensor, w: Tensor, transposed: bool) -> Tensor:
    """Each token times the weights of its expert; those are (experts, outputs, inputs), or
    (experts, inputs, outputs) when transposed."""
    made = x.new_zeros(x.shape[0], w.shape[2 if transposed else 1])
    for one in range(w.shape[0]):
        rows = (expert == one).nonzero().flatten()
        made[rows] = x[rows] @ (w[one] if transposed else w[one].T)
    return made


@expert_linear.register_fake
def _(x: Tensor, expert: Tensor, w: Tensor, transposed: bool) -> Tensor:
    del expert
    return x.new_empty(x.shape[0], w.shape[2 if transposed else 1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.transposed = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, None]:
    x, expert, w = ctx.saved_tensors
    weights = torch.zeros_like(w)
    for one in range(w.shape[0]):
        rows = (expert == one).nonzero().flatten()
        product = x[rows].T @ gradient[rows]
        weights[one] = product if ctx.transposed else product.T
    return expert_linear(gradient, expert, w, not ctx.transposed), None, weights, None


expert_linear.register_autograd(_backward, setup_context=_keep)


def _experts(self: nn.Module, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """An experts module's forward pass: tokens (t, h), chosen experts and their shares (t, k)."""
    own: Any = self
    count, choices = hidden.shape[0], chosen.shape[1]
    expert = chosen.reshape(-1)
    x = hidden.unsqueeze(1).expand(-1, choices, -1).reshape(count * choices, -1)
    name = "gate_up_proj" if own.has_gate else "up_proj"
    x = _linear(own, name, x, expert)
    x = own._apply_gate(x) if own.has_gate else own.act_fn(x)
    x = _linear(own, "down_proj", x, expert)
    if own.has_post_expert_norm:
        x = own.post_expert_norm(x)
    weighted = x * shares.reshape(-1, 1)
    return weighted.unflatten(0, (count, choices)).sum(1).to(hidden.dtype)


def _linear(own: Any, name: str, x: Tensor, expert: Tensor) -> Tensor:
    weight = getattr(own, name)
    made = expert_linear(x.to(weight.dtype), expert, weight, own.is_transposed)
    return made + getattr(own, f"{name}_bias")[expert] if own.has_bias else made


@cache
def register_experts() -> None:
    """Let configurations ask for this implementation by name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
