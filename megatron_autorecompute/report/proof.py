"""What is proven of a plan, in the words that every page and table uses."""

from __future__ import annotations

from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.planner.search.solution import nearness


def proof(plan: Plan) -> str:
    """What the plan's own bound says of its step; see docs/plan.md."""
    gap = plan.step_evidence.gap
    if gap is None or not plan.proven:
        return (
            "Not proven: the file was changed after it was written, or another version of this "
            "program wrote it. plan --profile with this file solves it again."
        )
    what = "make it shorter by more" if gap else "make a shorter one"
    return (
        f"The step is proven {nearness(gap)} in this model: no choices that fit the budget {what}."
    )
