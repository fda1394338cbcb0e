"""What one stage may choose: its fastest fitting choices, whatever each of its events counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_autorecompute.planner.arrays import Ints
from megatron_autorecompute.planner.stage_search.problem import ChunkProblem, StageChoice
from megatron_autorecompute.planner.stage_search.search import Effort, StageSearch
from megatron_autorecompute.policy import LayerPolicy

Split = tuple[tuple[LayerPolicy, ...], ...]
"""What a stage does, `[chunk][position]`."""
LARGEST = 1 << 58
"""Weighted times of a stage stay below this."""
_WIDTHS = (16, 64, 256, 1024, 4096, 16_384)
"""Of the rounds of searches for some weights, narrow ones first: many such searches are made."""
_SCALE = 1 << 20
"""Where some events do not count, choices are asked for by weights so many times as large, plus
one: so that of choices equally fast on a path, those are found that are not slow elsewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """Choices of one stage that fit."""

    split: Split
    own_ps: Ints
    """`[direction, chunk]` of one microbatch."""
    times: Ints
    """The same with the stage's residual, in units of the replay."""
    peak_bytes: int
    runs: int


@dataclass(frozen=True, slots=True)
class Least:
    """The least weighted time of a stage, residual included."""

    option: int
    """Its number, of choices that take that or nearly that."""
    time_ps: int
    """What they take."""
    bound_ps: int
    """No choices that fit take less."""
    whole: bool
    """Whether the search went through all, or was cut short by its work."""


