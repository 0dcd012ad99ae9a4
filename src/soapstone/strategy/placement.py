"""One block's decision: how it is split, how often it is repeated, and where every shard runs.

FlexFlow 4: a parallelization configuration c_i is a degree for each parallelizable dim and a device
for each of the |c_i| tasks -> `Placement`. Copies are ours: Unity's replica dim, as far as it means
computing the same shard more than once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from soapstone.errors import StrategyError


@dataclass(frozen=True)
class Placement:
    """Degrees of the dims that are split (in the order of the leader's dims), and the devices.

    Shards are counted in row-major order of the dims; copies of one shard stand side by side:
    copy c of shard s runs on `devices[s * copies + c]`.
    """

    degrees: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]
    copies: int = 1

    def __post_init__(self) -> None:
        if self.copies < 1 or any(degree < 2 for _, degree in self.degrees):
            raise StrategyError(
                f"a placement lists degrees of at least 2 and copies of at least 1, not {self}"
            )
        if len(self.devices) != self.parts * self.copies:
            raise StrategyError(
                f"{self.parts} shards in {self.copies} copies need {self.parts * self.copies} devices,"
                f" not {len(self.devices)}"
            )

    @cached_property
    def parts(self) -> int:
        """How many shards there are."""
        return prod(degree for _, degree in self.degrees)

    @cached_property
    def degree_of(self) -> Mapping[str, int]:
        """The degrees by dim."""
        return dict(self.degrees)

    def devices_of(self, shard: int) -> tuple[int, ...]:
        """Where the copies of a shard run."""
        return self.devices[shard * self.copies : (shard + 1) * self.copies]

    def devices_of_all(self, shards: Iterable[int]) -> tuple[int, ...]:
        """Where the copies of some shards run, each device once."""
        return tuple(dict.fromkeys(device for shard in shards for device in self.devices_of(shard)))


def placed(degrees: Mapping[str, int], devices: Sequence[int], copies: int = 1) -> Placement:
    """A placement from degrees by dim; degrees of one are left out."""
    return Placement(tuple((dim, n) for dim, n in degrees.items() if n > 1), tuple(devices), copies)
