"""Climbs from a measured profile to a plan for the whole budget, within a few steps."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence

from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.runtime.call_guard import Step
from megatron_autorecompute.runtime.decisions import Decisions
from megatron_autorecompute.runtime.plan_in_force import PlanInForce


def climb(
    profile: Profile,
    decisions: Decisions,
    in_force: PlanInForce,
    notes: Sequence[str] = (),
) -> Generator[Step, None, Plan]:
    """Run a plan for half of the slack, correct the prediction, then a plan for all of it.

    notes: sentences for the plan about what came before.

    Returns the plan in force: one that kept its budgets for a step, or, if a step was lost, the
    next plan down.

    Raises:
        InfeasibleError: with plan only, the leanest policy needs more than the budget.
        LostStepsError: several steps in a row ran out of memory.
    """
    budgets = decisions.budgets(profile)
    first = (False, "a plan for half of the slack"), (True, "a plan for all of the slack")
    for is_whole, what in itertools.chain(first, itertools.repeat((True, "a corrected plan"))):
        while True:
            # The next call may have other lengths than the last one, and so another need.
            goal = budgets if is_whole else _halfway(decisions.lean_peaks(profile), budgets)
            plan = decisions.solved(profile, goal, notes)
            smaller = yield from in_force.try_step(plan, what)
            if smaller is not None:
                return smaller
            if not in_force.was_raised:
                break
        if is_whole and decisions.are_kept(plan):
            break
        profile = decisions.corrected(plan)
    return decisions.with_own_peaks(plan)


def _halfway(lean: Sequence[int], budgets: Sequence[int]) -> list[int]:
    return [min(high, (low + high + 1) // 2) for low, high in zip(lean, budgets, strict=True)]
