"""The picture of a policy, and matplotlib's figures as SVG (a unit is a point) and as files.

pyplot is not used: a program's own figures stay as they are.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from megatron_autorecompute.json_records import write_atomically
from megatron_autorecompute.planner.cost.layout import Chunk
from megatron_autorecompute.planner.cost.unit_costs import CostTable, fastest_choice
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.policy import NONE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.report.terminal import legend

POINTS = 72
"""Points of an inch."""
DPI = 110
_MARKED = re.compile(r'<g id="@([\w-]+) ?(\d*)(?:: ([^"]*))?">')
"""An artist whose `gid` is @CLASS, @CLASS: TITLE or @CLASS LAYER: TITLE."""
CELL, ROW, GAP, LABEL = 17, 19, 9, 56
"""Points: width and height of a cell, space between chunks, space for the stage's name."""
BETWEEN = 15
"""Points above a row, for the index of the first layer of every chunk."""
MOST_CELLS = 64
"""Cells in a row; a longer stage continues in the next row."""
RECOMPUTE_RAMP = ("#fdd9bd", "#f9a05f", "#d55e00", "#8a3000")
"""Colours from the choice that recomputes least to the one that recomputes most, without none."""
NO_RECOMPUTE = "#e9ecef"
INK = "#333333"
Looks = dict[LayerPolicy, tuple[str, str]]
"""The letter and the colour of every choice."""
STYLE = """@media screen and (prefers-color-scheme: dark) {
  .strip .name text { fill: #ddd !important } .strip .few text { fill: #aaa !important }
  .strip .group path { stroke: #ddd !important }
}"""


def svg(figure: Figure, kind: str, about: str, style: str = "") -> str:
    """The picture as an SVG element; a `gid` that begins with @ gives its class and its title.

    Args:
        figure: what is drawn.
        kind: the element's class.
        about: what a screen reader says of it.
        style: a style sheet for pictures that stand alone.
    """
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": kind}):
        figure.savefig(text, format="svg", facecolor="none", metadata={"Date": None})
    left_out = r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>"
    found = re.sub(left_out, "", text.getvalue(), flags=re.DOTALL)
    found = _MARKED.sub(_marked, found[found.index("<svg") :])
    head = f'<svg class="{kind}" role="group" aria-label="{about}" '
    head += re.sub(r'"([\d.]+)pt"', r'"\1"', found[len("<svg ") : found.index(">") + 1])
    return f"{head}{style and f'<style>{style}</style>'}{found[found.index('>') + 1 :]}"


def _marked(match: re.Match[str]) -> str:
    kind, layer, title = match.groups()
    of_layer = f' data-layer="{layer}"' if layer else ""
    return f'<g class="{kind}"{of_layer}>' + (f"<title>{title}</title>" if title else "")


def save_picture(figure: Figure, path: Path) -> None:
    """Write a picture, PNG or SVG by the file's name, whole or not at all. Raises: ProfileError if
    the file cannot be written."""
    if path.suffix == ".svg":
        text = svg(figure, "curve", "Step time against memory")
        write_atomically(f'<?xml version="1.0" encoding="UTF-8"?>\n{text}', path)
        return
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=DPI)
    write_atomically(image.getvalue(), path)


def strip_svg(plan: Plan) -> str:
    """The whole policy with its legend, as a self-contained SVG."""
    return svg(strip(plan), "strip", "What every layer recomputes", STYLE)


def strip(plan: Plan) -> Figure:
    """The whole policy with its legend."""
    figure = Figure(dpi=POINTS)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    colours, letters = choice_colours(plan), legend(plan.policy)
    looks = {choice: (letters[choice], colours[choice]) for choice in letters}
    y, right = 0, 420
    for number, chunks in enumerate(plan.layout.stages):
        x, used, y = LABEL, 0, y + BETWEEN
        _text(axes, 0, y + 14, f"stage {number}", "name")
        places = {}
        for chunk in chunks:
            cells: list[int | str] = ["E"] * chunk.embedding
            for cell in [*cells, *chunk.layers, *["L"] * chunk.head]:
                if used == MOST_CELLS:
                    x, used, y = LABEL, 0, y + ROW + BETWEEN
                if isinstance(cell, str):
                    said = "embedding" if cell == "E" else "head and loss"
                    _cell(axes, x, y, cell, None, f": {said}")
                else:
                    choice, places[cell] = plan.policy.layers[cell], (x, y)
                    _cell(axes, x, y, *looks[choice], f" {cell}: layer {cell}: {choice}")
                    if cell == chunk.layers[0]:
                        _text(axes, x, y - 3, str(cell), "few", size=9, color="#666666")
                x, used = x + CELL, used + 1
                right = max(right, x)
            x += GAP
        for group in groups(plan.policy, chunks):
            for layer in group:
                left, top = places[layer]
                ends = left + (layer == group[0]), left + CELL - 2 * (layer == group[-1])
                _underline(axes, *ends, top + ROW + 1.5)
        y += ROW + 2
    y = _legend(axes, plan.policy, looks, y + BETWEEN)
    figure.set_size_inches((right + 2) / POINTS, y / POINTS)
    axes.set(xlim=(0, right + 2), ylim=(y, 0))
    return figure


