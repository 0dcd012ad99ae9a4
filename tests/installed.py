"""Run the README's commands with an installed wheel, from an empty directory: `installed.py BIN README`.

Not collected by pytest: `make wheel` builds the wheel and its environment first.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

COMMANDS = (
    "soapstone --version",
    "soapstone models",
    "soapstone machines",
    "soapstone rules list",
    "soapstone compare lenet --tiny --machine k80:1x4 --proposals 20",
    "soapstone plan lenet --tiny --batch 256 --machine cpu:1x2 --budget 2s -o plan.json",
    "soapstone simulate plan.json --trace trace.json --tasks tasks.json",
    "soapstone explain plan.json",
    "soapstone train plan.json --steps 2 --trace actual.json",
    "soapstone report plan.json --actual actual.json -o report.html",
    "soapstone export plan.json --to svg -o plan.svg",
    "soapstone profile",
)
"""What must work beside the README's own."""


def main(folder: str, readme: str) -> int:
    """Run every command; the first that fails ends it."""
    programs = Path(folder).absolute()
    shown = re.findall(r"^\$ (soapstone .*)$", Path(readme).read_text(encoding="utf-8"), re.MULTILINE)
    with tempfile.TemporaryDirectory() as elsewhere:
        where = subprocess.check_output(
            [programs / "python", "-c", "import soapstone; print(soapstone.__file__)"],
            cwd=elsewhere,
            text=True,
        )
        if str(programs.parent) not in where:
            sys.exit(f"not the installed package was imported but {where}")
        for command in (*(f"{each} --budget 3s" for each in shown), *COMMANDS):
            program, *arguments = command.split()
            done = subprocess.run(
                [programs / program, *arguments], cwd=elsewhere, capture_output=True, text=True, check=False
            )
            sys.stdout.write(f"{'ok  ' if done.returncode == 0 else 'FAIL'} {command}\n")
            if done.returncode or "Traceback" in done.stderr:
                sys.stdout.write(done.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
