"""Climbs from a measured profile to a plan for the whole budget, runs it, watches every step, and
replaces a plan that runs short of memory, or one whose copies do not hide."""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from megatron_autorecompute.compat import offload_modules
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import Profile, with_missed_bytes
from megatron_autorecompute.runtime.apply import AppliedPolicy
from megatron_autorecompute.runtime.calls import Calls, CallShape
from megatron_autorecompute.runtime.decisions import Decisions
from megatron_autorecompute.runtime.offload import CopyWatch, without_offload
from megatron_autorecompute.runtime.oom_guard import (
    FAILED,
    FINE,
    RAISED,
    SHORT,
    CallGuard,
    Step,
    StepGuard,
    notches,
    say_if_lost,
)
from megatron_autorecompute.runtime.plan_store import PlanStore
from megatron_autorecompute.runtime.ranks import on_rank_0
from megatron_autorecompute.units import gib

NOTICED = 0.001
"""Share of a stage's budget; if a call needs less than this more than predicted, no new plan is
made."""
STEPS = 32
"""A device that has less memory than when it was measured has less by parts of this."""
WATCHED_STEPS = 3
"""Steps in which waits for copies are measured; their median counts."""
LATE = 0.01
"""Share of a step; copies that are late by less hide as predicted."""
_STAYS = "Offload stays"
Key = tuple[CallShape, tuple[int, ...]]
"""A call's shape, and the budget of every stage."""


