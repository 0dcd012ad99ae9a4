"""What passes take by other costs than those that a task graph was built by."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.strategies import pipelined, planned

from soapstone.cost.analytic import AnalyticCosts
from soapstone.machine import Machine
from soapstone.strategy.strategy import Strategy
from soapstone.tasks.build import task_graph
from soapstone.tasks.passes import recosted
from soapstone.tasks.task import COMPUTE_KINDS, TaskKind


@given(st.one_of(planned(), pipelined()))
@settings(max_examples=40, deadline=None)
def test_other_costs_need_no_other_graph(case: tuple[Strategy, Machine]) -> None:
    """What tasks take by other costs is what they would take in a graph that is built by those."""
    strategy, machine = case
    tasks = task_graph(strategy, machine, AnalyticCosts())
    others = [AnalyticCosts(most_flops=0.01), AnalyticCosts(most_bandwidth=0.02)]
    for costs, times in zip(others, recosted(tasks, strategy, machine, others), strict=True):
        anew = task_graph(strategy, machine, costs)
        assert [task.key for task in anew.tasks] == [task.key for task in tasks.tasks]
        own = COMPUTE_KINDS - {TaskKind.TAKE}
        assert times == [t.duration_s if t.kind in own else 0.0 for t in anew.tasks]
