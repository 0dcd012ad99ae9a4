"""Lanes: work of a GPU beside its computing, done one piece after the other, and words that lanes of several
processes wait for.

A lane is a stream of CUDA. That a stream waits for a word in memory, or writes one, is the driver's to do:
no thread of the host has a part in it, and no multiprocessor. torch has no name for it, so the driver's own
functions are called, and for copies too: they take a quarter of the time that torch's `copy_` takes of the
thread that asks for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

DRIVER = "libcuda.so.1"
AT_LEAST = 0
"""The driver's flag for waiting until a word, as a signed difference, is at least a value."""

FIRST = -1
"""The priority of a stream whose few kernels go before those that compute."""


class Mark(Protocol):
    """A place that a lane has been asked to come to."""

    def query(self) -> bool:
        """Whether the lane has come there."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def hold_back(self) -> None:
        """Let what is computed from now on wait for it."""


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

    def mark(self) -> Mark:
        """A mark at this place."""

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until all of this is done."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for use on this lane, and for computing after it."""


class Host(Protocol):
    """The host's memory, as a GPU sees it."""

    def open(self, address: int, size_bytes: int) -> None:
        """Let lanes read and write memory that is mapped already."""

    def close(self, address: int) -> None:
        """Have done with memory that was opened."""


class Refused(Exception):
    """The driver cannot do what lanes need."""


class CudaMark:
    """An event of the driver's."""

    __slots__ = ("_device", "event")

    def __init__(self, device: int) -> None:
        self._device = device
        self.event = _events.pop() if _events else _new_event()

    def __del__(self) -> None:
        _events.append(self.event)

    def query(self) -> bool:
        """Whether the stream has come there."""
        code = _driver().query(self.event)
        if code != NOT_READY:
            _check(code)
        return code == 0

    def synchronize(self) -> None:
        """Wait until it has."""
        _check(_driver().synchronize(self.event))

    def hold_back(self) -> None:
        """Let what is launched on the current stream from now on wait for it."""
        _check(_driver().after(_current(self._device), self.event, 0))


class CudaLane:
    """A stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._driver = _driver()
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._stream = torch.cuda.Stream(device, priority=FIRST)
        self._handle = self._stream.cuda_stream
        self._here = CudaMark(self._device)
        self._computing: dict[int, torch.cuda.Stream] = {}

    def wait(self, address: int, value: int) -> None:
        """Go on when a word is at least a value."""
        _check(self._driver.wait(self._handle, address, value & 0xFFFFFFFF, AT_LEAST))

    def write(self, address: int, value: int) -> None:
        """Write a word; what was copied before is seen by whoever sees it."""
        _check(self._driver.write(self._handle, address, value & 0xFFFFFFFF, 0))

    def copy(self, to: int, origin: int, size_bytes: int) -> None:
        """Copy bytes from one address to another, of the GPU or of the host."""
        _check(self._driver.copy(to, origin, size_bytes, self._handle))

    def do(self, act: Callable[[], object]) -> None:
        """Launch what a call launches."""
        before = torch._C._cuda_getCurrentStream(self._device)
        torch.cuda.set_stream(self._stream)
        try:
            act()
        finally:
            stream_id, device_index, device_type = before
            torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)

    def after(self, mark: object | None) -> None:
        """Go on when another lane has come to its mark, or the current stream to where it is now."""
        if isinstance(mark, torch.cuda.Event):
            self._stream.wait_event(mark)
            return
        if mark is None:
            mark = self._here  # what waits for it already waits for where it was
            _check(self._driver.record(self._here.event, _current(self._device)))
        assert isinstance(mark, CudaMark)
        _check(self._driver.after(self._handle, mark.event, 0))

    def mark(self) -> CudaMark:
        """An event at this place."""
        mark = CudaMark(self._device)
        _check(self._driver.record(mark.event, self._handle))
        return mark

    def hold(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until all of this is done."""
        tensor.record_stream(self._stream)

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for use on this lane, and on the current stream after it. It is this lane's own: what is
        written to it need not wait for what computing has done with it before."""
        found: list[Tensor] = []
        self.do(lambda: found.append(torch.empty(tuple(shape), dtype=dtype, device="cuda")))
        current = _current(self._device)
        if current not in self._computing:
            self._computing[current] = torch.cuda.current_stream(self._device)
        found[0].record_stream(self._computing[current])
        return found[0]


class CudaHost:
    """Memory of the host that is pinned for the GPU at hand."""

    def open(self, address: int, size_bytes: int) -> None:
        """Pin memory that is mapped already."""
        code = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
        if code:
            raise Refused(f"cudaHostRegister gave {code}")

    def close(self, address: int) -> None:
        """Have done with memory that was pinned."""
        torch.cuda.cudart().cudaHostUnregister(address)


# -- the driver -------------------------------------------------------------------------------------

NOT_READY = 600
"""The driver's word for an event that has not come yet."""

_UNTIMED = 2


@dataclass(frozen=True)
class _Driver:
    """The driver's functions; each gives an error code, or 0."""

    wait: Callable[[int, int, int, int], int]
    write: Callable[[int, int, int, int], int]
    copy: Callable[[int, int, int, int], int]
    create: Callable[[Any, int], int]
    record: Callable[[int, int], int]
    after: Callable[[int, int, int], int]
    query: Callable[[int], int]
    synchronize: Callable[[int], int]


@cache
def _driver() -> _Driver:
    pointer, word, number, size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t
    names: dict[str, list[Any]] = {
        "cuStreamWaitValue32_v2": [pointer, word, number, number],
        "cuStreamWriteValue32_v2": [pointer, word, number, number],
        "cuMemcpyAsync": [word, word, size, pointer],
        "cuEventCreate": [ctypes.POINTER(pointer), number],
        "cuEventRecord": [pointer, pointer],
        "cuStreamWaitEvent": [pointer, pointer, number],
        "cuEventQuery": [pointer],
        "cuEventSynchronize": [pointer],
    }
    try:
        library = ctypes.CDLL(DRIVER)
        functions = [getattr(library, name) for name in names]
    except (OSError, AttributeError) as error:
        raise Refused(str(error)) from None
    for function, types in zip(functions, names.values(), strict=True):
        function.argtypes = types
    return _Driver(*functions)


_events: list[int] = []
"""Events that nobody needs any more."""


def _new_event() -> int:
    found = ctypes.c_void_p()
    _check(_driver().create(ctypes.byref(found), _UNTIMED))
    assert found.value is not None
    return found.value


def _current(device: int) -> int:
    """The driver's name for the stream that computing is launched on."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver gave error {code} for a message between ranks")
