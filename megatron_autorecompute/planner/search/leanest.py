"""The choices of a stage with the lowest peak, whatever their time: exact, without labels.

Of a chunk other chunks feel only what it holds, the less the better; and within a chunk the less
the first layers hold, the better for all later ones. So under one peak the least that every chunk
can hold is found by going up: begin as if chunks held nothing, let each hold the least with which
its own moments fit what the others hold, and repeat until nothing rises. If that ends, these
choices fit; if a chunk finds none, nothing fits. The lowest such peak is then found between two
bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter

import numpy as np

from megatron_autorecompute.planner.cost.arrays import Ints
from megatron_autorecompute.planner.search.stage_problem import (
    ChunkProblem,
    StageChoice,
    StageProblem,
    runs,
)
from megatron_autorecompute.policy import LayerPolicy

_FAR = 1 << 60
"""Bytes that no sum reaches."""
_Limits = tuple[int, int]
"""Of forwards and of backwards, in bytes."""


def _below(one: _Limits, other: _Limits) -> bool:
    return one[0] <= other[0] and one[1] <= other[1]


def leanest(problem: StageProblem) -> StageChoice:
    """The choices with the lowest peak; of these, every chunk's hold the least they can."""
    chunks = [_Chunk(chunk) for chunk in problem.chunks]
    found = _fitting(problem, chunks, _FAR, np.zeros(len(chunks), np.int64))
    low, best, held = problem.floor_bytes, found.choices, found.held
    high = _peak_bytes(problem, found)
    while low < high:
        peak = (low + high) // 2
        found = _fitting(problem, chunks, peak, held)
        if found.fits:
            high, best, held = _peak_bytes(problem, found), found.choices, found.held
        else:
            low = min(high, peak + found.short_bytes)
    time_ps = sum(sum(c.times_ps(own)) for c, own in zip(problem.chunks, best, strict=True))
    return StageChoice(best, time_ps, high, sum(map(runs, best)), time_ps)


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


def _fitting(problem: StageProblem, chunks: Sequence[_Chunk], peak: int, held: Ints) -> _Found:
    """Whether anything has such a peak; chunks hold no less than they do under a higher one."""
    held = held.copy()
    most: list[_Limits | None] = [None] * len(chunks)
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
            way = chunk.least(asked)
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
    highest: _Limits
    choices: tuple[LayerPolicy, ...]
    short_bytes: int
    """With limits higher by fewer, the same would have come out."""


class _Options:
    """What may begin at one position of a chunk.

    A choice of one layer has its number in `names`, a group of n layers the number -n.
    """

    def __init__(self, chunk: ChunkProblem, position: int, names: dict[LayerPolicy, int]) -> None:
        single, group = chunk.singles[position], chunk.groups[position]
        left, gradient = len(chunk.layers) - position, chunk.output_gradient_bytes
        # At the end of the chunk the unit counts the gradient of its output until it frees it.
        at_end = left == 1 and not chunk.after
        forward = single.held + single.forward
        backward = single.held + single.backward + (single.kept_gradient if at_end else gradient)
        numbers = [names.setdefault(policy, len(names)) for policy in single.policies]
        columns = *(column.tolist() for column in (single.held, forward, backward)), numbers
        self.alone = _not_worse(zip(*columns, range(len(single.held)), strict=True))
        """(held, highest in forward, in backward, number, place in the profile), without what is
        held before."""
        self.held = group.held_bytes[1:]
        """`[group]` of 2 layers and more, as the next ones."""
        self.forward = self.held + group.forward_transient_bytes[1:]
        self.backward = self.held + group.backward_transient_bytes[1:] + gradient
        if len(self.held) == left - 1 and not chunk.after:
            self.backward[-1:] -= gradient
        self.sizes = np.arange(2, len(self.held) + 2)

    def reach(self, number: int) -> tuple[int, int]:
        """The highest points of an option."""
        if number < 0:
            return int(self.forward[-number - 2]), int(self.backward[-number - 2])
        return next(own[1:3] for own in self.alone if own[3] == number)


_Alone = tuple[int, int, int, int, int]


def _not_worse(options: Iterable[_Alone]) -> list[_Alone]:
    """Those that are better in something than every other, in order of what they hold."""
    kept: list[_Alone] = []
    for own in sorted(options, key=itemgetter(0, 1, 2)):
        if not any(other[1] <= own[1] and other[2] <= own[2] for other in kept):
            kept.append(own)
    return sorted(kept, key=itemgetter(0, 4))


