"""What ranks hold at most in a step, predicted and seen: cases for `oracles.ranks`."""

from __future__ import annotations

from random import Random

import torch

from soapstone.cost.analytic import AnalyticCosts
from soapstone.cost.at_hand import device_at_hand
from soapstone.cost.candidates import candidates_of
from soapstone.cost.profiler import Profiler
from soapstone.frontends.source import load
from soapstone.machine import preset
from soapstone.plans import planned, simulation
from soapstone.runtime.session import joined, seeded
from soapstone.search.baselines import baseline
from soapstone.strategy.space import random_strategy
from soapstone.validation.rehearsing import Inside, rehearsed_peaks
from soapstone.validation.running import model_of, ran

COSTS = AnalyticCosts()


def peaks(rank: int, size: int, model: str, batch: int, strategy: str) -> tuple[list[int], list[int]]:
    """Each rank's peak under a strategy (a baseline, or 'random SEED'), predicted and seen."""
    del rank
    torch.set_num_threads(1)
    wire, machine = joined("cpu"), preset(f"cpu:1x{size}")
    with seeded(0):
        source = load(model, batch=batch, devices=size, weights=True)
    captured = source.captured()
    name, _, seed = strategy.partition(" ")
    if name == "random":
        chosen = random_strategy(captured.graph, size, Random(int(seed)))
    else:
        chosen = baseline(name, captured.graph, machine, COSTS, 0)
    plan = planned(chosen, machine, simulation(chosen, machine, COSTS), COSTS)
    profiler = Profiler(device_at_hand("cpu", "cpu", 1, size))
    for candidate in candidates_of(chosen.layouts.values()):
        profiler.measure_hidden(candidate)
    inside = Inside(profiler.hidden_bytes, profiler.apart_bytes)
    (predicted,), reasons = rehearsed_peaks([plan], captured.constants, inside, wire)
    assert not reasons
    module = model_of(source, captured.graph, captured.constants, wire.device)
    (seen,) = ran([plan], module, wire, 2, lambda _: None)
    return list(predicted), list(seen.peak_bytes)
