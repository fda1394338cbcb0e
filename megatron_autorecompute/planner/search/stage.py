"""The search of one stage, for any number of budgets.

With EP overlap, two events side by side need bytes that are no sum over their two chunks: they
depend on which layers of both are alive at once. So the search sees the two events one after the
other, each without the other's microbatch. No choices that fit need less than that, so the bound
holds. The answer is compared with the true peak, and searched again with bytes added to the events
of pairs. CUDA graphs of layers work in the same way: their pool and everything else together need
at least what any moment has of both, and bytes are added to all events. `shrunk` finds how many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from megatron_autorecompute.planner.cost.policy_cost import PolicyCosts
from megatron_autorecompute.planner.search.chunk_plans import Plans, Thin, Walk
from megatron_autorecompute.planner.search.stage_plans import LEAST_WORK, WORK, StagePlans
from megatron_autorecompute.planner.search.stage_problem import (
    BACKWARD,
    FAR,
    HELD,
    ChunkUnits,
    OnlyChoices,
    Split,
    StageChoice,
    StageProblem,
    leanest,
    runs,
    stage_problem,
)
from megatron_autorecompute.policy import NONE, LayerPolicy, RecomputePolicy

TRIES = 6
"""Searches of one problem; what they leave open is the gap of the answer."""
_GROWTH = 8
"""A part of the bytes less, by which they grow at least from one search to the next."""
_Found = TypeVar("_Found")
Tables = dict[object, Walk]
"""The tables of chunks, one for all that are alike."""
Less = tuple[int, ...]
"""Bytes less than each budget."""


@dataclass(slots=True)
class _Budget:
    """What is known of the bytes less with which one budget is met."""

    low: int = 0
    less: int = 0
    high: int = FAR

    def learn(self, over: int | None) -> None:
        """How many bytes too many were needed, None where nothing was found; `less` is what to try
        next."""
        if over is None or over <= 0:
            self.high = self.less
        else:
            self.low = self.less
            self.high = self.high if self.high > self.low else FAR  # as other budgets got smaller
        if self.high == FAR:
            self.less = self.low + max(over or 0, self.low // _GROWTH)
        else:
            self.less = (self.low + self.high) // 2

    @property
    def is_known(self) -> bool:
        """Whether one byte less would be too few."""
        return self.high <= self.low + 1


def shrunk(
    search: Callable[[Less], _Found | None],
    over: Callable[[_Found], Sequence[int]],
    worse: Callable[[_Found], Any],
    number: int = 1,
    tries: int = TRIES,
) -> tuple[_Found | None, Less]:
    """The best that truly fits, and the bytes less with which it was found; or None, and the most
    bytes less with which anything was found.

    The search counts the least bytes that choices can need. If its answer truly needs more than the
    budget, the search runs again with the budget lowered by the excess.

    Args:
        search: what is best with so many bytes less; None where nothing fits.
        over: bytes by which that exceeds each true budget; negative where it fits.
        worse: what is to be the least.
        number: the number of budgets.
        tries: searches at most.
    """
    budgets = [_Budget() for _ in range(number)]
    best: tuple[_Found | None, Less] = None, (0,) * number
    for _ in range(tries):
        less = tuple(budget.less for budget in budgets)
        found = search(less)
        more: list[int | None] = [None] * number
        if found is not None:
            more = [*over(found)]
            better = best[0] is None or worse(found) < worse(best[0])
            best = (found, less) if better and max(over(found)) <= 0 else best
        for budget, own in zip(budgets, more, strict=True):
            budget.learn(own)
        if all(budget.is_known for budget in budgets):
            break
    return best if best[0] is not None else (None, tuple(budget.low for budget in budgets))


class Stage:
    """One stage's search; all stages share the tables."""

    def __init__(self, costs: PolicyCosts, number: int, only: OnlyChoices, tables: Tables) -> None:
        self._costs, self._number, self._only, self._tables = costs, number, only, tables
        self._budget = -1
        self._kept: dict[int, StagePlans | None] = {}
        self._found: dict[int, StageChoice | None] = {}

    @cached_property
    def problem(self) -> StageProblem:
        """The problem of the stage."""
        return stage_problem(self._costs, self._number, self._only)

    @cached_property
    def is_plain(self) -> bool:
        """Whether sums over chunks say the true peak: nothing runs side by side, and no layer is a
        CUDA graph."""
        return not self.problem.paired.any()

    def true_peak(self, split: Split) -> int:
        """Peak of the stage's choices."""
        layers = [NONE] * self._costs.profile.num_layers
        for chunk, policies in zip(self._costs.layout.stages[self._number], split, strict=True):
            for layer, choice in zip(chunk.layers, policies, strict=True):
                layers[layer] = choice
        return self._costs.peak_alone(self._number, RecomputePolicy(tuple(layers))).bytes

    def arranged(self, split: Split) -> tuple[int, Split]:
        """The true peak of choices, and these; layers of one kind in the order of what they hold,
        if that is lower: as one microbatch's first layers come, another's last ones have gone."""
        ascending = tuple(map(_ascending, self.problem.chunks, split))
        peaks = [(self.true_peak(own), own) for own in (split, ascending)]
        return min(peaks, key=lambda own: own[0])

    @cached_property
    def least_ps(self) -> int:
        """Time of the fastest choices, at any peak."""
        places = (rows for chunk in self.problem.chunks for rows in chunk.alone)
        return sum(int(rows[:, :HELD].sum(axis=1).min()) for rows in places)

    @cached_property
    def leanest(self) -> StageChoice:
        """The choices with the lowest peak, at any time."""
        found = leanest(self.problem)
        return found if self.is_plain else self._arranged(found)

    def _arranged(self, choice: StageChoice) -> StageChoice:
        peak_bytes, split = self.arranged(choice.policies)
        return replace(choice, policies=split, peak_bytes=peak_bytes)

    def plans(self, budget: int, added: int = 0) -> StagePlans | None:
        """Its plans under a budget, with bytes added to events of pairs; None where none fit.

        Those of the last budget are kept, with what was found of them.
        """
        if self._budget != budget:
            self._budget, self._kept = budget, {}
        if added not in self._kept:
            self._kept[added] = None
            problem = self.problem.apart(added)
            lean = self.leanest if self.is_plain else leanest(problem)
            if lean.peak_bytes <= budget:
                relaxed = self.plans(budget) if added else None
                own = relaxed.plans if relaxed else self._open()
                work = max(WORK // self._costs.layout.num_stages, LEAST_WORK)
                self._kept[added] = StagePlans(problem, budget, own, lean.policies, work)
        return self._kept[added]

    def _open(self) -> list[Plans]:
        """The search state of every chunk, shared by equal chunks."""
        forward = bool(self.problem.is_forward.any())
        own, found = dict[object, Plans](), list[Plans]()
        for units in self.problem.chunks:
            rows = tuple(rows.tobytes() for rows in (*units.alone, *units.together))
            key = rows, tuple(units.policies), forward
            if key not in self._tables:
                self._tables[key] = Walk(units, Thin(units), forward=forward)
            found.append(own.setdefault(key, Plans(self._tables[key])))
        return found

    def fastest(self, budget: int) -> StageChoice | None:
        """The least busy choices whose peak is at most the budget; None when none fit."""
        return self._found[budget] if budget in self._found else self.afresh(budget)

    def afresh(self, budget: int) -> StageChoice | None:
        """Search as `fastest`, but again, so that `plans` has what this budget alone found."""
        self._budget = -1
        found = self._least_busy(budget, 0)
        if found is not None and not self.is_plain:
            best, _ = self.shrunk(budget)
            found = best and replace(best, bound_ps=min(best.time_ps, found.bound_ps))
        self._found[budget] = found
        return found

    def shrunk(self, budget: int) -> tuple[StageChoice | None, int]:
        """Choices whose true peak fits, and the bytes added to events at which they were found."""

        def search(added: Less) -> StageChoice | None:
            found = self._least_busy(budget, *added)
            return None if found is None else self._arranged(found)

        best = shrunk(search, lambda own: [own.peak_bytes - budget], lambda own: own.time_ps)
        if best[0] is None and self.leanest.peak_bytes <= budget:
            return self.leanest, best[1][0]
        return best[0], best[1][0]

    def _least_busy(self, budget: int, added: int) -> StageChoice | None:
        stage = self.plans(budget, added)
        if stage is None:
            return None
        listed = stage.listed(np.ones((2, len(stage.plans))))
        times = stage.times(listed.rows).sum(axis=(0, 1))
        peaks = stage.peaks(listed.rows)
        best = np.flatnonzero(times == times.min())
        best = best[peaks[best] == peaks[best].min()]
        found = [stage.choices(listed.rows[at].tolist()) for at in best]
        fewest = min(found, key=lambda split: sum(map(runs, split)))
        time = int(times.min())
        bound = time if listed.whole else min(time, int(np.ceil(listed.bound)))
        return StageChoice(fewest, time, int(peaks[best[0]]), bound)


def _ascending(units: ChunkUnits, policies: tuple[LayerPolicy, ...]) -> tuple[LayerPolicy, ...]:
    """The choices of a chunk with the layers of every kind in the order of what they hold."""
    alike = defaultdict[object, list[int]](list)
    for position, choice in enumerate(policies):
        if choice.group == 1:
            place = units.first + position
            key = units.policies[place], units.alone[place][:, :BACKWARD].tobytes()
            alike[key].append(position)
    result = list(policies)
    for positions in alike.values():
        place = units.first + positions[0]
        held = dict(zip(units.policies[place], units.alone[place][:, HELD].tolist(), strict=True))
        own = sorted((policies[position] for position in positions), key=held.__getitem__)
        for position, policy in zip(positions, own, strict=True):
            result[position] = policy
    return tuple(result)
