"""What is proven of a plan, in the words that every page and table uses."""

from __future__ import annotations

import math

from megatron_autorecompute.planner.plan import Plan


def proof(plan: Plan) -> str:
    """What the plan's own bound says of its step; see docs/plan.md."""
    gap = plan.step_evidence.gap
    if gap is None or not plan.proven:
        return (
            "Not proven: the file was changed after it was written, or another version of this "
            "program wrote it. plan --profile with this file solves it again."
        )
    if gap == 0:
        return (
            "The step is proven optimal in this model: no choices that fit the budget make a "
            "shorter one."
        )
    most = math.ceil(1e5 * gap) / 1e3
    return (
        f"The step is proven within {most:.3f}% of the optimum in this model: no choices that fit "
        "the budget make it shorter by more."
    )
