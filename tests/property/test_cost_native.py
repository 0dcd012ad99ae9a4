"""With measured costs too, the native core makes the plain task graph, to the bit."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.profiles import made_up_costs
from oracles.strategies import planned

from soapstone import native
from soapstone.cost.candidates import candidates, candidates_of
from soapstone.cost.measured import Basis
from soapstone.cost.profile import flat_shape, key_of
from soapstone.machine import Machine
from soapstone.search.exact import lower_bound
from soapstone.strategy.space import Space
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.flat import KINDS, FlatProblem, native_tasks


@given(planned(most_copies=3), st.integers(0, 2**16), st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=40, deadline=None)
def test_native_tasks_are_the_plain_ones(plan: tuple[Strategy, Machine], seed: int, share: float) -> None:
    """Measured shapes, fitted ones and kinds without a profile: every duration is the same."""
    strategy, machine = plan
    costs = made_up_costs(strategy, machine, Random(seed), share)
    plain, flat = task_graph(strategy, machine, costs), native_tasks(strategy, machine, costs)
    assert [t.kind for t in plain.tasks] == [KINDS[k] for k in flat.kind]
    assert [t.duration_s for t in plain.tasks] == flat.duration_s.tolist()
    assert [t.size_bytes for t in plain.tasks] == flat.size_bytes.tolist()


@given(planned(), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_proposals_equal_full_simulations(plan: tuple[Strategy, Machine], seed: int) -> None:
    """The incremental engine sees measured costs as full simulation does."""
    strategy, machine = plan
    random = Random(seed)
    costs = made_up_costs(strategy, machine, random)
    problem = FlatProblem(strategy.graph, machine, costs, strategy.apart)
    proposals = native.Proposals(problem.native)
    for number, block in enumerate(problem.blocks):
        placement = strategy.placements[block.name]
        assert proposals.place(
            number, problem.degrees(block, placement), placement.copies, list(placement.devices)
        )
    for _ in range(4):
        number = random.randrange(len(problem.blocks))
        block = problem.blocks[number]
        drawn = Space(strategy.graph, block, len(machine.devices)).drawn(random)
        strategy = Strategy(strategy.graph, {**strategy.placements, block.name: drawn}, strategy.apart)
        found_s = proposals.propose(
            number, problem.degrees(block, drawn), drawn.copies, list(drawn.devices), float("inf")
        )
        assert found_s == native_tasks(strategy, machine, costs).simulated()[2]
        proposals.accept()


@given(planned(), st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_a_measured_shape_has_its_measured_time(plan: tuple[Strategy, Machine], seed: int) -> None:
    """What was measured is used as it is; what was not is fitted, or analytic where nothing was."""
    strategy, machine = plan
    costs = made_up_costs(strategy, machine, Random(seed))
    for candidate in candidates_of(strategy.layouts.values()):
        for work in candidate.works:
            for kind in {device.kind for device in machine.devices}:
                profile = costs.profiles.get(kind.name)
                if profile is None or {key.gradients > 0 for key in profile.times} != {False, True}:
                    assert costs.basis(work, kind) is Basis.ANALYTIC
                    continue
                times = {m.shape: m for m in profile.times.get(key_of(work), ())}
                known = times.get(flat_shape(work.operands, work.outputs))
                assert (costs.basis(work, kind) is Basis.MEASURED) == (known is not None)
                if known is not None:
                    assert costs.compute_s(work, kind) == known.seconds


@given(planned())
@settings(max_examples=20, deadline=None)
def test_candidates_cover_the_search_space(plan: tuple[Strategy, Machine]) -> None:
    """Every shard that a strategy may have is among the candidates to be measured."""
    strategy, machine = plan
    parts = range(1, max(4, len(machine.devices)) + 1)
    listed = candidates(strategy.graph, parts, strategy.apart)
    known = {work for candidate in listed for work in candidate.works}
    for candidate in candidates_of(strategy.layouts.values()):
        assert known.issuperset(candidate.works)


def test_misuse_of_curves_is_refused() -> None:
    """A curve that does not fit together is a ValueError, not a crash."""
    curve = native.TimeCurve()
    curve.shapes, curve.seconds = [[1, 2]], []
    with pytest.raises(ValueError, match="a time for each of its shapes"):
        native.Problem(native.MachineData(), [], [], [], [curve])
    block, node = native.BlockData(), native.NodeData()
    node.forward_curve = [0]
    block.nodes = [node]
    with pytest.raises(ValueError, match="a curve for each kind"):
        native.Problem(native.MachineData(), [block], [], [], [])
    machine = native.MachineData()
    machine.launch_s = [0.0]
    with pytest.raises(ValueError, match="no such curve"):
        native.Problem(machine, [block], [], [], [])


@given(planned(), st.integers(0, 2**16), st.sampled_from([1e-3, 1e-8]))
@settings(max_examples=40, deadline=None)
def test_no_strategy_is_below_the_bound(plan: tuple[Strategy, Machine], seed: int, longest_s: float) -> None:
    """Shards may take less than their part of the whole, and devices less than their datasheets say."""
    strategy, machine = plan
    costs = made_up_costs(strategy, machine, Random(seed), 1.0, longest_s)
    makespan_s = native_tasks(strategy, machine, costs).simulated()[2]
    assert makespan_s >= lower_bound(strategy.graph, machine, costs).seconds
