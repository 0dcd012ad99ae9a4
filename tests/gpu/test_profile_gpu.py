"""Measuring on a GPU: kernels apart from launching them, and the real times of tasks.

python -m pytest tests/gpu -m gpu
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from oracles.gpucases import trainer_on_gpu
from oracles.training import tiny

from soapstone.cost.at_hand import device_at_hand
from soapstone.cost.candidates import candidates
from soapstone.cost.profile import Launched
from soapstone.cost.profiler import Profiler
from soapstone.graph import GraphBuilder
from soapstone.tasks.task import TaskKind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


def launched(rows: int) -> tuple[Launched, Launched, float]:
    """A linear layer's two passes on so many rows, and the seconds of the first."""
    build = GraphBuilder("linear")
    x, w = build.input("x", (rows, 2048)), build.weight("w", (2048, 2048))
    (y,) = build.add("linear", [x, w, None], name="y")
    (loss,) = build.add("sum", [y], {"dim": (0, 1)}, name="loss")
    graph = build.graph(loss=loss)
    (candidate,) = [each for each in candidates(graph, [1]) if each.node.name == "y"]
    profiler = Profiler(device_at_hand("cuda"), launches=True)
    assert profiler.measure(candidate), profiler.failed
    found = {
        key.gradients > 0: measured for key, times in profiler.profile.times.items() for measured in times
    }
    forward, backward = found[False].launched, found[True].launched
    assert forward is not None
    assert backward is not None
    return forward, backward, found[False].seconds


def test_kernels_and_launching_are_told_apart() -> None:
    """Launching takes what it takes; kernels take longer for more rows, and are what counts there."""
    few, few_backward, _ = launched(8)
    many, many_backward, seconds = launched(32768)
    assert few.launching_s < 50 * many.launching_s
    assert many.kernels_s > 20 * few.kernels_s
    assert many_backward.kernels_s > 20 * few_backward.kernels_s
    assert many.kernels_s == pytest.approx(seconds, rel=0.3)
    assert many.kernels_s > many.launching_s > 0


def test_a_traced_step_has_the_times_of_the_gpu() -> None:
    """Tasks follow each other on the one GPU, and what they take together is the step but for gaps."""
    _, batches, _ = tiny("lenet", 4)
    trainer = trainer_on_gpu("lenet", fuse=False)
    for batch in batches[:-1]:
        trainer.step(batch)
    _, graph, timeline = trainer.traced_step(batches[-1])
    spans = sorted(
        (start_s, end_s)
        for task, start_s, end_s in zip(graph.tasks, timeline.start_s, timeline.end_s, strict=True)
        if task.kind in (TaskKind.FORWARD, TaskKind.BACKWARD)
    )
    assert all(start_s < end_s for start_s, end_s in spans)
    for (_, end_s), (start_s, _) in pairwise(spans):
        assert start_s > end_s - 2e-4  # two clocks
