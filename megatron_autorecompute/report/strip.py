"""The policy as a picture: a row per stage, a cell per layer, darker where more is recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from megatron_autorecompute.planner.cost.layout import Chunk
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.report.terminal import legend
from megatron_autorecompute.report.words import choice_colours, ink_on, without_group

CELL, ROW, GAP, LABEL = 17, 19, 9, 56
"""Pixels: width and height of a cell, space between chunks, space for the stage's name."""
BETWEEN = 15
"""Pixels above a row, for the index of the first layer of every chunk."""
MOST_CELLS = 64
"""Cells in a row; a longer stage continues in the next row."""
STYLE = """
@media screen and (prefers-color-scheme: dark) {
  .strip .name { fill: #ddd } .strip .few { fill: #aaa } .strip .group { stroke: #ddd }
}
"""
Looks = dict[LayerPolicy, str]
"""What every choice looks like: its colour, or its letter."""
INK, QUIET = "#333333", "#666666"


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a cell, in pixels."""

    x: int
    y: int
    chunk: int
    layer: int | None
    """The layer's index; None for embedding and head."""
    end: str = ""
    """`E` for the embedding, `L` for the head; else empty."""


def strip_svg(plan: Plan) -> str:
    """The whole policy with its legend, as a self-contained SVG."""
    colours, letters, parts, y, right = choice_colours(plan), legend(plan.policy), [], 0, 420
    for stage, chunks in enumerate(plan.layout.stages):
        places = list(_placed(chunks, y))
        parts.append(_name(0, y + BETWEEN + 14, f"stage {stage}"))
        parts += _cells(plan, places, chunks, colours, letters)
        right = max([right, *(place.x + CELL for place in places)])
        y = max([y, *(place.y for place in places)]) + ROW + 2
    below = list(_legend(plan, y + BETWEEN, colours, letters))
    height = y + BETWEEN + 22 * len(below)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="strip" viewBox="0 0 {right + 2} {height}"'
        f' width="{right + 2}" height="{height}" font-family="system-ui, sans-serif" role="group" '
        f'aria-label="What every layer recomputes"><style>{STYLE}</style>\n'
        + "\n".join([*parts, *below])
        + "\n</svg>\n"
    )


def _name(x: int, y: int, text: str) -> str:
    return f'<text class="name" x="{x}" y="{y}" font-size="11" fill="{INK}">{escape(text)}</text>'


def _letter(x: int, y: int, letter: str, colour: str) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="11" text-anchor="middle" fill="{colour}">{letter}</text>'
    )


def _group(x: float, y: float, to: str) -> str:
    return f'<path class="group" d="M{x} {y}{to}" stroke="{INK}" stroke-width="2"/>'


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
    plan: Plan, places: list[_Place], chunks: tuple[Chunk, ...], colours: Looks, letters: Looks
) -> Iterator[str]:
    policy, begun = plan.policy, -1
    for place in places:
        middle = place.x + CELL // 2
        if place.layer is None:
            name = "embedding" if place.end == "E" else "head and loss"
            yield (
                f'<g class="cell"><title>{name}</title><rect x="{place.x + 1}" '
                f'y="{place.y + 0.5}" width="{CELL - 3}" height="{ROW - 1}" fill="none" '
                f'stroke="#888888"/>{_letter(middle, place.y + 14, place.end, "#888888")}</g>'
            )
            continue
        if place.chunk > begun:
            begun = place.chunk
            yield (
                f'<text class="few" x="{place.x}" y="{place.y - 3}" font-size="9" '
                f'fill="{QUIET}">{place.layer}</text>'
            )
        choice = policy.layers[place.layer]
        name = escape(f"layer {place.layer}: {choice}")
        yield (
            f'<g class="cell" data-layer="{place.layer}"><title>{name}</title>'
            f'<rect x="{place.x}" y="{place.y}" width="{CELL - 1}" height="{ROW}" '
            f'fill="{colours[choice]}"/>'
            f"{_letter(middle, place.y + 14, letters[choice], ink_on(colours[choice]))}</g>"
        )
    at = {place.layer: place for place in places if place.layer is not None}
    for group in groups(policy, chunks):
        for layer in group:
            place = at[layer]
            left = place.x + (layer == group[0])
            right = place.x + CELL - (2 if layer == group[-1] else 0)
            yield _group(left, place.y + ROW + 1.5, f"H{right}")


def groups(policy: RecomputePolicy, chunks: tuple[Chunk, ...]) -> Iterator[tuple[int, ...]]:
    """The layers of every checkpoint around several layers."""
    for chunk in chunks:
        for run in policy.chunk_runs(chunk.layers):
            size = run.policy.group
            layers = chunk.layers[run.start : run.start + run.count]
            if size > 1:
                yield from (layers[i : i + size] for i in range(0, len(layers), size))


def _legend(plan: Plan, top: int, colours: Looks, letters: Looks) -> Iterator[str]:
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
            f'fill="{colour}"/>{_letter(LABEL + CELL // 2, y + 13, letter, ink_on(colour))}</g>'
            + _name(LABEL + CELL + 8, y + 13, f"{name} · {count} layer{'s' * (count != 1)}")
        )
        y += 22
    if any(choice.group > 1 for choice in letters):
        yield _group(LABEL, y + 9, f"h{CELL - 2}")
        yield _name(LABEL + CELL + 8, y + 13, "one checkpoint around these layers")
