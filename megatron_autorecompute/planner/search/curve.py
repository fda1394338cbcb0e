"""Step time against budget: many budgets of one problem, each helped by those before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_autorecompute.planner.cost.two_clocks import knows_host
from megatron_autorecompute.planner.search.clocks import deciding
from megatron_autorecompute.planner.search.offload import OffloadSearch, spread, without_offload
from megatron_autorecompute.planner.search.offload_settings import (
    host_over,
    may_offload,
    settings_of_modules,
    settings_of_whole_layers,
)
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.stage_problem import StageChoice, put_together
from megatron_autorecompute.policy import RecomputePolicy

_RELAXED_POINTS = 24
"""The most points of the curve without copy times: each of its policies is replayed thrice."""
Progress = Callable[[float], None]
"""Called with the share that is done."""


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One point of time against budget."""

    budget_bytes: int
    step_ms: float
    peak_high_bytes: int
    policy: RecomputePolicy


def pareto(
    problem: Problem,
    points: int = 64,
    progress: Progress = lambda _: None,
    curve: BudgetCurve | None = None,
) -> tuple[ParetoPoint, ...]:
    """Step time against budget, from the largest useful budget down to the least that fits.

    Points are each stage's choices of the least busy time, whose step is not searched further:
    `solve` is as fast or faster, mostly in a schedule with several chunks per stage. What a `curve`
    finds, it keeps for further budgets.

    Where layers may offload, budgets are those at which the best of some replayed policies
    changes, and `solve` is as fast or faster.
    """
    if may_offload(problem):
        return _replayed(problem, points, progress)
    if knows_host(problem.profile):
        return pareto(deciding(problem), points, progress)
    return (curve or BudgetCurve(problem)).points(points, progress)


def _replayed(problem: Problem, points: int, progress: Progress) -> tuple[ParetoPoint, ...]:
    """Points of policies found without offload or copy times, replayed with their copies."""
    relaxed = BudgetCurve(OffloadSearch(problem).relaxed)
    found = relaxed.points(min(points, _RELAXED_POINTS), lambda share: progress(share / 2))
    without = without_offload(problem)
    plain = () if without is None else BudgetCurve(without).points(points)
    policies = dict.fromkeys(point.policy for point in (*found, *plain))
    spreads = [spread(problem, own, late=late) for own in policies for late in (False, True)]
    settings = settings_of_whole_layers(problem) + settings_of_modules(problem)
    tried = list(dict.fromkeys((*policies, *spreads, *settings)))
    replayed = []
    for number, policy in enumerate(tried, start=1):
        cost = problem.cost(policy)
        if host_over(problem, cost) == 0:
            peak_bytes = cost.peak_high_bytes
            replayed.append(ParetoPoint(peak_bytes, cost.step_ms, peak_bytes, policy))
        progress(0.5 + 0.5 * number / len(tried))
    curve = list[ParetoPoint]()
    for point in sorted(replayed, key=lambda point: (point.budget_bytes, point.step_ms)):
        if not curve or point.step_ms < curve[-1].step_ms:
            curve.append(point)
    return tuple(reversed(curve))


class BudgetCurve:
    """Each stage's choices of the least busy time, for any number of budgets.

    Of choices that are equally good, which one is found may depend on the budgets asked before; a
    new curve knows of none.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._solved: dict[int, dict[int, StageChoice]] = {}

    def points(self, number: int, progress: Progress = lambda _: None) -> tuple[ParetoPoint, ...]:
        """The curve of `pareto`, where no layer may offload."""
        stages = self.problem.stages
        low = max(choice.peak_bytes for choice in stages.leanest)
        high = max(max(choice.peak_bytes for choice in stages.fastest), low)
        steps = max(number - 1, 1)
        budgets = [high - (high - low) * i // steps for i in range(number)]
        # By halving intervals: a budget between two solved ones is solved fastest.
        stride, done = 1 << number.bit_length(), set[int]()
        while stride := stride // 2:
            for budget in budgets[::stride]:
                for stage in range(self.problem.layout.num_stages):
                    self.choose(stage, budget)
                done.add(budget)
                progress(len(done) / number)
        curve = [self._point(min(budgets))]
        for budget in sorted(set(budgets))[1:]:
            point = self._point(budget)
            if point.step_ms > curve[-1].step_ms:
                # As fast on every stage, but split over chunks so that other stages wait longer.
                point = replace(curve[-1], budget_bytes=budget)
            curve.append(point)
        return tuple(reversed(curve))

    def _point(self, budget_bytes: int) -> ParetoPoint:
        policy = self.policy(budget_bytes)
        cost = self.problem.cost(policy)
        stages = range(self.problem.layout.num_stages)
        found = (self.choose(stage, budget_bytes) for stage in stages)
        peak_bytes = max(choice.peak_bytes for choice in found if choice is not None)
        return ParetoPoint(budget_bytes, cost.step_ms, peak_bytes, policy)

    def policy(self, budget_bytes: int) -> RecomputePolicy:
        """Every stage's choices, for a budget that is known to fit."""
        stages = range(self.problem.layout.num_stages)
        found = [choice for s in stages if (choice := self.choose(s, budget_bytes)) is not None]
        return put_together(self.problem.layout, [choice.policies for choice in found])

    def choose(self, stage: int, budget_bytes: int) -> StageChoice | None:
        """Best choices of one stage; None when none fit."""
        solved = self._solved.setdefault(stage, {})
        below = solved.get(max((b for b in solved if b <= budget_bytes), default=-1))
        above = solved.get(min((b for b in solved if b >= budget_bytes), default=-1))
        # If the optimum of a larger budget fits this budget, it is the optimum here, too. If a
        # larger and a smaller budget are equally fast, so is every budget between them. Nothing is
        # faster here than a larger budget's bound.
        if above is not None and above.gap == 0 and above.peak_bytes <= budget_bytes:
            return above
        if above is not None and below is not None and above.time_ps == below.time_ps:
            return below
        bound_ps = 0 if above is None else above.bound_ps
        found = below
        if below is None or below.time_ps > bound_ps:
            found = self.problem.stages.stage(stage).fastest(budget_bytes)
        if found is not None:
            found = replace(found, bound_ps=max(found.bound_ps, bound_ps))
            solved[budget_bytes] = found
        return found
