"""How near predictions are to real runs: the table of `soapstone validate` over several models.

For each model, strategies are drawn, run on this computer and compared with their predictions; one half
serves to fit the few factors of `soapstone.validation.calibrating`, the other half makes the figures here.

    python bench/accuracy.py                              small variants of several models on 2 CPU ranks
    python bench/accuracy.py lenet --tiny --ranks 4
    python bench/accuracy.py gpt2 bert_large --gpu-slices 4 --strategies 20

The machine is detected first, by as many ranks. A model may carry its batch: 'mlp:layers=8@256'.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SMALL = (
    "lenet@256",
    "mlp:features=512,hidden=512,layers=8@256",
    "alexnet:image=99,grid=2,hidden=1024,classes=100@16",
    "inception_v3:narrowing=8,image=169,auxiliary_kernel=2,classes=100@16",
    "resnet101:image=64,channels=16,width=16,classes=100@32",
    "rnntc:hidden=256,steps=10,vocabulary=1000@64",
    "rnnlm:hidden=256,steps=8,vocabulary=1000@64",
    "nmt:hidden=256,steps=8,source_vocabulary=1000,target_vocabulary=1000@32",
    "gpt2:layers=2,hidden=256,heads=4,sequence=64,positions=64,vocabulary=1000@16",
    "bert_large:layers=2,hidden=256,heads=4,feed_forward=1024,sequence=64,positions=64,vocabulary=1000@16",
    "vit_l:layers=2,hidden=256,heads=4,feed_forward=1024,image=64,patch=8,classes=100@16",
)
"""FlexFlow's six models and three transformers, and two small ones: at sizes that a step of one core takes
well under a second of."""


def told(*arguments: object) -> dict[str, Any]:
    """What a command of Soapstone prints, as its JSON document."""
    command = [sys.executable, "-m", "soapstone", *map(str, arguments), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ran.stderr.strip()}")
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


def row(name: str, document: dict[str, Any]) -> str:
    summary, raw = document["summary"], document["summary_unfitted"]
    return (
        f"| {name} | {summary['count']} | {summary['median_error']:.1%} | {summary['worst_error']:.1%}"
        f" | {summary['tau']:.2f} | {summary['clear_tau']:.2f} | {raw['median_error']:.1%} | {raw['tau']:.2f}"
        f" | {summary['median_memory_error']:.1%} | {summary['worst_memory_error']:.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(SMALL))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gpu-slices", type=int, help="ranks share a GPU")
    parser.add_argument("--strategies", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--statistic", default="quartile")
    parser.add_argument("--costs", default="measured")
    parser.add_argument("--budget", default="2m", help="for measuring the operators of a model")
    parser.add_argument("--json", type=Path, help="write all that was measured here")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        machine = Path(folder) / "here.yaml"
        where = ["--gpu-slices", options.gpu_slices] if options.gpu_slices else ["--device", options.device]
        ranks = options.gpu_slices or options.ranks
        found["machine"] = told("machine", "detect", "--ranks", ranks, *where, "-o", machine)
        print(
            "| model | strategies | error, median | worst | tau | tau of clear pairs | median without the fit"
            " | tau | memory error, median | worst |\n|---|---|---|---|---|---|---|---|---|---|"
        )
        for model in options.models:
            name, _, batch = model.partition("@")
            arguments = ["validate", name, "--machine", machine, "--strategies", options.strategies]
            arguments += ["--steps", options.steps, "--seed", options.seed, *where]
            arguments += ["--statistic", options.statistic, "--costs", options.costs]
            arguments += ["--batch", batch] if batch else []
            arguments += ["--tiny"] if options.tiny else []
            arguments += ["--budget", options.budget]
            try:
                found[model] = told(*arguments)
                print(row(model, found[model]), flush=True)
            except RuntimeError as error:  # the other models still count
                found[model] = {"failed": str(error)}
                print(f"| {model} | failed: {str(error).splitlines()[-1]} |", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
