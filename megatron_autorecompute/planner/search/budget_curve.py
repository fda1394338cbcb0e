"""Step time against budget: many budgets of one problem, each helped by those before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_autorecompute.planner.search.stage_problem import StageChoice, put_together
from megatron_autorecompute.policy import RecomputePolicy

if TYPE_CHECKING:
    from megatron_autorecompute.planner.search.solve import Planner


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One point of time against budget."""

    budget_bytes: int
    step_ms: float
    peak_high_bytes: int
    policy: RecomputePolicy


class BudgetCurve:
    """Each stage's choices of the least busy time, for any number of budgets.

    Of choices that are equally good, which one is found may depend on the budgets asked before; a
    new curve knows of none.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self._solved: dict[int, dict[int, StageChoice]] = {}

    def points(
        self, number: int, progress: Callable[[float], None] = lambda _: None
    ) -> tuple[ParetoPoint, ...]:
        """As `Planner.pareto`, where no layer may offload."""
        planner = self.planner
        low = max(choice.peak_bytes for choice in planner.leanest)
        high = max(max(choice.peak_bytes for choice in planner.fastest), low)
        steps = max(number - 1, 1)
        budgets = [high - (high - low) * i // steps for i in range(number)]
        # By halving intervals: a budget between two solved ones is solved fastest.
        stride, done = 1 << number.bit_length(), set[int]()
        while stride := stride // 2:
            for budget in budgets[::stride]:
                for stage in range(planner.layout.num_stages):
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
        cost = self.planner.evaluate(policy)
        stages = range(self.planner.layout.num_stages)
        found = (self.choose(stage, budget_bytes) for stage in stages)
        peak_bytes = max(choice.peak_bytes for choice in found if choice is not None)
        return ParetoPoint(budget_bytes, cost.step_ms, peak_bytes, policy)

    def policy(self, budget_bytes: int) -> RecomputePolicy:
        """Every stage's choices, for a budget that is known to fit."""
        stages = range(self.planner.layout.num_stages)
        found = [choice for s in stages if (choice := self.choose(s, budget_bytes)) is not None]
        return put_together(self.planner.layout, [choice.policies for choice in found])

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
            found = self.planner.choose(stage, budget_bytes)
        if found is not None:
            found = replace(found, bound_ps=max(found.bound_ps, bound_ps))
            solved[budget_bytes] = found
        return found
