"""Oracles for operators: random operands, and a sharded run joined from its pieces."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from soapstone.ops.box import slices
from soapstone.ops.examples import Example, Tensor
from soapstone.ops.op import Op, Shard
from soapstone.ops.signature import IterationBox, Signature


@dataclass(frozen=True)
class Result:
    """Outputs of an operator and the gradients of its operands (None where there is none)."""

    outputs: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor | None, ...]


def random_operands(example: Example, seed: int = 0) -> list[Any]:
    """Operands for an example, floats in double precision so that a bug stands out from rounding."""
    generator = torch.Generator().manual_seed(seed)
    operands: list[Any] = []
    for given in example.operands:
        if not isinstance(given, Tensor):
            operands.append(given)
        elif given.below is not None:
            operands.append(torch.randint(given.below, given.shape, generator=generator))
        elif given.mask:
            operands.append(torch.rand(given.shape, generator=generator) > 0.4)
        else:
            values = torch.randn(given.shape, generator=generator, dtype=torch.float64)
            if given.positive:
                values = values.abs() + 0.1
            elif given.probability:
                values = values.sigmoid()
            operands.append(values.requires_grad_())
    return operands


def shapes_of(operands: Sequence[Any]) -> list[tuple[int, ...] | None]:
    """What a signature is bound to: None for an operand left out, () for a number."""
    return [None if o is None else tuple(getattr(o, "shape", ())) for o in operands]


def random_degrees(signature: Signature, seed: int, most: int = 8) -> dict[str, int]:
    """A random legal split into at most `most` parts, drawn over all of them."""
    rng = random.Random(seed)
    choices = [d for parts in range(2, most + 1) for d in signature.legal_degrees(parts)]
    return rng.choice(choices) if choices else {}


def whole_run(op: Op, signature: Signature, attrs: Mapping[str, Any], operands: Sequence[Any]) -> Result:
    """The operator run in one piece."""
    outputs = op.run(op.slices(operands, shard := Shard(signature, signature.points)), attrs, shard)
    return _differentiated(op, outputs, [(o, o) for o in operands], operands)


def sharded_run(
    op: Op,
    signature: Signature,
    attrs: Mapping[str, Any],
    operands: Sequence[Any],
    degrees: Mapping[str, int],
) -> Result:
    """The operator run shard by shard on detached slices, joined by the boxes alone: outputs are
    written (added, where partial) at their boxes, gradients are added at the boxes read."""
    boxes = signature.shards(degrees)
    place = next((str(o.device) for o in operands if isinstance(o, torch.Tensor)), "cpu")
    shards = [Shard(signature, box, dtype="f64", device=place) for box in boxes]
    pieces = [[_leaf(piece) for piece in op.slices(operands, shard)] for shard in shards]
    stats = statistics(op, attrs, shards, pieces, degrees)
    parts = [
        op.run(piece, attrs, shard, stat) for piece, shard, stat in zip(pieces, shards, stats, strict=True)
    ]
    outputs = tuple(
        joined(signature, i, boxes, [part[i] for part in parts], degrees)
        for i in range(len(signature.outputs))
    )
    leaves = [
        (operand, (piece, region.box))
        for box, row in zip(boxes, pieces, strict=True)
        for i, (operand, piece) in enumerate(zip(operands, row, strict=True))
        if piece is not None and isinstance(piece, torch.Tensor)
        for region in [signature.read(i, box)]
    ]
    return _differentiated(op, outputs, leaves, operands)


def _leaf(piece: Any) -> Any:
    if isinstance(piece, torch.Tensor):
        return piece.detach().clone().requires_grad_(piece.requires_grad)
    return piece


def statistics(
    op: Op,
    attrs: Mapping[str, Any],
    shards: Sequence[Shard],
    pieces: Sequence[Sequence[Any]],
    degrees: Mapping[str, int],
) -> list[Any]:
    """What each shard is told about the dims that it sees only a part of."""
    dims = op.statistics.dims if op.statistics is not None else ()
    split = any(degrees.get(dim, 1) > 1 for dim in dims)
    if op.statistics is None or not split or not op.complete(attrs).get("sync", True):
        return [None] * len(shards)

    def group(box: IterationBox) -> tuple[Any, ...]:
        return tuple(interval for dim, interval in box.items() if dim not in dims)

    local = [op.statistics.local(*piece) for piece in pieces]
    merged = {
        group(shard.box): op.statistics.merge(
            [s for s, other in zip(local, shards, strict=True) if group(other.box) == group(shard.box)]
        )
        for shard in shards
    }
    return [merged[group(shard.box)] for shard in shards]


def joined(
    signature: Signature,
    output: int,
    boxes: Sequence[IterationBox],
    parts: Sequence[Any],
    degrees: Mapping[str, int],
) -> torch.Tensor:
    partial = any(degrees.get(dim, 1) > 1 for dim in signature.partial_dims(output))
    place = parts[0].device
    whole = torch.zeros(signature.output_shapes[output], dtype=parts[0].dtype, device=place)
    for box, part in zip(boxes, parts, strict=True):
        at = signature.write(output, box)
        expected = tuple(interval.length for interval in at)
        assert tuple(part.shape) == expected, f"a shard wrote {tuple(part.shape)} where its box is {expected}"
        grown = torch.zeros_like(whole)
        grown[slices(at)] = part
        if partial:
            whole = whole + grown
        else:
            inside = torch.zeros(whole.shape, dtype=torch.bool, device=place)
            inside[slices(at)] = True
            whole = torch.where(inside, grown, whole)
    return whole


def _differentiated(
    op: Op, outputs: tuple[torch.Tensor, ...], leaves: Sequence[tuple[Any, Any]], operands: Sequence[Any]
) -> Result:
    """Pull fixed random gradients of the outputs back to the leaves, and add them up per operand."""
    generator = torch.Generator().manual_seed(17)
    pulled = [
        (out, torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device))
        for out in outputs
        if out.is_floating_point()
    ]
    pulled = [(out, grad) for out, grad in pulled if out.requires_grad]
    total: list[torch.Tensor | None] = [
        torch.zeros_like(o) if isinstance(o, torch.Tensor) and o.requires_grad else None for o in operands
    ]
    wanted = [
        (operand, leaf if isinstance(leaf, tuple) else (leaf, None))
        for operand, leaf in leaves
        if isinstance(operand, torch.Tensor) and operand.requires_grad
    ]
    if not op.needs_grad or not torch.is_grad_enabled() or not pulled or not wanted:
        return Result(tuple(out.detach() for out in outputs), tuple(total))
    found = torch.autograd.grad(
        [out for out, _ in pulled],
        [leaf for _, (leaf, _) in wanted],
        [g for _, g in pulled],
        allow_unused=True,
    )
    position = {id(operand): i for i, operand in enumerate(operands)}
    for (operand, (_, box)), gradient in zip(wanted, found, strict=True):
        target = total[position[id(operand)]]
        if gradient is not None and target is not None:
            target[slices(box) if box is not None else ...] += gradient
    return Result(tuple(out.detach() for out in outputs), tuple(total))
