"""The choices of a stage with the lowest peak, whatever their time: exact, without labels.

Of a chunk other chunks feel only what it holds, the less the better; and within a chunk the less
the first layers hold, the better for all later ones. So under one peak the least that every chunk
can hold is found by going up: begin as if chunks held nothing, let each hold the least with which
its own moments fit what the others hold, and repeat until nothing rises. If that ends, these
choices fit; if a chunk finds none, nothing fits. The lowest such peak is then found between two
bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.planner.arrays import Ints
from megatron_autorecompute.planner.stage_search.problem import (
    ChunkProblem,
    StageChoice,
    StageProblem,
)
from megatron_autorecompute.policy import LayerPolicy

_FAR = 1 << 60
"""Bytes that no sum reaches."""


def leanest(problem: StageProblem) -> StageChoice:
    """The choices with the lowest peak; of these, every chunk's hold the least they can."""
    chunks = [_Chunk(chunk) for chunk in problem.chunks]
    found = _fitting(problem, chunks, _FAR)
    low, best = problem.floor_bytes, found.choices
    high = _peak_bytes(problem, found)
    while low < high:
        peak = (low + high) // 2
        found = _fitting(problem, chunks, peak)
        if found.fits:
            high, best = _peak_bytes(problem, found), found.choices
        else:
            low = min(high, peak + found.short_bytes)
    time_ps = sum(c.time_ps(own) for c, own in zip(problem.chunks, best, strict=True))
    return StageChoice(best, time_ps, high, sum(map(_runs, best)), time_ps)


@dataclass(frozen=True, slots=True)
class _Found:
    """What comes of one peak."""

    fits: bool
    choices: tuple[tuple[LayerPolicy, ...], ...]
    """`[chunk][position]`."""
    held: Ints
    """`[chunk]` bytes."""
    highest: Ints
    """`[direction, chunk]` bytes, forwards first."""
    short_bytes: int
    """With fewer more nothing would have come out differently."""


def _fitting(problem: StageProblem, chunks: Sequence[_Chunk], peak: int) -> _Found:
    held = np.zeros(len(chunks), np.int64)
    most: list[tuple[int, int]] = [(-1, -1)] * len(chunks)
    ways: list[_Way | None] = [None] * len(chunks)
    short_bytes, rising = _FAR, True
    while rising:
        rising = False
        room = peak - problem.constant - problem.counts @ held
        for c, chunk in enumerate(chunks):
            own = problem.running == c
            asked = (
                int(room[own & problem.is_forward].min(initial=_FAR)),
                int(room[own & ~problem.is_forward].min(initial=_FAR)),
            )
            if asked == most[c]:
                continue
            most[c] = asked
            way = chunk.least(*asked)
            short_bytes = min(short_bytes, way.short_bytes)
            if way.held is None:
                return _Found(False, (), held, np.zeros((2, 0), np.int64), short_bytes)
            ways[c] = way
            if way.held > held[c]:
                held[c], rising = way.held, True
                room = peak - problem.constant - problem.counts @ held
    found = [way for way in ways if way is not None]
    highest = np.array([way.highest for way in found], np.int64).reshape(len(found), 2).T
    return _Found(True, tuple(way.choices for way in found), held, highest, short_bytes)


def _peak_bytes(problem: StageProblem, found: _Found) -> int:
    own = found.highest[np.where(problem.is_forward, 0, 1), problem.running]
    needed = problem.constant + problem.counts @ found.held + own
    return int(max(needed.max(initial=0), problem.floor_bytes))


@dataclass(frozen=True, slots=True)
class _Way:
    """The choices of one chunk that hold the least below two limits."""

    held: int | None
    """None where no choices stay below the limits."""
    highest: tuple[int, int]
    choices: tuple[LayerPolicy, ...]
    short_bytes: int
    """With limits higher by fewer, the same would have come out."""


@dataclass(frozen=True, slots=True)
class _Options:
    """What may begin at one position, `[option]`, in order of layers."""

    size: Ints
    """Layers."""
    held: Ints
    reach: Ints
    """`[direction, option]` highest point, counted from what is held before."""
    policies: tuple[LayerPolicy, ...]
    ids: Ints
    """A number for each of them."""
    alone: int
    """How many are of one layer; they come first."""

    @classmethod
    def of(cls, chunk: ChunkProblem, position: int, ids: dict[LayerPolicy, int]) -> _Options:
        """Every choice of one layer, then every checkpoint around several."""
        single, group = chunk.singles[position], chunk.groups[position]
        several = slice(1, len(group.held_bytes))
        alone = len(single.policies)
        sizes = np.concatenate([np.ones(alone, np.int64), np.arange(2, len(group.held_bytes) + 1)])
        ends_chunk = (position + sizes == len(chunk.layers)) & (not chunk.after)
        keeps = np.concatenate([single.keeps, np.ones(len(sizes) - alone, np.int64)])
        held = np.concatenate([single.held, group.held_bytes[several]])
        forward = np.concatenate([single.forward, group.forward_transient_bytes[several]])
        backward = np.concatenate([single.backward, group.backward_transient_bytes[several]])
        backward = backward + chunk.output_gradient_bytes * (1 - keeps * ends_chunk)
        groups = tuple(LayerPolicy("full", group=int(size)) for size in sizes[alone:])
        policies = (*single.policies, *groups)
        reach = held + np.stack([forward, backward])
        kept = _not_worse(np.stack([held, *reach], axis=1), alone)
        numbers = np.array([ids.setdefault(policy, len(ids)) for policy in policies], np.int64)
        return cls(
            sizes[kept],
            held[kept],
            reach[:, kept],
            tuple(policies[i] for i in kept),
            numbers[kept],
            sum(i < alone for i in kept),
        )


