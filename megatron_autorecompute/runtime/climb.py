"""From a measured profile to the plan that uses the whole budget, in as few steps as it takes."""

from __future__ import annotations

import itertools
from collections.abc import Generator

from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.runtime.decisions import Decisions
from megatron_autorecompute.runtime.plan_in_force import PlanInForce, Step


def climb(
    profile: Profile, decisions: Decisions, in_force: PlanInForce
) -> Generator[Step, None, Plan]:
    """Half of the slack first, corrected by what is seen, then all of it.

    Ends with the plan that is in force: one that kept its budgets for a step, or the next one down
    from one whose step was lost.

    Raises:
        InfeasibleError: even the leanest policy needs more than the budget.
        LostStepsError: one step after the other ran out of memory.
    """
    budgets, lean = decisions.budgets(profile), decisions.lean_peaks(profile)
    # Where even the leanest policy needs more than the budget, solving for it says so.
    halfway = [min(high, (low + high + 1) // 2) for low, high in zip(lean, budgets, strict=True)]
    first = (halfway, "a plan for half of the slack"), (budgets, "a plan for all of the slack")
    for goal, what in itertools.chain(first, itertools.repeat((budgets, "a corrected plan"))):
        plan = decisions.solved(profile, goal)
        smaller = yield from in_force.try_step(plan, what)
        if smaller is not None:
            return smaller
        if goal is budgets and decisions.are_kept(plan):
            break
        profile = decisions.corrected(plan)
    return plan
