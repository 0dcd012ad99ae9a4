"""The runtime against PyTorch, side by side and interleaved: what a step costs beside the operators.

    one device      a step of ours against the plain eager step
    data parallel   a data-parallel plan against DistributedDataParallel, on ranks of this computer
    per task        what a step of a model of tiny operators takes beyond eager's, for each task

    python bench/runtime.py [--ranks 2] [--rounds 15] [--device cpu|cuda] [--only NAME]

Ratios are eager (or DDP) seconds over ours: above 1 we are faster. Each round times both, one after the
other in turns, and a ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from soapstone.api import parallelize
from soapstone.frontends.capture import capture
from soapstone.frontends.zoo import ZOO
from soapstone.graph import Graph
from soapstone.machine import preset
from soapstone.plan import Plan, simulation
from soapstone.runtime.wire import Wire
from soapstone.search.baselines import data_parallel, single_device

MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "resnet101, 64 x 64": ("resnet101", 4, {"image": 64}),
    "bert, 4 layers": (
        "bert_large",
        2,
        {"layers": 4, "hidden": 512, "sequence": 64, "heads": 8, "feed_forward": 2048, "dropout": 0.0},
    ),
    "rnnlm, 256 wide": ("rnnlm", 16, {"hidden": 256, "steps": 20}),
    "mlp, 8 wide, 32 layers": ("mlp", 4, {"features": 8, "hidden": 8, "layers": 32}),
    "mlp, 512 wide": ("mlp", 64, {"features": 512, "hidden": 512, "layers": 8}),
}
"""Models at sizes that a laptop's step takes well under a second of: name, samples a device, options."""


def local_statistics(graph: Graph) -> Graph:
    """The graph with batch norm over each shard's own samples, as DDP has it."""
    nodes = tuple(
        replace(node, attrs={**node.attrs, "sync": False}) if node.op.statistics is not None else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def built(name: str, ranks: int) -> tuple[nn.Module, tuple[torch.Tensor, ...], Plan]:
    torch.manual_seed(0)
    model, batch, options = MODELS[name]
    module = ZOO[model].build(**options)
    inputs = ZOO[model].inputs(batch * ranks, **options)
    graph = local_statistics(capture(module, inputs, model).graph)
    machine = preset(f"cpu:1x{ranks}")
    strategy = (single_device if ranks == 1 else data_parallel)(graph, machine)
    return module, inputs, Plan(strategy, machine, simulation(strategy, machine).prediction, model)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9)


def eager(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Callable[[], float]:
    optimizer = sgd(module.parameters())
    module.train()

    def step() -> float:
        optimizer.zero_grad()
        loss = module(*inputs)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def compared(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int
) -> tuple[float, float, float]:
    """Our median seconds, theirs, and the median ratio theirs / ours of rounds that take turns."""
    for _ in range(2):
        ours()
        theirs()
    times: list[tuple[float, float]] = []
    for number in range(rounds):
        both = {}
        for which, step in ((0, ours), (1, theirs)) if number % 2 else ((1, theirs), (0, ours)):
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            both[which] = time.perf_counter() - start
        times.append((both[0], both[1]))
    return (
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(b / a for a, b in times),
    )


def one_device(name: str, rounds: int, device: str) -> dict[str, Any]:
    module, inputs, plan = built(name, 1)
    place = torch.device(device)
    plain = deepcopy(module).to(place)
    given = tuple(t.to(place) for t in inputs)
    trainer = parallelize(module, plan, optimizer=sgd, wire=Wire(device=place))
    ours_s, eager_s, ratio = compared(lambda: trainer.step(given), eager(plain, given), rounds)
    tasks = len(trainer.run.executor.program.actions)
    return {
        "model": name, "ranks": 1, "ours_s": ours_s, "eager_s": eager_s, "ratio": ratio, "tasks": tasks,
        "us_per_task": (ours_s - eager_s) / tasks * 1e6,
    }  # fmt: skip


def ddp_rank(rank: int, ranks: int, port: int, names: list[str], rounds: int, out: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo")
    for name in names:
        module, inputs, plan = built(name, ranks)
        share = inputs[0].shape[0] // ranks
        mine = tuple(t[rank * share : (rank + 1) * share] for t in inputs)
        plain = DistributedDataParallel(deepcopy(module))
        trainer = parallelize(module, plan, optimizer=sgd)
        ours_s, ddp_s, ratio = compared(lambda t=trainer, i=inputs: t.step(i), eager(plain, mine), rounds)
        if rank == 0:
            out.put({"model": name, "ranks": ranks, "ours_s": ours_s, "ddp_s": ddp_s, "ratio": ratio})
    dist.destroy_process_group()


def against_ddp(names: list[str], ranks: int, rounds: int) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    torch.multiprocessing.spawn(ddp_rank, (ranks, port, names, rounds, out), nprocs=ranks)
    return [out.get() for _ in names]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--skip-one", action="store_true", help="only against DDP")
    parser.add_argument("--only", default="", help="models whose name begins so")
    arguments = parser.parse_args()
    names = [name for name in MODELS if name.startswith(arguments.only)]
    for name in names if not arguments.skip_one else []:
        print(json.dumps(one_device(name, arguments.rounds, arguments.device)), flush=True)
    if arguments.device == "cpu" and arguments.ranks > 1:
        names = [name for name in names if "8 wide" not in name]
        for row in against_ddp(names, arguments.ranks, arguments.rounds):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
