"""Exact search for the fastest choices of one stage under its memory limits.

Rounds of growing width improve the best known solution. A round in which no label was cut off
proves it optimal. If even the widest round cuts labels off, the cheapest of them is the lower
bound, and the distance to it is the gap of the answer. Short chunks have few labels; all of them
are kept for every budget, and no prices are needed.

At equal times the lower peak wins; if both are equal, the fewest runs of equal choices, counted per
chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_autorecompute.planner.stage_search import side_by_side
from megatron_autorecompute.planner.stage_search.chunk_labels import ChunkLabels, Filters
from megatron_autorecompute.planner.stage_search.combine import ChunkOptions, Combiner, Goal
from megatron_autorecompute.planner.stage_search.labels import Tally
from megatron_autorecompute.planner.stage_search.leanest import leanest
from megatron_autorecompute.planner.stage_search.limits import NEVER, NO_LIMIT, SLACK, Limits
from megatron_autorecompute.planner.stage_search.prices import multipliers
from megatron_autorecompute.planner.stage_search.problem import StageChoice, StageProblem
from megatron_autorecompute.policy import LayerPolicy

_AT_A_BOUND = 64
"""Labels kept per position where only choices at a known bound are looked for."""
_GROWTH = 2
"""Times the work of a round that the next one, four times as wide, takes at least."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work a search may do; what it leaves unproven is the gap of its answer."""

    widths: tuple[int, ...] = (4, 16, 64, 256, 1024, 4096, 16_384, 131_072)
    """Labels kept per position in successive rounds; the last bounds memory to about 100 MB."""
    most_work: int = 6 * 10**9
    """Counted as in `Tally`, of all stages together: no round is begun that would do more, and
    one that comes to it keeps few labels from there on. About 5 s on one core."""
    complete_layers: int = 4
    """If no chunk has more layers, all labels of a stage are computed once and kept for every
    budget. Longer chunks have too many labels, so each budget is searched separately."""
    complete_width: int = 256
    """Labels of a position up to which the same is done."""
    many_layers: int = 12
    """The same where many budgets will be asked, as of a curve."""
    many_width: int = 4096
    """The same."""
    work_of_a_budget: int = 10**7
    """Up to so much for each of them is spent on it, about what a search of one is at the least."""

    def of_one(self, shares: int) -> Effort:
        """One of so many equal shares."""
        return replace(self, most_work=self.most_work // shares)


class StageSearch:
    """Searches one stage for any number of budgets."""

    def __init__(
        self,
        problem: StageProblem,
        effort: Effort | None = None,
        unweighted: StageSearch | None = None,
    ) -> None:
        self.problem = problem
        self.effort = effort or Effort()
        self._unweighted = unweighted
        self._apart: dict[int, StageSearch] = {}
        self.work = 0
        """Done so far, but for what all budgets share."""

    def weighted(self, weights: Sequence[tuple[int, int]], effort: Effort) -> StageSearch:
        """The search in which a chunk's forward and backward count so often, by chunk."""
        pairs = zip(self.problem.chunks, weights, strict=True)
        chunks = tuple(replace(chunk, weights=own) for chunk, own in pairs)
        return StageSearch(replace(self.problem, chunks=chunks), effort, self)

    def apart(self, added_bytes: int) -> StageSearch:
        """The search of the same choices as if nothing ran side by side; see `side_by_side`."""
        if added_bytes not in self._apart:
            own = self._unweighted and self._unweighted.apart(added_bytes)
            effort = self.effort.of_one(side_by_side.TRIES)
            self._apart[added_bytes] = StageSearch(self.problem.apart(added_bytes), effort, own)
        return self._apart[added_bytes]

    @cached_property
    def complete(self) -> Combiner | None:
        """All labels of all chunks, for every budget; None if they are too many to keep."""
        if max(len(chunk.layers) for chunk in self.problem.chunks) > self.effort.complete_layers:
            return None
        if self._unweighted is None:
            return self._combiner(self._kept_labels(apart=False))
        options = self._unweighted.of_any_weights
        if options is None:
            return None
        pairs = zip(options, self.problem.chunks, strict=True)
        return Combiner(self.problem, [own.weighted(chunk.weights) for own, chunk in pairs])

    def of_many(self, budgets: int) -> StageSearch:
        """The same search; one that keeps all labels, if that is likely to be less work than
        searching so many budgets."""
        longest = max(len(chunk.layers) for chunk in self.problem.chunks)
        apart = self.problem.true_peak is not None  # each of its tries would keep labels
        if self.complete is not None or apart or longest > self.effort.many_layers:
            return self
        tally = Tally(budgets * self.effort.work_of_a_budget)
        many = StageSearch(self.problem, self.effort)
        many.complete = self._combiner(self._all_labels(False, tally, self.effort.many_width))
        return many

    @cached_property
    def of_any_weights(self) -> list[ChunkOptions] | None:
        """All labels of all chunks, forwards and backwards apart; None where they are too many."""
        return self._kept_labels(apart=True)

    def _kept_labels(self, apart: bool) -> list[ChunkOptions] | None:
        return self._all_labels(apart, self._tally(), self.effort.complete_width)

    def _all_labels(self, apart: bool, tally: Tally, width: int) -> list[ChunkOptions] | None:
        moments = len(self.problem.constant)
        room, price = np.full(moments, NO_LIMIT), np.zeros(moments)
        rounds = _Rounds(Limits(self.problem, room, price, tally, apart), None)
        options, left_ps = rounds.options(Goal(), width, all_or_none=True)
        return options if left_ps == math.inf else None

    def _combiner(self, options: list[ChunkOptions] | None) -> Combiner | None:
        return None if options is None else Combiner(self.problem, options)

    def fastest(self, budget_bytes: int, known: StageChoice | None = None) -> StageChoice | None:
        """Fastest choices whose peak is at most the budget; None when no choices fit.

        `known` choices that fit, such as those of a smaller budget, make the search faster.
        """
        problem = self.problem
        if problem.floor_bytes > budget_bytes:
            return None
        if problem.true_peak is not None:
            best = side_by_side.fastest(self, budget_bytes)
            self.work = sum(search.work for search in self._apart.values())
            return best
        rounds = self._rounds(budget_bytes)
        found = self._fastest(rounds, budget_bytes, known)
        self.work += rounds.limits.tally.done
        return found

    def _fastest(
        self, rounds: _Rounds, budget_bytes: int, known: StageChoice | None
    ) -> StageChoice | None:
        if rounds.bound_ps >= NEVER:
            return None
        least_ps = self.least_ps
        if rounds.complete or rounds.bound_ps <= least_ps:
            # Usually the answer: the fastest choices if memory is no limit, otherwise choices at an
            # exact bound. With this goal nearly every label is dropped at once.
            goal = Goal(max(least_ps, rounds.bound_ps))
            found, left_ps = rounds.round(goal, _AT_A_BOUND)
            if found is not None and found.time_ps == goal.time_ps and left_ps == math.inf:
                return found
            known = _better(known, found)
        best, bound_ps, tally = known, 0.0, rounds.limits.tally
        done, last = tally.done, 0
        for width in self.effort.widths:
            if last and tally.done + _GROWTH * (tally.done - done) > tally.most:
                break
            done, last = tally.done, width
            found, left_ps = rounds.round(Goal.of(best, budget_bytes), width)
            best = _better(best, found)
            if left_ps == math.inf:
                return best
            bound_ps = max(bound_ps, rounds.bound_ps, left_ps)
            if best is None:
                lean = self.leanest
                if lean.peak_bytes > budget_bytes:
                    return None
                best = lean
        assert best is not None  # the leanest choices fit
        bound = min(best.time_ps, math.floor(bound_ps))
        return StageChoice(best.policies, best.time_ps, best.peak_bytes, best.runs, bound)

    def priced_bound_ps(self, budget_bytes: int) -> int:
        """No choices that fit take less, by prices of bytes alone; `NEVER` where none can fit."""
        problem = self.problem
        if problem.floor_bytes > budget_bytes:
            return int(NEVER)
        if problem.true_peak is not None:
            return self.apart(0).priced_bound_ps(budget_bytes)
        room = budget_bytes - problem.constant
        limits = Limits(problem, room, multipliers(problem, room), self._tally())
        return _Rounds(limits, None).bound_ps

    def all_within(
        self, budget_bytes: int, time_ps: int, width: int, most: int
    ) -> list[StageChoice] | None:
        """All choices whose peak is at most the budget and which take at most so long.

        Without those that are as slow as others or slower in the forward and backward of every
        chunk. None where they are more than `most`, or a position has more labels than `width`.
        """
        problem = self.problem
        if problem.floor_bytes > budget_bytes:
            return []
        if problem.true_peak is not None:
            found = self.apart(0).all_within(budget_bytes, time_ps, width, most)
            true = [side_by_side.arranged(problem, choice) for choice in found or ()]
            fit = found is not None and all(own.peak_bytes <= budget_bytes for own in true)
            return true if fit else None
        room = budget_bytes - problem.constant
        limits = Limits(problem, room, multipliers(problem, room), self._tally(), apart=True)
        options, left_ps = _Rounds(limits, None).options(Goal(time_ps), width)
        if left_ps < math.inf:
            return None
        if not all(len(option.final) for option in options):
            return []
        return Combiner(problem, options).all_within(limits, time_ps, most)

    @cached_property
    def least_ps(self) -> int:
        """Time of the fastest choices, whatever their peak."""
        return sum(chunk.least_ps for chunk in self.problem.chunks)

    @cached_property
    def leanest(self) -> StageChoice:
        """The choices with the lowest peak, whatever their time."""
        if self.problem.true_peak is not None:
            return side_by_side.arranged(self.problem, self.apart(0).leanest)
        return leanest(self.problem)

    def _tally(self) -> Tally:
        return Tally(self.effort.most_work)

    def _rounds(self, budget_bytes: int) -> _Rounds:
        problem, complete = self.problem, self.complete
        room = budget_bytes - problem.constant
        price = np.zeros(len(room)) if complete else multipliers(problem, room)
        return _Rounds(Limits(problem, room, price, self._tally()), complete)


def _better(one: StageChoice | None, other: StageChoice | None) -> StageChoice | None:
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda c: (c.time_ps, c.peak_bytes, c.runs))


