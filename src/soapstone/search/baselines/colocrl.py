"""ColocRL (Mirhoseini et al. 2017): whole operators on devices, the placement learned by REINFORCE.

A policy draws a device for each block; the simulated time of an iteration is its reward; and the policy
is moved towards what did better than usual:

    reward      R = -sqrt(time)                         [paper] Mirhoseini et al. 3.1
    baseline    B, a moving average of R                [paper] the same
    gradient    the mean over a batch of samples of (R - B) * d log p(placement); we divide R - B by the
                spread of the batch, so that one rate does for models of all sizes

Their policy is a recurrent network that reads the operators one by one; ours is a table of scores for each
device, the sum of one for all blocks, one for each layer and one for each block, so that it can learn which
devices to use at all, then to move the steps of a layer together, and then apart. Theirs measured
placements for hours, on up to 160 machines; ours simulates them. The best placement that was drawn is the
result, as theirs is. numpy only, and all chance comes from the seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.search.baselines.anatomy import Anatomy
from soapstone.search.baselines.layers import layers
from soapstone.search.baselines.scoring import Scorer
from soapstone.strategy.placement import Placement
from soapstone.strategy.strategy import Strategy

Numbers = NDArray[np.float64]

TINY = 1e-8
"""What keeps a division by a spread of zero from failing."""


@dataclass(frozen=True)
class Training:
    """How long and how fast the policy learns."""

    updates: int = 300
    """[choice] More bring little: on few devices the policy has settled by then."""
    samples: int = 10
    """[choice] Placements drawn for each update."""
    rate: float = 0.05
    """[choice] Adam's step, of the scores."""
    memory: float = 0.9
    """[choice] The share of the baseline that each update keeps."""


@dataclass(frozen=True)
class Update:
    """What one update saw: the time of each placement drawn, and the best of all so far."""

    times_s: tuple[float, ...]
    best_s: float
    best: tuple[int, ...]


def colocrl(
    graph: Graph, machine: Machine, costs: AnalyticCosts, seed: int, training: Training | None = None
) -> Strategy:
    """The best placement that was drawn while the policy learned."""
    (last,) = deque(learned(graph, machine, costs, seed, training or Training()), maxlen=1)
    names = [block.name for block in Anatomy(graph).blocks]
    return Strategy(graph, {name: Placement((), (d,)) for name, d in zip(names, last.best, strict=True)})


def learned(
    graph: Graph, machine: Machine, costs: AnalyticCosts, seed: int, training: Training
) -> Iterator[Update]:
    """The updates of the policy, one after another."""
    scorer, chance = Scorer(graph, machine, costs), np.random.default_rng(seed)
    policy = Policy(Anatomy(graph), len(machine.devices), training.rate)
    baseline: float | None = None
    best_s, best = inf, ()
    for _ in range(training.updates):
        drawn = [policy.drawn(chance) for _ in range(training.samples)]
        times_s = [scorer.whole_makespan_s(devices.tolist()) for devices in drawn]
        if min(times_s) < best_s:
            best_s = min(times_s)
            best = tuple(drawn[times_s.index(best_s)].tolist())
        rewards = -np.sqrt(times_s)
        usual = float(rewards.mean())
        baseline = usual if baseline is None else training.memory * baseline + (1 - training.memory) * usual
        policy.reinforce(drawn, (rewards - baseline) / (rewards.std() + TINY))
        yield Update(tuple(times_s), best_s, best)


class Policy:
    """Scores of devices for all blocks, for layers and for blocks; a block's device is drawn by the softmax
    of their sum."""

    def __init__(self, anatomy: Anatomy, devices: int, rate: float) -> None:
        numbers = {block.name: i for i, layer in enumerate(layers(anatomy)) for block in layer.blocks}
        self._layer = np.array([numbers[block.name] for block in anatomy.blocks], dtype=np.intp)
        self._of_all = _Adam((1, devices), rate)
        self._of_layers = _Adam((len(set(numbers.values())), devices), rate)
        self._of_blocks = _Adam((len(self._layer), devices), rate)

    @property
    def probabilities(self) -> Numbers:
        """For each block, how likely it is to be placed on each device."""
        scores = self._of_all.values + self._of_layers.values[self._layer] + self._of_blocks.values
        likely: Numbers = np.exp(scores - scores.max(axis=1, keepdims=True))
        likely /= likely.sum(axis=1, keepdims=True)
        return likely

    def drawn(self, chance: np.random.Generator) -> NDArray[np.intp]:
        """A device for each block."""
        ends = self.probabilities.cumsum(axis=1)
        below = ends < chance.random((len(ends), 1)) * ends[:, -1:]
        devices: NDArray[np.intp] = below.sum(axis=1, dtype=np.intp)
        return devices

    def reinforce(self, drawn: Sequence[NDArray[np.intp]], advantages: Numbers) -> None:
        """Make what was drawn likelier, as far as it was better than usual."""
        probabilities, gradient = self.probabilities, np.zeros(self._of_blocks.values.shape)
        for devices, advantage in zip(drawn, advantages, strict=True):
            gradient -= advantage * probabilities
            gradient[np.arange(len(devices)), devices] += advantage
        gradient /= len(drawn)
        summed = np.zeros(self._of_layers.values.shape)
        np.add.at(summed, self._layer, gradient)
        self._of_all.ascend(gradient.sum(axis=0, keepdims=True))
        self._of_layers.ascend(summed)
        self._of_blocks.ascend(gradient)


class _Adam:
    """Values that climb along gradients (Kingma and Ba 2015, with their constants)."""

    def __init__(self, shape: tuple[int, ...], rate: float) -> None:
        self.values = np.zeros(shape)
        self._rate, self._step = rate, 0
        self._mean, self._square = np.zeros(shape), np.zeros(shape)

    def ascend(self, gradient: Numbers) -> None:
        self._step += 1
        self._mean = 0.9 * self._mean + 0.1 * gradient
        self._square = 0.999 * self._square + 0.001 * gradient**2
        mean = self._mean / (1 - 0.9**self._step)
        square = self._square / (1 - 0.999**self._step)
        self.values += self._rate * mean / (np.sqrt(square) + TINY)
