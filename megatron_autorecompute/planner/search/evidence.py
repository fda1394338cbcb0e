"""A policy with what is proven of its step and of its stages."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import (
    NOTHING_BINDS,
    Solution,
    StageEvidence,
    StepEvidence,
)
from megatron_autorecompute.policy import RecomputePolicy


def proven(
    problem: Problem,
    policy: RecomputePolicy,
    bound_ms: float | None,
    others: Sequence[RecomputePolicy] = (),
) -> Solution:
    """A policy that fits the problem's budgets as a solution.

    Args:
        problem: the problem that it solves.
        policy: the policy that fits.
        bound_ms: on the step of all that fit; None where nobody has worked one out.
        others: policies that fit and that the searches of stages do not know.
    """
    cost, evidence = problem.cost(policy), []
    for number, budget_bytes in enumerate(problem.budgets):
        choice = problem.stages.stage(number).fastest(budget_bytes)
        bounds_ps = [] if choice is None else [choice.bound_ps]
        bounds_ps += [_busy_ps(problem, number, other) for other in others]
        evidence.append(stage_evidence(problem, number, policy, cost, min(bounds_ps) / PS_PER_MS))
    return Solution(policy, cost, tuple(evidence), StepEvidence.of(cost.step_ms, bound_ms))


def instead(problem: Problem, policy: RecomputePolicy, fastest: Solution) -> Solution:
    """A policy in place of the fastest one, whose budgets it fits; nothing is searched."""
    cost = problem.cost(policy)
    evidence = (
        stage_evidence(problem, own.stage, policy, cost, own.bound_ms) for own in fastest.evidence
    )
    return Solution(
        policy,
        cost,
        tuple(evidence),
        StepEvidence.of(cost.step_ms, fastest.step_evidence.bound_ms),
        fastest.without_offload_ms,
    )


def stage_evidence(
    problem: Problem, stage: int, policy: RecomputePolicy, cost: PolicyCost, bound_ms: float | None
) -> StageEvidence:
    """How busy a policy makes a stage, with its bound. A bound above that, or none, counts as the
    least.

    Args:
        problem: with its budgets.
        stage: the pipeline rank.
        policy: one choice for every layer.
        cost: the cost of the policy.
        bound_ms: on how busy the stage is at least; None where nobody has worked one out.
    """
    time_ps, own = _busy_ps(problem, stage, policy), cost.stages[stage]
    time_ms, free = time_ps / PS_PER_MS, time_ps <= problem.stages.stage(stage).least_ps
    known = StepEvidence.of(time_ms, bound_ms)
    return StageEvidence(
        stage,
        problem.budgets[stage],
        time_ms,
        known.bound_ms,
        known.gap,
        own.peak_high_bytes,
        NOTHING_BINDS if free else own.peak.moment,
    )


def _busy_ps(problem: Problem, stage: int, policy: RecomputePolicy) -> int:
    chunks = problem.layout.stages[stage]
    units = (unit for chunk in chunks for unit in problem.table.chunk_units(chunk, policy))
    return sum(unit.time_ps for unit in units)
