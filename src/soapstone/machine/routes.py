"""Best routes over a graph of links, found from one device at a time and kept.

A route from `a` to `b` is, among all paths through switches, the one with

1. the widest narrowest link (what a large transfer takes is its size over that),
2. then the least latency,
3. then the fewest links,
4. then, from `b` back to `a`, the lowest-ranked link at each step (links are ranked by name).

1 and 2 together do not have the prefix property (a narrower, quicker prefix may win once a later link
is narrow anyway), so they are found one after the other: first the width of every device, then, for
each width that occurs, shortest paths over the links at least that wide. On real machines few widths
occur and the wide ones reach only a node, so one source costs about two traversals of the graph.

Latencies are added as whole femtoseconds: sums are exact, so ties are ties and both directions agree.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

FEMTOSECONDS_PER_S = 10**15

Hop = tuple[int, int, int, float, float]
"""(rank of the link, vertex left, vertex entered, bandwidth in bytes per second, latency in seconds)."""


class Path(NamedTuple):
    """One route: the ranks of its links in order, its narrowest link (the first, of equals), its figures."""

    links: tuple[int, ...]
    narrowest: int
    bandwidth_bytes_per_s: float
    latency_s: float


class _Out(NamedTuple):
    rank: int
    head: int
    bandwidth_bytes_per_s: float
    latency_fs: int


_Arrivals = dict[int, tuple[int, int, int, int]]
"""For each vertex reached: (latency in fs, number of links, rank of the last link, vertex before)."""


class Routes:
    """Routes between the vertices below `device_count`; the vertices from there on are switches.

    Threads may share one: what it keeps only ever grows, by entries that do not depend on the order asked.
    """

    def __init__(self, device_count: int, vertex_count: int, hops: Iterable[Hop]) -> None:
        self._device_count = device_count
        self._outgoing: list[list[_Out]] = [[] for _ in range(vertex_count)]
        self._bandwidths: dict[int, float] = {}
        for rank, tail, head, bandwidth, latency in hops:
            self._outgoing[tail].append(_Out(rank, head, bandwidth, round(latency * FEMTOSECONDS_PER_S)))
            self._bandwidths[rank] = bandwidth
        self._arrivals: dict[int, dict[int, _Arrivals]] = {}
        self._paths: dict[tuple[int, int], Path] = {}

    def path(self, a: int, b: int) -> Path:
        """The route from device `a` to device `b`, which `unconnected_pair` must not have reported."""
        path = self._paths.get((a, b))
        if path is None:
            path = self._paths[a, b] = self._traced(a, b)
        return path

    def unconnected_pair(self) -> tuple[int, int] | None:
        """The first pair of devices (by index) without a route, or None when all are connected."""
        if self._one_switch_joins_all():
            return None
        devices = range(self._device_count)
        for a in devices:
            reached = self._reached(a, self._heads)
            missing = next((b for b in devices if b not in reached), None)
            if missing is not None:
                return (a, missing)
        return None

    def _one_switch_joins_all(self) -> bool:
        """Whether every device reaches some one switch and is reached from it: the usual, quick case."""
        switches = [v for v in self._reached(0, self._heads) if v >= self._device_count]
        if not switches:
            return self._device_count == 1
        incoming: list[list[int]] = [[] for _ in self._outgoing]
        for tail, hops in enumerate(self._outgoing):
            for hop in hops:
                incoming[hop.head].append(tail)
        devices = set(range(self._device_count))
        hub = switches[-1]
        there, back = self._reached(hub, self._heads), self._reached(hub, incoming.__getitem__)
        return devices <= there.keys() and devices <= back.keys()

    def _heads(self, vertex: int) -> list[int]:
        return [hop.head for hop in self._outgoing[vertex]]

    def _reached(self, start: int, neighbours: Callable[[int], Sequence[int]]) -> dict[int, None]:
        """The vertices reached from `start` through switches, in the order found."""
        reached = {start: None}
        frontier = [start]
        while frontier:
            for vertex in neighbours(frontier.pop()):
                if vertex not in reached:
                    reached[vertex] = None
                    if vertex >= self._device_count:
                        frontier.append(vertex)
        return reached

    def _traced(self, a: int, b: int) -> Path:
        """The path read off the arrivals at `b`, last link first."""
        if a == b:
            return Path((), -1, math.inf, 0.0)
        arrivals = self._arrivals_from(a)[b]
        ranks: list[int] = []
        vertex = b
        while vertex != a:
            _, _, rank, vertex = arrivals[vertex]
            ranks.append(rank)
        ranks.reverse()
        narrowest = min(ranks, key=self._bandwidths.__getitem__)
        latency_s = arrivals[b][0] / FEMTOSECONDS_PER_S
        return Path(tuple(ranks), narrowest, self._bandwidths[narrowest], latency_s)

    def _arrivals_from(self, source: int) -> dict[int, _Arrivals]:
        """For each other device, the shortest paths over the links as wide as its best route."""
        found = self._arrivals.get(source)
        if found is None:
            devices_by_width: defaultdict[float, set[int]] = defaultdict(set)
            for device, width in self._widths_from(source).items():
                devices_by_width[width].add(device)
            found = {
                device: arrivals
                for width, devices in devices_by_width.items()
                for arrivals in (self._shortest_from(source, width, devices),)
                for device in devices
            }
            self._arrivals[source] = found
        return found

    def _widths_from(self, source: int) -> dict[int, float]:
        """For each other device, the bandwidth of the widest path's narrowest link (Prim, widest first)."""
        widths: dict[int, float] = {}
        settled: set[int] = set()
        queue = [(-math.inf, source)]
        while queue:
            negative_width, vertex = heapq.heappop(queue)
            if vertex in settled:
                continue
            settled.add(vertex)
            if vertex < self._device_count and vertex != source:
                widths[vertex] = -negative_width
                continue
            for hop in self._outgoing[vertex]:
                if hop.head not in settled:
                    heapq.heappush(queue, (max(negative_width, -hop.bandwidth_bytes_per_s), hop.head))
        return widths

    def _shortest_from(self, source: int, width: float, targets: set[int]) -> _Arrivals:
        """Dijkstra by (latency, links) over links of at least `width`, until all `targets` are settled."""
        arrivals: _Arrivals = {source: (0, 0, -1, source)}
        settled: set[int] = set()
        waiting = len(targets)
        queue = [(0, 0, source)]
        while queue and waiting:
            latency_fs, links, vertex = heapq.heappop(queue)
            if vertex in settled:
                continue
            settled.add(vertex)
            waiting -= vertex in targets
            if vertex < self._device_count and vertex != source:
                continue
            for hop in self._outgoing[vertex]:
                if hop.bandwidth_bytes_per_s < width or hop.head in settled:
                    continue
                arrival = (latency_fs + hop.latency_fs, links + 1, hop.rank, vertex)
                if hop.head not in arrivals or arrival < arrivals[hop.head]:
                    arrivals[hop.head] = arrival
                    heapq.heappush(queue, (arrival[0], arrival[1], hop.head))
        return arrivals