class _Rounds:
    """The rounds of one search: same problem, same budget, same multipliers."""

    def __init__(self, limits: Limits, complete: Combiner | None) -> None:
        self.limits, self.complete = limits, complete
        self.ids: dict[LayerPolicy, int] = {}
        self.chunk_bounds: list[float] = []
        if complete is None:
            chunks = range(len(limits.problem.chunks))
            self.chunk_bounds = [limits.unsearched_bound(c) for c in chunks]

    @property
    def bound_ps(self) -> int:
        """Lower bound on the time of any choices that fit."""
        if self.complete is not None:
            return self.complete.bound_ps(self.limits.room)
        value = math.fsum(self.chunk_bounds) - self.limits.budget_price
        return max(0, int(np.floor(value - SLACK * abs(value))))

    def round(self, goal: Goal, width: int) -> tuple[StageChoice | None, float]:
        """One pass: the best found, and a lower bound on the time of labels cut off for width.

        The bound is infinite if no label was cut off, which proves that the first is optimal.
        """
        combiner, left_ps = self.complete, math.inf
        if combiner is None:
            options, left_ps = self.options(goal, width)
            if not all(len(option.final) for option in options):
                return None, left_ps
            combiner = Combiner(self.limits.problem, options)
        found, also_left_ps = combiner.best(self.limits, goal, width)
        return found, min(left_ps, also_left_ps)

    def options(
        self, goal: Goal, width: int, *, all_or_none: bool = False
    ) -> tuple[list[ChunkOptions], float]:
        """Labels of every chunk, up to one that has none; the second value is as in `round`.

        If `all_or_none`, it ends where labels are cut off for width.
        """
        options: list[ChunkOptions] = []
        left_ps = math.inf
        for c in range(len(self.limits.problem.chunks)):
            filters = Filters(self.limits, c, self.chunk_bounds, goal.time_ps, width)
            labels, final = ChunkLabels(self.limits, c, self.ids).search(filters)
            if filters.left < math.inf:
                cut_ps = filters.left - self.limits.budget_price
                left_ps = min(left_ps, cut_ps - SLACK * max(abs(filters.left), abs(cut_ps)))
            options.append(ChunkOptions(labels, final, self.ids))
            if not len(final) or (all_or_none and filters.left < math.inf):
                break
            if filters.left == math.inf:
                self.chunk_bounds[c] = max(
                    self.chunk_bounds[c], float(self.limits.priced(final, c).min())
                )
        return options, left_ps
