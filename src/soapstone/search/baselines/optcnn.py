"""OptCNN (Jia et al. 2018): the best configuration of every layer, by dynamic programming.

A layer may be split along sample, attribute and parameter dims, and its shards run on devices 0, 1, 2, ...
in order: there is no choice of devices, and so no parallelism between layers (the O of SOAP). The cost of
a strategy is the sum of what its layers and edges take on their own (`part_costs`), and its minimum is
found exactly by eliminating layers one after another (`elimination`).

Recurrent networks are fused as FlexFlow 8.1.3 does: all steps of a layer have one configuration
(`layers`). To keep the tables small, a configuration splits at most `MOST_DIMS` dims, into as many shards
as a divisor of the number of devices. On several nodes, shards are one, as many as the devices of a node,
or as all devices, and of two dims that are split one is the samples'. Data parallelism is always among
the configurations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from soapstone.cost.analytic import AnalyticCosts
from soapstone.graph import Graph
from soapstone.machine import Machine
from soapstone.ops import Kind
from soapstone.search.baselines.anatomy import Anatomy
from soapstone.search.baselines.elimination import Minimum, Problem, minimum
from soapstone.search.baselines.layers import Layer, layers
from soapstone.search.baselines.part_costs import PartCosts
from soapstone.search.baselines.simple import data_parallel
from soapstone.strategy.blocks import Block
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy

MOST_DIMS = 2
"""[choice] The most dims of one block that are split: hybrids of two, as all of Jia et al.'s figures show."""


def optcnn(graph: Graph, machine: Machine, costs: AnalyticCosts) -> Strategy:
    """The strategy of least cost."""
    return OptCNN(graph, machine, costs).strategy


@dataclass(frozen=True)
class OptCNN:
    """A graph on a machine as OptCNN sees it: layers with configurations, and a sum of costs."""

    graph: Graph
    machine: Machine
    costs: AnalyticCosts

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, in the order of the graph."""
        return layers(self._anatomy)

    @cached_property
    def configurations(self) -> tuple[tuple[Placement, ...], ...]:
        """For each layer the placements that every one of its blocks can have, data parallelism first."""
        return tuple(self._possible(layer) for layer in self.layers)

    @cached_property
    def problem(self) -> Problem:
        """The sum of costs, a variable for each layer."""
        single = [self._layer_s(layer, own) for layer, own in self._configured]
        pairs: dict[tuple[int, int], NDArray[np.float64]] = {}
        for reader in self._anatomy.blocks:
            for name in self._anatomy.before[reader.name]:
                i, j = self._number[name], self._number[reader.name]
                table = self._parts.exchange_s(
                    self._by_name[name], reader, self.configurations[i], self.configurations[j]
                )
                if i == j:
                    single[i] = single[i] + np.diag(table)
                elif i < j:
                    pairs[i, j] = pairs.get((i, j), 0.0) + table
                else:
                    pairs[j, i] = pairs.get((j, i), 0.0) + table.T
        return Problem(single, pairs)

    @cached_property
    def minimum(self) -> Minimum:
        """The choices of configurations that cost least."""
        return minimum(self.problem, [0] * len(self.layers))

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy of least cost."""
        return self.chosen(self.minimum.choices)

    def chosen(self, choices: Sequence[int]) -> Strategy:
        """The strategy in which each layer has the configuration of that number."""
        return Strategy(
            self.graph,
            {
                block.name: own[choice]
                for (layer, own), choice in zip(self._configured, choices, strict=True)
                for block in layer.blocks
            },
        )

    @cached_property
    def _anatomy(self) -> Anatomy:
        return Anatomy(self.graph)

    @cached_property
    def _parts(self) -> PartCosts:
        return PartCosts(self.graph, self.machine, self.costs)

    @cached_property
    def _by_name(self) -> dict[str, Block]:
        return {block.name: block for block in self._anatomy.blocks}

    @cached_property
    def _number(self) -> dict[str, int]:
        return {block.name: i for i, layer in enumerate(self.layers) for block in layer.blocks}

    @cached_property
    def _samples(self) -> Mapping[str, Placement]:
        return data_parallel(self.graph, self.machine).placements

    @property
    def _configured(self) -> Iterator[tuple[Layer, tuple[Placement, ...]]]:
        return zip(self.layers, self.configurations, strict=True)

    @cached_property
    def _shard_counts(self) -> tuple[int, ...]:
        """The numbers of shards that are tried: divisors of the number of devices, of which a machine of
        several nodes has only one device, the devices of a node, and all."""
        count = len(self.machine.devices)
        divisors = [parts for parts in range(1, count + 1) if count % parts == 0]
        if len(self.machine.nodes) > 1:
            node = len(self.machine.devices_on(self.machine.nodes[0]))
            divisors = [parts for parts in divisors if parts in (1, node, count)]
        return tuple(divisors)

    def _possible(self, layer: Layer) -> tuple[Placement, ...]:
        """The placements that every block of a layer can have."""
        candidates = self._candidates(layer)
        possible = np.all(
            [np.isfinite(self._parts.block(block, candidates).compute_s) for block in layer.blocks], axis=0
        )
        return tuple(placement for placement, is_so in zip(candidates, possible, strict=True) if is_so)

    def _candidates(self, layer: Layer) -> tuple[Placement, ...]:
        """Data parallelism, and all that the operator and the limits of this module allow."""
        node = layer.blocks[0].leader
        sample = self.graph.sample_dims.get(node.name, "")
        allowed = {dim for dim, kind in self.graph.kinds(node).items() if kind is not Kind.REDUCTION}
        allowed.add(sample)  # a loss sums over its samples

        def is_tried(degrees: Mapping[str, int]) -> bool:
            is_simple = len(degrees) <= 1 or sample in degrees or len(self.machine.nodes) == 1
            return len(degrees) <= MOST_DIMS and allowed.issuperset(degrees) and is_simple

        found = [self._samples[block.name] for block in layer.blocks]
        for parts in self._shard_counts:
            every = self.graph.signature(node).legal_degrees(parts)
            found.extend(placed(degrees, range(parts)) for degrees in every if is_tried(degrees))
        return tuple(dict.fromkeys(found))

    def _layer_s(self, layer: Layer, own: tuple[Placement, ...]) -> NDArray[np.float64]:
        """What all steps of a layer compute, and the exchange of the gradients they have in common."""
        steps = [self._parts.block(block, own) for block in layer.blocks]
        return sum((step.compute_s for step in steps), steps[0].sync_s)
