"""Graph splitting (Unity 5.3, after MetaFlow): a graph in runs of nodes that are rewritten one at a time.

The number of candidates grows exponentially with the nodes that are rewritten together, so a graph is cut
where the fewest applications of rules would be cut with it, at values that are all that goes from one side to
the other. No parallelization is lost by it: every candidate is mapped as a whole (`mapping`), the placements
on both sides of a cut included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from soapstone.graph import Graph
from soapstone.strategy.blocks import free_values

LEAST_NODES = 10
"""[paper] Unity 5.3: the k of its experiments, the least number of nodes of a part."""

MOST_NODES = 30
"""[choice] A part is cut before it has more, if there is where to."""


def cuts(graph: Graph) -> list[int]:
    """The numbers of the nodes before which only one value crosses, of those that must be moved."""
    free = free_values(graph) | graph.weight_made
    place = {name: i for i, node in enumerate(graph.nodes) for name in node.outputs}
    crossing = [0] * (len(graph.nodes) + 1)
    for name, i in place.items():
        readers = [j for j, node in enumerate(graph.nodes) if name in node.reads] if name not in free else []
        if readers:
            crossing[i + 1] += 1
            crossing[max(readers) + 1] -= 1
    found, count = [], 0
    for number in range(1, len(graph.nodes)):
        count += crossing[number]
        if count == 1:
            found.append(number)
    return found


def parts(graph: Graph, spans: Iterable[Sequence[str]]) -> list[frozenset[str]]:
    """The names of the nodes of each part, in the order of the graph. `spans` are the nodes that each
    possible application of a rule takes in."""
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    disrupted = [0] * (len(graph.nodes) + 1)
    for span in spans:
        places = [place[name] for name in span]
        for cut in range(min(places) + 1, max(places) + 1):
            disrupted[cut] += 1
    allowed, ends, last = cuts(graph), list[int](), 0
    while True:
        near = [cut for cut in allowed if last + LEAST_NODES <= cut <= last + MOST_NODES]
        later = [cut for cut in allowed if cut > last + MOST_NODES]
        near = [cut for cut in near or later[:1] if cut <= len(graph.nodes) - LEAST_NODES]
        if not near:
            break
        last = min(near, key=lambda cut: (disrupted[cut], -cut))
        ends.append(last)
    bounds = [0, *ends, len(graph.nodes)]
    return [frozenset(node.name for node in graph.nodes[begin:end]) for begin, end in pairwise(bounds)]
