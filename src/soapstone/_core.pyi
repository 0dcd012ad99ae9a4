"""The native core as it is compiled from `cpp/module.cc`; `soapstone.native` says what it does."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

def overlaps(written: NDArray[np.int64], read: NDArray[np.int64]) -> NDArray[np.int64]: ...
def grid_overlaps(
    sizes: Sequence[int], degrees: Sequence[int], read: NDArray[np.int64]
) -> NDArray[np.int64]: ...
def simulate(
    duration_s: NDArray[np.float64],
    resource: NDArray[np.int32],
    after_begin: NDArray[np.int64],
    after: NDArray[np.int32],
    resource_count: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]: ...
def word_load(address: int) -> int: ...
def word_add(address: int, difference: int) -> int: ...
def word_ring(address: int) -> None: ...
def word_wait(address: int, seen: int, watch_s: float, timeout_s: float) -> bool: ...

class Axis:
    offset: int
    divisor: int
    dims: list[int]
    strides: list[int]

class Access:
    value: int
    weight: int
    inner_node: int
    inner_output: int
    is_present: bool
    is_finishing: bool
    is_gathered: bool
    wants_gradient: bool
    is_kept: bool
    item_bytes: int
    shape: list[int]
    axes: list[Axis]

class TimeCurve:
    base_s: float
    s_per_flop: float
    s_per_byte: float
    least_s_per_flop: float
    least_s_per_byte: float
    shapes: list[list[int]]
    seconds: list[float]

class NodeData:
    sizes: list[int]
    is_splittable: list[bool]
    is_summed: list[bool]
    is_shared: list[bool]
    is_gathered: list[bool]
    synchronises: bool
    factored: list[list[int]]
    carried: int
    flops: float
    flops_per_s: list[float]
    forward_curve: list[int]
    backward_curve: list[int]
    operands: list[Access]
    outputs: list[Access]
    has_backward: bool
    writes_gradient: bool
    is_free_forward: bool
    is_free_backward: bool

class BlockData:
    nodes: list[NodeData]
    needs_backward: bool
    passes_sums: bool
    sample_dim: int

class ValueData:
    rank: int
    item_bytes: int
    is_differentiable: bool
    number: int

class WeightData:
    rank: int
    item_bytes: int
    number: int
    shelf: int

class MachineData:
    device_count: int
    link_count: int
    kind: list[int]
    link: list[int]
    bandwidth: list[float]
    latency: list[float]
    launch_s: list[float]
    message_s: list[float]
    memory_bytes_per_s: list[float]
    update_bytes_per_byte: float
    sums_by_one_device: bool

class Problem:
    def __init__(
        self,
        machine: MachineData,
        blocks: list[BlockData],
        values: list[ValueData],
        weights: list[WeightData],
        curves: list[TimeCurve] = [],
        has_buckets: bool = False,
    ) -> None: ...
    def in_buckets(self) -> Problem: ...

class HeldData:
    size_bytes: list[int]
    made_in: int
    needed_in: int
    kept_for: int
    def __init__(self) -> None: ...

class BlockHeld:
    held: list[HeldData]
    outputs: list[int]
    values: list[tuple[int, int]]
    def __init__(self) -> None: ...

class PlannedTasks:
    def __init__(self, problem: Problem) -> None: ...
    def place(
        self,
        block: int,
        degrees: list[int],
        copies: int,
        devices: list[int],
        lanes: int = 1,
        in_flight: int = 0,
    ) -> bool: ...
    def flat(
        self,
    ) -> tuple[
        NDArray[np.uint8],
        NDArray[np.int32],
        NDArray[np.float64],
        NDArray[np.int64],
        NDArray[np.int64],
        NDArray[np.int32],
    ]: ...
    def foretold(
        self, held: list[BlockHeld], input_bytes: list[int], states_per_weight: int
    ) -> tuple[float, int, int, list[float], list[tuple[int, float, list[int]]]]: ...

class Proposals:
    def __init__(
        self,
        problem: Problem,
        seed: int = 0,
        method: Literal["engine", "full", "paper_delta", "plain"] = "engine",
        uses_threshold: bool = True,
        is_structured: bool = False,
        has_ranges: bool = False,
    ) -> None: ...
    def place(
        self,
        block: int,
        degrees: list[int],
        copies: int,
        devices: list[int],
        lanes: int = 1,
        in_flight: int = 0,
    ) -> bool: ...
    def makespan(self) -> float: ...
    def propose(
        self,
        block: int,
        degrees: list[int],
        copies: int,
        devices: list[int],
        threshold_s: float,
        lanes: int = 1,
        in_flight: int = 0,
    ) -> float: ...
    def accept(self) -> None: ...
    def reject(self) -> None: ...
    def place_at_random(self) -> None: ...
    def limit(self, capacity_bytes: list[int], numbers_per_weight: int) -> None: ...
    def footprint_bytes(self, numbers_per_weight: int) -> list[int]: ...
    def step(self, proposals: int, temperature_s: float) -> int: ...
    def quieten(self, proposals: int, limit_s: float) -> int: ...
    @property
    def link_s(self) -> float: ...
    def placed(self, block: int) -> tuple[list[int], int, list[int]]: ...
    def best(self, block: int) -> tuple[list[int], int, list[int]]: ...
    def degrees(self, block: int) -> list[list[int]]: ...
    def ends(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]: ...
    @property
    def best_s(self) -> float: ...
    @property
    def best_at(self) -> int: ...
    @property
    def best_excess_bytes(self) -> int: ...
    @property
    def counters(self) -> tuple[int, int, int, int]: ...
    @property
    def task_count(self) -> int: ...

class ExactSearch:
    def __init__(
        self, problem: Problem, tolerance: float, has_ranges: bool = False, first_restart: int = ...
    ) -> None: ...
    def offer(self, strategy: list[tuple[list[int], int, list[int]]]) -> None: ...
    def bounds(self, strategy: list[tuple[list[int], int, list[int]]]) -> list[float]: ...
    def step(self, count: int) -> bool: ...
    def split(self, block: int, part: int, parts: int) -> None: ...
    def beat(self, makespan_s: float) -> None: ...
    def best(self) -> list[tuple[list[int], int, list[int]]]: ...
    @property
    def first_block(self) -> int: ...
    @property
    def has_settled(self) -> bool: ...
    @property
    def best_s(self) -> float: ...
    @property
    def lower_bound_s(self) -> float: ...
    @property
    def bounded(self) -> int: ...
    @property
    def simulated(self) -> int: ...
    @property
    def symmetry(self) -> int: ...
    @property
    def entered(self) -> list[int]: ...

def lower_bound(problem: Problem) -> tuple[float, float]: ...

class TermBank:
    def __init__(self, seed: int) -> None: ...
    def add_program(
        self,
        arity: int,
        size: int,
        points: int,
        combine: int,
        outside: int,
        gather: NDArray[np.int32],
        body: list[tuple[int, int]],
        extra: int,
        finish_gather: NDArray[np.int32],
        finish: list[tuple[int, int]],
        salt: list[int],
    ) -> int: ...
    def add_operator(
        self, operands: list[int], outputs: list[int], programs: list[int], commutes: bool
    ) -> int: ...
    def add_variable(self, type: int, size: int, enumerated: bool) -> int: ...  # noqa: A002
    def apply(self, op: int, operands: list[int]) -> int: ...
    def fingerprint(self, value: int) -> int: ...
    def type(self, value: int) -> int: ...
    def node_of(self, value: int) -> int: ...
    def output_of(self, value: int) -> int: ...
    def operator_of(self, node: int) -> int: ...
    def operands_of(self, node: int) -> list[int]: ...
    def equal_graphs(self, most_nodes: int, most_outputs: int) -> NDArray[np.int32]: ...
    @property
    def node_count(self) -> int: ...
    @property
    def value_count(self) -> int: ...
    @property
    def graph_count(self) -> int: ...
