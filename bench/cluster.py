"""Several hosts on one computer: nodes are network namespaces, the link between them has a set bandwidth.

Two nodes of two CPU ranks each train a multilayer perceptron under the strategies that a person would think
of (data parallel, tensor parallel, two stages, one device) and under others that are drawn. Which is best
depends on the link, and the prediction has to know: it is made from messages and operators measured beside
the run.

    sudo python bench/cluster.py
    sudo python bench/cluster.py --rates 1gbit 200mbit --strategies 20 --json cluster.json

Needs root, `ip` and `tc`. The namespaces are named after this process, and removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from soapstone.frontends.source import load
from soapstone.graph import Graph
from soapstone.machine import Device, DeviceKind, Machine, full_duplex
from soapstone.runtime.detecting import measured_kind, measured_pair
from soapstone.runtime.session import seeded, session
from soapstone.runtime.wire import Wire
from soapstone.search.baselines import baseline
from soapstone.strategy.placement import Placement, placed
from soapstone.strategy.strategy import Strategy
from soapstone.validation.drawing import Drawn
from soapstone.validation.validating import Wanted, validated

NODES, PER_NODE = 2, 2
RANKS = NODES * PER_NODE
MODEL = "mlp:features=384,hidden=384,layers=8"
BATCH = 5120
"""[choice] Sizes at which the better of data parallelism and one device depends on the link."""
WORST = 3
"""[choice] Of so many of the worst predictions it is told what accounts for them."""
SUBNET = "10.213.7"
BURST = "128kb"

SMALL_BYTES, LARGE_BYTES = 1024, 4 * 2**20
"""[choice] Messages whose times tell latency and bandwidth."""


# -- the nodes --------------------------------------------------------------------------------------


def told(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)}: {ran.stderr.strip()}")


@contextmanager
def namespaces(rate: str) -> Iterator[list[str]]:
    """Two nodes, joined by a link of this rate in each direction."""
    names = [f"soapstone{os.getpid()}-{i}" for i in range(NODES)]
    with ExitStack() as stack:
        for name in names:
            told("ip", "netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
        ends = [f"ss{os.getpid() % 100000}-{i}" for i in range(NODES)]
        told("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for i, (name, end) in enumerate(zip(names, ends, strict=True)):
            told("ip", "link", "set", end, "netns", name, "name", "uplink")
            inside = ("ip", "-n", name)
            told(*inside, "address", "add", f"{SUBNET}.{i + 1}/24", "dev", "uplink")
            told(*inside, "link", "set", "lo", "up")
            told(*inside, "link", "set", "uplink", "up")
            shape = ("root", "tbf", "rate", rate, "burst", BURST, "latency", "100ms")
            told("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "uplink", *shape)
        yield names


def run_ranks(names: Sequence[str], arguments: Sequence[str]) -> None:
    """This script as one rank of each device; one that fails ends all."""
    processes = []
    for rank in range(RANKS):
        node = rank // PER_NODE
        environment = {
            "RANK": rank, "LOCAL_RANK": rank % PER_NODE, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": PER_NODE,
            "MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": 29517, "GLOO_SOCKET_IFNAME": "uplink",
            "OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR",
        }  # fmt: skip
        command = ["ip", "netns", "exec", names[node], sys.executable, __file__, "--as-rank", *arguments]
        given = {name: str(value) for name, value in environment.items()}
        processes.append(subprocess.Popen(command, env={**os.environ, **given}))
    try:
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit("a rank has failed")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()


# -- a rank -----------------------------------------------------------------------------------------


def detected(wire: Wire) -> Machine:
    """The cluster as its ranks measure it: within a node, and between two."""
    kind = measured_kind(wire)
    within = measured_pair(wire, 0, 1, SMALL_BYTES, LARGE_BYTES)
    between = measured_pair(wire, 0, PER_NODE, SMALL_BYTES, LARGE_BYTES)
    numbers = torch.tensor([*within, *between, *kind.peak_flops_per_s.values()], dtype=torch.float64)
    first = wire.shared(numbers if wire.rank == 0 else None, numbers.shape, numbers.dtype, 0, "links")
    in_s, in_rate, out_s, out_rate, *rates = (float(f"{number:.4g}") for number in first.tolist())
    kind = DeviceKind(
        "cpu",
        kind.memory_bytes,
        dict(zip(kind.peak_flops_per_s, rates, strict=True)),
        kind.memory_bandwidth_bytes_per_s,
        kind.launch_overhead_s,
    )
    return cluster(kind, (in_s, in_rate), (out_s, out_rate))


def cluster(kind: DeviceKind, within: tuple[float, float], between: tuple[float, float]) -> Machine:
    devices, links, hosts = [], [], [f"node{n}/host" for n in range(NODES)]
    for i in range(RANKS):
        node = f"node{i // PER_NODE}"
        device = Device(i, f"{node}/cpu{i % PER_NODE}", kind, node)
        devices.append(device)
        links += full_duplex(
            f"{node}/link{i % PER_NODE}", device.name, f"{node}/host", within[1], within[0] / 2
        )
    latency_s = max(0.0, between[0] - within[0])  # the rest of the way is within the nodes
    links += full_duplex("uplink", hosts[0], hosts[1], between[1], latency_s)
    return Machine("cluster", tuple(devices), tuple(links), tuple(hosts))


def by_hand(graph: Graph, machine: Machine) -> list[Drawn]:
    """What a person would think of."""
    plain = baseline("data_parallel", graph, machine)
    everywhere = tuple(range(RANKS))
    layers = [block.name for block in plain.blocks if any(n.op_name == "linear" for n in block.nodes)]
    ways = {name: {"o": RANKS} if i % 2 == 0 else {"i": RANKS} for i, name in enumerate(layers)}
    tensor = {
        block.name: placed(ways[block.name], everywhere)
        if block.name in ways
        else Placement((), everywhere, RANKS)
        for block in plain.blocks
    }
    half = len(layers) // 2
    late = set(layers[half:])
    first = plain.blocks.index(next(block for block in plain.blocks if block.name in late))
    stages = {
        block.name: _within(
            plain.placements[block.name], range(PER_NODE) if i < first else range(PER_NODE, RANKS)
        )
        for i, block in enumerate(plain.blocks)
    }
    return [
        Drawn("data parallel", plain),
        Drawn("tensor parallel", Strategy(graph, tensor)),
        Drawn("two stages", Strategy(graph, stages)),
        Drawn("one device", baseline("single_device", graph, machine)),
    ]


def _within(placement: Placement, devices: Sequence[int]) -> Placement:
    """The same split over fewer devices."""
    return placed({dim: len(devices) for dim, _ in placement.degrees}, devices)


def as_rank(options: argparse.Namespace) -> None:
    with session("cpu") as wire:
        machine = detected(wire)
        with seeded(0):
            source = load(options.model, batch=options.batch, devices=RANKS, weights=True)
        wanted = Wanted(
            machine,
            options.strategies,
            options.steps,
            options.seed,
            "measured",
            60.0,
            options.statistic,
            lambda graph: by_hand(graph, machine),
        )
        outcome = validated(source, wanted, wire, WORST, lambda *_: None)
        if wire.rank == 0:
            links = {link.name: (link.bandwidth_bytes_per_s, link.latency_s) for link in machine.links}
            found = {
                "links": links,
                "summary": asdict(outcome.reported),
                "summary_unfitted": asdict(outcome.unfitted),
                "unfitted_s": outcome.unfitted_s,
                "measured": outcome.measured,
                "worst": [{"strategy": each.name} | asdict(found) for each, found in outcome.worst],
                "fitted": asdict(outcome.calibration),
                "strategies": [asdict(each) for each in outcome.compared],
                "fitted_on": sorted(outcome.fitted_on),
            }
            options.out.write_text(json.dumps(found))


# -- the tables -------------------------------------------------------------------------------------


def shown(rate: str, found: dict[str, Any]) -> None:
    bandwidth, latency_s = next(value for name, value in found["links"].items() if name.startswith("uplink"))
    print(f"\n{rate}: the link carries {bandwidth / 1e6:.1f} MB/s, {latency_s * 1e6:.0f} us")
    print("| strategy | predicted ms | actual ms | error |\n|---|---|---|---|")
    for i, each in enumerate(found["strategies"]):
        predicted_s, actual_s = each["predicted_s"], each["actual_s"]
        mark = " (fitted)" if i in found["fitted_on"] else ""
        times = f"{predicted_s * 1e3:.1f} | {actual_s * 1e3:.1f} | {predicted_s / actual_s - 1:+.1%}"
        print(f"| {each['name']}{mark} | {times} |")
    summary = found["summary"]
    print(
        f"of those that were not fitted: error {summary['median_error']:.1%} (median),"
        f" {summary['worst_error']:.1%} (worst), tau {summary['tau']:.2f}"
    )
    four = found["strategies"][:4]
    predicted = min(four, key=lambda each: each["predicted_s"])["name"]
    actual = min(four, key=lambda each: each["actual_s"])["name"]
    print(f"best of the four by hand: predicted {predicted}, actual {actual}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"], help="of the link, as tc has it")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--strategies", type=int, default=20)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--statistic", default="quartile", choices=["quartile", "median", "fastest"])
    parser.add_argument("--json", type=Path, help="write all that was measured here")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        as_rank(options)
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # namespaces are removed then too
    everything = {}
    for rate in options.rates:
        with namespaces(rate) as names, TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            arguments = [
                "--model",
                options.model,
                "--batch",
                options.batch,
                "--strategies",
                options.strategies,
            ]
            arguments += ["--steps", options.steps, "--seed", options.seed, "--statistic", options.statistic]
            run_ranks(names, [*map(str, arguments), "--out", str(out)])
            everything[rate] = json.loads(out.read_text())
        shown(rate, everything[rate])
        if options.json is not None:
            options.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
