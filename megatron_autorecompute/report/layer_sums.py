"""The sum of a measured step's layers, to compare with Megatron's own figures of the step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_autorecompute.planner.cost.peak_memory import stage_base
from megatron_autorecompute.planner.cost.policy_cost import evaluate
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.policy import RecomputePolicy


@dataclass(frozen=True, slots=True)
class LayerSums:
    """One stage of a step, added up from the records of its layers, embedding and head.

    The stage's residuals are left out: they are what a measured step showed above these sums.
    """

    forward_ms: float
    """All microbatches and chunks."""
    backward_ms: float
    """The backward's time, recompute included."""
    peak_bytes: int
    """Static bytes included."""


def sums_of_layers(plan: Plan) -> tuple[LayerSums, ...] | None:
    """The sums of every stage in the profile's `measured_step`, under the policy that ran in it.

    None if there is no such step, or if a stage of the plan has other layers than in that step.
    """
    profile, layout, step = plan.profile, plan.layout, plan.profile.measured_step
    stages = range(layout.num_stages)
    if step is None or not all(stage_base(profile, layout, stage).measured for stage in stages):
        return None
    bare = tuple(replace(record, residual_bytes=0, residual_ms=0.0) for record in profile.stages)
    cost = evaluate(
        replace(profile, stages=bare),
        layout,
        replace(plan.schedule, num_microbatches=step.num_microbatches),
        RecomputePolicy.parse(step.recompute_policy, num_layers=profile.num_layers),
        percentile=plan.imbalance_percentile,
    )
    return tuple(
        LayerSums(
            sum(stage.forward_ms) * step.num_microbatches,
            sum(stage.backward_ms) * step.num_microbatches,
            stage.peak.bytes,
        )
        for stage in cost.stages
    )
