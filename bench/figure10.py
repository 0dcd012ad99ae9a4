"""FlexFlow's Figure 10 from our own runs: predicted against actual step times, one mark for each strategy.

    python bench/accuracy.py --json cpu.json
    python bench/figure10.py cpu.json gpu.json -o figure10.svg

Takes the files that `bench/accuracy.py` writes. Lines are at no error and at 30 %, the worst of the paper.
Marks of strategies that served to fit are hollow.
"""

from __future__ import annotations

import argparse
import json
import math
from html import escape
from pathlib import Path
from typing import NamedTuple

SIDE, MARGIN, LEGEND = 440.0, 56.0, 230.0
SHAPES = ("circle", "square", "diamond", "triangle", "cross", "plus")
COLOURS = ("#1f5fbf", "#b3541e", "#2f7d32", "#7b3fa0", "#a3173f", "#00707a")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1d2125; } .axis { stroke: #5c646d; fill: none; }
.line { stroke: #5c646d; stroke-dasharray: 4 4; } .ground { fill: #ffffff; }
@media (prefers-color-scheme: dark) { text { fill: #e8eaec; } .ground { fill: #1c2024; } }
"""


class Run(NamedTuple):
    """A strategy that was run."""

    model: str
    predicted_s: float
    actual_s: float
    is_fitted: bool


def runs_of(path: Path) -> list[Run]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return [
        Run(f"{model} ({path.stem})", each["predicted_s"], each["actual_s"], each["used_for"] == "fitting")
        for model, document in found.items()
        for each in document.get("strategies", ())
    ]


def mark(shape: str, x: float, y: float) -> str:
    match shape:
        case "circle":
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
        case "square":
            return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>'
        case "diamond":
            path = "M0-5L5 0L0 5L-5 0Z"
        case "triangle":
            path = "M0-5L5 4L-5 4Z"
        case "cross":
            path = "M-4-4L4 4M-4 4L4-4"
        case _:
            path = "M-5 0L5 0M0-5L0 5"
    return f'<path d="{path}" transform="translate({x:.1f} {y:.1f})"/>'


def figure(runs: list[Run]) -> str:
    low = min(min(run.predicted_s, run.actual_s) for run in runs) / 1.3
    high = max(max(run.predicted_s, run.actual_s) for run in runs) * 1.3

    def at(seconds: float) -> float:
        return SIDE * math.log(seconds / low) / math.log(high / low)

    def place(actual_s: float, predicted_s: float) -> tuple[float, float]:
        return MARGIN + at(actual_s), MARGIN + SIDE - at(predicted_s)

    parts = [f'<rect class="ground" width="{MARGIN * 2 + SIDE + LEGEND:g}" height="{MARGIN * 2 + SIDE:g}"/>']
    parts.append(f'<rect class="axis" x="{MARGIN}" y="{MARGIN}" width="{SIDE}" height="{SIDE}"/>')
    for factor, name in ((1.0, "0 %"), (1.3, "+30 %"), (1 / 1.3, "-23 %")):
        first, last = max(low, low / factor), min(high, high / factor)
        (x1, y1), (x2, y2) = place(first, first * factor), place(last, last * factor)
        parts.append(f'<line class="line" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
        parts.append(f'<text x="{x2 - 34:.1f}" y="{y2 + (14 if factor < 1 else -4):.1f}">{name}</text>')
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        seconds = 10.0**power
        if low <= seconds <= high:
            x, y = place(seconds, seconds)
            told = f"{seconds * 1e3:g} ms"
            parts.append(f'<text x="{x:.1f}" y="{MARGIN + SIDE + 18}" text-anchor="middle">{told}</text>')
            parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{told}</text>')
    parts.append(f'<text x="{MARGIN + SIDE / 2}" y="{MARGIN + SIDE + 40}" text-anchor="middle">actual</text>')
    parts.append(f'<text x="{MARGIN}" y="{MARGIN - 12}">predicted</text>')
    for number, model in enumerate(dict.fromkeys(run.model for run in runs)):
        shape, colour = SHAPES[number % len(SHAPES)], COLOURS[number % len(COLOURS)]
        for run in runs:
            if run.model == model:
                fill = "none" if run.is_fitted else colour
                drawn = mark(shape, *place(run.actual_s, run.predicted_s))
                parts.append(f'<g stroke="{colour}" fill="{fill}">{drawn}</g>')
        y = MARGIN + 16 + 20 * number
        key = mark(shape, MARGIN + SIDE + 20, y - 4)
        parts.append(f'<g stroke="{colour}" fill="{colour}">{key}</g>')
        parts.append(f'<text x="{MARGIN + SIDE + 32}" y="{y}">{escape(model)}</text>')
    width, height = MARGIN * 2 + SIDE + LEGEND, MARGIN * 2 + SIDE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
        f"<title>Predicted against actual step times</title><style>{STYLE}</style>"
        + "".join(parts)
        + "</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="what bench/accuracy.py --json has written")
    parser.add_argument("-o", "--output", type=Path, default=Path("figure10.svg"))
    options = parser.parse_args()
    runs = [run for path in options.files for run in runs_of(path)]
    if not runs:
        raise SystemExit("there is no strategy in these files")
    options.output.write_text(figure(runs), encoding="utf-8")
    print(f"{len(runs)} strategies in {options.output}")


if __name__ == "__main__":
    main()