def _cell(axes: Axes, x: int, y: int, letter: str, colour: str | None, mark: str) -> None:
    """A cell with its letter, and without a colour its edge alone; `mark` follows its class."""
    looks = {"fc": colour, "lw": 0} if colour else {"fc": "none", "ec": "#888888"}
    cell = Rectangle((x, y), CELL - 1, ROW, **looks, gid=f"@cell{mark}", clip_on=False)
    axes.add_patch(cell)
    ink = ink_on(colour) if colour else "#888888"
    _text(axes, x + CELL / 2, y + 14, letter, "letter", ha="center", color=ink)


def _text(axes: Axes, x: float, y: float, text: str, kind: str, **looks: Any) -> None:
    axes.text(x, y, text, gid=f"@{kind}", **{"size": 11, "color": INK, **looks})


def _underline(axes: Axes, left: float, right: float, y: float) -> None:
    axes.plot((left, right), (y, y), color=INK, lw=2, solid_capstyle="butt", gid="@group")


def groups(policy: RecomputePolicy, chunks: tuple[Chunk, ...]) -> Iterator[tuple[int, ...]]:
    """The layers of every checkpoint around several layers."""
    for chunk in chunks:
        for run in policy.chunk_runs(chunk.layers):
            size = run.policy.group
            layers = chunk.layers[run.start : run.start + run.count]
            if size > 1:
                yield from (layers[i : i + size] for i in range(0, len(layers), size))


def _legend(axes: Axes, policy: RecomputePolicy, looks: Looks, top: int) -> int:
    """An entry for each letter; returns where they end."""
    named = {looks[choice]: choice for choice in looks if choice.group == 1}
    alone = [replace(choice, group=1) for choice in policy.layers]
    named |= {looks[choice]: replace(choice, group=1) for choice in looks if choice.group > 1}
    for look, choice in named.items():
        count = alone.count(choice)
        _cell(axes, LABEL, top, *look, "")
        said = f"{choice} · {count} layer{'s' * (count != 1)}"
        _text(axes, LABEL + CELL + 8, top + 14, said, "name")
        top += 22
    if any(choice.group > 1 for choice in looks):
        _underline(axes, LABEL, LABEL + CELL - 2, top + 9)
        said = "one checkpoint around these layers"
        _text(axes, LABEL + CELL + 8, top + 13, said, "name")
        top += 22
    return top


def choice_colours(plan: Plan) -> dict[LayerPolicy, str]:
    """A colour for every choice of a policy; choices that recompute more are darker.

    Only their order counts, so that choices of nearly the same cost can be told apart.
    """
    cost: dict[LayerPolicy, float] = {}
    table = CostTable(plan.profile)
    for layer, choice in enumerate(plan.policy.layers):
        alone = replace(choice, group=1)
        plain = table.layer(layer, fastest_choice(table, layer))
        more = table.layer(layer, alone).time_ps - plain.time_ps
        cost[alone] = max(cost.get(alone, 0.0), more)
    ordered = sorted(cost.keys() - {NONE}, key=lambda c: (c.granularity == "full", cost[c], c))
    ramp, last = LinearSegmentedColormap.from_list("recompute", RECOMPUTE_RAMP), len(ordered)
    # One choice alone is not the darkest.
    colours = {c: to_hex(ramp(at / last if last > 1 else 2 / 3)) for at, c in enumerate(ordered, 1)}
    colours[NONE] = NO_RECOMPUTE
    return {choice: colours[replace(choice, group=1)] for choice in plan.policy.layers}


def ink_on(colour: str) -> str:
    """Black or white, whichever is readable on a colour."""
    return "#000000" if np.dot(to_rgb(colour), (0.299, 0.587, 0.114)) > 0.55 else "#ffffff"