class StageOptions:
    """The choices of one stage that were found so far, and a search for more.

    Args:
        search: of the stage, every event counted once.
        budget_bytes: what it must fit.
        residual: added to the time of every event, `[direction, chunk]`, ps.
        unit: picoseconds that the replay counts in.
        busy: the answer where every event counts once; option 0.
    """

    def __init__(
        self,
        search: StageSearch,
        budget_bytes: int,
        residual: Ints,
        unit: int,
        busy: StageChoice,
    ) -> None:
        self.search, self.budget_bytes, self.busy = search, budget_bytes, busy
        self.residual, self.unit = residual, unit
        self.chunks = search.problem.chunks
        self.found: list[Option] = []
        self._by_times: dict[bytes, int] = {}
        self._by_split: dict[Split, int] = {}
        self._least: dict[tuple[int, ...], Least] = {}
        self.work = 0
        """Done in searches so far, as `Tally` counts it."""
        self._most_ps = max(1, sum(map(_most_ps, self.chunks)))
        self._least_ps = _least_of(self.chunks)
        self._add(busy)

    def __len__(self) -> int:
        return len(self.found)

    def add(self, split: Split, own_ps: Ints, peak_bytes: int, runs: int) -> int:
        """The number of choices; of equal times the leaner are kept."""
        times = np.maximum(own_ps + self.residual, 0) // self.unit
        index = self._by_times.setdefault(times.tobytes(), len(self.found))
        option = Option(split, own_ps, times, peak_bytes, runs)
        if index == len(self.found):
            self.found.append(option)
        elif (peak_bytes, runs) < (self.found[index].peak_bytes, self.found[index].runs):
            self.found[index] = option
        self._by_split[split] = index
        return index

    def _add(self, choice: StageChoice) -> int:
        if choice.policies in self._by_split:
            return self._by_split[choice.policies]
        pairs = zip(self.chunks, choice.policies, strict=True)
        own_ps = np.array([chunk.times_ps(policies) for chunk, policies in pairs], np.int64).T
        return self.add(choice.policies, own_ps, choice.peak_bytes, choice.runs)

    def least(self, weights: Ints, most_work: int | None = None, *, exact: bool = False) -> Least:
        """The least weighted time of any choices that fit.

        Args:
            weights: how often each event counts, `[direction, chunk]`.
            most_work: of the search, as `Tally` counts it; None is what its stage may do.
            exact: whether a bound that is some millionths too low will not do.
        """
        most_work = self.search.effort.most_work if most_work is None else most_work
        key = (most_work, exact, *weights.ravel().tolist())
        if key not in self._least:
            asked, effort = _Asked.of(weights, self._most_ps), Effort(_WIDTHS, most_work)
            search = self._proven if exact else self._nearly
            choice, bound_ps = search(asked, effort)
            option = self._add(choice)
            bound_ps = asked.whole(bound_ps, self._least_ps) + dot(weights, self.residual)
            time_ps = dot(weights, self.found[option].times) * self.unit
            whole = choice.bound_ps == choice.time_ps
            self._least[key] = Least(option, time_ps, bound_ps, whole)
        return self._least[key]

    def all_within(self, weights: Ints, most_ps: int, labels: int, number: int) -> list[int] | None:
        """Numbers of all choices whose weighted time, residual included, is at most so much.

        Without those than which others are slower in nothing. None where they are more than a
        `number`, or need more than so many `labels` at one position of a chunk.
        """
        asked = _Asked.of(weights, self._most_ps)
        room = most_ps - dot(weights, self.residual)
        room = min((room // asked.divisor) >> asked.shift, 4 * LARGEST - 1)
        if room < 0:
            return []
        search = self._weighted(asked.small, self.search.effort)
        within = search.all_within(self.budget_bytes, room, labels, number)
        return None if within is None else list(dict.fromkeys(map(self._add, within)))

    def _proven(self, asked: _Asked, effort: Effort) -> tuple[StageChoice, int]:
        """The fastest choices, and the bound that the search ends with."""
        small = asked.small
        if (small == small.flat[0]).all():  # as is known already
            return self.busy, int(small.flat[0]) * self.busy.bound_ps
        found = self._fastest(small, effort)
        return found, found.bound_ps

    def _nearly(self, asked: _Asked, effort: Effort) -> tuple[StageChoice, int]:
        """Choices that are fastest, or nearly, and not slow where nothing counts; and a bound."""
        small = asked.small
        scale = min(_SCALE, LARGEST // (self._most_ps * max(int(small.max()), 1)) - 1)
        if small.min() > 0 or scale < 1 or small.max() == 0:
            return self._proven(asked, effort)
        found = self._fastest(small * scale + 1, effort)
        # Of any choices: scale * weighted time + time >= bound, and time <= most.
        return found, max(0, -(-(found.bound_ps - self._most_ps) // scale))

    def _fastest(self, small: Ints, effort: Effort) -> StageChoice:
        times = [dot(small, option.own_ps) for option in self.found]
        keys = [(t, o.peak_bytes, o.runs) for t, o in zip(times, self.found, strict=True)]
        time_ps, peak_bytes, runs = min(keys)
        split = self.found[keys.index((time_ps, peak_bytes, runs))].split
        known = StageChoice(split, time_ps, peak_bytes, runs, time_ps)
        search = self._weighted(small, effort)
        found = search.fastest(self.budget_bytes, known)
        self.work += search.work
        assert found is not None  # what is known fits
        return found

    def _weighted(self, small: Ints, effort: Effort) -> StageSearch:
        return self.search.weighted(_pairs(small), effort)


def priced_bound_ps(search: StageSearch, budget_bytes: int, weights: Ints) -> int:
    """The least weighted time of a stage that fits, without residual, is no less than this.

    By prices of bytes alone, without a search; at least `NEVER` where nothing can fit.

    Args:
        search: of the stage, every event counted once.
        budget_bytes: what it must fit.
        weights: how often each event counts, `[direction, chunk]`.
    """
    chunks = search.problem.chunks
    asked = _Asked.of(weights, max(1, sum(map(_most_ps, chunks))))
    own = search.weighted(_pairs(asked.small), search.effort)
    return asked.whole(own.priced_bound_ps(budget_bytes), _least_of(chunks))


def dot(weights: Ints, times: Ints) -> int:
    """The sum of products, of any size."""
    return sum(w * t for w, t in zip(weights.ravel().tolist(), times.ravel().tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """Weights as a search can take them: `weights = divisor * ((small << shift) + rest)`."""

    small: Ints
    rest: Ints
    shift: int
    divisor: int

    @classmethod
    def of(cls, weights: Ints, most_ps: int) -> _Asked:
        """As large as sums of times leave room for."""
        divisor = max(1, int(np.gcd.reduce(weights, axis=None)))
        weights = weights // divisor
        shift = max(0, (int(weights.max()) * most_ps // LARGEST).bit_length())
        small = weights >> shift
        return cls(small, weights - (small << shift), shift, divisor)

    def whole(self, bound_ps: int, least_ps: Ints) -> int:
        """What a bound by the small weights, and the least of every event, say of all."""
        return ((bound_ps << self.shift) + dot(self.rest, least_ps)) * self.divisor


def _pairs(weights: Ints) -> list[tuple[int, int]]:
    return [(forward, backward) for forward, backward in weights.T.tolist()]


def _least_of(chunks: Sequence[ChunkProblem]) -> Ints:
    """`[direction, chunk]` no more than any choices take."""
    return np.array([_least_ps(chunk) for chunk in chunks], np.int64).T


def _most_ps(chunk: ChunkProblem) -> int:
    """No less than any choices of a chunk take."""
    fixed = sum(unit.time_ps for unit in (*chunk.before, *chunk.after))
    times = [(chunk.single_ps[i], chunk.group_ps[i]) for i in range(len(chunk.layers))]
    return fixed + sum(max(int(own.max(initial=0)) for own in pair) for pair in times)


def _least_ps(chunk: ChunkProblem) -> tuple[int, int]:
    """No more than the forward, and than the backward, of any choices of a chunk take."""
    one, other = (_covered(replace(chunk, weights=weights)) for weights in ((1, 0), (0, 1)))
    return one, other


def _covered(chunk: ChunkProblem) -> int:
    after = sum(chunk.unit_ps(unit) for unit in chunk.after)
    return math.floor((float(chunk.covering(0.0)[-1]) + after) * (1 - 1e-9))
