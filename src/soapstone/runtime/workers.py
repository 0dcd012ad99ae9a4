"""Local ranks: one process for each device of a plan, started, watched and ended together.

What torchrun does for many hosts, for those who have one: every rank is this same command with the
environment that torch.distributed expects. Rank 0 speaks; the others are heard only if it said nothing. None
outlives the command that watches them, however that is ended.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from time import monotonic, sleep
from typing import IO

from soapstone.errors import TrainingError
from soapstone.machine.cores import usable_cores
from soapstone.machine.heap import KEPT

GRACE_S = 12.0
"""[choice] How long the other ranks may take to end by themselves once one has failed: longer than rank
0 takes to ask what everyone was waiting for."""

POLL_S = 0.05

WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""[choice] Threads that have nothing to compute leave their core to those that carry messages."""

STANDARD_OUTPUT = 1

ON_DEATH_OF_PARENT = 1
"""What Linux calls PR_SET_PDEATHSIG."""

_LIBRARY = ctypes.CDLL(None)

Process = subprocess.Popen[bytes]


def run_workers(count: int, arguments: Sequence[str], told: Mapping[str, str] | None = None) -> int:
    """Run `soapstone ARGUMENTS` as so many ranks; 0 if all went well, 2 if rank 0 has said what did not, 1 if
    it ended because nobody reads what it says. `told` is set in the environment of each."""
    common = {**_environment(count), **(told or {})}
    with tempfile.TemporaryFile() as said:
        processes: list[Process] = []
        try:
            for rank in range(count):
                environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(_started(arguments, environment, None if rank == 0 else said))
            return _watched(processes, said)
        finally:
            _end(processes)


def _started(arguments: Sequence[str], environment: Mapping[str, str], said: IO[bytes] | None) -> Process:
    return subprocess.Popen(
        [sys.executable, "-m", "soapstone", *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=None if said is None else subprocess.DEVNULL,
        stderr=said,
        preexec_fn=_end_with_parent,  # noqa: PLW1509, it takes no lock
    )


def _end_with_parent() -> None:
    """Have the process that calls this end when the one that made it does, also if that is killed."""
    _LIBRARY.prctl(ON_DEATH_OF_PARENT, signal.SIGTERM)


def _environment(count: int) -> dict[str, str]:
    """What torch.distributed and the ranks' libraries are told; what the user has set stays."""
    threads = max(1, usable_cores() // count)
    chosen = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR", **WAITING, **KEPT}
    return {
        **{name: value for name, value in chosen.items() if name not in os.environ},
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _watched(processes: Sequence[Process], said: IO[bytes]) -> int:
    """Wait for all ranks; once one has failed the others have a moment to end by themselves."""
    deadline: float | None = None
    while any(process.poll() is None for process in processes):
        failed = any(process.poll() not in (None, 0) for process in processes)
        if failed and deadline is None:
            deadline = monotonic() + GRACE_S
        if deadline is not None and monotonic() > deadline:
            break
        sleep(POLL_S)
    codes = [process.poll() for process in processes]
    if all(code == 0 for code in codes):
        return 0
    if codes[0] == 2 or (codes[0] == 1 and _nobody_reads(STANDARD_OUTPUT)):
        return codes[0]
    raise TrainingError(_told(codes, said))


def _nobody_reads(output: int) -> bool:
    """Whether what is written there goes into a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(output, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _told(codes: Sequence[int | None], said: IO[bytes]) -> str:
    """What happened, when rank 0 could not say it."""
    killed = [(rank, -code) for rank, code in enumerate(codes) if code is not None and code < 0]
    if killed:
        rank, number = killed[0]
        return f"rank {rank} was ended by {signal.Signals(number).name}, and training with it"
    said.seek(0)
    lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    rank = next(rank for rank, code in enumerate(codes) if code != 0)
    last = f": {lines[-1].strip()}" if lines else ""
    return f"rank {rank} failed{last}"


def _end(processes: Sequence[Process]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()
