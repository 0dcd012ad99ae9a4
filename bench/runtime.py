"""The runtime against PyTorch, side by side and interleaved: what a step costs beside the operators.

    --section cpu     one device against the plain eager step; a data-parallel plan against
                      DistributedDataParallel on ranks of this computer; bookkeeping for each task
    --section gpu     one GPU against eager, with steps launched and replayed; a data-parallel plan against
                      DistributedDataParallel on slices of the GPU, both over gloo
    --section found   plans that split weights against DistributedDataParallel and FSDP2 (`fully_shard`), on
                      models with large embeddings, dense layers or vocabularies

    python bench/runtime.py [--section cpu] [--ranks 2] [--rounds 15] [--only NAME] [--json FILE]
    python bench/runtime.py --section gpu [--ranks 4]
    python bench/runtime.py --section found [--ranks 2] [--strategy NAME | --plan FILE]

Ratios are their seconds over ours: above 1 we are faster. Each round times all, one after the other in
turns, and a ratio is the median over rounds. The gpu section needs no native core.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from soapstone.api import parallelize
from soapstone.errors import StrategyError
from soapstone.frontends.capture import capture
from soapstone.frontends.zoo import ZOO
from soapstone.graph import Graph
from soapstone.machine import Machine, preset
from soapstone.machine.cores import usable_cores
from soapstone.machine.heap import KEPT, keep_freed_memory
from soapstone.plans import Plan, read_plan, simulation
from soapstone.runtime import session
from soapstone.runtime.slices import check_slices, sliced
from soapstone.runtime.wire import Wire
from soapstone.runtime.workers import WAITING
from soapstone.strategy.layout import layout
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy

Case = tuple[str, int, dict[str, Any]]
"""A model of the zoo, samples a device, and its sizes."""

MODELS: dict[str, Case] = {
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
"""Sizes that a laptop's step takes well under a second of."""

GPU_MODELS: dict[str, Case] = {
    "resnet101": ("resnet101", 16, {}),
    "bert-large": ("bert_large", 4, {"sequence": 128, "dropout": 0.0}),
    "rnnlm": ("rnnlm", 64, {}),
    "resnet101, 64 x 64": MODELS["resnet101, 64 x 64"],
    "bert, 4 layers": MODELS["bert, 4 layers"],
    "rnnlm, 256 wide": MODELS["rnnlm, 256 wide"],
}
"""The models of the papers at their own sizes, and steps that are bound by launches."""

FOUND: dict[str, tuple[Case, str]] = {
    "alexnet, 112 x 112": (("alexnet", 8, {"image": 112, "dropout": 0.0}), "krizhevsky"),
    "rnnlm, 20k words": (("rnnlm", 8, {"hidden": 512, "steps": 8, "vocabulary": 20000}), "optcnn"),
    "nmt, 32k words": (("nmt", 4, {"hidden": 512, "steps": 4}), "optcnn"),
    "dlrm, 8 tables of 100k": (
        ("dlrm", 32, {"rows": (100_000,) * 8, "width": 64, "bottom": (13, 256, 64), "top": (256, 256, 1)}),
        "dlrm_expert",
    ),
    "bert, 100k words": (
        (
            "bert_large",
            2,
            {
                "layers": 2, "hidden": 512, "sequence": 64, "heads": 8, "feed_forward": 2048,
                "vocabulary": 100_000, "dropout": 0.0,
            },
        ),
        "megatron",
    ),
}  # fmt: skip
"""Models whose weights are large for their work, and the strategy that is measured unless one is named."""

WRAPPED_PARAMETERS = 1_000_000
"""[choice] A child module with more parameters than this is a group of its own to FSDP2."""


# -- plans ------------------------------------------------------------------------------------------


