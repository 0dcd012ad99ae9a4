"""Made-up profiles: random times for some of a strategy's shards."""

from __future__ import annotations

from random import Random

from soapstone.cost.candidates import candidates_of
from soapstone.cost.measured import MeasuredCosts
from soapstone.cost.profile import Measured, OpKey, Profile, Updated, key_of
from soapstone.machine import Machine
from soapstone.strategy.strategy import Strategy


def made_up_costs(
    strategy: Strategy, machine: Machine, random: Random, share: float = 0.5, longest_s: float = 1e-3
) -> MeasuredCosts:
    """Measured costs of some kinds of the machine's devices, with random times of some of the shards."""
    kinds = sorted({device.kind.name for device in machine.devices})
    chosen = [kind for kind in kinds if random.random() < 0.8] or kinds[:1]
    return MeasuredCosts(
        profiles={kind: _profile(kind, strategy, random, share, longest_s) for kind in chosen}
    )


def _profile(kind: str, strategy: Strategy, random: Random, share: float, longest_s: float) -> Profile:
    times: dict[OpKey, list[Measured]] = {}
    for candidate in candidates_of(strategy.layouts.values()):
        for work in candidate.works:
            if random.random() < share:
                seconds = random.uniform(1e-3 * longest_s, longest_s)
                times.setdefault(key_of(work), []).append(
                    Measured(work.operands, work.outputs, seconds, 0.0, work.flops, work.size_bytes)
                )
    updates = tuple(Updated(4**i, random.uniform(1e-6, 1e-5) * 2**i, 0.0) for i in range(random.randrange(5)))
    return Profile(kind, {"made": "up"}, {key: tuple(found) for key, found in times.items()}, updates)
