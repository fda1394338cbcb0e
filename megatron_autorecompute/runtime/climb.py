"""Climbs from a measured profile to a plan for the whole budget, within a few steps, and on to one
without offload if copies do not hide.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Generator, Sequence
from dataclasses import replace

from megatron_autorecompute.compat import offload_modules
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.runtime.call_guard import Step
from megatron_autorecompute.runtime.copy_watch import CopyWatch
from megatron_autorecompute.runtime.decisions import Decisions
from megatron_autorecompute.runtime.offload_choices import without_offload
from megatron_autorecompute.runtime.plan_in_force import PlanInForce
from megatron_autorecompute.units import gib


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


STEPS = 3
"""Steps whose waits are measured; their median counts."""
NOTICED = 0.01
"""Share of a step; copies that are late by less hide as predicted."""
_STAYS = "Offload stays"


def that_hides(
    plan: Plan, decisions: Decisions, in_force: PlanInForce
) -> Generator[Step, None, Plan]:
    """Watch the copies of the plan in force for some steps, if it has any.

    Args:
        plan: in force, past Megatron's warm-up.
        decisions: the decisions of the job.
        in_force: runs plans.

    Returns the plan in force: this one, or one without offload if that is faster than this one is
    with the waits that were measured.

    Raises:
        LostStepsError: as `climb`.
    """
    copies, waits = CopyWatch(), list[float]()
    while plan.policy.offloads and len(waits) < STEPS:
        around = copies.watching
        next_plan = yield from in_force.one_step(plan, reads_bytes=False, around=around)
        if next_plan is plan:
            waits.append(copies.waited_ms())
            continue
        plan = next_plan
        waits.clear()
        yield from in_force.warm_up(plan)
    if not waits:
        return plan
    waited_ms = decisions.shard.by_stage(statistics.median(waits), max)
    late_ms, said = _late(plan, waited_ms)
    said = f"{said} {_pinned(plan, decisions)}"
    if late_ms <= NOTICED * plan.cost.step_ms:
        decisions.job.say(f"recompute auto: {said} {_STAYS}.")
        return plan
    profile = without_offload(plan.profile)  # with all that was corrected on the way
    plain = decisions.solved(profile, plan.budget_bytes)
    took_ms = plan.cost.step_ms + late_ms
    if plain.cost.step_ms > took_ms:
        note = f"{said} {_STAYS}: without it {plain.cost.step_ms:,.1f} ms a step."
        decisions.job.say(f"recompute auto: COPIES DO NOT HIDE: {note}")
        notes = (own for own in plan.notes if _STAYS not in own)
        plan = replace(plan, notes=(*notes, note))
        in_force.switch(plan)
        return plan
    note = f"{said} Offload was given up: without it {plain.cost.step_ms:,.1f} ms a step."
    decisions.job.say(f"recompute auto: COPIES DO NOT HIDE: {note}")
    return (yield from climb(profile, decisions, in_force, (note,)))


def _pinned(plan: Plan, decisions: Decisions) -> str:
    pinned_bytes = decisions.shard.by_stage(offload_modules.host_memory().pinned_bytes, max)
    stage = max(range(len(pinned_bytes)), key=pinned_bytes.__getitem__)
    return (
        f"Pinned host memory: {gib(pinned_bytes[stage])} GiB on a rank of stage {stage}, "
        f"{gib(plan.cost.stages[stage].host_bytes)} GiB predicted with that of experts."
    )


def _late(plan: Plan, waited_ms: Sequence[float]) -> tuple[float, str]:
    """The delay of copies on the stage where it is largest, and a sentence."""
    predicted_ms = [stage.stall_ms for stage in plan.cost.stages]
    late_ms = [waited - own for waited, own in zip(waited_ms, predicted_ms, strict=True)]
    stage = max(range(len(late_ms)), key=late_ms.__getitem__)
    return late_ms[stage], (
        f"Backwards of stage {stage} waited {waited_ms[stage]:,.1f} ms a step for copies, "
        f"{predicted_ms[stage]:,.1f} ms predicted; the step takes "
        f"{plan.cost.step_ms + max(0.0, late_ms[stage]):,.1f} ms."
    )
