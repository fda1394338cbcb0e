"""Step time against budget: many budgets of one problem, each helped by the larger ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from megatron_autorecompute.planner.cost.two_clocks import knows_host
from megatron_autorecompute.planner.search.manual import (
    has_room,
    may_offload,
    settings_of_modules,
    settings_of_whole_layers,
)
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import (
    deciding,
    spreads,
    without_copies,
    without_offload,
)
from megatron_autorecompute.planner.search.stage import Stage
from megatron_autorecompute.planner.search.stage_problem import StageChoice, put_together
from megatron_autorecompute.policy import RecomputePolicy

_RELAXED_POINTS = 24
"""The most points of the curve without copy times: each of its policies is replayed twice."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One point of the curve of time against budget."""

    budget_bytes: int
    """The budget of every stage."""
    step_ms: float
    """The predicted time of the step."""
    peak_high_bytes: int
    """The predicted peak of the fullest stage, at its high end."""
    recompute_policy: str
    """The policy as `RecomputePolicy.parse` reads it."""


def pareto(
    problem: Problem,
    points: int = 64,
    also: Collection[int] = (),
    known: Collection[CurvePoint] = (),
) -> tuple[CurvePoint, ...]:
    """Step time against budget, from the largest useful budget down to the least that fits.

    Points are each stage's choices of the least busy time, whose step is not searched further:
    `solve` is as fast or faster, mostly in a schedule with several chunks per stage. A larger
    budget is never slower than a smaller one.

    Where layers may offload, budgets are those at which the best of some replayed policies
    changes, and `solve` is as fast or faster.

    Args:
        problem: its own budgets do not matter.
        points: how many budgets, at even distances.
        also: further budgets, of which those between the least and the largest count.
        known: points of other searches.
    """
    if may_offload(problem):
        found = _replayed(problem, points)
    else:
        own = deciding(problem) if knows_host(problem.profile) else problem
        found = [_point(own, each, budget) for budget, each in _least_busy(own, points, also)]
    curve = list[CurvePoint]()
    for _, point in sorted({own.budget_bytes: own for own in (*found, *known)}.items()):
        if curve and point.step_ms > curve[-1].step_ms:
            # As fast on every stage, but split over chunks so that other stages wait longer.
            point = replace(curve[-1], budget_bytes=point.budget_bytes)
        curve.append(point)
    return tuple(reversed(curve))


def _replayed(problem: Problem, points: int) -> list[CurvePoint]:
    """Points of policies found without offload or copy times, replayed with their copies."""
    relaxed, without = without_copies(problem), without_offload(problem)
    found = _least_busy(relaxed, min(points, _RELAXED_POINTS))
    found += [] if without is None else _least_busy(without, points)
    tried = {own: None for _, policy in found for own in spreads(problem, policy)}
    tried |= dict.fromkeys(settings_of_whole_layers(problem) + settings_of_modules(problem))
    replayed = [
        _point(problem, policy, problem.cost(policy).peak_high_bytes)
        for policy in tried
        if has_room(problem, policy)
    ]
    curve = list[CurvePoint]()
    for point in sorted(replayed, key=lambda point: (point.budget_bytes, point.step_ms)):
        if not curve or point.step_ms < curve[-1].step_ms:
            curve.append(point)
    return curve


def _least_busy(
    problem: Problem, number: int, also: Collection[int] = ()
) -> list[tuple[int, RecomputePolicy]]:
    """Budgets, the largest first, and the least busy choices of all stages under each.

    The optimum of a larger budget that fits is the optimum of a smaller one, too.
    """
    stages = problem.stages
    low = max(choice.peak_bytes for choice in stages.leanest)
    high = max(max(choice.peak_bytes for choice in stages.fastest), low)
    budgets = {high - (high - low) * i // max(number - 1, 1) for i in range(number)}
    budgets |= {budget for budget in also if low <= budget <= high}
    found, known = list[tuple[int, RecomputePolicy]](), dict[Stage, StageChoice]()
    for budget in sorted(budgets, reverse=True):
        for stage in stages.all:
            last = known.get(stage)
            if last is None or last.gap or last.peak_bytes > budget:
                best = stage.fastest(budget)
                assert best is not None  # the leanest choices fit
                known[stage] = best
        splits = [known[stage].policies for stage in stages.all]
        found.append((budget, put_together(problem.layout, splits)))
    return found


def _point(problem: Problem, policy: RecomputePolicy, budget_bytes: int) -> CurvePoint:
    cost = problem.cost(policy)
    return CurvePoint(budget_bytes, cost.step_ms, cost.peak_high_bytes, policy.format())