class _Chunk:
    """Finds the choices of one chunk that hold the least; keeps what it was asked."""

    def __init__(self, chunk: ChunkProblem) -> None:
        self.chunk = chunk
        self.names: dict[LayerPolicy, int] = {}
        self._known: list[tuple[_Limits, _Way]] = []

    @cached_property
    def options(self) -> list[_Options]:
        """Per position."""
        return [_Options(self.chunk, i, self.names) for i in range(len(self.chunk.layers))]

    @cached_property
    def _ends(self) -> tuple[tuple[int, _Limits], tuple[int, _Limits]]:
        """(held, highest points) of the units before the layers, and of those after them."""
        found = []
        for units in (self.chunk.before, self.chunk.after):
            held = forward = backward = 0
            for unit in units:
                held += unit.held_bytes
                gradient = self.chunk.output_gradient_bytes
                forward = max(forward, held + unit.forward_transient_bytes)
                backward = max(backward, held + unit.backward_transient_bytes + gradient)
            found.append((held, (max(forward, held), max(backward, held))))
        return found[0], found[1]

    def least(self, limits: _Limits) -> _Way:
        """The choices that hold the least of those below both limits.

        What is found below some limits is the answer below all lower ones that it meets, too.
        """
        for known, way in self._known:
            if _below(limits, known) and _below(way.highest, limits):
                return way
        self._known.append((limits, self._least(limits)))
        return self._known[-1][1]

    def _least(self, limits: _Limits) -> _Way:
        (before, before_reach), (after, after_reach) = self._ends
        walk = _Walk(self.options, limits)
        if walk.may(before_reach):
            walk.begin(before)
            for position in range(len(self.options)):
                walk.go_on(position)
        total = int(walk.held[-1])
        after_reach = total + after_reach[0], total + after_reach[1]
        if total >= _FAR or not walk.may(after_reach):
            return _Way(None, (-_FAR, -_FAR), (), walk.short_bytes)
        choices, reach = walk.back(list(self.names), self.chunk.full)
        forward, backward = map(max, reach, before_reach, after_reach)
        return _Way(total + after, (forward, backward), choices, walk.short_bytes)


class _Walk:
    """From the first layer of a chunk to its last: the least held before each, below limits."""

    def __init__(self, options: Sequence[_Options], limits: _Limits) -> None:
        self.options, self.limits = options, limits
        count = len(options) + 1
        self.held, self.runs = np.full(count, _FAR), np.zeros(count, np.int64)
        self.came = np.full(count, -1)
        """Position before."""
        self.by = np.full(count, _FAR)
        """Number of the option with which it came from there."""
        self.short_bytes = _FAR

    def begin(self, held: int) -> None:
        """With what the units before the layers hold."""
        self.held[0] = held

    def may(self, reach: _Limits) -> bool:
        """Whether points stay below the limits; otherwise by how much they are short."""
        over = max(reach[0] - self.limits[0], reach[1] - self.limits[1])
        if over > 0:
            self.short_bytes = min(self.short_bytes, over)
        return over <= 0

    def go_on(self, position: int) -> None:
        """With every option at a position."""
        held = int(self.held[position])
        if held < _FAR:
            self._alone(position, held)
            if len(self.options[position].held):
                self._together(position, held)

    def _alone(self, position: int, held: int) -> None:
        to, best = position + 1, (int(self.held[position + 1]), int(self.runs[position + 1]))
        runs, last = int(self.runs[position]), int(self.by[position])
        for own, forward, backward, number, _ in self.options[position].alone:
            if held + own > best[0]:
                break
            if self.may((held + forward, held + backward)):
                found = held + own, runs + (number != last)
                if found < best:
                    best = self.held[to], self.runs[to] = found
                    self.came[to], self.by[to] = position, number

    def _together(self, position: int, held: int) -> None:
        options = self.options[position]
        forward, backward = self.limits[0] - held, self.limits[1] - held
        over = np.maximum(options.forward - forward, options.backward - backward)
        self.short_bytes = min(self.short_bytes, int(over[over > 0].min(initial=_FAR)))
        to = slice(position + 2, position + 2 + len(over))
        total = held + options.held
        runs = self.runs[position] + (options.sizes != -self.by[position])
        better = total < self.held[to]
        better |= (total == self.held[to]) & (runs < self.runs[to])
        which = np.flatnonzero(better & (over <= 0))
        if len(which):
            at = which + position + 2
            self.held[at], self.runs[at], self.came[at] = total[which], runs[which], position
            self.by[at] = -options.sizes[which]

    def back(
        self, names: Sequence[LayerPolicy], full: LayerPolicy
    ) -> tuple[tuple[LayerPolicy, ...], _Limits]:
        """The choices that led to the end, and their highest points."""
        choices: list[LayerPolicy] = []
        forward, backward, place = 0, 0, len(self.options)
        while place:
            number, size, place = int(self.by[place]), place, int(self.came[place])
            size -= place
            choices += [names[number] if number >= 0 else replace(full, group=size)] * size
            held, own = int(self.held[place]), self.options[place].reach(number)
            forward, backward = max(forward, held + own[0]), max(backward, held + own[1])
        return tuple(reversed(choices)), (forward, backward)
