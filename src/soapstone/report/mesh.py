"""A strategy on a mesh of two axes, `data` by `tensor`: what DTensor has words for.

`on_mesh` chooses the sizes of the axes; `ways` says how each block runs along a row of the mesh, `agreement`
how each value lies. What fits into no such picture stands in the way, and is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from soapstone.report.agreement import Agreement
from soapstone.report.ways import Split, Way, Ways
from soapstone.strategy.strategy import Strategy


@dataclass(frozen=True)
class Mesh:
    """The strategy on the mesh: ways and layouts by block, or what stands in the way, by block."""

    strategy: Strategy
    data: int
    tensor: int
    ways: Mapping[str, Way] = field(default_factory=dict)
    splits: Mapping[str, Split] = field(default_factory=dict)
    input_splits: Mapping[str, Split] = field(default_factory=dict)
    objections: Mapping[str, str] = field(default_factory=dict)


def on_mesh(strategy: Strategy, device_count: int) -> Mesh:
    """The mesh on which nothing stands in the way; if there is none, that with the fewest objections.

    Of several, the one with the most rows: its devices talk to the fewest others.
    """
    sizes = [t for t in range(1, device_count + 1) if device_count % t == 0]
    tried = [Ways(strategy, device_count // t, t) for t in sizes]
    fewest = min(reversed(tried), key=lambda ways: len(ways.objections))
    if fewest.objections:
        return Mesh(strategy, fewest.data, fewest.tensor, objections=fewest.objections)
    found = [_agreed(ways) for ways in tried if not ways.objections]
    return min(found, key=lambda mesh: len(mesh.objections))


def _agreed(ways: Ways) -> Mesh:
    agreement = Agreement(ways)
    return Mesh(
        ways.strategy,
        ways.data,
        ways.tensor,
        ways.of_blocks,
        agreement.of_blocks,
        agreement.of_inputs,
        agreement.objections,
    )
