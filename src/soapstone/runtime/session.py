"""Joining the other ranks: those that torchrun or `soapstone train` started, or none.

One rank for each device of the plan. gloo serves CPUs and GPUs that several ranks share, and within a
computer they leave messages in shared memory (`mailbox`, `belts`); NCCL serves ranks that have a GPU each.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from soapstone.errors import TrainingError
from soapstone.machine.heap import keep_freed_memory
from soapstone.runtime.belts import local_belts
from soapstone.runtime.mailbox import local_mailbox
from soapstone.runtime.wire import TIMEOUT_S, Wire

DEVICES = ("cpu", "cuda")

SHARING = "SOAPSTONE_SHARED_MEMORY"
"""Set to 0 in the environment of all ranks, messages go through gloo also within a computer."""


def joined(device: str = "cpu", timeout_s: float = TIMEOUT_S) -> Wire:
    """A wire to the ranks of this run; a process that nobody started as one of several is alone."""
    if device not in DEVICES:
        raise TrainingError(f"there is no device '{device}': choose one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainingError("torch finds no GPU here: use --device cpu")
    place = _place(device)
    if device == "cpu" and "RANK" in os.environ:
        keep_freed_memory()
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        own_gpu = (
            device == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
        )
        try:
            _start("nccl" if own_gpu else "gloo", timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            raise TrainingError(_not_found(error, timeout_s)) from error
    if not dist.is_initialized():
        return Wire(device=place, timeout_s=timeout_s)
    rank, size = dist.get_rank(), dist.get_world_size()
    mailbox, belts = None, None
    is_shared = device == "cpu" or dist.get_backend() == "gloo"
    if is_shared and size > 1 and os.environ.get(SHARING, "1") != "0":
        store = dist.distributed_c10d._get_default_store()
        try:
            mailbox = local_mailbox(rank, store)
            if mailbox is not None and device == "cuda":
                belts = local_belts(mailbox, place, store)
                mailbox = None
        except RuntimeError as error:  # a rank has gone meanwhile
            raise TrainingError(_not_found(error, timeout_s)) from error
    return Wire(rank, size, place, timeout_s, mailbox, belts)


def _not_found(error: BaseException, timeout_s: float) -> str:
    """What a rank waited for that did not find the others."""
    told = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    return (
        f"rank {os.environ.get('RANK', '?')} did not find the other ranks of"
        f" {os.environ.get('WORLD_SIZE', '?')} at {address}"
        f" within {timeout_s:g} s: {told}"
    )


def _start(backend: str, timeout: timedelta) -> None:
    """Start torch.distributed from the environment. torchrun's store outlives a restart, and ranks that
    are started again must not read the addresses of those before them."""
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"soapstone/attempt{attempt}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
    atexit.register(_end)


def _end() -> None:
    """Leave the other ranks before the interpreter goes: with a group that was left to it, 2 of 24 runs
    aborted at their end ([measured] `examples/own_model.py`), presumably by threads of torch's. After an
    error others may wait for this rank, and it would wait for them: then it just goes."""
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        dist.destroy_process_group()


def _place(device: str) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        torch.cuda.set_device(place)
        torch.zeros(1, device=place)  # a context is made now, not amid the first step
    except RuntimeError as error:
        told = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise TrainingError(f"GPU {place.index} cannot be used: {told}") from error
    return place


@contextmanager
def session(device: str = "cpu", timeout_s: float = TIMEOUT_S) -> Iterator[Wire]:
    """A wire for as long as the context lasts."""
    had_one = dist.is_initialized()
    wire = joined(device, timeout_s)
    try:
        yield wire
    finally:
        if dist.is_initialized() and not had_one:
            dist.destroy_process_group()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw torch's random numbers from a seed within, so that all ranks make the same model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
