"""The policy as a picture: a row per stage, a cell per layer, darker where more is recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from megatron_autorecompute.planner.layout import Chunk
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.report.words import choice_colours, ink_on, symbols, without_group

CELL, ROW, GAP, LABEL = 17, 19, 9, 56
"""Pixels: width and height of a cell, space between chunks, space for the stage's name."""
BETWEEN = 15
"""Pixels above a row, for the index of the first layer of every chunk."""
MOST_CELLS = 64
"""Cells in a row; a longer stage continues in the next row."""
STYLE = """
.strip text { font: 11px system-ui, sans-serif; fill: #333 }
.strip .few { font-size: 9px; fill: #666 }
.strip .cell text { text-anchor: middle }
.strip .end rect { fill: none; stroke: #888 }
.strip .group { stroke: #333; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  .strip text { fill: #ddd } .strip .few { fill: #aaa } .strip .group { stroke: #ddd }
}
@media print { .strip text { fill: #333 } .strip .group { stroke: #333 } }
"""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a cell, in pixels."""

    x: int
    y: int
    chunk: int
    layer: int | None
    """None for embedding and head."""
    end: str = ""
    """`E` or `L` for these."""


def strip_svg(plan: Plan, *, interactive: bool = False) -> str:
    """The whole policy with its legend, as a self-contained SVG.

    interactive: for a page that shows more about a cell than its title.
    """
    parts, y, right = [], 0, 420
    for stage, chunks in enumerate(plan.layout.stages):
        places = list(_placed(chunks, y))
        parts.append(f'<text x="0" y="{y + BETWEEN + 14}">stage {stage}</text>')
        parts += _cells(plan, places, chunks, interactive)
        right = max([right, *(place.x + CELL for place in places)])
        y = max([y, *(place.y for place in places)]) + ROW + 2
    legend = list(_legend(plan, y + BETWEEN))
    height = y + BETWEEN + 22 * len(legend)
    style = "" if interactive else f"<style>{STYLE}</style>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="strip" viewBox="0 0 {right + 2} {height}"'
        f' width="{right + 2}" height="{height}" role="group" aria-label="What every layer '
        f'recomputes">{style}\n' + "\n".join([*parts, *legend]) + "\n</svg>\n"
    )


def _placed(chunks: tuple[Chunk, ...], top: int) -> Iterator[_Place]:
    x, y, used = LABEL, top + BETWEEN, 0
    for number, chunk in enumerate(chunks):
        cells: list[int | str] = ["E"] * chunk.embedding + [*chunk.layers] + ["L"] * chunk.head
        for cell in cells:
            if used == MOST_CELLS:
                x, y, used = LABEL, y + ROW + BETWEEN, 0
            layer, end = (None, cell) if isinstance(cell, str) else (cell, "")
            yield _Place(x, y, number, layer, end)
            x, used = x + CELL, used + 1
        x += GAP


def _cells(
    plan: Plan, places: list[_Place], chunks: tuple[Chunk, ...], interactive: bool
) -> Iterator[str]:
    colours, letters, policy = choice_colours(plan), symbols(plan), plan.policy
    begun = -1
    for place in places:
        if place.layer is None:
            name = "embedding" if place.end == "E" else "head and loss"
            yield (
                f'<g class="cell end"><title>{name}</title><rect x="{place.x + 1}" '
                f'y="{place.y + 0.5}" width="{CELL - 3}" height="{ROW - 1}"/>'
                f'<text x="{place.x + CELL // 2}" y="{place.y + 14}">{place.end}</text></g>'
            )
            continue
        if place.chunk > begun:
            begun = place.chunk
            yield f'<text class="few" x="{place.x}" y="{place.y - 3}">{place.layer}</text>'
        choice = policy.layers[place.layer]
        name = escape(f"layer {place.layer}: {choice}")
        about = (
            f'data-layer="{place.layer}" tabindex="-1" role="button" aria-label="{name}">'
            if interactive
            else f"><title>{name}</title>"
        )
        yield (
            f'<g class="cell" {about}<rect x="{place.x}" y="{place.y}" width="{CELL - 1}" '
            f'height="{ROW}" fill="{colours[choice]}"/><text x="{place.x + CELL // 2}" '
            f'y="{place.y + 14}" style="fill:{ink_on(colours[choice])}">{letters[choice]}'
            "</text></g>"
        )
    at = {place.layer: place for place in places if place.layer is not None}
    for group in groups(policy, chunks):
        for layer in group:
            place = at[layer]
            left = place.x + (layer == group[0])
            right = place.x + CELL - (2 if layer == group[-1] else 0)
            y = place.y + ROW + 1.5
            yield f'<path class="group" d="M{left} {y}H{right}"/>'


def groups(policy: RecomputePolicy, chunks: tuple[Chunk, ...]) -> Iterator[tuple[int, ...]]:
    """The layers of every checkpoint around several layers."""
    for chunk in chunks:
        for run in policy.chunk_runs(chunk.layers):
            size = run.policy.group
            layers = chunk.layers[run.start : run.start + run.count]
            if size > 1:
                yield from (layers[i : i + size] for i in range(0, len(layers), size))


def _legend(plan: Plan, top: int) -> Iterator[str]:
    colours, letters = choice_colours(plan), symbols(plan)
    named = {letters[choice]: choice for choice in letters if choice.group == 1}
    if any(choice.granularity == "full" for choice in letters):
        named.setdefault("F", next(c for c in letters if c.granularity == "full"))
    y = top
    for letter, choice in named.items():
        colour = colours[choice]
        name = without_group(choice)
        count = sum(without_group(other) == name for other in plan.policy.layers)
        yield (
            f'<g class="cell"><rect x="{LABEL}" y="{y}" width="{CELL - 1}" height="{ROW - 2}" '
            f'fill="{colour}"/><text x="{LABEL + CELL // 2}" y="{y + 13}" '
            f'style="fill:{ink_on(colour)}">{letter}</text></g>'
            f'<text x="{LABEL + CELL + 8}" y="{y + 13}">{escape(str(name))} · '
            f"{count} layer{'s' * (count != 1)}</text>"
        )
        y += 22
    if any(choice.group > 1 for choice in letters):
        yield (
            f'<path class="group" d="M{LABEL} {y + 9}h{CELL - 2}"/>'
            f'<text x="{LABEL + CELL + 8}" y="{y + 13}">one checkpoint around these layers</text>'
        )
