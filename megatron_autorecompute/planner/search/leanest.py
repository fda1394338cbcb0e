"""The choices of a stage with the lowest peak, at any time: exact, without tables.

A chunk affects other chunks only by what it holds, and less is better. Within a chunk, less held by
the first layers is better for all later ones. So iteration finds the least that every chunk can
hold under a peak: begin as if chunks held nothing, let each hold the least with which its own
moments fit beside the others, and repeat until nothing rises. If the iteration ends, these choices
fit; if a chunk finds none, nothing fits. Bisection then finds the lowest such peak.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_autorecompute.planner.cost import Bools, Ints
from megatron_autorecompute.planner.search.stage_problem import (
    BACKWARD,
    FORWARD,
    HELD,
    HIGHEST,
    ChunkUnits,
    StageChoice,
    StageProblem,
)
from megatron_autorecompute.policy import LayerPolicy

_FAR = 1 << 60
"""Bytes that no sum reaches."""


def leanest(problem: StageProblem) -> StageChoice:
    """The choices with the lowest peak; of these, every chunk's hold the least they can."""
    best = _fitting(problem, _FAR, np.zeros(len(problem.chunks), np.int64))
    low, high = problem.floor_bytes, _peak_bytes(problem, best)
    while low < high:
        peak = (low + high) // 2
        found = _fitting(problem, peak, best.held)
        if found.ways:
            best, high = found, _peak_bytes(problem, found)
        else:
            low = min(high, peak + found.short_bytes)
    time_ps = sum(int(way.figures[:HELD].sum()) for way in best.ways)
    return StageChoice(tuple(way.choices for way in best.ways), time_ps, high, time_ps)


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """The choices of one chunk that hold the least below two limits."""

    choices: tuple[LayerPolicy, ...]
    figures: Ints
    """`[column]`, as of `ChunkUnits.plan`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What comes of one peak."""

    ways: tuple[_Way, ...]
    """The ways of every chunk; none where nothing fits."""
    held: Ints
    """`[chunk]` bytes."""
    short_bytes: int
    """The least number of further bytes that would have changed the result."""


def _fitting(problem: StageProblem, peak: int, held: Ints) -> _Found:
    """Whether anything has such a peak; chunks hold no less than they do under a higher one."""
    held, short_bytes, rising = held.copy(), _FAR, True
    ways: list[_Way | None] = [None] * len(problem.chunks)
    while rising:
        rising = False
        for c, chunk in enumerate(problem.chunks):
            way, short = _least(chunk, _limits(problem, c, peak, held))
            short_bytes = min(short_bytes, short)
            if way is None:
                return _Found((), held, short_bytes)
            ways[c] = way
            rising |= bool(way.figures[HELD] > held[c])
            held[c] = max(held[c], way.figures[HELD])
    return _Found(tuple(way for way in ways if way is not None), held, short_bytes)


def _limits(problem: StageProblem, chunk: int, peak: int, held: Ints) -> Ints:
    """The limits of a chunk's highest points in forwards and in backwards."""
    room = peak - problem.constant - problem.counts @ held
    own, forward = problem.running == chunk, problem.is_forward
    return np.array([room[own & each].min(initial=_FAR) for each in (forward, ~forward)])


def _peak_bytes(problem: StageProblem, found: _Found) -> int:
    figures = np.stack([way.figures for way in found.ways])
    own = figures[problem.running, np.where(problem.is_forward, FORWARD, BACKWARD)]
    needed = problem.constant + problem.counts @ found.held + own
    return int(max(needed.max(initial=0), problem.floor_bytes))


def _least(units: ChunkUnits, limits: Ints) -> tuple[_Way | None, int]:
    """The choices of a chunk that hold the least of those below both limits, None where there are
    none; and by how much higher limits may be for the same answer.

    From the first unit to the last it keeps the choices with the least held before each place, of
    these the ones with the fewest runs of equal choices.
    """
    places, short_bytes = units.places, _FAR
    held, runs = np.full(places + 1, _FAR), np.zeros(places + 1, np.int64)
    held[0], came, last = 0, np.zeros((places + 1, 2), np.int64), [-1] * (places + 1)
    for place, (rows, sizes, names) in enumerate(units.every):
        if held[place] >= _FAR:
            continue
        total = held[place] + rows[:, HELD]
        over = (total[:, None] + rows[:, HIGHEST] - limits).max(axis=1)
        short_bytes = min(short_bytes, int(over.min(initial=_FAR, where=over > 0)))
        number = runs[place] + (names != last[place])
        known = held[place + sizes], runs[place + sizes]
        for at in _better(over <= 0, total, number, known):
            to = place + int(sizes[at])
            held[to], runs[to], came[to] = total[at], number[at], (place, at)
            last[to] = int(names[at])
    if held[-1] >= _FAR:
        return None, short_bytes
    choices, place = list[tuple[LayerPolicy, ...]](), places
    while place:  # back along what led to the end
        before, at = came[place].tolist()
        choices.append(units.choice(before, at, place - before))
        place = before
    whole = tuple(choice for own in reversed(choices) for choice in own)
    return _Way(whole, units.plan(whole)), short_bytes


def _better(fits: Bools, total: Ints, runs: Ints, known: tuple[Ints, Ints]) -> list[int]:
    """Units that lead somewhere with less held, or as much in fewer runs; the best last."""
    held, before = known
    which = np.flatnonzero(fits & ((total < held) | ((total == held) & (runs < before))))
    order: list[int] = which[np.lexsort((-which, -runs[which], -total[which]))].tolist()
    return order
