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
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from megatron_autorecompute.planner.cost.p2p_tensors import Moment
from megatron_autorecompute.planner.cost.policy_cost import PolicyCosts
from megatron_autorecompute.planner.search.chunk_plans import ChunkTable, Plans
from megatron_autorecompute.planner.search.leanest import leanest
from megatron_autorecompute.planner.search.stage_plans import LEAST_WORK, WORK, StagePlans
from megatron_autorecompute.planner.search.stage_problem import (
    BACKWARD,
    HELD,
    ChunkUnits,
    Split,
    StageChoice,
    StageProblem,
    runs,
)
from megatron_autorecompute.policy import NONE, LayerPolicy, RecomputePolicy

TRIES = 6
"""Searches of one problem; what they leave open is the gap of the answer."""
_GROWTH = 8
"""A part of the bytes less, by which they grow at least from one search to the next."""
_FAR = 1 << 60
_Found = TypeVar("_Found")
Less = tuple[int, ...]
"""Bytes less than each budget."""


@dataclass(slots=True)
class _Budget:
    """What is known of the bytes less with which one budget is met."""

    low: int = 0
    less: int = 0
    high: int = _FAR

    def learn(self, over: int | None) -> None:
        """How many bytes too many were needed, None where nothing was found; `less` is what to try
        next."""
        if over is None or over <= 0:
            self.high = self.less
        else:
            self.low = self.less
            self.high = self.high if self.high > self.low else _FAR  # as other budgets got smaller
        if self.high == _FAR:
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


class Tables:
    """The tables of chunks, one for all that are alike."""

    def __init__(self) -> None:
        self._known: dict[object, ChunkTable] = {}

    def of(self, units: ChunkUnits, *, forward: bool) -> ChunkTable:
        """The table of a chunk, with the highest point in a forward or without."""
        digest = blake2b()
        for rows in (*units.alone, *units.together):
            digest.update(len(rows).to_bytes(8, "little") + rows.tobytes())
        key = digest.digest(), tuple(units.policies), forward
        if key not in self._known:
            self._known[key] = ChunkTable(units, forward=forward)
        return self._known[key]


class Stage:
    """One stage's search.

    Args:
        problem: the problem of the stage.
        tables: the tables that all stages share.
        stages: the stages of the whole problem, which share the work.
    """

    def __init__(self, problem: StageProblem, tables: Tables, stages: int) -> None:
        self.problem, self._tables, self._stages = problem, tables, stages
        self._budget = -1
        self._kept: dict[int, StagePlans | None] = {}
        self._found: dict[int, StageChoice | None] = {}

    @cached_property
    def tables(self) -> list[ChunkTable]:
        """The table of every chunk."""
        forward = bool(self.problem.is_forward.any())
        return [self._tables.of(chunk, forward=forward) for chunk in self.problem.chunks]

    @cached_property
    def least_ps(self) -> int:
        """Time of the fastest choices, at any peak."""
        places = (rows for chunk in self.problem.chunks for rows in chunk.alone)
        return sum(int(rows[:, :HELD].sum(axis=1).min()) for rows in places)

    @cached_property
    def leanest(self) -> StageChoice:
        """The choices with the lowest peak, at any time."""
        if self.problem.true_peak is None:
            return leanest(self.problem)
        return arranged(self.problem, leanest(self.problem.apart(0)))

    def plans(self, budget: int, added: int = 0) -> StagePlans | None:
        """Its plans under a budget, with bytes added to events of pairs; None where none fit.

        Those of the last budget are kept, with what was found of them.
        """
        if self._budget != budget:
            self._budget, self._kept = budget, {}
        if added not in self._kept:
            self._kept[added] = self._plans(budget, added)
        return self._kept[added]

    def _plans(self, budget: int, added: int) -> StagePlans | None:
        problem = self.problem if self.problem.true_peak is None else self.problem.apart(added)
        lean = self.leanest if self.problem.true_peak is None else leanest(problem)
        if lean.peak_bytes > budget:
            return None
        relaxed = self.plans(budget) if added else None
        return StagePlans(
            problem,
            budget,
            relaxed.plans if relaxed else self._open(),
            lean.policies,
            max(WORK // self._stages, LEAST_WORK),
        )

    def _open(self) -> list[Plans]:
        """The search state of every chunk, shared by equal chunks."""
        tables = {id(table): table for table in self.tables}
        own = {key: Plans(table) for key, table in tables.items()}
        return [own[id(table)] for table in self.tables]

    def fastest(self, budget: int) -> StageChoice | None:
        """The least busy choices whose peak is at most the budget; None when none fit."""
        return self._found[budget] if budget in self._found else self.afresh(budget)

    def afresh(self, budget: int) -> StageChoice | None:
        """Search as `fastest`, but again, so that `plans` has what this budget alone found."""
        self._budget = -1
        self._found[budget] = self._fastest(budget)
        return self._found[budget]

    def _fastest(self, budget: int) -> StageChoice | None:
        if self.problem.true_peak is None:
            return self._least_busy(budget, 0)
        relaxed = self._least_busy(budget, 0)
        if relaxed is None:
            return None
        best, _ = self.shrunk(budget)
        return best and replace(best, bound_ps=min(best.time_ps, relaxed.bound_ps))

    def shrunk(self, budget: int) -> tuple[StageChoice | None, int]:
        """Choices whose true peak fits, and the bytes added to events at which they were found."""

        def search(added: Less) -> StageChoice | None:
            found = self._least_busy(budget, *added)
            return None if found is None else arranged(self.problem, found)

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


def true_peak(
    costs: PolicyCosts, stage: int, moments: Sequence[Moment]
) -> Callable[[Split], int] | None:
    """A function for the peak of a stage's choices; None where its moments say it, because nothing
    runs side by side and no layer is a CUDA graph."""
    if not costs.profile.graphs_of_layers and not any(m.in_parts for m in moments):
        return None

    def peak_bytes(split: Split) -> int:
        layers = [NONE] * costs.profile.num_layers
        for chunk, policies in zip(costs.layout.stages[stage], split, strict=True):
            for layer, choice in zip(chunk.layers, policies, strict=True):
                layers[layer] = choice
        return costs.peak_alone(stage, RecomputePolicy(tuple(layers))).bytes

    return peak_bytes


def arranged(problem: StageProblem, choice: StageChoice) -> StageChoice:
    """The choice with its true peak; layers of one kind in the order of what they hold, if that is
    lower: as one microbatch's first layers come, another's last ones have gone."""
    assert problem.true_peak is not None
    splits = choice.policies, ascending(problem, choice.policies)
    peaks = [problem.true_peak(split) for split in splits]
    best = 1 if peaks[1] < peaks[0] else 0
    return replace(choice, policies=splits[best], peak_bytes=peaks[best])


def ascending(problem: StageProblem, split: Split) -> Split:
    """A split with the layers of every kind in the order of what they hold."""
    return tuple(map(_ascending, problem.chunks, split))


def _ascending(units: ChunkUnits, policies: tuple[LayerPolicy, ...]) -> tuple[LayerPolicy, ...]:
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
