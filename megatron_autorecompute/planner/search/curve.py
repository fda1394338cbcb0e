"""Step time against budget: many budgets of one problem, each helped by the larger ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_autorecompute.planner.cost.two_clocks import knows_host
from megatron_autorecompute.planner.search.manual import (
    has_room,
    may_offload,
    settings_of_modules,
    settings_of_whole_layers,
)
from megatron_autorecompute.planner.search.offload import (
    spreads,
    without_copies,
    without_offload,
)
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import deciding
from megatron_autorecompute.planner.search.stage import Stage
from megatron_autorecompute.planner.search.stage_problem import StageChoice, put_together
from megatron_autorecompute.policy import RecomputePolicy

_RELAXED_POINTS = 24
"""The most points of the curve without copy times: each of its policies is replayed twice."""
Progress = Callable[[float], None]
"""Called with the share that is done."""


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
    progress: Progress = lambda _: None,
    also: Collection[int] = (),
) -> tuple[CurvePoint, ...]:
    """Step time against budget, from the largest useful budget down to the least that fits.

    Points are each stage's choices of the least busy time, whose step is not searched further:
    `solve` is as fast or faster, mostly in a schedule with several chunks per stage.

    Where layers may offload, budgets are those at which the best of some replayed policies
    changes, and `solve` is as fast or faster.

    Args:
        problem: its own budgets do not matter.
        points: how many budgets, at even distances.
        progress: told of.
        also: further budgets, of which those between the least and the largest count.
    """
    if may_offload(problem):
        return _replayed(problem, points, progress)
    if knows_host(problem.profile):
        return pareto(deciding(problem), points, progress, also)
    return _least_busy(problem, points, progress, also)


def _replayed(problem: Problem, points: int, progress: Progress) -> tuple[CurvePoint, ...]:
    """Points of policies found without offload or copy times, replayed with their copies."""
    relaxed = without_copies(problem)
    number = min(points, _RELAXED_POINTS)
    found = _least_busy(relaxed, number, lambda share: progress(share / 2))
    without = without_offload(problem)
    plain = () if without is None else _least_busy(without, points)
    texts = dict.fromkeys(point.recompute_policy for point in (*found, *plain))
    num_layers = problem.profile.num_layers
    policies = [RecomputePolicy.parse(text, num_layers=num_layers) for text in texts]
    settings = settings_of_whole_layers(problem) + settings_of_modules(problem)
    tried = list(
        dict.fromkeys((*(other for own in policies for other in spreads(problem, own)), *settings))
    )
    replayed = []
    for number, policy in enumerate(tried, start=1):
        if has_room(problem, policy):
            cost = problem.cost(policy)
            peak_bytes = cost.peak_high_bytes
            replayed.append(CurvePoint(peak_bytes, cost.step_ms, peak_bytes, policy.format()))
        progress(0.5 + 0.5 * number / len(tried))
    curve = list[CurvePoint]()
    for point in sorted(replayed, key=lambda point: (point.budget_bytes, point.step_ms)):
        if not curve or point.step_ms < curve[-1].step_ms:
            curve.append(point)
    return tuple(reversed(curve))


def _least_busy(
    problem: Problem, number: int, progress: Progress = lambda _: None, also: Collection[int] = ()
) -> tuple[CurvePoint, ...]:
    """The curve of `pareto`, where no layer may offload."""
    stages = problem.stages
    low = max(choice.peak_bytes for choice in stages.leanest)
    high = max(max(choice.peak_bytes for choice in stages.fastest), low)
    budgets = {high - (high - low) * i // max(number - 1, 1) for i in range(number)}
    budgets |= {budget for budget in also if low <= budget <= high}
    found: list[list[StageChoice]] = [[] for _ in stages.all]
    for done, (stage, own) in enumerate(zip(stages.all, found, strict=True)):
        for choice in _of_stage(stage, sorted(budgets, reverse=True)):
            own.append(choice)
            progress((done + len(own) / len(budgets)) / len(found))
    curve = list[CurvePoint]()
    for budget, *choices in zip(sorted(budgets), *map(reversed, found), strict=True):
        point = _point(problem, budget, choices)
        if curve and point.step_ms > curve[-1].step_ms:
            # As fast on every stage, but split over chunks so that other stages wait longer.
            point = replace(curve[-1], budget_bytes=budget)
        curve.append(point)
    return tuple(reversed(curve))


def _of_stage(stage: Stage, budgets: Sequence[int]) -> Iterator[StageChoice]:
    """The least busy choices at budgets that fit, the largest first.

    The optimum of a larger budget that fits is the optimum here, too.
    """
    found = None
    for budget in budgets:
        if found is None or found.gap or found.peak_bytes > budget:
            found = stage.fastest(budget)
            assert found is not None  # the leanest choices fit
        yield found


def _point(problem: Problem, budget_bytes: int, choices: Sequence[StageChoice]) -> CurvePoint:
    policy = put_together(problem.layout, [choice.policies for choice in choices])
    peak_bytes = max(choice.peak_bytes for choice in choices)
    return CurvePoint(budget_bytes, problem.cost(policy).step_ms, peak_bytes, policy.format())
