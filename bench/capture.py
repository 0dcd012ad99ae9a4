"""How long capturing takes, and how much of transformers can be captured.

The first table times every model of the zoo at its published size: building the module, `torch.export`,
its decomposition into functional operators, and our own walk over the result.

The second counts, over all model types of the installed transformers, how a model of the type's default
configuration (with few layers, on the meta device) is captured: whole, with opaque nodes, or not at all,
and why. Each is captured in a process of its own, `--jobs` at a time, for at most `--limit` seconds.

    python bench/capture.py
    python bench/capture.py --zoo resnet101 inception_v3 nmt --types
    python bench/capture.py --zoo --types bert llama mixtral --json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.export
import transformers
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch.export import ExportedProgram

from soapstone.cli.output import console, print_json, progress
from soapstone.errors import SoapstoneError
from soapstone.frontends.fidelity import replaced
from soapstone.frontends.source import load
from soapstone.frontends.zoo import ZOO

# Seconds that capturing may take.
TARGETS = {"resnet101": 10.0, "inception_v3": 10.0, "nmt": 20.0}

LAYERS = re.compile(r"(n|num|encoder|decoder|text|vision|audio|hidden|_)*_?(layers?|depth)")
"""Fields that count layers, by their whole name."""

# What the defaults of a type leave open, though no model can be built without it; sizes are those of a
# published model.
OPEN_FIELDS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 24},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_routed_experts": 64},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "informer": {"prediction_length": 24},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
    "time_series_transformer": {"prediction_length": 24},
}


@dataclass(frozen=True)
class Timing:
    """One model of the zoo; all times in seconds."""

    name: str
    nodes: int
    build_s: float
    export_s: float
    decompose_s: float
    own_s: float

    @property
    def capture_s(self) -> float:
        """All but building the module."""
        return self.export_s + self.decompose_s + self.own_s


@dataclass(frozen=True)
class Outcome:
    """One model type. `state` is whole, opaque, refused, unbuilt (transformers makes no model of the
    type's defaults) or late; `said` the reason, or the notes."""

    kind: str
    state: str
    seconds: float
    model: str = ""
    said: str = ""
    opaque: tuple[str, ...] = ()
    nodes: int = 0
    has_loss: bool = False
    sample_share: float = 0.0
    trace: str = ""


# -- the zoo ------------------------------------------------------------------------------------------


def timed(name: str) -> Timing:
    """Capture a model of the zoo on the meta device, with a clock on torch's two parts."""
    spent = Counter[str]()

    def clocked(part: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] += time.perf_counter() - started

        return run

    started = time.perf_counter()
    source = load(name)
    built = time.perf_counter()
    with (
        replaced(torch.export, "export", clocked("export", torch.export.export)),
        replaced(
            ExportedProgram, "run_decompositions", clocked("decompose", ExportedProgram.run_decompositions)
        ),
    ):
        captured = source.captured()
    total = time.perf_counter() - built
    torchs = spent["export"] + spent["decompose"]
    return Timing(
        name,
        len(captured.graph.nodes),
        built - started,
        spent["export"],
        spent["decompose"],
        total - torchs,
    )


# -- Hugging Face -------------------------------------------------------------------------------------


def configurations(kind: str) -> Iterator[dict[str, Any]]:
    """The type's default configuration, with two layers, with more, and as it is."""
    made = transformers.CONFIG_MAPPING[kind]
    given = OPEN_FIELDS.get(kind, {})
    whole = made(**given)
    for few in (2, 4, 6):
        try:
            config = made(**{**shortened(whole, few), **given})
        except Exception:  # noqa: BLE001 (a configuration's own checks may raise anything)
            continue
        yield {**config.to_dict(), "model_type": kind}
    yield {**whole.to_dict(), "model_type": kind}


def shortened(config: Any, few: int) -> dict[str, Any]:
    """The fields that make a configuration, and those within it, a few layers deep."""
    fields: dict[str, Any] = {}
    for name, value in vars(config).items():
        if LAYERS.fullmatch(name) and type(value) is int and value > few:
            fields[name] = few
        elif hasattr(value, "to_dict") and getattr(value, "model_type", ""):
            fields[name] = {"model_type": value.model_type, **shortened(value, few)}
    return fields


def outcome(kind: str) -> Outcome:
    """Build and capture a model of a type; with more layers where fewer do not fit together."""
    started = time.perf_counter()
    found = Outcome(kind, "unbuilt", 0.0, said="its default configuration cannot be made")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / kind / "config.json"
        file.parent.mkdir()
        try:
            for fields in configurations(kind):
                file.write_text(json.dumps(fields, default=str), encoding="utf-8")
                found = _outcome(kind, file)
                if found.state in ("whole", "opaque") or not _UNFIT.search(found.said):
                    break
        except Exception as error:  # noqa: BLE001 (a configuration's own checks may raise anything)
            found = replace(found, said=f"{found.said}: {type(error).__name__}: {error}")
    return replace(found, seconds=time.perf_counter() - started)


_UNFIT = re.compile("cannot be built|cannot be traced")


def _outcome(kind: str, file: Path) -> Outcome:
    model = ""
    try:
        source = load(f"hf:{file}", batch=4)
        model = type(source.module.inner).__name__
        captured = source.captured()
    except SoapstoneError as error:
        said = str(error).removeprefix(f"{file}: ")
        state = "unbuilt" if "be built" in said else "refused"
        return Outcome(kind, state, 0.0, model, said, trace=traceback.format_exc()[-3000:])
    graph = captured.graph
    opaque = tuple(sorted(str(node.attrs["target"]) for node in graph.opaque_nodes))
    heavy = [n for n in graph.nodes if n.op.weights and set(n.reads) & graph.weight_made]
    known = [n for n in heavy if n.name in graph.sample_dims]
    return Outcome(
        kind,
        "opaque" if opaque else "whole",
        0.0,
        model,
        "; ".join(captured.notes),
        opaque,
        len(graph.nodes),
        graph.loss is not None,
        len(known) / max(1, len(heavy)),
    )


def _work(kind: str, answer: multiprocessing.connection.Connection) -> None:
    warnings.simplefilter("ignore")
    try:
        answer.send(outcome(kind))
    except BaseException as error:  # noqa: BLE001 (a bug of ours is a result here)
        answer.send(Outcome(kind, "failed", 0.0, said=repr(error), trace=traceback.format_exc()[-3000:]))


def outcomes(kinds: Sequence[str], jobs: int, limit_s: float) -> Iterator[Outcome]:
    """Each type in a process of its own, forked from this one, which has imported everything."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(kinds), dict[Any, tuple[str, Any, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            kind = waiting.pop(0)
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(kind, theirs), daemon=True)
            process.start()
            theirs.close()
            running[mine] = (kind, process, time.perf_counter())
        ready = multiprocessing.connection.wait(list(running), timeout=0.5)
        for connection, (kind, process, started) in list(running.items()):
            seconds = time.perf_counter() - started
            if connection in ready:
                try:
                    yield connection.recv()
                except EOFError:
                    yield Outcome(kind, "failed", seconds, said="its process ended")
            elif seconds > limit_s:
                process.kill()
                yield Outcome(kind, "late", seconds, said=f"it took more than {limit_s:g} s")
            else:
                continue
            process.join()
            connection.close()
            del running[connection]


# -- tables -------------------------------------------------------------------------------------------


def print_zoo(timings: Sequence[Timing]) -> None:
    table = Table("model", box=SIMPLE_HEAD)
    for heading in ("nodes", "build s", "export s", "decompose s", "own s", "capture s", "target s"):
        table.add_column(heading, justify="right")
    for timing in timings:
        parts = (timing.build_s, timing.export_s, timing.decompose_s, timing.own_s, timing.capture_s)
        target = TARGETS.get(timing.name)
        table.add_row(
            timing.name, str(timing.nodes), *(f"{s:.2f}" for s in parts), f"{target:g}" if target else ""
        )
    console().print(table)


def print_types(found: Sequence[Outcome]) -> None:
    screen = console()
    counts = Counter(item.state for item in found)
    table = Table("model types", box=SIMPLE_HEAD)
    table.add_column(str(len(found)), justify="right")
    for state, count in counts.most_common():
        table.add_row(state, str(count))
    screen.print(table)
    for state in counts:
        rows = [item for item in found if item.state == state]
        if state == "whole":
            continue
        table = Table(state, "model", "why", box=SIMPLE_HEAD)
        for item in sorted(rows, key=lambda item: item.kind):
            why = ", ".join(f"{n} x {name}" for name, n in Counter(item.opaque).items()) or item.said
            table.add_row(item.kind, item.model, why)
        screen.print(table)


def main() -> None:
    known = list(transformers.CONFIG_MAPPING)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--zoo", nargs="*", metavar="NAME", default=list(ZOO), help="models of the zoo to time"
    )
    parser.add_argument("--types", nargs="*", metavar="TYPE", default=known, help="model types to capture")
    parser.add_argument("--jobs", type=int, default=2, help="how many types at a time")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for each type")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    load("lenet", tiny=True).captured()  # what torch imports and compiles at its first export
    timings = [timed(name) for name in options.zoo]
    found: list[Outcome] = []
    with progress("capturing model types", len(options.types)) as show:
        for item in outcomes(options.types, options.jobs, options.limit):
            found.append(item)
            show(len(found), f"{item.kind}: {item.state}")
    if options.json:
        rows = [{**asdict(timing), "capture_s": timing.capture_s} for timing in timings]
        print_json({"zoo": rows, "types": [asdict(item) for item in found]})
        return
    if timings:
        print_zoo(timings)
    if found:
        print_types(found)


if __name__ == "__main__":
    sys.exit(main())
