"""What the search answers: a policy, what it costs, and how near it is to the best one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
from megatron_autorecompute.policy import RecomputePolicy

NOTHING_BINDS = "nothing: every layer has its fastest choice"
OPTIMAL = "optimal"


def nearness(gap: float) -> str:
    """What is proven of a gap, in the words of docs/plan.md#what-is-proven: `optimal`, or `within
    0.124% of the optimum`, rounded up. All that says it says it with these."""
    return f"within {math.ceil(1e5 * gap) / 1e3:.3f}% of the optimum" if gap else OPTIMAL


@dataclass(frozen=True, slots=True)
class StageEvidence:
    """How busy a stage is, and how much less busy any choices that fit could make it."""

    stage: int
    """The stage's number, from 0."""
    budget_bytes: int
    """Bytes that torch may allocate on a device of this stage."""
    objective_ms: float
    """Forward plus backward of one microbatch through the stage."""
    bound_ms: float | None
    """A proven lower bound of objective_ms for all choices that fit; None: not worked out."""
    gap: float | None
    """(objective - bound) / objective; 0: proven to be the least; None: not known. A plan may make
    a stage busier because that makes the step shorter."""
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
    """A policy, what it costs, and what is proven of its step and of its stages."""

    policy: RecomputePolicy
    cost: PolicyCost
    evidence: tuple[StageEvidence, ...]
    step_evidence: StepEvidence
    without_offload_ms: float | None = None
    """The step of the best plan found without offload. Infinite: none fits. None: no layer may
    offload."""
