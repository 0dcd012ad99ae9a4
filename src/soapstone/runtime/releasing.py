"""When each tensor can be let go: after the last action that uses it.

Autograd keeps what the backward pass needs; all else that a step holds on to costs memory, and time, since
fresh memory has to be mapped. What crosses the end of a step (the loss, what buffers take) is let go then.
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.runtime.actions import Action, Backward, Exchanged, Forward
from soapstone.runtime.localshard import LocalSegment
from soapstone.runtime.ports import Inbox, Outlet, Port
from soapstone.runtime.region import Region


def releases(
    actions: Sequence[Action],
    read: dict[LocalSegment, list[Port]],
    taken: dict[Region, list[Port]],
    kept: Sequence[Outlet],
) -> list[list[Port]]:
    """For each action, the ports that no other needs after it; `kept` are for the end of the step.

    `read` are the ports that a segment's forward pass reads or fills, `taken` those that a region's
    backward pass does.
    """
    last: dict[Port, int] = {}
    for place, action in enumerate(actions):
        used: list[Port] = []
        match action:
            case Forward():
                used = read.get(action.segment, [])
            case Backward():
                used = taken.get(action.region, []) if action.is_first else []
            case Exchanged():
                used = [outlet for departure in action.departures for outlet, _ in departure.outlets]
            case _:
                pass
        for port in used:
            for each in _behind(port):
                last[each] = place
    for outlet in kept:
        outlet.is_kept = True
    found: list[list[Port]] = [[] for _ in actions]
    for port, place in last.items():
        found[place].append(port)
    return found


def _behind(port: Port) -> list[Port]:
    """A port, and those that it takes from."""
    return [port, *(source for source, _, _ in port.parts)] if isinstance(port, Inbox) else [port]
