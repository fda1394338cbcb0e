"""Climbs from a measured profile to a plan for the whole budget, runs it, watches every step, and
replaces a plan that runs short of memory."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import Profile, with_missed_bytes
from megatron_autorecompute.runtime.apply import AppliedPolicy
from megatron_autorecompute.runtime.calls import Calls, CallShape
from megatron_autorecompute.runtime.decisions import Decisions
from megatron_autorecompute.runtime.plan_store import PlanStore
from megatron_autorecompute.runtime.ranks import on_rank_0
from megatron_autorecompute.runtime.step_memory import is_out_of_memory
from megatron_autorecompute.units import gib

FINE, SHORT, RAISED = range(3)
"""Outcome of a step on the worst rank: as planned; above the budget; ended with an exception, which
a training loop may survive, so that it shows nothing."""
NOTICED = 0.001
"""Share of a stage's budget; if a call needs less than this more than predicted, no new plan is
made."""
STEPS = 32
"""A device that has less memory than when it was measured has less by parts of this."""
Step = AbstractContextManager[None]
"""A context around one training step."""
Key = tuple[CallShape, tuple[int, ...]]
"""A call's shape, and the budget of every stage."""

logger = logging.getLogger(__name__)


class PlanInForce:
    """The plan that runs in a job, and what became of the last step; every rank makes one in the
    same way."""

    def __init__(self, decisions: Decisions, applied: AppliedPolicy, store: PlanStore) -> None:
        self._decisions, self._memory, self._job = decisions, decisions.memory, decisions.job
        self.applied, self._store = applied, store
        self.plan: Plan | None = None
        """The plan that runs; None before the first."""
        self.outcome = self.own_outcome = FINE
        """The outcome of the last step: on the worst rank, once ranks have agreed before the next
        step, and on this one."""
        self.num_steps = 0
        """Training steps done."""
        self._is_read = False
        """Whether the last step's bytes were read, under this plan."""
        self._whole: tuple[int, ...] = ()
        """Bytes of every stage when a loop was measured whose calls differ."""
        self._plans: dict[Key, Plan] = {}
        """Its plans."""

    def switch(self, plan: Plan) -> None:
        """Run a plan from the next step on, on every rank."""
        if self.applied.policy != plan.policy:
            self.applied.switch(plan.policy)
        self.plan = plan

    def run(self, plan: Plan, what: str) -> None:
        """Run a plan as `switch` does, and say so; `what` describes it in the log."""
        self.switch(plan)
        fullest = max(range(plan.layout.num_stages), key=lambda s: plan.cost.stages[s].peak.bytes)
        self._job.say(
            f"recompute auto: running {what}; predicted {gib(plan.cost.stages[fullest].peak.bytes)}"
            f" of {gib(plan.budget_bytes[fullest])} GiB on stage {fullest}, the fullest, and "
            f"{plan.cost.step_ms:,.0f} ms a step"
        )

    # --- one step ---------------------------------------------------------------------------------

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Surround a training step and note its outcome. Before an out-of-memory error ends the
        job, leave less for the restart. Outside, as in an evaluation, errors are simply raised."""
        self.own_outcome = RAISED
        try:
            yield
        except Exception as error:  # of many types: torch, cuBLAS and NCCL each raise their own
            if is_out_of_memory(error):
                self._leave_less()
            raise
        self.own_outcome = SHORT if self._is_short() else FINE
        self.num_steps += 1

    @contextmanager
    def step(self, reads_bytes: bool) -> Iterator[None]:
        """`guarded` for a step under the plan in force, whose peak is read if `reads_bytes`."""
        self._is_read = reads_bytes
        with self._memory.watching() if reads_bytes else nullcontext(), self.guarded():
            yield

    def warm_up(self, plan: Plan) -> Generator[Step, None, None]:
        """Run the step that Megatron's offload needs before it keeps what it will keep."""
        if plan.policy.offloads:
            yield self.step(reads_bytes=False)

    def one_step(self, plan: Plan, *, reads_bytes: bool) -> Generator[Step, None, Plan]:
        """Run one `step` under the plan; returns the plan that runs then, the next one down if this
        step ran short of memory."""
        yield self.step(reads_bytes)
        return self._step_down(plan) if self.outcome == SHORT else plan

    def steps(self, plan: Plan) -> Generator[Step, None, None]:
        """Run steps without end, each under a plan for its number of microbatches."""
        while True:
            if self._job.calls is not None:
                plan = self._of_next_call(plan, self._job.calls)
            elif self._job.num_microbatches() != plan.schedule.num_microbatches:
                plan = self._decisions.solved(plan.profile, plan.budget_bytes, plan.notes)
                self.run(plan, f"a plan for {plan.schedule.num_microbatches} microbatches")
                self._store.save(plan)
            plan = yield from self.one_step(plan, reads_bytes=self._memory.is_cheap)

    # --- short of memory --------------------------------------------------------------------------

    def _is_short(self) -> bool:
        """Whether this rank passed its budget in this step, or its allocator had to retry."""
        if self.plan is None:
            return False
        return self._memory.is_short(self.plan.budget_bytes[self._decisions.shard.stage])

    def _step_down(self, plan: Plan) -> Plan:
        """Run and save the next plan down; returns it, or the same plan if none needs less."""
        short = self._decisions.shard.by_stage(self.own_outcome == SHORT, max)
        down = on_rank_0(lambda: self._decisions.less(plan, short, self.num_steps))
        if down is None:
            self._job.say("recompute auto: short of memory, and no plan needs less than this one.")
            return plan
        self.run(down, "the next plan down, short of memory")
        self._plans.clear()
        self._store.save(down)
        return down

    def _leave_less(self) -> None:
        """Save the next plan down for the restart, before this rank's error ends the job.

        The other ranks wait for this one, so it decides alone.
        """
        left, names = "no smaller plan could be left", self._decisions.options
        own_stage = self._decisions.shard.stage
        if self.plan is not None:
            short = [stage == own_stage for stage in range(self.plan.layout.num_stages)]
            less = self._decisions.less(self.plan, short, self.num_steps)
            if less is not None and self._store.leave(less):
                left = f"a restart begins with less, from {self._store.path}"
        elif self._store.leave_ended_measuring():
            left = "a restart measures with fewer layers at once beyond the leanest policy"
        else:
            given = f"give {names.PATH}, or a lower {names.BUDGET}"
            left = f"the next job would measure in the same way: {given}"
        logger.error(
            "recompute auto: out of memory on pipeline stage %d. The other ranks cannot finish the "
            "step without this one: the job ends; %s.",
            own_stage,
            left,
        )

    # --- a loop whose calls differ ----------------------------------------------------------------

    def missed_and_short_bytes(self) -> tuple[list[int], list[int]]:
        """By stage, 0 for all but this rank's: by how much its last step exceeded its plan's
        prediction, and how much less memory its device has now than when it was measured."""
        stage, num_stages = self._decisions.shard.stage, self._decisions.shard.layout.num_stages
        missed, short = [0] * num_stages, [0] * num_stages
        if self.plan is not None:
            predicted = self.plan.cost.stages[stage].peak_high_bytes
            missed[stage] = max(0, self._memory.peak_bytes - predicted) * self._is_read
            short[stage] = self._decisions.short_bytes(self.plan.profile)
        return missed, short

    def _of_next_call(self, plan: Plan, calls: Calls) -> Plan:
        """Run the plan for the next call, solved from what the running one knows."""
        profile, missed = plan.profile, calls.missed_bytes
        # Not the plan's, in which a call may have gone over them.
        self._whole = self._whole or self._decisions.budgets(profile, today=False)
        if any(m > NOTICED * b for m, b in zip(missed, plan.budget_bytes, strict=False)):
            profile = with_missed_bytes(profile, [0] * len(missed), missed)
            self._plans.clear()
            self._job.say(
                f"recompute auto: a call needed {gib(max(missed))} GiB more than predicted: "
                "counted from now on"
            )
        key = calls.shape, self._budgets_now(calls.short_bytes)
        if key not in self._plans:
            self._plans[key] = self._decisions.solved(profile, key[1], plan.notes)
            less = f", for {gib(min(key[1]))} GiB, less than when it was measured"
            self._job.say(
                f"recompute auto: a plan for up to {calls.shape.tokens:,} tokens a microbatch and "
                f"{calls.shape.microbatches} microbatches or more{less * (key[1] != self._whole)}"
            )
        self.switch(self._plans[key])
        return self._plans[key]

    def _budgets_now(self, short_bytes: Sequence[int]) -> tuple[int, ...]:
        """What every stage has in the next call; less than measured in steps, to share plans."""
        short = short_bytes or (0,) * len(self._whole)
        steps = (-(-less * STEPS // all_) for less, all_ in zip(short, self._whole, strict=True))
        return tuple(
            max(1, budget - budget * step // STEPS)
            for budget, step in zip(self._whole, steps, strict=True)
        )


def climb(
    profile: Profile, decisions: Decisions, in_force: PlanInForce
) -> Generator[Step, None, Plan]:
    """Run a plan for half of the slack, correct the prediction, then a plan for all of it.

    Returns the plan in force, which kept its budgets for a step.

    Raises InfeasibleError: with plan only, the leanest policy needs more than the budget.
    """
    budgets = decisions.budgets(profile)
    first = (False, "a plan for half of the slack"), (True, "a plan for all of the slack")
    for is_whole, what in itertools.chain(first, itertools.repeat((True, "a corrected plan"))):
        while True:
            # The next call may have other lengths than the last one, and so another need.
            goal = budgets if is_whole else _halfway(decisions.lean_peaks(profile), budgets)
            plan = decisions.solved(profile, goal)
            in_force.run(plan, what)
            yield from in_force.warm_up(plan)
            yield in_force.step(reads_bytes=True)
            if in_force.outcome != RAISED:
                break
        peaks = decisions.peaks()
        if is_whole and all(map(operator.le, peaks, plan.budget_bytes)):
            break
        predicted = [cost.peak.bytes for cost in plan.cost.stages]
        profile = with_missed_bytes(plan.profile, predicted, peaks)
    # Where calls differ, that step may have been a small one.
    return plan if decisions.job.calls else replace(plan, measured_peak_bytes=peaks)


def _halfway(lean: Sequence[int], budgets: Sequence[int]) -> list[int]:
    return [min(high, (low + high + 1) // 2) for low, high in zip(lean, budgets, strict=True)]
