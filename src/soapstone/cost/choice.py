"""Which costs a prediction uses: measured, analytic, or measured as far as there are any (auto).

Measured times of a machine's kinds of devices are looked for in the cache, and then among the profiles that
come with Soapstone (`cost/profiles/KIND.json`). Of several profiles of one kind in the cache, one measured
with the threads of the machine's ranks comes first, then one measured by as many ranks at once as the
machine's nodes have devices, then the one changed last.
"""

from __future__ import annotations

import json
from collections import Counter
from importlib import resources

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.cache import Cache
from soapstone.cost.candidates import candidates_of, keys_of
from soapstone.cost.measured import Basis, MeasuredCosts
from soapstone.cost.profile import Profile, profile_from
from soapstone.errors import CostError
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.machine.checks import did_you_mean
from soapstone.machine.cores import usable_cores
from soapstone.strategy.strategy import Strategy

CHOICES = ("auto", "measured", "analytic")


def costs_for(
    machine: Machine, choice: str = "auto", cache: Cache | None = None, graph: Graph | None = None
) -> AnalyticCosts:
    """The costs of a machine's devices: a `MeasuredCosts` wherever some are measured and wanted.

    `measured` refuses a machine with a kind of device that no profile speaks of; `auto` takes analytic
    costs for that kind. With a graph, only what its operators need is kept: that is what its plan holds.
    """
    if choice not in CHOICES:
        raise CostError(f"there are no costs {choice!r}{did_you_mean(choice, CHOICES)}")
    if choice == "analytic":
        return AnalyticCosts()
    kinds = list(dict.fromkeys(device.kind.name for device in machine.devices))
    profiles = {kind: found for kind in kinds for found in [profile_for(kind, machine, cache)] if found}
    missing = [kind for kind in kinds if kind not in profiles]
    if choice == "measured" and missing:
        raise CostError(
            f"no costs of '{missing[0]}' were measured: run `soapstone profile` on one, or import a profile"
        )
    if graph is not None:
        keys = keys_of(graph)
        profiles = {kind: part for kind, found in profiles.items() for part in [found.of(keys)] if part.times}
    return MeasuredCosts(profiles=profiles) if profiles else AnalyticCosts()


def profile_for(kind: str, machine: Machine, cache: Cache | None = None) -> Profile | None:
    """The measured times of a kind of device; None where there are none."""
    found = [profile for profile in (cache or Cache()).profiles(kind) if profile.count]
    threads, ranks = str(threads_of_a_rank(machine)), str(len(machine.devices_on(machine.nodes[0])))

    def unlike(profile: Profile) -> tuple[bool, bool]:
        """Whether it was measured with other threads, and alone."""
        told = profile.software
        return told.get("threads", threads) != threads, told.get("ranks") != ranks

    return min(found, key=unlike, default=None) or shipped(kind)


def threads_of_a_rank(machine: Machine) -> int:
    """The threads that each of a computer's ranks has, as `soapstone train` starts them."""
    on_one = max(len(machine.devices_on(node)) for node in machine.nodes)
    return max(1, usable_cores() // on_one)


def shipped(kind: str) -> Profile | None:
    """The profile of a kind of device that comes with Soapstone."""
    if kind not in shipped_kinds():
        return None
    file = resources.files("soapstone.cost") / "profiles" / f"{kind}.json"
    return profile_from(json.loads(file.read_text(encoding="utf-8")), f"{kind}.json")


def shipped_kinds() -> tuple[str, ...]:
    """The kinds of devices whose profiles come with Soapstone."""
    folder = resources.files("soapstone.cost") / "profiles"
    if not folder.is_dir():
        return ()
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))


def bases(strategy: Strategy, machine: Machine, costs: AnalyticCosts) -> dict[Basis, int]:
    """How many of a strategy's distinct compute times rest on what."""
    counts: Counter[Basis] = Counter()
    kinds = {device.kind for device in machine.devices}
    for candidate in candidates_of(strategy.layouts.values()):
        for work in candidate.works:
            for kind in kinds:
                counts[costs.basis(work, kind) if isinstance(costs, MeasuredCosts) else Basis.ANALYTIC] += 1
    return {basis: counts[basis] for basis in Basis if counts[basis]}
