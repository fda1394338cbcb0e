"""Climbs from a measured profile to a plan for the whole budget, within a few steps."""

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
    """Run a plan for half of the slack, correct the prediction, then a plan for all of it.

    Returns the plan in force: one that kept its budgets for a step, or, if a step was lost, the
    next plan down.

    Raises:
        InfeasibleError: with plan only, the leanest policy needs more than the budget.
        LostStepsError: several steps in a row ran out of memory.
    """
    budgets, lean = decisions.budgets(profile), decisions.lean_peaks(profile)
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