def _not_worse(costs: Ints, alone: int) -> list[int]:
    """Options without those of one layer, the first ones, that are nowhere better than another."""
    rows = costs[:alone].tolist()
    worse = {
        i
        for i, own in enumerate(rows)
        for j, other in enumerate(rows)
        if all(a <= b for a, b in zip(other, own, strict=True)) and (other != own or j < i)
    }
    return [i for i in range(len(costs)) if i not in worse]


class _Chunk:
    """Finds the choices of one chunk that hold the least; keeps what it was asked."""

    def __init__(self, chunk: ChunkProblem) -> None:
        self.chunk = chunk
        self._known: dict[tuple[int, int], _Way] = {}

    @cached_property
    def options(self) -> list[_Options]:
        """Per position."""
        ids: dict[LayerPolicy, int] = {}
        return [_Options.of(self.chunk, i, ids) for i in range(len(self.chunk.layers))]

    @cached_property
    def _ends(self) -> tuple[tuple[int, Ints], tuple[int, Ints]]:
        """(held, `[direction]` highest point) of the units before the layers, and after them."""
        found = []
        for units in (self.chunk.before, self.chunk.after):
            held, highest = 0, np.zeros(2, np.int64)
            for unit in units:
                held += unit.held_bytes
                backward = unit.backward_transient_bytes + self.chunk.output_gradient_bytes
                own = np.array([unit.forward_transient_bytes, backward], np.int64)
                highest = np.maximum(highest, held + own)
            found.append((held, np.maximum(highest, held)))
        return found[0], found[1]

    def least(self, forward_limit: int, backward_limit: int) -> _Way:
        """The choices that hold the least of those below both limits."""
        asked = forward_limit, backward_limit
        if asked not in self._known:
            self._known[asked] = self._least(np.array(asked, np.int64))
        return self._known[asked]

    def _least(self, limit: Ints) -> _Way:
        (before, before_reach), (after, after_reach) = self._ends
        walk = _Walk(self.options, limit)
        if walk.may(before_reach):
            walk.begin(before)
            for position in range(len(self.options)):
                walk.go_on(position)
        total = int(walk.held[-1])
        if total >= _FAR or not walk.may(total + after_reach):
            return _Way(None, (0, 0), (), walk.short_bytes)
        choices, highest = walk.back()
        highest = np.maximum(np.maximum(highest, before_reach), total + after_reach)
        pair = int(highest[0]), int(highest[1])
        return _Way(total + after, pair, choices, walk.short_bytes)


class _Walk:
    """From the first layer of a chunk to its last: the least held before each, below a limit."""

    def __init__(self, options: Sequence[_Options], limit: Ints) -> None:
        self.options, self.limit = options, limit
        count = len(options) + 1
        self.held, self.runs = np.full(count, _FAR), np.zeros(count, np.int64)
        self.came = np.full((count, 2), -1)
        """(position, option) before."""
        self.last = np.full(count, -1)
        """The option's id."""
        self.short_bytes = _FAR

    def begin(self, held: int) -> None:
        """With what the units before the layers hold."""
        self.held[0] = held

    def may(self, reach: Ints) -> bool:
        """Whether points stay below the limit; otherwise by how much it is short."""
        over = int((reach - self.limit).max())
        if over > 0:
            self.short_bytes = min(self.short_bytes, over)
        return over <= 0

    def go_on(self, position: int) -> None:
        """With every option at a position."""
        held, options = int(self.held[position]), self.options[position]
        if held >= _FAR:
            return
        over = (options.reach + (held - self.limit)[:, None]).max(axis=0)
        self.short_bytes = min(self.short_bytes, int(over[over > 0].min(initial=_FAR)))
        runs = self.runs[position] + (options.ids != self.last[position])
        alone = [i for i in range(options.alone) if over[i] <= 0]
        if alone:
            best = min(alone, key=lambda i: (int(options.held[i]), int(runs[i]), i))
            self._reach(position, np.array([best]), held, runs)
        self._reach(
            position, options.alone + np.flatnonzero(over[options.alone :] <= 0), held, runs
        )

    def _reach(self, position: int, which: NDArray[np.intp], held: int, runs: Ints) -> None:
        """Where options of unlike length end, if nothing better does."""
        options = self.options[position]
        to, total = position + options.size[which], held + options.held[which]
        better = (total < self.held[to]) | (
            (total == self.held[to]) & (runs[which] < self.runs[to])
        )
        which, to = which[better], to[better]
        self.held[to], self.runs[to] = total[better], runs[which]
        self.came[to, 0], self.came[to, 1] = position, which
        self.last[to] = options.ids[which]

    def back(self) -> tuple[tuple[LayerPolicy, ...], Ints]:
        """The choices that led to the end, and their `[direction]` highest point."""
        choices: tuple[LayerPolicy, ...] = ()
        highest, place = np.zeros(2, np.int64), len(self.options)
        while place:
            place, option = self.came[place].tolist()
            own = self.options[place]
            choices = (own.policies[option],) * int(own.size[option]) + choices
            highest = np.maximum(highest, self.held[place] + own.reach[:, option])
        return choices, highest


def _runs(choices: Sequence[LayerPolicy]) -> int:
    return sum(1 for i, own in enumerate(choices) if i == 0 or own != choices[i - 1])