class PlansByShape:
    """The plans of a loop whose calls differ; every rank makes one in the same way.

    Args:
        decisions: the decisions of the job.
        calls: what is known of the next call.
        switch: runs a plan.
    """

    def __init__(self, decisions: Decisions, calls: Calls, switch: Callable[[Plan], None]) -> None:
        self._decisions, self._calls, self._switch = decisions, calls, switch
        self._budgets: tuple[int, ...] | None = None
        """Bytes of every stage when it was measured."""
        self._plans: dict[Key, Plan] = {}
        self._ran: dict[Key, int] = {}

    def next(self, plan: Plan) -> Plan:
        """Run the plan for the next call, solved from what the running one knows."""
        profile, missed = plan.profile, self._calls.missed_bytes
        if self._budgets is None:  # not the plan's, in which a call may have gone over them
            self._budgets = self._decisions.budgets(plan.profile, today=False)
        uneven = self._decisions.with_routed(plan, self._calls.most_routed)
        if uneven is not None:  # what was missed is of this
            profile = uneven
            self._plans.clear()
            self._say(
                f"the experts of a rank got {self._calls.most_routed:,} tokens in a layer, more "
                "than ever before: counted from now on"
            )
        elif any(m > NOTICED * b for m, b in zip(missed, plan.budget_bytes, strict=False)):
            profile = with_missed_bytes(profile, [0] * len(missed), missed)
            self._plans.clear()
            self._say(
                f"a call needed {gib(max(missed))} GiB more than predicted: counted from now on"
            )
        key = self._calls.shape, self._budgets_now(self._budgets)
        if key not in self._plans:
            self._plans[key] = self._decisions.solved(profile, key[1], plan.notes)
            self._say(_described(*key, self._budgets))
        self._switch(self._plans[key])
        self._ran[key] = self._ran.get(key, 0) + 1
        return self._plans[key]

    def _budgets_now(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """What every stage has in the next call; less than measured in steps, to share plans."""
        short = self._calls.short_bytes or (0,) * len(whole)
        steps = (-(-less * STEPS // budget) for less, budget in zip(short, whole, strict=True))
        return tuple(
            max(1, budget - budget * step // STEPS)
            for budget, step in zip(whole, steps, strict=True)
        )

    def forget(self) -> None:
        """Keep no plan: each knows less than the one that runs now."""
        self._plans.clear()

    def saving(self) -> str:
        """What the plans saved so far against one plan for the longest; empty before any ran."""
        if not self._plans:
            return ""
        longest = max(self._plans, key=lambda key: key[0].tokens)
        policy = self._plans[longest].policy
        taken_ms = saved_ms = 0.0
        for key, times in self._ran.items():
            if key in self._plans:
                own = self._plans[key]
                one_ms = own.problem().cost(policy).step_ms * times
                taken_ms += one_ms
                saved_ms += one_ms - own.cost.step_ms * times
        top = longest[0].tokens
        shorter = sum(n for (shape, _), n in self._ran.items() if shape.tokens < top)
        share = saved_ms / taken_ms if taken_ms else 0.0
        return (
            f"recompute auto: {shorter} of {sum(self._ran.values())} calls ran a plan for shorter "
            f"microbatches, which saved {share:.1%} of the predicted time of one plan for all"
        )

    def _say(self, what: str) -> None:
        self._decisions.job.say(f"recompute auto: {what}")


def _described(shape: CallShape, budgets: tuple[int, ...], whole: tuple[int, ...]) -> str:
    of = f", for {gib(min(budgets))} GiB, less than when it was measured" * (budgets != whole)
    return (
        f"a plan for up to {shape.tokens:,} tokens a microbatch and {shape.microbatches} "
        f"microbatches or more{of}"
    )


logger = logging.getLogger(__name__)


class PlanInForce:
    """The plan that runs in a job; every rank makes one in the same way.

    Args:
        decisions: the decisions of the job.
        optimizer: Megatron's.
        applied: the policy in force on the model.
        store: where plans are kept.
    """

    def __init__(
        self,
        decisions: Decisions,
        optimizer: Any,
        applied: AppliedPolicy,
        store: PlanStore,
    ) -> None:
        self._decisions, self._memory, self._job = decisions, decisions.memory, decisions.job
        self.applied, self._store = applied, store
        self.plan: Plan | None = None
        """The plan that runs; None before the first."""
        self._is_read = False
        """Whether the last step's bytes were read, under this plan."""
        moves = decisions.options.recompute_allow_offload
        why_not = "offload keeps what it has moved to the host" if moves else None
        self.guard: CallGuard = (
            StepGuard(decisions.shard.chunks, optimizer, self._is_short, self._leave_less, why_not)
            if decisions.job.calls is None
            else CallGuard(self._is_short, self._leave_less)
        )
        """Guards every step, also those before the first plan."""
        calls = decisions.job.calls
        self._by_shape = None if calls is None else PlansByShape(decisions, calls, self.switch)

    def switch(self, plan: Plan) -> None:
        """Run a plan from the next step on, on every rank."""
        if self.applied.policy != plan.policy:
            self.applied.switch(plan.policy)
            self._memory.plan_begins()
        self.plan = plan

    def run(self, plan: Plan, what: str) -> None:
        """Run a plan as `switch` does, and say so; `what` describes it in the log."""
        self.applied.switch(plan.policy)
        self._memory.plan_begins()
        self.plan = plan
        fullest = max(range(plan.layout.num_stages), key=lambda s: plan.cost.stages[s].peak.bytes)
        self._job.say(
            f"recompute auto: running {what}; predicted {gib(plan.cost.stages[fullest].peak.bytes)}"
            f" of {gib(plan.budget_bytes[fullest])} GiB on stage {fullest}, the fullest, and "
            f"{plan.cost.step_ms:,.0f} ms a step"
        )

    def warm_up(self, plan: Plan) -> Generator[Step, None, None]:
        """Run the step that Megatron's offload needs before it keeps what it will keep."""
        if plan.policy.offloads:
            yield self._step(reads_bytes=False)

    def one_step(
        self,
        plan: Plan,
        *,
        reads_bytes: bool,
        around: Callable[[], Step] = nullcontext,
        down_after: Sequence[int] = (SHORT, FAILED),
    ) -> Generator[Step, None, Plan]:
        """Run one step under the plan; returns the plan that runs then, the next one down if this
        step ran short of memory.

        Args:
            plan: the one in force.
            reads_bytes: whether the step's peak is read.
            around: makes a context around the step.
            down_after: outcomes after which the next plan down replaces this one.

        Raises:
            LostStepsError: the steps before it were lost too, down to the leanest policy.
        """
        yield self._step(reads_bytes, around)
        say_if_lost(self.guard, self.applied.policy, self._job.say)
        return self._step_down(plan) if self.guard.outcome in down_after else plan

    def steps(self, plan: Plan) -> Generator[Step, None, None]:
        """Run steps without end, each under a plan for its number of microbatches.

        Raises:
            LostStepsError: as `one_step`.
        """
        while True:
            if self._by_shape is not None:
                plan = self._by_shape.next(plan)
            elif self._job.num_microbatches() != plan.schedule.num_microbatches:
                plan = self._solved_again(plan)
            plan = yield from self.one_step(plan, reads_bytes=self._memory.is_cheap)

    def _solved_again(self, plan: Plan) -> Plan:
        """The plan, solved again for the microbatches of the next step."""
        plan = self._decisions.solved(plan.profile, plan.budget_bytes, plan.notes)
        self.run(plan, f"a plan for {plan.schedule.num_microbatches} microbatches")
        self._store.save(plan)
        return plan

    @contextmanager
    def _step(self, reads_bytes: bool, around: Callable[[], Step] = nullcontext) -> Iterator[None]:
        self._is_read = reads_bytes
        read = self._memory.watching() if reads_bytes else nullcontext()
        with read, around(), self.guard.step():
            yield

    def _step_down(self, plan: Plan) -> Plan:
        """Run and save the next plan down; returns it, or the same plan if none needs less."""
        outcomes = self._decisions.shard.by_stage(self.guard.own_outcome, max)
        down = on_rank_0(lambda: self._less(plan, outcomes))
        if down is None:
            self._job.say("recompute auto: short of memory, and no plan needs less than this one.")
            return plan
        self.run(down, "the next plan down, short of memory")
        if self._by_shape is not None:
            self._by_shape.forget()
        self._store.save(down)
        return down

    def missed_bytes(self) -> list[int]:
        """By stage: by how many bytes this rank's last step exceeded its plan's prediction."""
        missed = [0] * self._decisions.shard.layout.num_stages
        if self.plan is not None and self._is_read:
            stage = self._decisions.shard.stage
            predicted = self.plan.cost.stages[stage].peak_high_bytes
            missed[stage] = max(0, self._memory.peak_bytes - predicted)
        return missed

    def short_bytes(self) -> list[int]:
        """By stage: how much less memory this rank's device has now than when it was measured."""
        short = [0] * self._decisions.shard.layout.num_stages
        if self.plan is not None:
            short[self._decisions.shard.stage] = self._decisions.short_bytes(self.plan.profile)
        return short

    def saving(self) -> str:
        """As `PlansByShape.saving`; empty where calls do not differ."""
        return "" if self._by_shape is None else self._by_shape.saving()

    def _is_short(self) -> bool:
        """Whether this rank passed its budget in this step, or its allocator had to retry."""
        if self.plan is None:
            return False
        return self._memory.is_short(self.plan.budget_bytes[self._decisions.shard.stage])

    def _leave_less(self, why: str) -> None:
        """Save the next plan down for the restart, before this rank's error ends the job.

        The other ranks wait for this one, so it decides alone.
        """
        left = "no smaller plan could be left"
        if self.plan is None and self._store.leave_ended_measuring():
            left = "a restart measures with fewer layers at once beyond the leanest policy"
        elif self.plan is None:
            names = self._decisions.options
            left = (
                "the next job would measure in the same way: give "
                f"{names.PATH}, or a lower {names.BUDGET}"
            )
        else:
            outcomes = [FINE] * self.plan.layout.num_stages
            outcomes[self._decisions.shard.stage] = FAILED
            less = self._less(self.plan, outcomes)
            if less is not None and self._store.leave(less):
                left = f"a restart begins with less, from {self._store.path}"
        logger.error(
            "recompute auto: out of memory on pipeline stage %d, and the other ranks cannot finish "
            "the step without this one: %s. The job ends; %s.",
            self._decisions.shard.stage,
            why,
            left,
        )

    def _less(self, plan: Plan, outcomes: Sequence[int]) -> Plan | None:
        return self._decisions.less(plan, outcomes, notches(self.guard), self.guard.steps)


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
            in_force.run(plan, what)
            yield from in_force.warm_up(plan)
            after = yield from in_force.one_step(plan, reads_bytes=True, down_after=(FAILED,))
            if in_force.guard.outcome == FAILED:
                return after
            if in_force.guard.outcome != RAISED:
                break
        if is_whole and decisions.are_kept(plan):
            break
        profile = decisions.corrected(plan)
    return decisions.with_own_peaks(plan)


def _halfway(lean: Sequence[int], budgets: Sequence[int]) -> list[int]:
    return [min(high, (low + high + 1) // 2) for low, high in zip(lean, budgets, strict=True)]


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
    while plan.policy.offloads and len(waits) < WATCHED_STEPS:
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
    if late_ms <= LATE * plan.cost.step_ms:
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
