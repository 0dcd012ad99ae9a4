"""Real ranks for tests: processes that are started once and take one case after another.

A case is a function `case(rank, size, *arguments)` of a module that the ranks can import; each case has
its own process group, so that nothing of one is left for the next.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_S = 20.0
"""[choice] How long a rank waits for another within a case."""

PATIENCE_S = 180.0
"""[choice] How long a case may take: many times the longest one ([measured] 20 s, two x86 cores with nothing
else at work), since other tests run beside it, and a computer may be three times as slow as a moment ago."""


class Ranks:
    """Up to `size` processes that wait for cases; they are told that they are on so many computers, or
    nothing about it."""

    def __init__(self, size: int, *, computers: int | None = 1) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there, computers), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        self.folder = tempfile.TemporaryDirectory()
        self.count = 0

    def run(
        self, case: Callable[..., Any], size: int, *arguments: Any, leaving: Sequence[int] = ()
    ) -> list[Any]:
        """What each of `size` ranks returns but for those that leave; the first exception of any is raised
        here."""
        self.count += 1
        store = str(Path(self.folder.name) / f"store{self.count}")
        name = f"{case.__module__}:{case.__name__}"
        for pipe in self.pipes[:size]:
            pipe.send((name, size, store, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes[:size]):
            if rank in leaving:
                continue
            if not pipe.poll(PATIENCE_S):
                raise TimeoutError(f"rank {rank} gave no answer to {name}")
            answers.append(pipe.recv())
        for rank, (_, failure) in enumerate(answers):
            if failure is not None:
                raise AssertionError(f"rank {rank} failed:\n{failure}")
        return [result for result, _ in answers]

    def close(self, leaving: Sequence[int] = ()) -> None:
        """End the processes; some have ended."""
        for rank, pipe in enumerate(self.pipes):
            if rank not in leaving:
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()


def _serve(rank: int, pipe: Connection, computers: int | None) -> None:
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    while True:
        order = pipe.recv()
        if order is None:
            return
        name, size, store, arguments = order
        if computers is not None:
            on_each = size // computers
            os.environ.update(LOCAL_RANK=str(rank % on_each), LOCAL_WORLD_SIZE=str(on_each))
        try:
            limit, shared = timedelta(seconds=TIMEOUT_S), dist.FileStore(store, size)
            dist.init_process_group("gloo", store=shared, rank=rank, world_size=size, timeout=limit)
            # one that leaves at once would close its connections while another still makes them
            shared.set(f"rank {rank} is connected", "yes")
            shared.wait([f"rank {other} is connected" for other in range(size)], limit)
            module, function = name.split(":")
            result = getattr(importlib.import_module(module), function)(rank, size, *arguments)
            pipe.send((result, None))
        except BaseException:  # noqa: BLE001, the parent reports whatever it was
            pipe.send((None, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
