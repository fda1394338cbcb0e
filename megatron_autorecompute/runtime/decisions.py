"""Decides from a job's profile: budgets, plans, and corrections by what a step has shown.

All ranks combine their figures; one rank solves, and all use its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_autorecompute.compat import rules
from megatron_autorecompute.errors import InfeasibleError
from megatron_autorecompute.planner.cost.lengths import profile_at
from megatron_autorecompute.planner.plan import Plan, make_plan, plan_early_if_it_pays
from megatron_autorecompute.planner.search.problem import NO_LIMIT, Budget, Problem
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import Profile, with_missed_bytes
from megatron_autorecompute.runtime.auto_options import (
    AHEAD_CHOICES,
    AutoOptions,
    budget_bytes,
    budget_reason,
)
from megatron_autorecompute.runtime.job_facts import JobFacts
from megatron_autorecompute.runtime.lengths_seen import Points, Varying
from megatron_autorecompute.runtime.model_shard import ModelShard
from megatron_autorecompute.runtime.plan_store import PlanStore
from megatron_autorecompute.runtime.ranks import on_rank_0
from megatron_autorecompute.runtime.step_memory import StepMemory, available_bytes
from megatron_autorecompute.units import gib

NOTCHES = 16
"""Steps from a stage's plan down to its leanest policy."""