def local_statistics(graph: Graph) -> Graph:
    """The graph with batch norm over each shard's own samples, as DDP has it."""
    nodes = tuple(
        replace(node, attrs={**node.attrs, "sync": False}) if node.op.statistics is not None else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def over_samples(graph: Graph, devices: int) -> Strategy:
    """Every block split along samples; copies of those that cannot be. (As `search.baselines` has it,
    which needs the native core.)"""

    def placement(block: Any) -> Placement:
        degrees = {graph.sample_dims.get(block.name, ""): devices}
        try:
            layout(graph, block, degrees)
        except StrategyError:
            return Placement((), tuple(range(devices)), devices)
        return placed(degrees, range(devices))

    blocks = Strategy(graph, {}).blocks
    if devices == 1:
        return Strategy(graph, {block.name: Placement((), (0,)) for block in blocks})
    return Strategy(graph, {block.name: placement(block) for block in blocks})


def strategy_named(name: str, graph: Graph, machine: Machine) -> Strategy:
    if name == "data_parallel":
        return over_samples(graph, len(machine.devices))
    from soapstone.search.baselines import baseline

    return baseline(name, graph, machine)


def built(
    case: Case, ranks: int, strategy: str = "data_parallel"
) -> tuple[nn.Module, tuple[torch.Tensor, ...], Plan]:
    torch.manual_seed(0)
    model, batch, options = case
    module = ZOO[model].build(**options)
    inputs = ZOO[model].inputs(batch * ranks, **options)
    graph = local_statistics(capture(module, inputs, model).graph)
    machine = preset(f"cpu:1x{ranks}")
    chosen = strategy_named(strategy, graph, machine)
    return module, inputs, Plan(chosen, machine, simulation(chosen, machine).prediction, model)


# -- steps ------------------------------------------------------------------------------------------


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


def callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """The children that are called, those of containers included."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from callable_children(child)
        else:
            yield child


def fully_sharded(module: nn.Module, ranks: int) -> nn.Module:
    """The module under FSDP2: large children are groups of their own, and weights stay gathered from the
    forward to the backward pass, which is the faster way where they fit. Tied weights have to be in one
    group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    tied = len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters()))
    for child in callable_children(module) if not tied else []:
        if sum(p.numel() for p in child.parameters()) > WRAPPED_PARAMETERS:
            fully_shard(child, mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return module


def timed(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each contestant in rounds that take turns."""
    for step in steps.values():
        for _ in range(5 if torch.cuda.is_available() else 2):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            if dist.is_initialized():
                dist.barrier()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            steps[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return times


def row(model: str, ranks: int, times: dict[str, list[float]], **more: Any) -> dict[str, Any]:
    """Median seconds of all, and the median ratio of each to ours."""
    ours = times["ours"]
    found: dict[str, Any] = {"model": model, "ranks": ranks}
    found |= {f"{name}_s": statistics.median(own) for name, own in times.items()}
    for name, own in times.items():
        if name != "ours":
            pairs = zip(own, ours, strict=True)
            found[f"{name}/ours"] = statistics.median(theirs / mine for theirs, mine in pairs)
    return found | more


# -- one device -------------------------------------------------------------------------------------


def one_device(name: str, case: Case, rounds: int, device: str) -> dict[str, Any]:
    module, inputs, plan = built(case, 1)
    place = torch.device(device)
    plain = deepcopy(module).to(place)
    given = tuple(t.to(place) for t in inputs)
    trainer = parallelize(module, plan, optimizer=sgd, wire=Wire(device=place))
    steps: dict[str, Callable[[], float]] = {
        "ours": lambda: trainer.step(given),
        "eager": eager(plain, given),
    }
    more: dict[str, Any] = {}
    if device == "cuda":
        launched = parallelize(module, plan, optimizer=sgd, wire=Wire(device=place), replay=False)
        steps["launched"] = lambda: launched.step(given)
    times = timed(steps, rounds)
    replay = trainer.run.executor.replay
    if replay is not None:
        more["replayed"] = replay.is_recorded or replay.refusal
    tasks = len(trainer.run.executor.program.actions)
    found = row(name, 1, times, tasks=tasks, **more)
    return found | {"us_per_task": (found["ours_s"] - found["eager_s"]) / tasks * 1e6}


# -- ranks ------------------------------------------------------------------------------------------


def joined(rank: int, ranks: int, port: int, device: str) -> Wire:
    local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": ranks, **local}
    os.environ.update({name: str(value) for name, value in told.items()})
    torch.set_num_threads(max(1, usable_cores() // ranks))
    dist.init_process_group("gloo")
    keep_freed_memory()  # as ranks of Soapstone do; PyTorch's have it too then
    return session.joined(device)


def share_of(inputs: Sequence[torch.Tensor], rank: int, ranks: int, place: torch.device) -> Any:
    share = inputs[0].shape[0] // ranks
    return tuple(t[rank * share : (rank + 1) * share].to(place) for t in inputs)


def ddp_rank(rank: int, ranks: int, port: int, names: list[str], rounds: int, device: str, out: Any) -> None:
    wire = joined(rank, ranks, port, device)
    place = wire.device
    models = GPU_MODELS if device == "cuda" else MODELS
    for name in names:
        module, inputs, plan = built(models[name], ranks)
        mine = share_of(inputs, rank, ranks, place)
        given = tuple(t.to(place) for t in inputs)
        plain = DistributedDataParallel(deepcopy(module).to(place))
        trainer = parallelize(module, plan, optimizer=sgd, wire=wire)
        steps = {"ours": lambda t=trainer, i=given: t.step(i), "ddp": eager(plain, mine)}
        times = timed(steps, rounds)
        if rank == 0:
            out.put(row(name, ranks, times))
    dist.destroy_process_group()


def found_rank(
    rank: int, ranks: int, port: int, names: list[str], rounds: int, chosen: tuple[str, str], out: Any
) -> None:
    wire = joined(rank, ranks, port, "cpu")
    strategy, plan_file = chosen
    for name in names:
        case, usual = FOUND[name]
        module, inputs, plan = built(case, ranks, strategy or usual)
        plan = read_plan(Path(plan_file)) if plan_file else plan
        mine = share_of(inputs, rank, ranks, wire.device)
        sharded = fully_sharded(deepcopy(module), ranks)
        plain = DistributedDataParallel(deepcopy(module))
        trainer = parallelize(module, plan, optimizer=sgd, wire=wire)
        steps = {
            "ours": lambda t=trainer, i=inputs: t.step(i),
            "ddp": eager(plain, mine),
            "fsdp2": eager(sharded, mine),
        }
        times = timed(steps, rounds)
        if rank == 0:
            told = plan_file or strategy or usual
            out.put(row(name, ranks, times, plan=told, predicted_s=plan.prediction.makespan_s))
        del trainer, plain, sharded, module
    dist.destroy_process_group()


def by_ranks(rank_main: Callable[..., None], ranks: int, names: list[str], *arguments: Any) -> list[Any]:
    """What rank 0 has to say of each model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update({**WAITING, **KEPT})  # for ours and for theirs
    context = torch.multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    torch.multiprocessing.spawn(rank_main, (ranks, port, names, *arguments, out), nprocs=ranks)
    return [out.get() for _ in names]


# -- sections ---------------------------------------------------------------------------------------


def cpu_section(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    names = [name for name in MODELS if name.startswith(arguments.only)]
    rows = [
        shown(one_device(name, MODELS[name], arguments.rounds, arguments.device))
        for name in names
        if not arguments.skip_one
    ]
    names = [name for name in names if "8 wide" not in name]
    if arguments.device == "cpu" and arguments.ranks > 1 and names:
        rows += map(shown, by_ranks(ddp_rank, arguments.ranks, names, arguments.rounds, "cpu"))
    return rows


def gpu_section(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    names = [name for name in GPU_MODELS if name.startswith(arguments.only)]
    rows = []
    for name in names if not arguments.skip_one else []:
        rows.append(shown(one_device(name, GPU_MODELS[name], arguments.rounds, "cuda")))
        torch.cuda.empty_cache()
    if arguments.ranks > 1:
        if not arguments.no_mps:
            check_slices(arguments.ranks, arguments.ranks)
        with nullcontext({}) if arguments.no_mps else sliced(arguments.ranks) as told:
            os.environ.update(told)
            rows += map(shown, by_ranks(ddp_rank, arguments.ranks, names, arguments.rounds, "cuda"))
    return rows


def found_section(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    names = [name for name in FOUND if name.startswith(arguments.only)]
    chosen = (arguments.strategy, arguments.plan)
    rows = []
    for name in names:  # each with ranks of its own, so that one model's memory is not another's
        rows += map(shown, by_ranks(found_rank, arguments.ranks, [name], arguments.rounds, chosen))
    return rows


def shown(found: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(found), flush=True)
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown: times in ms, ratios as they are."""
    columns = list(dict.fromkeys(name for found in rows for name in found))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for found in rows:
        cells = []
        for name in columns:
            value = found.get(name, "")
            if isinstance(value, float):
                value = f"{value * 1e3:.2f} ms" if name.endswith("_s") else f"{value:.2f}"
            cells.append(str(value))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sections = {"cpu": cpu_section, "gpu": gpu_section, "found": found_section}
    parser.add_argument("--section", default="cpu", choices=list(sections))
    parser.add_argument("--ranks", type=int, help="(2; 4 on a GPU)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of the cpu section")
    parser.add_argument("--skip-one", action="store_true", help="only against DDP")
    parser.add_argument("--no-mps", action="store_true", help="ranks on a GPU take turns")
    parser.add_argument("--only", default="", help="models whose name begins so")
    parser.add_argument("--strategy", default="", help="the found plans are of this strategy")
    parser.add_argument("--plan", default="", help="the found plan is in this file (with --only)")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    arguments = parser.parse_args()
    arguments.ranks = arguments.ranks or (4 if arguments.section == "gpu" else 2)
    rows = sections[arguments.section](arguments)
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
