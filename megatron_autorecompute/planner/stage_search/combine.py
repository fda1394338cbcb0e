"""Combines the chunks of a stage: picks one label of each, and adds up time and load per moment.

While chunks are combined, a tighter bound than prices is used: the least time of the remaining
chunks whose load fits at one moment, which is known exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.planner.arrays import Bools, Floats, Ints
from megatron_autorecompute.planner.stage_search.labels import (
    APART,
    BACKWARD,
    FORWARD,
    GROUP_IDS,
    HELD,
    OPTION,
    PARENT,
    RUNS,
    TIME,
    Labels,
    front,
)
from megatron_autorecompute.planner.stage_search.limits import NEVER, SLACK, Limits
from megatron_autorecompute.planner.stage_search.problem import StageChoice, StageProblem
from megatron_autorecompute.policy import LayerPolicy

UNTHINNED = 64
"""Labels of several chunks that are not worth thinning."""
_MOST_DROPPED = 64
"""Times as many labels as may be kept are looked at."""
_MOST_COMPARED = 16
"""Times as many labels as may be kept are compared with each other."""


@dataclass(frozen=True, slots=True)
class Combined:
    """Labels of the first few chunks together."""

    time: Ints
    runs: Ints
    load: Ints
    """`[label, moment]` bytes."""
    trail: Ints
    """`[label, chunk]` index of the chunk's own label."""

    @classmethod
    def empty(cls, moments: int) -> Combined:
        """The single label of no chunks: no time, no load."""
        one = np.zeros(1, np.int64)
        return cls(one, one, np.zeros((1, moments), np.int64), np.zeros((1, 0), np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Combined]) -> Combined:
        """The labels of all parts."""
        return cls(
            np.concatenate([part.time for part in parts]),
            np.concatenate([part.runs for part in parts]),
            np.concatenate([part.load for part in parts]),
            np.concatenate([part.trail for part in parts]),
        )

    def blocks(self, factor: int, most: int = 1 << 18) -> Iterator[Combined]:
        """Slices whose size times `factor` is not much more than `most` labels."""
        step = max(1, most // factor)
        for start in range(0, len(self.time), step):
            yield self.pick(np.arange(start, min(start + step, len(self.time))))

    def pick(self, which: NDArray[Any]) -> Combined:
        """Some of the labels."""
        return Combined(self.time[which], self.runs[which], self.load[which], self.trail[which])

    def times(self, final: Ints, load: Ints) -> Combined:
        """Every label combined with every label of the next chunk."""
        left = np.repeat(np.arange(len(self.time)), len(final))
        right = np.tile(np.arange(len(final)), len(self.time))
        return Combined(
            self.time[left] + final[right, TIME],
            self.runs[left] + final[right, RUNS],
            self.load[left] + load[right],
            np.column_stack([self.trail[left], right]),
        )

    def thinned(
        self, moments: NDArray[np.intp], bound: Ints, limits: Limits, width: int
    ) -> tuple[Combined, float]:
        """At most `width` labels, none dominated at `moments`; and the least bound cut off."""
        likely, left_ps = np.arange(len(self.time)), math.inf
        if len(likely) > _MOST_COMPARED * width:
            likely, left_ps = self._likeliest(likely, bound, limits, _MOST_COMPARED * width)
        dims = np.column_stack([self.time[likely], self.load[np.ix_(likely, moments)]])
        none = np.zeros(len(likely), np.int64)
        kept = likely[front(dims, self.runs[likely], none, limits.tally)]
        if len(kept) > width:
            kept, left_ps = self._likeliest(kept, bound, limits, width)
        return self.pick(kept), left_ps

    def _likeliest(
        self, which: NDArray[np.intp], bound: Ints, limits: Limits, most: int
    ) -> tuple[NDArray[np.intp], float]:
        """The ones of the least bounds, and the least bound of the others."""
        priced = self.time[which] + limits.priced_loads(self.load[which])
        order = which[np.lexsort((priced, bound[which]))]
        return order[:most], float(bound[order[most]])


@dataclass(frozen=True, slots=True)
class Goal:
    """What is worth finding: faster than `time_ps`, or as fast with `spare_bytes` to spare."""

    time_ps: int | None = None
    spare_bytes: int = 0
    """By how much the peak of equally fast choices must stay below the budget."""

    @classmethod
    def of(cls, known: StageChoice | None, budget_bytes: int) -> Goal:
        """At least as good as the known choices."""
        return cls() if known is None else cls(known.time_ps, budget_bytes - known.peak_bytes)


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """The final labels of one chunk, and the choices they stand for."""

    labels: Labels
    final: Ints
    ids: dict[LayerPolicy, int]

    def weighted(self, weights: tuple[int, int]) -> ChunkOptions:
        """The same where forwards and backwards count so often."""
        final = self.final.copy()
        final[:, TIME] = final[:, APART] @ np.array(weights, np.int64)
        return ChunkOptions(self.labels, final, self.ids)

    def policies(self, index: int) -> tuple[LayerPolicy, ...]:
        """The choices of one final label, one per position."""
        names = {number: policy for policy, number in self.ids.items()}
        found: list[LayerPolicy] = []
        row = int(self.final[index, PARENT])
        while self.labels.data[row, PARENT] >= 0:
            option = int(self.labels.data[row, OPTION])
            if option >= GROUP_IDS:
                size = option - GROUP_IDS
                found += [LayerPolicy("full", group=size)] * size
            else:
                found.append(names[option])
            row = int(self.labels.data[row, PARENT])
        return tuple(found)


class Combiner:
    """Picks one label per chunk.

    For the chunks not yet picked, the least time whose load fits at one moment is known exactly,
    from a front of two dimensions. It bounds the final time of a label much more tightly than
    prices.
    """

    def __init__(self, problem: StageProblem, options: Sequence[ChunkOptions]) -> None:
        self.problem, self.options = problem, options
        self.times = [option.final[:, TIME] for option in options]
        self.loads = [self._load(c, option.final) for c, option in enumerate(options)]
        none = np.zeros((1, len(problem.constant)), np.int64)
        least = [load.min(axis=0, keepdims=True) for load in reversed(self.loads)]
        self.least = np.concatenate([none, *least]).cumsum(axis=0)[::-1]
        """`[chunk, moment]` least load of that chunk and the later ones."""
        self.fronts: dict[tuple[int, int], tuple[Ints, Ints]] = {}

    def _load(self, c: int, final: Ints) -> Ints:
        """`[label, moment]` bytes that a chunk puts on every moment."""
        own = self.problem.running == c
        load = final[:, [HELD]] * self.problem.counts[:, c]
        load[:, own & self.problem.is_forward] += final[:, [FORWARD]]
        load[:, own & ~self.problem.is_forward] += final[:, [BACKWARD]]
        return np.asarray(load, np.int64)

    def bound_ps(self, limit: Ints) -> int:
        """Lower bound on the time of labels that fit; `NEVER` if none do."""
        if not np.all(self.least[0] <= limit):
            return int(NEVER)
        least = [
            (self.times[0] + self._least_ps(k, 1, limit[k] - self.loads[0][:, k])).min()
            for k in self._tightest(limit)
        ]
        return max(map(int, least), default=0)

    def _least_ps(self, moment: int, c: int, room: Ints) -> Ints:
        """Least time of chunks c and later that put at most `room` on a moment."""
        load, time = self.front(moment, c)
        index = np.searchsorted(load, room, side="right") - 1
        return np.where(index >= 0, time[index], NEVER)

    def front(self, moment: int, c: int) -> tuple[Ints, Ints]:
        """Loads, ascending, and the least time of chunks c and later at each."""
        if c == len(self.options):
            return np.zeros(1, np.int64), np.zeros(1, np.int64)
        if (moment, c) not in self.fronts:
            load, time = _planefront(self.loads[c][:, moment], self.times[c])
            later_load, later_time = self.front(moment, c + 1)
            self.fronts[moment, c] = _coarser(
                *_planefront(
                    (load[:, None] + later_load).ravel(), (time[:, None] + later_time).ravel()
                )
            )
        return self.fronts[moment, c]

    @cached_property
    def _priced(self) -> tuple[Floats, Floats]:
        """Trial prices of a byte, and the least time plus priced load, of shape [moment, price]."""
        saved = math.fsum(float(time.max() - time.min()) for time in self.times)
        loads = sum(load.max(axis=0) - load.min(axis=0) for load in self.loads)
        scale = saved / max(float(np.max(loads, initial=0)), 1.0)
        prices: Floats = scale * np.array([2.0**power for power in range(-4, 8)])
        pairs = zip(self.times, self.loads, strict=True)
        least = [(t[:, None, None] + load[..., None] * prices).min(axis=0) for t, load in pairs]
        return prices, np.asarray(sum(least), np.float64)

    def _tightest(self, limit: Ints, most: int = 3) -> list[int]:
        """The moments that cost the most time, roughly."""
        prices, least = self._priced
        cost = (least - limit[:, None] * prices).max(axis=1)
        return [int(k) for k in np.argsort(-cost, kind="stable")[:most]]

    def best(self, limits: Limits, goal: Goal, width: int) -> tuple[StageChoice | None, float]:
        """The best labels that fit and reach the goal; the second value as in `_Rounds.round`."""
        limit = limits.room
        tightest = self._tightest(limit)
        rest_price = [
            float((time + limits.priced_loads(load)).min())
            for time, load in zip(self.times, self.loads, strict=True)
        ]
        ceiling = math.inf if goal.time_ps is None else goal.time_ps + limits.budget_price
        ceiling += SLACK * max(abs(ceiling), goal.time_ps or 0)
        table = Combined.empty(len(limit))
        left_ps = math.inf
        for c, final in enumerate(option.final for option in self.options):
            parts, bounds = [], []
            for block in table.blocks(len(final)):
                limits.tally.rows(len(block.time) * len(final), len(limit))
                part = block.times(final, self.loads[c])
                priced = part.time + limits.priced_loads(part.load) + math.fsum(rest_price[c + 1 :])
                part = part.pick(
                    np.all(part.load + self.least[c + 1] <= limit, axis=1) & (priced <= ceiling)
                )
                keep, bound = self._may_reach(goal, part, c + 1, limit, tightest)
                parts.append(part.pick(keep))
                bounds.append(bound[keep])
            table, bound = Combined.joined(parts), np.concatenate(bounds)
            if c + 1 < len(self.options) and len(table.time) > min(UNTHINNED, width):
                kept = limits.tally.width(width)
                table, cut_ps = table.thinned(self._decided(c), bound, limits, kept)
                left_ps = min(left_ps, cut_ps)
            if not len(table.time):
                return None, left_ps
        peak = self._peaks(table)
        # Of equals, what all stages agree on: the slowest chunk first. They then wait less.
        spent = [time[index] for time, index in zip(self.times, table.trail.T, strict=True)]
        best = np.lexsort((*reversed([-t for t in spent]), table.runs, peak, table.time))[0]
        return self._choice(table.trail[best].tolist(), int(peak[best])), left_ps

    def all_within(self, limits: Limits, time_ps: int, most: int) -> list[StageChoice] | None:
        """Labels that fit and take at most so long, but for those that are as slow as others or
        slower in the forward and backward of every chunk. None where more than `most` at once
        would have to be looked at.
        """
        limit = limits.room
        tightest = self._tightest(limit)
        table = Combined.empty(len(limit))
        for c, final in enumerate(option.final for option in self.options):
            if len(table.time) * len(final) > most * _MOST_DROPPED:
                return None
            parts = []
            for block in table.blocks(len(final)):
                limits.tally.rows(len(block.time) * len(final), len(limit))
                part = block.times(final, self.loads[c])
                part = part.pick(np.all(part.load + self.least[c + 1] <= limit, axis=1))
                _, least = self._may_reach(Goal(), part, c + 1, limit, tightest)
                parts.append(part.pick(least <= time_ps))
            table = Combined.joined(parts)
            if not 0 < len(table.time) <= most:
                return [] if not len(table.time) else None
        peak = self._peaks(table)
        order = np.lexsort((table.runs, peak, table.time))
        table, peak = table.pick(order), peak[order]
        apart = [
            option.final[index][:, APART]
            for option, index in zip(self.options, table.trail.T, strict=True)
        ]
        none = np.zeros(len(peak), np.int64)
        kept = front(np.column_stack(apart), none, none, limits.tally)
        return [self._choice(table.trail[i].tolist(), int(peak[i])) for i in np.sort(kept)]

    def _peaks(self, table: Combined) -> Ints:
        highest = (table.load + self.problem.constant).max(axis=1, initial=0)
        return np.asarray(np.maximum(highest, self.problem.floor_bytes), np.int64)

    def _may_reach(
        self, goal: Goal, table: Combined, c: int, limit: Ints, tightest: Sequence[int]
    ) -> tuple[Bools, Ints]:
        """Whether labels can still reach the goal, and a lower bound on their final time."""
        best, leaner = table.time, table.time
        for k in tightest:
            room = limit[k] - table.load[:, k]
            best = np.maximum(best, table.time + self._least_ps(k, c, room))
            lower = self._least_ps(k, c, room - goal.spare_bytes)
            leaner = np.maximum(leaner, table.time + lower)
        if goal.time_ps is None:
            return np.ones(len(best), np.bool_), best
        return (best < goal.time_ps) | (leaner <= goal.time_ps), best

    def _decided(self, c: int) -> NDArray[np.intp]:
        """One moment of each set that is equal as far as chunks 0 .. c are concerned."""
        problem = self.problem
        runs = np.where(problem.running <= c, problem.running, -1)
        rows = np.column_stack([problem.counts[:, : c + 1], runs, problem.is_forward & (runs >= 0)])
        return np.unique(rows, axis=0, return_index=True)[1]

    def _choice(self, chosen: Sequence[int], peak_bytes: int) -> StageChoice:
        pairs = list(zip(self.options, chosen, strict=True))
        policies = tuple(option.policies(index) for option, index in pairs)
        runs = sum(int(option.final[index, RUNS]) for option, index in pairs)
        chunks = self.problem.chunks
        time = sum(chunk.time_ps(p) for chunk, p in zip(chunks, policies, strict=True))
        return StageChoice(policies, time, peak_bytes, runs, time)


def _planefront(load: Ints, time: Ints) -> tuple[Ints, Ints]:
    """Loads, ascending, each with a lower time than all before; dominated points are dropped."""
    order = load.argsort()  # in any order where equal: only the last one of equal loads counts
    load, least = load[order], np.minimum.accumulate(time[order])
    last = np.append(load[1:] != load[:-1], True)
    load, least = load[last], least[last]
    better = np.append(True, least[1:] < least[:-1])
    return load[better], least[better]


def _coarser(load: Ints, time: Ints, most: int = 1024) -> tuple[Ints, Ints]:
    """A front of at most `most` points, none above the given front."""
    if len(load) <= most:
        return load, time
    starts = np.arange(most) * len(load) // most
    return load[starts], np.append(time[starts[1:] - 1], time[-1])
