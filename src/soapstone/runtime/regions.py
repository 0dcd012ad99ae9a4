"""Which backward tasks autograd can take back in one call.

A backward task joins the region of the one before it when all gradients it needs come from within the
region over links that are autograd's own, or are at hand before the region starts. What is received
later starts a new region: a wait inside a region could be for an answer to what the region has yet to
send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soapstone.runtime.actions import Exchanged
from soapstone.runtime.linking import Links, Task
from soapstone.runtime.listing import Listed
from soapstone.runtime.ports import Arrival, Inbox, Outlet
from soapstone.runtime.region import Region
from soapstone.runtime.weights import Piece
from soapstone.tasks.placed import FORWARD


def found_regions(links: Links, listed: Sequence[Listed], fuse: bool) -> Mapping[Task, Region]:
    """The region of each backward task; each has its own unless they are to be fused."""
    regions: dict[Task, Region] = {}
    posted: dict[int, int] = {}  # id of an arrival -> its place in the list
    members: set[Task] = set()
    start = count = 0
    for place, (_, key, what) in enumerate(listed):
        if isinstance(what, Exchanged):
            posted.update((id(arrival), place) for arrival in what.arrivals)
        elif isinstance(what, Piece):
            continue
        elif key[0] == FORWARD:
            members = set()
        else:
            if not (fuse and members and _joins(links, what, members, posted, start)):
                members, start, count = set(), place, count + 1
                region = Region(count - 1)
            members.add(what)
            regions[what] = region
    return regions


def _joins(links: Links, task: Task, members: set[Task], posted: Mapping[int, int], start: int) -> bool:
    where, _ = task
    if any(other == where for other, _ in members):
        return False
    for inbox in _gradients_of(links, task):
        for port, _, _ in inbox.parts:
            if isinstance(port, Arrival):
                if posted.get(id(port), start) >= start:
                    return False
            elif links.left_by[id(port)] in members and linked_writer(links, port) is None:
                return False
    return True


def _gradients_of(links: Links, task: Task) -> list[Inbox]:
    """Where a backward task finds the gradients it starts from."""
    where, segment = task
    placed = links.block(where)
    found = [
        giver
        for n, node in enumerate(placed.block.nodes)
        if placed.segments.writes_in[n] == segment
        for name in node.outputs
        for giver in links.made[where, name].givers
        if isinstance(giver, Inbox)
    ]
    totals = [s.total for (shard, _), s in links.statistics.items() if shard == where]
    return found + [total for total in totals if total is not None]


def linked_writer(links: Links, gradient: Outlet) -> Task | None:
    """The task of this rank that made what a reader took, if autograd can carry the gradient back to
    it: the reader took all from it alone, and no one else wants the gradient."""
    if id(gradient) in links.sent or id(gradient) not in links.read_by:
        return None
    inboxes = links.taken_by.get(id(gradient), [])
    if len(inboxes) != 1 or len(links.wanted_by[id(inboxes[0])]) != 1:
        return None
    (writer,) = links.wanted_by[id(inboxes[0])]
    where, node, operand = links.read_by[id(gradient)]
    placed = links.block(where)
    name, box = placed.block.nodes[node].operands[operand], placed.layout.reads(node, operand)[where[1]]
    assert isinstance(name, str)
    assert box is not None
    source = links.inboxes[name, box].only_outlet
    return writer if source is links.made[writer[0], name].outlet else None


def drop_part(links: Links, gradient: Outlet) -> None:
    """Take a gradient that autograd carries out of the inbox it would go to."""
    (inbox,) = links.taken_by[id(gradient)]
    inbox.parts = [part for part in inbox.parts if part[0] is not gradient]
    if not inbox.parts:
        (writer,) = links.wanted_by[id(inbox)]
        where, node, operand = links.read_by[id(gradient)]
        name = links.block(where).block.nodes[node].operands[operand]
        assert isinstance(name, str)
        links.made[writer[0], name].givers.remove(inbox)
