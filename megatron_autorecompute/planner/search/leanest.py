"""The choices of a stage with the lowest peak, at any time: exact, without tables.

A chunk affects other chunks only by what it holds, and less is better. Within a chunk, less held by
the first layers is better for all later ones. So iteration finds the least that every chunk can
hold under a peak: begin as if chunks held nothing, let each hold the least with which its own
moments fit beside the others, and repeat until nothing rises. If the iteration ends, these choices
fit; if a chunk finds none, nothing fits. Bisection then finds the lowest such peak.
"""

from __future__ import annotations

import numpy as np

from megatron_autorecompute.planner.cost import Ints
from megatron_autorecompute.planner.search.stage_problem import (
    BACKWARD,
    FORWARD,
    HELD,
    HIGHEST,
    ChunkUnits,
    Split,
    StageChoice,
    StageProblem,
)
from megatron_autorecompute.policy import LayerPolicy

_FAR = 1 << 60
"""Bytes that no sum reaches."""


def leanest(problem: StageProblem) -> StageChoice:
    """The choices with the lowest peak; of these, every chunk's hold the least they can."""
    found, _ = _fitting(problem, _FAR, np.zeros(len(problem.chunks), np.int64))
    assert found is not None  # without a limit everything fits
    best, figures = found
    low, high = problem.floor_bytes, _peak_bytes(problem, figures)
    while low < high:
        peak = (low + high) // 2
        found, short_bytes = _fitting(problem, peak, figures[:, HELD])
        if found is None:
            low = min(high, peak + short_bytes)
        else:
            best, figures = found
            high = _peak_bytes(problem, figures)
    time_ps = int(figures[:, :HELD].sum())
    return StageChoice(best, time_ps, high, time_ps)


def _fitting(problem: StageProblem, peak: int, held: Ints) -> tuple[tuple[Split, Ints] | None, int]:
    """Choices with such a peak and their figures, `[chunk, column]`, None where there are none; and
    the least number of further bytes that would have changed the result. Chunks hold no less than
    they do under a higher peak."""
    short_bytes = _FAR
    while True:
        split, figures = list[tuple[LayerPolicy, ...]](), list[Ints]()
        for c, chunk in enumerate(problem.chunks):
            room = peak - problem.constant - problem.counts @ held
            own, forward = problem.running == c, problem.is_forward
            limits = [room[own & each].min(initial=_FAR) for each in (forward, ~forward)]
            choices, short = _least(chunk, np.array(limits))
            short_bytes = min(short_bytes, short)
            if choices is None:
                return None, short_bytes
            split.append(choices)
            figures.append(chunk.plan(choices))
        rising = np.maximum(held, [own[HELD] for own in figures])
        if np.array_equal(rising, held):
            return (tuple(split), np.stack(figures)), short_bytes
        held = rising


def _peak_bytes(problem: StageProblem, figures: Ints) -> int:
    own = figures[problem.running, np.where(problem.is_forward, FORWARD, BACKWARD)]
    needed = problem.constant + problem.counts @ figures[:, HELD] + own
    return int(max(needed.max(initial=0), problem.floor_bytes))


def _least(units: ChunkUnits, limits: Ints) -> tuple[tuple[LayerPolicy, ...] | None, int]:
    """The choices of a chunk that hold the least of those below both limits, None where there are
    none; and by how much higher limits may be for the same answer.

    From the first unit to the last it keeps the choices with the least held before each place.
    """
    places, short_bytes = units.places, _FAR
    held, came = np.full(places + 1, _FAR), np.zeros((places + 1, 2), np.int64)
    held[0] = 0
    for place, (rows, sizes, _) in enumerate(units.every):
        if held[place] >= _FAR:
            continue
        total = held[place] + rows[:, HELD]
        over = (total[:, None] + rows[:, HIGHEST] - limits).max(axis=1)
        short_bytes = min(short_bytes, int(over.min(initial=_FAR, where=over > 0)))
        which = np.flatnonzero((over <= 0) & (total < held[place + sizes]))
        which = which[np.argsort(-total[which], kind="stable")]  # the least is written last
        held[place + sizes[which]] = total[which]
        came[place + sizes[which], 0], came[place + sizes[which], 1] = place, which
    if held[-1] >= _FAR:
        return None, short_bytes
    choices, place = list[tuple[LayerPolicy, ...]](), places
    while place:  # back along what led to the end
        before, at = came[place].tolist()
        choices.append(units.choice(before, at, place - before))
        place = before
    return tuple(choice for own in reversed(choices) for choice in own), short_bytes
