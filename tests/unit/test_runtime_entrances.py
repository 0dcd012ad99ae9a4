"""What enters a region: one leaf for all who read it and whose gradients go the same ways."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from pathlib import Path
from random import Random
from time import perf_counter

import torch
from oracles.ranks import Ranks
from oracles.training import Recipe, assert_same, tiny, trained_by_ranks, trained_plainly

from soapstone.cost.analytic import AnalyticCosts
from soapstone.frontends.source import load
from soapstone.machine import preset
from soapstone.plans import planned, simulation
from soapstone.runtime.alone import StepAlone
from soapstone.runtime.linking import Links
from soapstone.runtime.localshard import Entrance
from soapstone.runtime.nobody import NobodysWire
from soapstone.runtime.ports import Inbox, Outlet
from soapstone.runtime.region import Region
from soapstone.search.baselines.zero import zero
from soapstone.strategy.space import random_strategy
from soapstone.tasks.build import task_graph
from soapstone.validation.running import model_of

BOX = ()
CPU = torch.device("cpu")
MACHINE, COSTS = preset("cpu:1x2"), AnalyticCosts()
RECIPE = Recipe("SGD", {"lr": 0.01, "momentum": 0.9})


def inbox_of(tensor: torch.Tensor) -> Inbox:
    inbox = Inbox(BOX, tensor.dtype, tensor.device, adds=False)
    outlet = Outlet(BOX)
    outlet.put(tensor)
    inbox.connect(outlet, BOX)
    return inbox


def test_one_leaf_has_the_gradients_of_all_who_read_it() -> None:
    region, gradients = Region(0), [Outlet(BOX), Outlet(BOX)]
    entrance = Entrance(inbox_of(torch.tensor(3.0)), region)
    reads = [entrance.add(gradient) for gradient in gradients]
    seed = Outlet(BOX)
    for step in (1.0, 2.0):
        first, second = (read() for read in reads)
        assert first is second
        seed.put(torch.tensor(step))
        region.root(first * 5.0 + second**2, [seed])
        region.backward()
        assert [each.is_filled for each in gradients] == [True, True]
        total, nothing = (each.take() for each in gradients)
        assert (float(total), nothing) == (step * (5.0 + 2 * 3.0), None)


def test_a_step_that_broke_off_is_forgotten() -> None:
    region = Region(0)
    entrance = Entrance(inbox_of(torch.tensor(3.0)), region)
    read, other = (entrance.add(Outlet(BOX)) for _ in range(2))
    before = read()
    entrance.clear()
    region.clear()
    assert read() is not before
    other()


def test_cells_under_zero_share_what_was_gathered() -> None:
    """Every box enters a region once, however many read it."""
    source = load("rnnlm", tiny=True, devices=2, weights=True)
    captured = source.captured()
    strategy = zero(captured.graph, MACHINE)
    plan = planned(strategy, MACHINE, simulation(strategy, MACHINE, COSTS), COSTS)
    model = model_of(source, captured.graph, captured.constants, CPU)
    step = StepAlone(plan, model.state, model.parameters, model.inputs, NobodysWire(0, 2, CPU, "memory"))
    program = step._trainer.run.executor.program
    boxes = {(inbox, region) for inbox, region, _ in program.entrances}
    readers = [len(entrance._gradients) for entrance in program.entrances.values()]
    assert len(program.entrances) == len(boxes)
    assert max(readers) > 1
    step.run(perf_counter)
    assert all(entrance._entered is None for entrance in program.entrances.values())


def test_gradients_that_go_other_ways_stay_apart(tmp_path: Path) -> None:
    """What copies of a reader compute on several devices is not sent to them, but what one alone computes of
    the same box is: added up, the first would count twice."""
    module, batches, captured = tiny("nmt", steps=2)
    strategy = random_strategy(captured.graph, 3, Random(4), most_copies=3)
    tasks = task_graph(strategy, preset("cpu:1x3"), COSTS)
    assert any(len(ways) > 1 for rank in range(3) for ways in ways_of(Links(strategy, tasks, rank, CPU)))
    ranks = Ranks(3)
    ours = trained_by_ranks(ranks, strategy, 3, captured, module, batches, RECIPE, tmp_path)
    ranks.close()
    assert_same(ours, trained_plainly(module, batches, RECIPE))


def ways_of(links: Links) -> Iterable[set[frozenset[int]]]:
    """For each box that this rank reads, the ways of its gradients."""
    found: dict[Hashable, set[frozenset[int]]] = {}
    for (where, n, i), gradient in links.gradients.items():
        placed = links.block(where)
        box = placed.block.nodes[n].operands[i], placed.layout.reads(n, i)[where[1]]
        found.setdefault(box, set()).add(links.takers_of(gradient))
    return found.values()
