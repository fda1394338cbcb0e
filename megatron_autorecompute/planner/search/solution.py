"""What the search answers: a policy, what it costs, and how near it is to the best one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
from megatron_autorecompute.planner.cost.step_interval import COVERAGE, StepErrors
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.manual import ManualStrategy
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.work_order import contains

NOTHING_BINDS = "nothing: every layer has its fastest choice"
OPTIMAL = "optimal"


def nearness(gap: float) -> str:
    """What is proven of a gap, in the words of docs/plan.md#what-is-proven: `optimal`, or `within
    0.124% of the optimum`, rounded up. All that says it says it with these."""
    return f"within {math.ceil(1e5 * gap) / 1e3:.3f}% of the optimum" if gap else OPTIMAL


@dataclass(frozen=True, slots=True)
class StageEvidence:
    """How busy a stage is, and what keeps it from faster choices."""

    stage: int
    """The stage's number, from 0."""
    budget_bytes: int
    """Bytes that torch may allocate on a device of this stage."""
    objective_ms: float
    """Forward plus backward of one microbatch through the stage."""
    peak_high_bytes: int
    """The high end of the predicted peak, which is within the budget."""
    binding: str
    """The moment whose bytes rule out a faster choice, or a sentence that nothing does."""


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """How far a plan's step is from the shortest one."""

    bound_ms: float | None
    """A proven lower bound of the step for all choices that fit; None: not worked out."""
    gap: float | None
    """(step - bound) / step; 0: proven optimal; None: not known."""

    @classmethod
    def of(cls, step_ms: float, bound_ms: float | None) -> StepEvidence:
        """What a bound says of a step; one that is none, or above the step, says it is proven."""
        if bound_ms is None:
            return cls(None, None)
        if not 0 <= bound_ms <= step_ms:
            bound_ms = step_ms
        return cls(bound_ms, (step_ms - bound_ms) / step_ms if step_ms else 0.0)


@dataclass(frozen=True, slots=True)
class Solution:
    """A policy, what it costs, and what is proven of its step."""

    policy: RecomputePolicy
    cost: PolicyCost
    step_evidence: StepEvidence
    without_offload_ms: float | None = None
    """The step of the best plan found without offload. Infinite: none fits. None: no layer may
    offload."""


def proven(problem: Problem, policy: RecomputePolicy, bound_ms: float | None) -> Solution:
    """A policy that fits the problem's budgets as a solution. The bound is on the step of all that
    fit."""
    cost = problem.cost(policy)
    return Solution(policy, cost, StepEvidence.of(cost.step_ms, bound_ms))


def stage_evidence(problem: Problem, policy: RecomputePolicy) -> tuple[StageEvidence, ...]:
    """How busy a policy makes the stages, and what binds them."""
    found = []
    for stage, own in enumerate(problem.cost(policy).stages):
        busy_ps = _busy_ps(problem, stage, policy)
        free = busy_ps <= problem.stages.stage(stage).least_ps
        binding = NOTHING_BINDS if free else own.peak.moment
        figures = problem.budgets[stage], busy_ps / PS_PER_MS, own.peak_high_bytes
        found.append(StageEvidence(stage, *figures, binding))
    return tuple(found)


def _busy_ps(problem: Problem, stage: int, policy: RecomputePolicy) -> int:
    chunks = problem.layout.stages[stage]
    units = (unit for chunk in chunks for unit in problem.table.chunk_units(chunk, policy))
    return sum(unit.time_ps for unit in units)


_SHOWN = 5e-6
"""A smaller share is 0.000% in the sentence."""


def simpler_within_errors(
    problem: Problem, fastest: Solution, manual: ManualStrategy | None
) -> tuple[Solution, tuple[str, ...]]:
    """The fastest policy, or Megatron's best own setting if it is not surely slower; and a sentence
    if that is not the fastest policy found."""
    if manual is None:
        return fastest, ()
    simple = problem.table.without_dead_work(manual.policy)  # holds the same, and reruns no more
    if not problem.may_be(simple) or _reruns_no_more(fastest.policy, simple):
        return fastest, ()
    own = StepErrors(problem.costs, fastest.policy)
    if own.surely_shorter(StepErrors(problem.costs, simple)):
        return fastest, ()
    simpler = replace(
        proven(problem, simple, fastest.step_evidence.bound_ms),
        without_offload_ms=fastest.without_offload_ms,
    )
    less = 1 - fastest.cost.step_ms / simpler.cost.step_ms
    if less < _SHOWN:
        return simpler, ()
    return simpler, (gave_way(manual.name, fastest.policy.format(), less),)


def gave_way(taken: str, faster: str, less: float) -> str:
    """The sentence that says why something is planned that is not the fastest found, which takes
    less by such a share."""
    if less < _SHOWN:
        return f"{taken} is taken: {faster} takes as long by the profile's times."
    return (
        f"{taken} is taken: {faster} takes {less:.3%} less by the profile's times, but not surely: "
        f"it is shorter in fewer than {COVERAGE:.0%} of profiles."
    )


def _reruns_no_more(policy: RecomputePolicy, other: RecomputePolicy) -> bool:
    """Whether each layer reruns at most what it reruns in the other, which no noise can change."""
    pairs = zip(policy.layers, other.layers, strict=True)
    return all(own == theirs or contains(theirs, own) for own, theirs in pairs)
