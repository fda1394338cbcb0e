"""`--recompute-policy auto` inside a job: measure, decide, agree, climb, watch.

Wrap every training step in `AutoTuner.step()`. The first steps are ordinary training steps that
are watched (`measuring`); then one rank solves, all ranks follow (`decisions`), and from there on
nothing is measured but the peak. This module knows nothing of `megatron.training` or of Megatron
Bridge: `JobFacts` brings what it needs of them.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import torch

from megatron_autorecompute.compat import model_layers
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Parallelism, Profile
from megatron_autorecompute.runtime.apply import apply
from megatron_autorecompute.runtime.auto_options import AutoOptions
from megatron_autorecompute.runtime.auto_rules import refuse_unmeasurable
from megatron_autorecompute.runtime.auto_text import gib, plan_text
from megatron_autorecompute.runtime.decisions import Decisions
from megatron_autorecompute.runtime.fingerprint import fingerprint
from megatron_autorecompute.runtime.job_facts import JobFacts
from megatron_autorecompute.runtime.lost_steps import notches, was_lost
from megatron_autorecompute.runtime.measuring import Measuring
from megatron_autorecompute.runtime.model_shard import ModelShard
from megatron_autorecompute.runtime.oom_guard import FAILED, FINE, StepGuard
from megatron_autorecompute.runtime.plan_store import PlanStore
from megatron_autorecompute.runtime.ranks import on_first_rank
from megatron_autorecompute.runtime.step_memory import StepMemory
from megatron_autorecompute.units import GIB

__all__ = ["AutoTuner", "JobFacts"]
logger = logging.getLogger(__name__)
Course = Generator[AbstractContextManager[None], None, Plan]
"""One context for each training step, and the plan that runs after them."""


class AutoTuner:
    """Finds, applies and watches the policy of one job; every rank makes one alike.

    Args:
        chunks: this rank's model chunks, built, without a policy.
        optimizer: Megatron's optimizer on them.
        options: what the user asked for.
        job: what the program knows.

    Raises:
        AutorecomputeError: the config is one that cannot be measured, no budget can be found, the
            plan path cannot be written.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        options: AutoOptions,
        job: JobFacts,
    ) -> None:
        self.optimizer, self.options, self.job = optimizer, options, job
        refuse_unmeasurable(model_layers.unwrapped(chunks[0]).config)
        self.shard = ModelShard(chunks)
        self.steps = 0
        self.memory = StepMemory(self.shard.chunks, optimizer, job.without_cuda, job.memory)
        self.decisions = Decisions(self.shard, self.memory, options, job)
        self._plan: Plan | None = None
        self.fingerprint = self._fingerprint()
        self._store = PlanStore(options.recompute_plan_path, self.fingerprint, job.say)
        nothing = RecomputePolicy.parse("none", num_layers=self.shard.num_layers)
        self.applied = apply(nothing, self.shard.chunks, holder="--recompute-policy auto")
        self.applied.switch(self.decisions.leanest)
        self._guard = StepGuard(self.shard.chunks, optimizer, self._is_short, self._leave_less)
        self._course = self._steps()

    def _fingerprint(self) -> dict[str, str]:
        shapes = {f.name: str(getattr(self.job.parallelism, f.name)) for f in fields(Parallelism)}
        encoder_layers = self.shard.encoder_layers
        encoder = {"encoder_layers": str(encoder_layers)} if encoder_layers else {}
        device = "CPU" if self.job.without_cuda else torch.cuda.get_device_name()
        given = {**shapes, **self.job.shapes, **encoder, "device": device}
        return fingerprint(self.shard.chunks, self.optimizer, self.shard.layout, given)

    @property
    def peak_bytes(self) -> int:
        """The most this rank allocated in the last step that was read, or since its plan began."""
        return self.memory.peak_bytes

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one training step, forward to optimizer, on every rank."""
        with next(self._course):
            yield
        self.steps += 1
        self._store.step_done()

    def close(self) -> None:
        """Leave the policy in force and stop; the model keeps training with it."""
        self._course.close()
        self._store.close()

    def _steps(self) -> Iterator[AbstractContextManager[None]]:
        """The whole course, one context for each step."""
        plan = self._known_plan()
        if plan is None:
            plan = yield from self._found()
            self._store.save(plan)
        elif not self.options.recompute_plan_only:
            self._run(plan, f"the plan in {self._store.path}")
            plan = yield from self._carried(plan, reads_bytes=True)
        self._tell(plan)
        if self.options.recompute_plan_only:
            raise SystemExit(0)
        yield from self._watch(plan)

    def _found(self) -> Course:
        """Measure, solve, climb."""
        measuring = Measuring(self.decisions, self.optimizer, self.applied, self._guard)
        ended_before = self._store.ended_measuring()
        if ended_before:
            self.job.say(
                f"recompute auto: {ended_before} job(s) before this one ran out of memory while "
                "measuring; fewer layers at once leave the leanest policy this time."
            )
        profile = yield from measuring.run(self.fingerprint, ended_before)
        return (yield from self._climb(profile))

    # --- climb ------------------------------------------------------------------------------------

    def _climb(self, profile: Profile) -> Course:
        """Half of the slack first, corrected by what is seen, then all of it."""
        budgets, lean = self.decisions.budgets(profile), self.decisions.lean_peaks(profile)
        # Where even the leanest policy needs more than the budget, solving for it says so.
        halfway = [
            min(high, (low + high + 1) // 2) for low, high in zip(lean, budgets, strict=True)
        ]
        goals = [
            (halfway, "a plan for half of the slack"),
            (budgets, "a plan for all of the slack"),
        ]
        while True:
            name = f"a plan for {goals[0][1]}" if goals else "a corrected plan"
            goal, _ = goals.pop(0) if goals else (budgets, name)
            plan = self.decisions.solved(profile, goal)
            self._run(plan, name)
            yield self._observed(plan, reads_bytes=True)
            if self._was_lost():
                return self._stepped_down(plan)
            if not goals and not self._over(plan):
                return plan
            profile = self.decisions.corrected(plan)

    def _over(self, plan: Plan) -> bool:
        seen = self.decisions.peaks()
        return any(peak > most for peak, most in zip(seen, plan.budget_bytes, strict=True))

    def _run(self, plan: Plan, what: str) -> None:
        self.applied.switch(plan.policy)
        self.memory.plan_begins()
        fullest = max(range(plan.layout.num_stages), key=lambda s: plan.cost.stages[s].peak.bytes)
        self.job.say(
            f"recompute auto: running {what}; predicted {gib(plan.cost.stages[fullest].peak.bytes)}"
            f" of {gib(plan.budget_bytes[fullest])} GiB on stage {fullest}, the fullest, and "
            f"{plan.cost.step_ms:,.0f} ms a step"
        )

    # --- watch ------------------------------------------------------------------------------------

    def _watch(self, plan: Plan) -> Iterator[AbstractContextManager[None]]:
        """Ordinary steps for ever; between them, leave a policy that runs out of memory."""
        while True:
            if self.job.num_microbatches() != plan.schedule.num_microbatches:
                plan = self.decisions.solved(plan.profile, plan.budget_bytes)
                self._run(plan, f"a plan for {plan.schedule.num_microbatches} microbatches")
                self._store.save(plan)
            plan = yield from self._carried(plan, reads_bytes=self.memory.is_cheap)

    def _carried(self, plan: Plan, reads_bytes: bool) -> Course:
        """One step under the plan."""
        yield self._observed(plan, reads_bytes)
        if self._was_lost() or self._guard.outcome != FINE:
            return self._stepped_down(plan)
        return plan

    def _was_lost(self) -> bool:
        return was_lost(self._guard, self.applied.policy, self.job.say)

    @contextmanager
    def _observed(self, plan: Plan, reads_bytes: bool) -> Iterator[None]:
        """A step under the plan."""
        self._plan = plan
        read = self.memory.watching() if reads_bytes else nullcontext()
        with self._guard.step(), read:
            yield

    def _is_short(self) -> bool:
        """Whether this rank passed its budget in this step, or its allocator had to retry."""
        if self._plan is None:
            return False
        return self.memory.is_short(self._plan.budget_bytes[self.shard.stage])

    def _leave_less(self, why: str) -> None:
        """Before this rank's error ends the job: the next plan down, for the restart to begin with.

        The other ranks wait for this one, so it decides alone.
        """
        left = "no smaller plan could be left"
        if self._plan is None and self._store.leave_ended_measuring():
            left = "a restart measures with fewer layers at once beyond the leanest policy"
        elif self._plan is None:
            left = (
                "nothing tells the next one, which will measure alike: give "
                "--recompute-plan-path, or a lower --recompute-memory-budget-gib"
            )
        else:
            outcomes = [FINE] * self._plan.layout.num_stages
            outcomes[self.shard.stage] = FAILED
            less = self._less(self._plan, outcomes)
            if less is not None and self._store.leave(less):
                left = f"a restart begins with less, from {self._store.path}"
        logger.error(
            "recompute auto: out of memory on pipeline stage %d, and the other ranks cannot finish "
            "the step without this one: %s. The job ends; %s.",
            self.shard.stage,
            why,
            left,
        )

    def _less(self, plan: Plan, outcomes: Sequence[int]) -> Plan | None:
        return self.decisions.less(plan, outcomes, notches(self._guard), self.steps)

    def _stepped_down(self, plan: Plan) -> Plan:
        outcomes = self.shard.by_stage(self._guard.own_outcome, max)
        down = on_first_rank(lambda: self._less(plan, outcomes))
        if down is None:
            self.job.say("recompute auto: short of memory, and no plan needs less than this one.")
            return plan
        self._run(down, "the next plan down, short of memory")
        self._store.save(down)
        return down

    # --- the plan file ----------------------------------------------------------------------------

    def _known_plan(self) -> Plan | None:
        """The plan file's plan when it is of this very job, solved again for what is asked now."""
        plan = self._store.known()
        if plan is None:
            return None
        budgets = self.decisions.budgets(plan.profile)
        asked = {
            "budgets in GiB": (plan.budget_bytes, budgets),
            "percentile": (plan.imbalance_percentile, self.options.recompute_imbalance_percentile),
            "microbatches": (plan.schedule.num_microbatches, self.job.num_microbatches()),
        }
        other = [
            f"{what} {_shown(was)}, now {_shown(now)}"
            for what, (was, now) in asked.items()
            if was != now
        ]
        if not plan.proven:
            why = "was changed, or another version of this program wrote it"
        elif other:
            why = f"was made for other figures ({'; '.join(other)})"
        else:
            return plan
        self.job.say(
            f"recompute auto: the plan in {self._store.path} {why}; solved again from its "
            "measurements."
        )
        plan = self.decisions.solved(plan.profile, budgets)
        self._store.save(plan)
        return plan

    def _tell(self, plan: Plan) -> None:
        """A row per stage, and the writers that are on, once the plan has run a step."""
        full = self.decisions.planner(plan.profile).evaluate(self.decisions.leanest)
        peaks = self.decisions.peaks() if self.steps else None
        self.job.say(f"recompute auto: the plan\n{plan_text(plan, peaks, full.step_ms)}")
        for stage, cost in enumerate(plan.cost.stages):
            if peaks is not None:
                self._write(f"recompute/measured_peak_gib/stage{stage}", peaks[stage] / GIB)
            self._write(f"recompute/predicted_peak_gib/stage{stage}", cost.peak.bytes / GIB)
            self._write(f"recompute/recompute_ms/stage{stage}", cost.recompute_ms)

    def _write(self, name: str, value: float) -> None:
        iteration = self.steps if self.job.iteration is None else self.job.iteration()
        for writer in self.job.writers():
            if hasattr(writer, "add_scalar"):  # TensorBoard
                writer.add_scalar(name, value, iteration)
            else:  # Weights & Biases
                writer.log({name: value}, iteration)


def _shown(figure: Any) -> str:
    """A figure for people; budgets of all stages in GiB, once where they are equal."""
    return " ".join(dict.fromkeys(map(gib, figure))) if isinstance(figure, tuple) else str(figure)
