"""Computes everything that the report of a plan shows, from the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.planner.launch_lines import bridge_lines, job_lines, pretrain_lines
from megatron_autorecompute.planner.plan import ManualResult, Plan
from megatron_autorecompute.planner.search.curve import CurvePoint, pareto
from megatron_autorecompute.planner.search.manual import manual_policy, manual_settings
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import WHOLE
from megatron_autorecompute.report.recorded import RecordedStep
from megatron_autorecompute.report.terminal import unbeaten
from megatron_autorecompute.report.timeline import Timeline, timeline

CURVE_POINTS = 24

Progress = Callable[[str, float], None]
"""A function that is told what is being computed, and the share of it that is done (0 to 1)."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Step time against memory."""

    title: str
    """The name of the model or of the plan."""
    points: tuple[CurvePoint, ...]
    """Plans, largest budget first."""
    strategies: tuple[ManualResult, ...]
    """Megatron's own settings."""
    budget_bytes: int | None = None
    """Budget of the tightest stage; None if none was given."""
    plan: CurvePoint | None = None
    """The plan itself, at the peak of its fullest stage."""


@dataclass(frozen=True, slots=True)
class ReportData:
    """What the report of one plan shows."""

    plan: Plan
    """The plan."""
    timeline: Timeline
    """The step of the plan."""
    curve: Curve
    """Time against budget, with Megatron's own settings."""
    pastes: dict[str, str]
    """Texts to paste into a launch, and the place of each; the most likely first."""
    recorded: RecordedStep | None = None
    """A step of one stage as torch recorded it."""
    speed: str = ""
    """A sentence on bubble and throughput; empty for none."""


def report_data(plan: Plan, progress: Progress = lambda what, share: None) -> ReportData:
    """Replay and compare a plan. Raises: ProfileError if its profile lacks a record."""
    problem = plan.problem()
    return ReportData(
        plan,
        timeline(plan),
        _curve(plan, problem, progress),
        _pastes(plan),
    )


def _curve(plan: Plan, problem: Problem, progress: Progress) -> Curve:
    strategies = strategies_of(
        problem, plan.budget_bytes, lambda share: progress("Megatron's own", share)
    )
    here = CurvePoint(
        max(plan.budget_bytes), plan.cost.step_ms, plan.cost.peak_high_bytes, plan.policy.format()
    )
    known = [here] if len(set(plan.budget_bytes)) == 1 else []
    points = best_points(problem, strategies, lambda share: progress("Curve", share), known)
    return Curve(plan.profile.model.name, points, strategies, min(plan.budget_bytes), here)


def best_points(
    problem: Problem,
    strategies: Iterable[ManualResult],
    progress: Callable[[float], None],
    known: Iterable[CurvePoint] = (),
    num_points: int = CURVE_POINTS,
) -> tuple[CurvePoint, ...]:
    """The best policies for some budgets, largest first: for evenly spaced ones, and for what the
    unbeaten strategies need. `pareto` solves them quickly; the step of a plan is searched further.
    A larger budget is never slower than a smaller one."""
    also = [strategy.peak_high_bytes for strategy in unbeaten(strategies)]
    solved = pareto(problem, num_points, progress, also)
    points = {own.budget_bytes: own for own in (*solved, *known)}
    found: list[CurvePoint] = []
    for _, point in sorted(points.items()):
        if found and found[-1].step_ms < point.step_ms:
            point = replace(found[-1], budget_bytes=point.budget_bytes)
        found.append(point)
    return tuple(found[::-1])


def strategies_of(
    problem: Problem, budgets: tuple[int, ...] | None, progress: Callable[[float], None]
) -> tuple[ManualResult, ...]:
    """Megatron's own settings, without those it refuses or the profile has no records for."""
    settings, found = manual_settings(problem), []
    for done, setting in enumerate(settings, start=1):
        with suppress(PolicyError, ProfileError):
            cost = problem.cost(manual_policy(problem, setting))
            peaks = [stage.peak_high_bytes for stage in cost.stages]
            fits = budgets is None or all(p <= b for p, b in zip(peaks, budgets, strict=True))
            found.append(ManualResult(str(setting), cost.step_ms, max(peaks), fits))
        progress(done / len(settings))
    return tuple(found)


def _pastes(plan: Plan) -> dict[str, str]:
    """Texts to paste: first for the form the job was described in, then for other forms."""
    forms = [job_lines(plan), pretrain_lines(plan, None), bridge_lines(plan, None)]
    if WHOLE not in plan.policy.layers:
        forms.append(["Run in Python:", *_python_lines(plan)])
    places = dict[str, str]()
    for where, *lines in filter(None, forms):
        places.setdefault("\n".join(lines), where.rstrip(":"))
    return places


def _python_lines(plan: Plan) -> tuple[str, ...]:
    return (
        "from megatron_autorecompute import RecomputePolicy, apply",
        "",
        f"policy = RecomputePolicy.parse({plan.policy.format()!r}, "
        f"num_layers={plan.profile.num_layers})",
        "apply(policy, model)",
    )
