"""Computes everything that the report of a plan shows, from the plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_autorecompute.planner.launch_lines import bridge_lines, job_lines, pretrain_lines
from megatron_autorecompute.planner.plan import ManualResult, Plan
from megatron_autorecompute.planner.search.curve import CurvePoint, pareto
from megatron_autorecompute.planner.search.manual import fits, manual_settings, usable
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.report.recorded import RecordedStep
from megatron_autorecompute.report.terminal import unbeaten
from megatron_autorecompute.report.timeline import Timeline, timeline


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


def report_data(plan: Plan) -> ReportData:
    """Replay and compare a plan. Raises: ProfileError if its profile lacks a record."""
    return ReportData(plan, timeline(plan), _curve(plan, plan.problem()), _pastes(plan))


def _curve(plan: Plan, problem: Problem) -> Curve:
    strategies = strategies_of(problem)
    here = CurvePoint(
        max(plan.budget_bytes), plan.cost.step_ms, plan.cost.peak_high_bytes, plan.policy.format()
    )
    known = [here] if len(set(plan.budget_bytes)) == 1 else []
    points = pareto(problem, 24, needs_of_unbeaten(strategies), known)
    return Curve(plan.profile.model.name, points, strategies, min(plan.budget_bytes), here)


def needs_of_unbeaten(strategies: Iterable[ManualResult]) -> list[int]:
    """Budgets that a curve has besides: peaks of the strategies that no other one beats."""
    return [strategy.peak_high_bytes for strategy in unbeaten(strategies)]


def strategies_of(problem: Problem) -> tuple[ManualResult, ...]:
    """Megatron's own settings, without those it refuses or the profile has no records for."""
    found = []
    for setting, policy in usable(problem, manual_settings(problem)):
        cost, is_within = problem.cost(policy), fits(problem, policy)
        found.append(ManualResult(str(setting), cost.step_ms, cost.peak_high_bytes, is_within))
    return tuple(found)


def _pastes(plan: Plan) -> dict[str, str]:
    """Texts to paste: first for the form the job was described in, then for other forms."""
    forms = [job_lines(plan), pretrain_lines(plan, None), bridge_lines(plan, None)]
    places = dict[str, str]()
    for where, *lines in filter(None, forms):
        places.setdefault("\n".join(lines), where.rstrip(":"))
    return places
