"""The strategy's picture as one SVG file, for documents: the boxes and tiles of the report page, drawn still.

Rows of a tile are parts along samples, columns are parts along all else, and copies are narrow; colours and
numbers are devices. A thick frame holds blocks that share weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from soapstone.machine import Machine
from soapstone.plans import Plan
from soapstone.report.page.picture import Box, Tile, boxes

WIDTH = 900
"""[choice] Where boxes go on to the next line."""

GAP, EDGE, LETTER = 10, 8, 6.2
"""[choice] Between boxes, inside of them, and the width of a letter of a heading."""

STYLE = """
text { font: 11px system-ui, sans-serif; fill: #1d2125; } .soft { fill: #5c646d; } .cell { fill: #10151a; font-size: 9px; }
.box { fill: #ffffff; stroke: #d9dcdf; } .shared { stroke: #1f5fbf; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8eaec; } .soft { fill: #a0a8b0; } .box { fill: #1c2024; stroke: #363c42; } .shared { stroke: #7fb0ff; }
}
"""  # noqa: E501, one rule on each line


@dataclass(frozen=True)
class _Drawn:
    """A piece of the picture and its size."""

    text: str
    width: float
    height: float


def strategy_svg(plan: Plan) -> str:
    """The strategy of a plan as SVG."""
    x = y = line = widest = 0.0
    pieces: list[str] = []
    for box in boxes(plan.strategy):
        drawn = _box(box, plan.machine)
        if x and x + drawn.width > WIDTH:
            x, y, line = 0.0, y + line + GAP, 0.0
        pieces.append(f'<g transform="translate({x + 1:g} {y + 1:g})">{drawn.text}</g>')
        x, line = x + drawn.width + GAP, max(line, drawn.height)
        widest = max(widest, x - GAP)
    width, height = f"{widest + 2:g}", f"{y + line + 2:g}"
    title = escape(f"{plan.graph.name} on {plan.machine.name}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n" + "\n".join(pieces) + "\n</svg>\n"
    )


def _box(box: Box, machine: Machine) -> _Drawn:
    name = box.name if box.layers == 1 else f"{box.name} ({box.layers} layers)"
    splits = list(dict.fromkeys(tile.split for tile in box.tiles))
    below = splits[0] if len(splits) == 1 else f"split in {len(splits)} ways"
    x, tallest, pieces = float(EDGE), 0.0, list[str]()
    for tile in box.tiles:
        drawn = _tile(tile, machine)
        pieces.append(f'<g transform="translate({x:g} 38)">{drawn.text}</g>')
        x, tallest = x + drawn.width + 4, max(tallest, drawn.height)
    width = max(x - 4 + EDGE, LETTER * max(len(name), len(below)) + 2 * EDGE)
    height = 38 + tallest + EDGE
    kind = "box shared" if box.shares_weights else "box"
    frame = f'<rect class="{kind}" width="{width:g}" height="{height:g}" rx="6"/>'
    words = f'<text x="{EDGE}" y="16">{escape(name)}</text>'
    words += f'<text class="soft" x="{EDGE}" y="30">{escape(below)}</text>'
    return _Drawn(frame + words + "".join(pieces), width, height)


def _tile(tile: Tile, machine: Machine) -> _Drawn:
    rows, columns, copies = len(tile.cells), len(tile.cells[0]), len(tile.cells[0][0])
    height, width = min(max(44, rows * 13), 132), min(max(44, columns * copies * 15), 240)
    high, wide = height / rows, width / (columns * copies)
    pieces: list[str] = []
    for y, row in enumerate(tile.cells):
        for x, device in enumerate(device for cell in row for device in cell):
            left, top = x * wide, y * high
            pieces.append(
                f'<rect x="{left + 0.75:g}" y="{top + 0.75:g}" width="{max(wide - 1.5, 0.5):g}" '
                f'height="{max(high - 1.5, 0.5):g}" fill="{colour(device, machine)}"/>'
            )
            if high >= 10 and wide >= 13:
                place = f'x="{left + wide / 2:g}" y="{top + high / 2 + 3:g}"'
                pieces.append(f'<text class="cell" {place} text-anchor="middle">{device}</text>')
    if tile.count > 1:
        pieces.append(f'<text class="soft" x="0" y="{height + 12:g}">× {tile.count}</text>')
    return _Drawn("".join(pieces), width, height + (16 if tile.count > 1 else 0))


def colour(device: int, machine: Machine) -> str:
    """A device's colour: devices of a node share a hue, unless there is one node only."""
    own = machine.devices[device]
    mates = machine.devices_on(own.node)
    place = [mate.index for mate in mates].index(device)
    if len(machine.nodes) == 1:
        return f"hsl({360 * place / len(mates):g}, 58%, 72%)"
    shift = 22 * (place / (len(mates) - 1) - 0.5) if len(mates) > 1 else 0.0
    return f"hsl({360 * machine.nodes.index(own.node) / len(machine.nodes):g}, 58%, {72 + shift:g}%)"
