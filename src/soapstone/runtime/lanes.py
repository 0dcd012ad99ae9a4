"""Lanes: work of a GPU beside its computing, done one piece after the other, and words that lanes of several
processes wait for.

A lane is a stream of CUDA. That a stream waits for a word in memory, or writes one, is the driver's to do:
no thread of the host has a part in it, and no multiprocessor. torch has no name for it, so the driver's own
functions are called, and for copies too: they take a quarter of the time that torch's `copy_` takes of the
thread that asks for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

DRIVER = "libcuda.so.1"
AT_LEAST = 0
"""The driver's flag for waiting until a word, as a signed difference, is at least a value."""

FIRST = -1
"""The priority of a stream whose few kernels go before those that compute."""


class Lane(Protocol):
    """What a lane can be asked to do next. Nothing of it waits for what was asked."""

    def wait(self, address: int, value: int) -> None:
        """Go on when a word is at least a value."""

    def write(self, address: int, value: int) -> None:
        """Write a word; what was copied before is seen by whoever sees it."""

    def copy(self, to: int, origin: int, size_bytes: int) -> None:
        """Copy bytes from one address to another."""

    def do(self, act: Callable[[], object]) -> None:
        """Do what is asked for within a call."""

    def after(self, mark: object | None) -> None:
        """Go on when another lane has come to its mark, or computing to where it is now."""

    def mark(self) -> object:
        """A mark at this place."""

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until all of this is done."""

    def room(self, like: Tensor, count: int) -> Tensor:
        """Memory for so many tensors like one, for use on this lane."""


class Refused(Exception):
    """The driver cannot do what lanes need."""


class CudaLane:
    """A stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wait, self._write, self._copy = _functions()
        self._stream = torch.cuda.Stream(device, priority=FIRST)
        self._handle = self._stream.cuda_stream
        self._here = torch.cuda.Event()

    def wait(self, address: int, value: int) -> None:
        """Go on when a word is at least a value."""
        _check(self._wait(self._handle, address, value & 0xFFFFFFFF, AT_LEAST))

    def write(self, address: int, value: int) -> None:
        """Write a word; what was copied before is seen by whoever sees it."""
        _check(self._write(self._handle, address, value & 0xFFFFFFFF, 0))

    def copy(self, to: int, origin: int, size_bytes: int) -> None:
        """Copy bytes from one address to another, of the GPU or of the host."""
        _check(self._copy(to, origin, size_bytes, self._handle))

    def do(self, act: Callable[[], object]) -> None:
        """Launch what a call launches."""
        with torch.cuda.stream(self._stream):
            act()

    def after(self, mark: object | None) -> None:
        """Go on when another lane has come to its mark, or the current stream to where it is now."""
        if not isinstance(mark, torch.cuda.Event):
            mark = self._here  # what waits for it already waits for where it was
            mark.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(mark)

    def mark(self) -> torch.cuda.Event:
        """An event at this place."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until all of this is done."""
        tensor.record_stream(self._stream)

    def room(self, like: Tensor, count: int) -> Tensor:
        """Memory for so many tensors like one, for use on this lane."""
        with torch.cuda.stream(self._stream):
            return like.new_empty((count, *like.shape))


def opened(address: int, size_bytes: int) -> None:
    """Let the GPU at hand read and write memory of the host that is mapped already."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
    if code:
        raise Refused(f"cudaHostRegister gave {code}")


@cache
def _functions() -> tuple[Callable[..., int], Callable[..., int], Callable[..., int]]:
    """The driver's waiting for a word, writing of one, and copying."""
    try:
        driver = ctypes.CDLL(DRIVER)
        wait, write = driver.cuStreamWaitValue32_v2, driver.cuStreamWriteValue32_v2
        copy = driver.cuMemcpyAsync
    except (OSError, AttributeError) as error:
        raise Refused(str(error)) from None
    for each in (wait, write):
        each.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return wait, write, copy


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver refused to copy, or to wait for a word: error {code}")
