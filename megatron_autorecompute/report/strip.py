"""The policy as a picture: a row per stage, a cell per layer, darker where more is recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_autorecompute.planner.cost.layout import Chunk
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.report.terminal import legend
from megatron_autorecompute.report.words import choice_colours, ink_on, template, without_group

CELL, ROW, GAP, LABEL = 17, 19, 9, 56
"""Pixels: width and height of a cell, space between chunks, space for the stage's name."""
BETWEEN = 15
"""Pixels above a row, for the index of the first layer of every chunk."""
MOST_CELLS = 64
"""Cells in a row; a longer stage continues in the next row."""

Looks = dict[LayerPolicy, tuple[str, str]]
"""The letter and the colour of every choice."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """A layer, the embedding or the head at its place (pixels), or an entry of the legend."""

    title: str
    letter: str
    colour: str = ""
    x: int = 0
    y: int = 0
    layer: int | None = None
    """The layer's index; None for embedding and head."""
    first: bool = False
    """Whether it is the first layer of its chunk."""


def strip_svg(plan: Plan) -> str:
    """The whole policy with its legend, as a self-contained SVG."""
    colours, letters = choice_colours(plan), legend(plan.policy)
    looks = {choice: (letter, colours[choice]) for choice, letter in letters.items()}
    stages, y, right = [], 0, 420
    for chunks in plan.layout.stages:
        cells = list(_cells(plan.policy, chunks, y, looks))
        underlines = list(_underlines(plan.policy, chunks, cells))
        stages.append({"y": y + BETWEEN + 14, "cells": cells, "groups": underlines})
        right = max([right, *(cell.x + CELL for cell in cells)])
        y = max([y, *(cell.y for cell in cells)]) + ROW + 2
    below = list(_legend(plan.policy, looks))
    grouped = any(choice.group > 1 for choice in plan.policy.layers)
    sizes = {"CELL": CELL, "ROW": ROW, "LABEL": LABEL}
    return template("strip.svg").render(
        stages=stages,
        legend=below,
        grouped=grouped,
        top=y + BETWEEN,
        width=right + 2,
        height=y + BETWEEN + 22 * (len(below) + 2 * grouped),
        ink_on=ink_on,
        **sizes,
    )


def _cells(
    policy: RecomputePolicy, chunks: tuple[Chunk, ...], top: int, looks: Looks
) -> Iterator[_Cell]:
    x, y, used = LABEL, top + BETWEEN, 0
    for chunk in chunks:
        cells: list[int | tuple[str, str]] = [("embedding", "E")] * chunk.embedding
        cells += [*chunk.layers, *[("head and loss", "L")] * chunk.head]
        for cell in cells:
            if used == MOST_CELLS:
                x, y, used = LABEL, y + ROW + BETWEEN, 0
            if isinstance(cell, tuple):
                yield _Cell(*cell, x=x, y=y)
            else:
                choice, first = policy.layers[cell], cell == chunk.layers[0]
                yield _Cell(f"layer {cell}: {choice}", *looks[choice], x, y, cell, first)
            x, used = x + CELL, used + 1
        x += GAP


def _underlines(
    policy: RecomputePolicy, chunks: tuple[Chunk, ...], cells: list[_Cell]
) -> Iterator[tuple[int, float, int]]:
    """Of every layer in a checkpoint around several: where the line below it begins, and ends."""
    at = {cell.layer: cell for cell in cells}
    for group in groups(policy, chunks):
        for layer in group:
            x = at[layer].x
            right = x + CELL - (2 if layer == group[-1] else 0)
            yield x + (layer == group[0]), at[layer].y + ROW + 1.5, right


def groups(policy: RecomputePolicy, chunks: tuple[Chunk, ...]) -> Iterator[tuple[int, ...]]:
    """The layers of every checkpoint around several layers."""
    for chunk in chunks:
        for run in policy.chunk_runs(chunk.layers):
            size = run.policy.group
            layers = chunk.layers[run.start : run.start + run.count]
            if size > 1:
                yield from (layers[i : i + size] for i in range(0, len(layers), size))


def _legend(policy: RecomputePolicy, looks: Looks) -> Iterator[_Cell]:
    named = {looks[choice][0]: choice for choice in looks if choice.group == 1}
    if any(choice.granularity == "full" for choice in looks):
        named.setdefault("F", next(c for c in looks if c.granularity == "full"))
    for choice in named.values():
        name = without_group(choice)
        count = sum(without_group(other) == name for other in policy.layers)
        yield _Cell(f"{name} · {count} layer{'s' * (count != 1)}", *looks[choice])