class Decisions:
    """Decides for one job; every rank makes one in the same way."""

    def __init__(
        self, shard: ModelShard, memory: StepMemory, options: AutoOptions, job: JobFacts
    ) -> None:
        self.shard, self.memory, self.options, self.job = shard, memory, options, job
        self.leanest = shard.leanest()
        if job.without_cuda:
            budget_bytes(options, available_bytes=None, fragmentation_bytes=0)

    def problem(self, profile: Profile, budgets: Budget = NO_LIMIT) -> Problem:
        """The problem for the microbatches of the next step, their number and their length."""
        shape = self.job.shape
        if shape is not None:
            profile = profile_at(profile, shape.microbatch, shape.call_tokens)
        return Problem(
            profile,
            self.shard.layout,
            self.shard.schedule(self.job.num_microbatches()),
            budgets,
            percentile=self.options.recompute_imbalance_percentile,
        )

    def solved(self, profile: Profile, budgets: Sequence[int], notes: Sequence[str] = ()) -> Plan:
        """A plan for these budgets (bytes by stage); one rank solves, all get its plan or error.

        A running job does not end because nothing fits its budgets: then a stage whose leanest
        choices need more is planned for what they need, and this is said.

        Raises: InfeasibleError if, with plan only, a stage needs more than its budget."""
        try:
            return self._solved(self.problem(profile, budgets), notes)
        except InfeasibleError:
            if self.options.recompute_plan_only:
                raise
        enough = self._at_least_lean(budgets, self.lean_peaks(profile))
        return self._solved(self.problem(profile, enough), notes)

    def _solved(self, problem: Problem, notes: Sequence[str]) -> Plan:
        asked = self.options.recompute_choices == AHEAD_CHOICES
        early = asked and rules.is_allowed(self.shard.config, LayerPolicy("full", ahead=True))
        make = plan_early_if_it_pays if early else make_plan
        return on_rank_0(lambda: make(problem, notes=notes))

    def _at_least_lean(self, budgets: Sequence[int], lean: Sequence[int]) -> list[int]:
        for stage, (budget, least) in enumerate(zip(budgets, lean, strict=True)):
            if least > budget:
                self.job.say(
                    f"recompute auto: OVER BUDGET: stage {stage} needs {gib(least)} GiB with its "
                    f"leanest choices, its budget is {gib(budget)} GiB: "
                    f"{budget_reason(self.options)}. It is planned for what these need."
                )
        return [max(pair) for pair in zip(budgets, lean, strict=True)]

    def lean_peaks(self, profile: Profile) -> list[int]:
        """Predicted peak bytes of every stage under its leanest choices, high end."""
        return [cost.peak_high_bytes for cost in self.problem(profile).cost(self.leanest).stages]

    # --- the plan file ----------------------------------------------------------------------------

    def known_plan(self, store: PlanStore) -> Plan | None:
        """The stored plan, if it is this job's. It is solved again if budgets or similar settings
        changed."""
        plan = store.known()
        if plan is None:
            return None
        budgets = self.budgets(plan.profile)
        asked = {
            "budgets in GiB": (plan.budget_bytes, budgets),
            "percentile": (plan.imbalance_percentile, self.options.recompute_imbalance_percentile),
            "microbatches": (plan.schedule.num_microbatches, self.job.num_microbatches()),
        }
        if self.job.shape is not None:
            sizes = plan.profile.parallelism
            tokens = sizes.seq_length // sizes.context_parallel
            asked["tokens of a microbatch"] = tokens, self.job.shape.tokens
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
            f"recompute auto: the plan in {store.path} {why}; solved again from its measurements."
        )
        plan = self.solved(plan.profile, budgets, plan.notes)
        store.save(plan)
        return plan

    # --- budgets ----------------------------------------------------------------------------------

    def peaks(self) -> tuple[int, ...]:
        """The most bytes allocated on every stage, as in `StepMemory.peak_bytes`."""
        return self.shard.by_stage(self.memory.peak_bytes, max)

    def found_budgets(self) -> tuple[int, ...]:
        """Bytes that torch may allocate on every stage, from the measurements so far."""
        return self._budgets(self._available(), self.memory.fragmentation_bytes)

    def _budgets(self, available: int | None, fragmentation: int) -> tuple[int, ...]:
        return self.shard.by_stage(budget_bytes(self.options, available, fragmentation), min)

    def _available(self) -> int | None:
        return None if self.job.without_cuda else available_bytes()

    def short_bytes(self, profile: Profile) -> int:
        """How much less memory this rank's device leaves to torch now than when it was measured,
        for example because an engine woke up. 0 with a given budget or without a device."""
        now, before = self._available(), profile.stages[self.shard.stage].available_bytes
        if now is None or self.options.budget_bytes is not None:
            return 0
        return max(0, (before or 0) - now)

    def budgets(self, profile: Profile, *, today: bool = True) -> tuple[int, ...]:
        """Bytes that torch may allocate on every stage, from a profile and the memory free then;
        today: or now, if that is less."""
        stage, now = profile.stages[self.shard.stage], self._available()
        available = stage.available_bytes
        if today and available is not None and now is not None:
            available = min(available, now)
        return self._budgets(available, stage.fragmentation_bytes)

    def too_lean(self, step: int) -> str | None:
        """What is over the budget after a step under the leanest policy; None if nothing is.

        Raises: InfeasibleError if, with plan only, some stage needed more than its budget."""
        peaks, budgets = self.peaks(), self.found_budgets()
        stage = max(range(len(peaks)), key=lambda stage: peaks[stage] - budgets[stage])
        if peaks[stage] <= budgets[stage]:
            return None
        layers = [i for chunk in self.shard.layout.stages[stage] for i in chunk.layers]
        lean = RecomputePolicy(tuple(self.leanest.layers[i] for i in layers))
        what = (
            f"Stage {stage} needed {gib(peaks[stage])} GiB in training step {step} even "
            f"with its leanest choices ({lean.format() or 'no layers'}); the budget "
            f"is {gib(budgets[stage])} GiB: {budget_reason(self.options)}. Raise the budget, lower "
            "the micro-batch size, or spread the model over more ranks."
        )
        if self.options.recompute_plan_only:
            raise InfeasibleError(what)
        return what

    # --- what a profile misses --------------------------------------------------------------------

    def with_others(self, profile: Profile, lean: Sequence[int]) -> Profile:
        """The profile with the figures from which budgets are found, and with what others hold.

        Other tensors on the device, such as a reference model, show as bytes that the prediction
        for the leanest policy does not explain."""
        costs = self.problem(profile).cost(self.leanest).stages
        predicted = [cost.peak.bytes for cost in costs]
        return self._with_budgets(with_missed_bytes(profile, predicted, lean))

    def with_lengths(self, profile: Profile, points: Points) -> Profile:
        """As `with_others`, for a loop whose microbatches differ: the profile gets lines, and each
        measured call is compared with the prediction for its own lengths."""
        varying = Varying(self.shard, points)
        profile = varying.with_lines(profile)
        least, most = varying.missed_bytes(profile)
        lows, highs = self.shard.by_stage(least, min), self.shard.by_stage(most, max)
        stages = (
            replace(
                stage,
                residual_bytes=stage.residual_bytes + (low + high) // 2,
                uncertainty_bytes=(high - low + 1) // 2,
            )
            for stage, low, high in zip(profile.stages, lows, highs, strict=True)
        )
        return self._with_budgets(replace(profile, stages=tuple(stages)))

    def _with_budgets(self, profile: Profile) -> Profile:
        available = self._available()
        least = self.shard.by_stage(available or 0, min)
        fragmentation = self.shard.by_stage(self.memory.fragmentation_bytes, max)
        others = self.shard.by_stage(self.memory.others_bytes or 0, max)
        stages = (
            replace(
                stage,
                available_bytes=None if available is None else found,
                fragmentation_bytes=lost,
                others_bytes=None if available is None else held,
            )
            for stage, found, lost, held in zip(
                profile.stages, least, fragmentation, others, strict=True
            )
        )
        return replace(profile, stages=tuple(stages))

    def less(self, plan: Plan, short: Sequence[int], step: int) -> Plan | None:
        """The best plan that needs less on the stages that ran short, by a part of the way from the
        stage's peak to what its leanest policy needs; the same on every rank. No recompute begins
        early in it.

        The budget stays the same. Instead, bytes are added to the stage's residual, so that a
        restart, and a plan for other microbatches, count them too.

        Returns None if no stage that ran short can go lower, and nothing began early.
        """
        lean = self.lean_peaks(plan.profile)
        stages, notes = list(plan.profile.stages), list(plan.notes)
        for stage, is_short in enumerate(short):
            peak, least = plan.cost.stages[stage].peak_high_bytes, lean[stage]
            if not is_short or peak <= least:
                continue
            notch = max(1, (peak - least) // NOTCHES)
            missed = plan.budget_bytes[stage] - peak + notch
            residual = stages[stage].residual_bytes + missed
            stages[stage] = replace(stages[stage], residual_bytes=residual)
            notes.append(
                f"step {step}: stage {stage} short of memory, went down by {gib(notch)} GiB"
            )
        if len(notes) == len(plan.notes):
            if not plan.policy.is_ahead:
                return None
            notes.append(f"step {step}: short of memory, so no recompute begins early any more")
        problem = self.problem(replace(plan.profile, stages=tuple(stages)), plan.budget_bytes)
        return make_plan(problem, notes=notes)


def _shown(figure: Any) -> str:
    """A figure as text; budgets of all stages in GiB, equal ones once."""
    return " ".join(dict.fromkeys(map(gib, figure))) if isinstance(figure, tuple) else str(figure)
