"""What ranks do in the tests of the mailbox; each gives what it got."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from soapstone.runtime import mailbox as module
from soapstone.runtime.mailbox import Mailbox, local_mailbox

TIMEOUT_S = 15.0
GROUPS = [(0, 1), (0, 2), (1, 2), (0, 1, 2)]


def opened(rank: int) -> Mailbox:
    found = local_mailbox(rank, dist.distributed_c10d._get_default_store())
    assert found is not None
    return found


def payload(sender: int, number: int, count: int) -> torch.Tensor:
    """What a rank gives as its message or part of a sum of this number."""
    return torch.arange(count, dtype=torch.float32) * (1 + sender) + number


class Taken:
    """A message that is copied when it is waited for."""

    def __init__(self, box: Mailbox, into: torch.Tensor, peer: int, tag: int) -> None:
        self.into, self.letter = into, box.receive(peer, tag, TIMEOUT_S)

    def wait(self) -> None:
        self.letter.wait()
        self.into.copy_(self.letter.content(self.into.dtype, self.into.shape, self.into.numel()))
        self.letter.give_back()


def talking(rank: int, size: int, acts: Sequence[Any], seed: int, places: int, parts_bytes: int) -> Any:
    """Post everything in the order of all, then wait for it in an order of this rank's own; as often as
    blocks are used again. Every second sum is of a tensor that is kept in its block. `acts` are
    ("message", sender, receiver, tag, count) or ("sum", ranks, count)."""
    del size
    module.PLACES, module.IN_PARTS_BYTES = places, parts_bytes
    box = opened(rank)
    found = []
    keeping: dict[int, torch.Tensor] = {}
    for again in range(3):
        pending = []
        for number, act in enumerate(acts):
            name = number + 100 * again
            if act[0] == "sum" and rank in act[1]:
                own = payload(rank, name, act[2])
                if number % 2 and act[2]:
                    kept = keeping.setdefault(number, box.kept(act[2], own.dtype))
                    box.wait_until_read(kept, TIMEOUT_S)
                    own = kept.copy_(own)
                pending.append((number, own, box.sum_up(own, act[1], GROUPS.index(act[1]), TIMEOUT_S)))
            elif act[0] == "message" and act[2] == rank:
                into = torch.empty(act[4])
                pending.append((number, into, Taken(box, into, act[1], act[3])))
            elif act[0] == "message" and act[1] == rank:
                box.send(payload(rank, name, act[4]), act[2], act[3], TIMEOUT_S)
        sums = [each for each in pending if acts[each[0]][0] == "sum"]
        order = torch.randperm(len(sums), generator=torch.Generator().manual_seed(seed + rank)).tolist()
        shuffled = [sums[i] for i in order]
        messages = [each for each in pending if acts[each[0]][0] == "message"]  # of one tag, in their order
        for _, _, each in [*shuffled, *messages] if rank % 2 else [*messages, *shuffled]:
            each.wait()
        found.append({number: got.tolist() for number, got, _ in pending})
    return found


def held(rank: int, size: int, count: int) -> int:
    """Bytes of memory after many messages of one size: blocks are used again."""
    del size
    box = opened(rank)
    into = torch.empty(count)
    for number in range(50):
        if rank == 0:
            box.send(payload(0, number, count), 1, 3, TIMEOUT_S)
            Taken(box, into, 1, 4).wait()
        else:
            Taken(box, into, 0, 3).wait()
            box.send(into, 0, 4, TIMEOUT_S)
    return box.held_bytes


def left_alone(rank: int, size: int, way: str) -> str:
    """Rank 1 ends its process; the others wait for it, or for each other in vain."""
    box = opened(rank)
    if rank == 1:
        box.send(torch.ones(3), 0, 5, TIMEOUT_S)
        os._exit(1)
    own = torch.ones(2**16)
    if rank == 0:
        box.receive(1, 5, TIMEOUT_S).wait()  # what was left before is still there
    try:
        if way == "message":
            box.receive(1, 7, TIMEOUT_S).wait()
        elif way == "sum":
            box.sum_up(own, range(size), 1, TIMEOUT_S).wait()
        else:
            box.receive(2 - rank, 7, 0.3).wait()
    except RuntimeError as error:
        return str(error)
    return ""
