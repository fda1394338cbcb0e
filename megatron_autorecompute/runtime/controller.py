"""`--recompute-policy auto` inside a job: measure, decide, agree, climb, watch.

Wrap every training step in `AutoTuner.step()`. The first steps are ordinary training steps that
are watched; then one rank solves, all ranks follow, and from there on nothing is measured but the
peak. This module knows nothing of `megatron.training` or of Megatron Bridge: `JobFacts` brings what
it needs of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch

from megatron_autorecompute.compat import model_layers
from megatron_autorecompute.errors import InfeasibleError, LostStepsError
from megatron_autorecompute.planner.plan import Plan, make_plan
from megatron_autorecompute.planner.planner import Planner
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Parallelism, Profile, RankStep, with_missed_bytes
from megatron_autorecompute.runtime.apply import apply
from megatron_autorecompute.runtime.auto_options import AutoOptions
from megatron_autorecompute.runtime.auto_rules import refuse_unmeasurable
from megatron_autorecompute.runtime.auto_text import gib, plan_text
from megatron_autorecompute.runtime.budget import budget_bytes, reason, stage_budget_bytes
from megatron_autorecompute.runtime.fingerprint import fingerprint
from megatron_autorecompute.runtime.measurement import Measurement
from megatron_autorecompute.runtime.model_shard import ModelShard
from megatron_autorecompute.runtime.oom_guard import FAILED, FINE, StepGuard
from megatron_autorecompute.runtime.plan_store import PlanStore
from megatron_autorecompute.runtime.probe import Memory
from megatron_autorecompute.runtime.ranks import gathered, on_first_rank
from megatron_autorecompute.runtime.static_memory import static_bytes
from megatron_autorecompute.runtime.step_memory import StepMemory, available_bytes
from megatron_autorecompute.runtime.whole_steps import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    WholeStep,
    covered,
    median_step,
    residuals_ms,
    running,
)
from megatron_autorecompute.units import GIB

logger = logging.getLogger(__name__)
Number = TypeVar("Number", int, float)
SETTLING_STEPS = 2
"""Steps at the leanest policy before measuring: they allocate what stays (optimizer state,
communication buffers), and show what the leanest policy needs."""
FEWEST_TIMES = 4
"""Times of each choice on a rank, where the steps allow it; the first one is set aside."""
NOTCHES = 16
"""Steps in which a stage that runs short of memory goes down to its leanest policy; after a lost
step the next one down is twice as large when that step is lost, too."""
LOST_IN_A_ROW = NOTCHES.bit_length() + 1
"""Lost steps in a row that end the job: by then the last one was under the leanest policy."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What the program around says of the training job."""

    parallelism: Parallelism
    """Shapes of a microbatch on this rank."""

    num_microbatches: Callable[[], int]
    """Microbatches of the next step; may change with batch-size ramp-up."""

    say: Callable[[str], None]
    """Prints on one rank."""

    timers: Any | None = None
    """Megatron's Timers, which run in measuring steps: what they say stands beside the sum of
    layers, and what layers leave of it is the stage's residual."""

    shapes: Mapping[str, str] = field(default_factory=dict)
    """What besides `parallelism` a plan holds for: the decoder's sequence length of T5."""

    writers: Callable[[], Sequence[Any]] = lambda: ()
    """TensorBoard and W&B writers that are on."""

    iteration: Callable[[], int] | None = None
    """The step's number in the training as a whole, for the writers; None counts from the start
    of this job."""

    without_cuda: bool = False
    """Bytes come from `LiveBytes`, as there is no allocator to ask."""

    memory: Callable[[], AbstractContextManager[Memory]] | None = None
    """Another place to read bytes from, in every step; for tests that enforce a budget."""


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
        self.chunks, self.optimizer, self.options, self.job = list(chunks), optimizer, options, job
        refuse_unmeasurable(model_layers.unwrapped(self.chunks[0]).config)
        self.shard = ModelShard(self.chunks)
        self.stage, self.layout = self.shard.stage, self.shard.layout
        self.steps = 0
        self.memory = StepMemory(self.chunks, optimizer, job.without_cuda, job.memory)
        self._guard: StepGuard | None = None
        self._plan: Plan | None = None
        self._whole_steps: list[WholeStep] = []
        if job.without_cuda:
            budget_bytes(options, available_bytes=None, fragmentation_bytes=0)
        self.fingerprint = self._fingerprint()
        self._store = PlanStore(options.recompute_plan_path, self.fingerprint, job.say)
        nothing = RecomputePolicy.parse("none", num_layers=self.shard.num_layers)
        self.applied = apply(nothing, self.chunks, holder="--recompute-policy auto")
        self.measurement = Measurement(self.shard, self.applied)
        self._leanest = self.shard.leanest()
        self.applied.switch(self._leanest)
        self._course = self._steps()

    def _fingerprint(self) -> dict[str, str]:
        shapes = {f.name: str(getattr(self.job.parallelism, f.name)) for f in fields(Parallelism)}
        encoder_layers = self.shard.encoder_layers
        encoder = {"encoder_layers": str(encoder_layers)} if encoder_layers else {}
        device = "CPU" if self.job.without_cuda else torch.cuda.get_device_name()
        given = {**shapes, **self.job.shapes, **encoder, "device": device}
        return fingerprint(self.chunks, self.optimizer, self.layout, given)

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
        elif not self.options.recompute_dry_run:
            self._guard = self._new_guard()
            self._run(plan, f"the plan in {self._store.path}")
            plan = yield from self._carried(plan, reads_bytes=True)
        self._tell(plan)
        if self.options.recompute_dry_run:
            raise SystemExit(0)
        yield from self._watch(plan)

    def _found(self) -> Generator[AbstractContextManager[None], None, Plan]:
        """Measure, solve, climb; returns the plan that runs."""
        self.job.say("recompute auto: measuring in the first steps, from the leanest policy on")
        self.memory.begin_measuring()
        for _ in range(SETTLING_STEPS):
            yield self._settling()
            self._check_leanest_fits()
        lean = self._peaks()
        profile = self._with_memory((yield from self._measured(lean)), lean)
        self._guard = self._new_guard()
        return (yield from self._climb(profile))

    # --- measure ----------------------------------------------------------------------------------

    def _measured(
        self, lean: Sequence[int]
    ) -> Generator[AbstractContextManager[None], None, Profile]:
        """Ordinary steps in which layers take turns at every choice; returns the profile."""
        # Where reading bytes distorts times, each takes a step of its own.
        left = max(1 + self._slow_to_read(), self.options.recompute_measure_steps - 1)
        # Once one layer without recompute is known, so is how many at once will fit.
        for _ in self.measurement.policies(room=[0] * self.layout.num_stages, most_steps=1):
            yield self._watched(reads_bytes=True)
        room = self._room(lean)
        if self._slow_to_read():
            for _ in self.measurement.policies(room=room, most_steps=left // 2):
                left -= 1
                yield self._said_and_watched(left, reads_bytes=True)
        repeats = max(2, -(-FEWEST_TIMES // self.job.num_microbatches()))
        for _ in self.measurement.policies(repeats, room=room, most_steps=left):
            left -= 1
            yield self._said_and_watched(left, reads_bytes=not self._slow_to_read())
        missing = self.measurement.unseen()
        if missing:
            self.job.say(
                f"recompute auto: {self.options.recompute_measure_steps} steps were not enough to "
                f"measure {', '.join(missing)}: left out. More: --recompute-measure-steps."
            )
        return self._profile()

    def _profile(self) -> Profile:
        profile = self.measurement.profile(
            self.shard.model(),
            self.job.parallelism,
            static_bytes(self.chunks, self.optimizer),
            fingerprint=self.fingerprint,
        )
        return self._with_whole_steps(profile)

    def _with_whole_steps(self, profile: Profile) -> Profile:
        """The profile with what layers leave of the times that Megatron's timers saw, and a step
        of the median time as every rank saw it."""
        planner = self._planner(profile)
        ranks = gathered(covered(planner, self._whole_steps))
        stages = zip(profile.stages, residuals_ms(planner, ranks), strict=True)
        return replace(
            profile,
            stages=tuple(replace(record, residual_ms=ms) for record, ms in stages),
            measured_step=median_step(ranks),
        )

    def _room(self, lean: Sequence[int]) -> list[int]:
        """How many layers of each stage may leave the leanest policy in one measuring step.

        Each costs at most what a layer without recompute holds, for every microbatch in flight.
        """
        schedule = self._schedule()
        budgets = self._by_stage(self._found_budget(), min)
        most_held = max(1, self.measurement.most_held_bytes())
        room = []
        for stage, (low, high) in enumerate(zip(lean, budgets, strict=True)):
            in_flight = int(schedule.in_flight(stage).sum(axis=1).max()) + 1
            room.append(max(0, high - low) // (most_held * in_flight))
        return room

    def _said_and_watched(self, left: int, reads_bytes: bool) -> AbstractContextManager[None]:
        self.job.say(f"recompute auto: measuring, at most {left} more steps")
        return self._watched(reads_bytes)

    def _slow_to_read(self) -> bool:
        """Whether reading bytes distorts times, so that each has steps of its own."""
        return self.job.without_cuda

    @contextmanager
    def _watched(self, reads_bytes: bool) -> Iterator[None]:
        if not reads_bytes:
            with running(self.job.timers) as took_ms, self.measurement.watch(None):
                yield
            self._note_whole_step(took_ms)
            return
        with self.memory.measuring() as memory:
            slow = self._slow_to_read()
            watched = self.measurement.watch(memory, times=not slow)
            with running(None if slow else self.job.timers) as took_ms, watched:
                yield
            self.memory.note(memory, self.measurement.peak_bytes)
        if not slow:
            self._note_whole_step(took_ms)

    @contextmanager
    def _settling(self) -> Iterator[None]:
        with self.memory.measuring() as memory:
            yield
            self.memory.note(memory, memory.peak_bytes)

    def _note_whole_step(self, took_ms: Mapping[str, float]) -> None:
        """Keep what Megatron's timers and torch's statistics say of the step that has just run."""
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        before = self.steps if self.job.iteration is None else self.job.iteration()
        allocated, reserved = self.memory.torch_peaks
        seen = RankStep(
            rank,
            self.stage,
            took_ms.get(FORWARD),
            took_ms.get(BACKWARD),
            took_ms.get(OPTIMIZER),
            allocated,
            reserved,
        )
        microbatches = self.job.num_microbatches()
        self._whole_steps.append(WholeStep(before + 1, self.applied.policy, microbatches, seen))

    # --- decide and agree -------------------------------------------------------------------------

    def _schedule(self) -> Schedule:
        return self.shard.schedule(self.job.num_microbatches())

    def _found_budget(self) -> int:
        """Bytes torch may allocate on this rank, from what was measured so far."""
        available = None if self.job.without_cuda else available_bytes()
        return budget_bytes(self.options, available, self.memory.fragmentation_bytes)

    def _budgets(self, profile: Profile) -> tuple[int, ...]:
        """Bytes torch may allocate on every stage that was measured, of what is free today."""
        stage = profile.stages[self.stage]
        if stage.available_bytes is not None and not self.job.without_cuda:
            today = min(stage.available_bytes, available_bytes())
            stage = replace(stage, available_bytes=today)
        return self._by_stage(stage_budget_bytes(self.options, stage), min)

    def _peaks(self) -> tuple[int, ...]:
        return self._by_stage(self.peak_bytes, max)

    def _check_leanest_fits(self) -> None:
        """After a step under the leanest policy: whether there is any use in measuring others."""
        peaks, budgets = self._peaks(), self._by_stage(self._found_budget(), min)
        stage = max(range(len(peaks)), key=lambda stage: peaks[stage] - budgets[stage])
        if peaks[stage] > budgets[stage]:
            layers = [i for chunk in self.layout.stages[stage] for i in chunk.layers]
            lean = RecomputePolicy(tuple(self._leanest.layers[i] for i in layers))
            raise InfeasibleError(
                f"Stage {stage} needed {gib(peaks[stage])} GiB in training step {self.steps} even "
                f"with its leanest choices ({lean.format() or 'no layers'}); the budget "
                f"is {gib(budgets[stage])} GiB: {reason(self.options)}. Raise the budget, lower "
                "the micro-batch size, or spread the model over more ranks."
            )

    def _with_memory(self, profile: Profile, lean: Sequence[int]) -> Profile:
        """The profile with what budgets are found from, and with what others hold.

        Whatever lives on the device beside the model, as a reference model does, shows as bytes
        that the leanest policy does not explain.
        """
        available = 0 if self.job.without_cuda else available_bytes()
        least = self._by_stage(available, min)
        fragmentation = self._by_stage(self.memory.fragmentation_bytes, max)
        predicted = self._planner(profile).evaluate(self._leanest).stages
        profile = with_missed_bytes(profile, [cost.peak.bytes for cost in predicted], lean)
        stages = (
            replace(
                stage,
                available_bytes=None if self.job.without_cuda else found,
                fragmentation_bytes=lost,
            )
            for stage, found, lost in zip(profile.stages, least, fragmentation, strict=True)
        )
        return replace(profile, stages=tuple(stages))

    def _by_stage(
        self, mine: Number, together: Callable[[list[Number]], Number]
    ) -> tuple[Number, ...]:
        """A figure of every stage, put together over its ranks."""
        by_stage: dict[int, list[Number]] = {}
        for stage, value in gathered((self.stage, mine)):
            by_stage.setdefault(stage, []).append(value)
        return tuple(together(by_stage[stage]) for stage in sorted(by_stage))

    def _solved(self, profile: Profile, budgets: Sequence[int]) -> Plan:
        """One rank solves, all get the same plan, or the same error."""

        planner = self._planner(profile)
        return on_first_rank(lambda: make_plan(planner, budgets))

    def _planner(self, profile: Profile) -> Planner:
        return Planner(
            profile,
            self.layout,
            self._schedule(),
            percentile=self.options.recompute_imbalance_percentile,
        )

    # --- climb ------------------------------------------------------------------------------------

    def _climb(self, profile: Profile) -> Generator[AbstractContextManager[None], None, Plan]:
        """Half of the slack first, corrected by what is seen, then all of it; returns the plan."""
        budgets = self._budgets(profile)
        stages = self._planner(profile).evaluate(self._leanest).stages
        lean = [cost.peak_high_bytes for cost in stages]
        # Where even the leanest policy needs more than the budget, solving for it says so.
        halfway = [
            min(high, (low + high + 1) // 2) for low, high in zip(lean, budgets, strict=True)
        ]
        for goal, name in ((halfway, "half of the slack"), (budgets, "all of the slack")):
            plan = self._solved(profile, goal)
            self._run(plan, f"a plan for {name}")
            yield self._observed(plan, reads_bytes=True)
            if self._failed():
                return self._stepped_down(plan)
            profile = self._corrected(plan)
        while self._over(plan):
            plan = self._solved(profile, budgets)
            self._run(plan, "a corrected plan")
            yield self._observed(plan, reads_bytes=True)
            if self._failed():
                return self._stepped_down(plan)
            profile = self._corrected(plan)
        return plan

    def _corrected(self, plan: Plan) -> Profile:
        """The plan's profile with what it missed of each stage's peak added to that stage."""
        predicted = [cost.peak.bytes for cost in plan.cost.stages]
        return with_missed_bytes(plan.profile, predicted, self._peaks())

    def _over(self, plan: Plan) -> bool:
        seen = self._peaks()
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
                plan = self._solved(plan.profile, plan.budget_bytes)
                self._run(plan, f"a plan for {plan.schedule.num_microbatches} microbatches")
                self._store.save(plan)
            plan = yield from self._carried(plan, reads_bytes=self.memory.is_cheap)

    def _carried(
        self, plan: Plan, reads_bytes: bool
    ) -> Generator[AbstractContextManager[None], None, Plan]:
        """One step under the plan; returns the plan for the next one."""
        assert self._guard is not None, "a step under a plan before the guard is there"
        yield self._observed(plan, reads_bytes)
        if self._failed() or self._guard.outcome != FINE:
            return self._stepped_down(plan)
        return plan

    def _failed(self) -> bool:
        """Whether a rank ran out of memory in this step; says so."""
        assert self._guard is not None, "a step under a plan before the guard is there"
        if self._guard.outcome != FAILED:
            return False
        if self._guard.lost_in_a_row == LOST_IN_A_ROW:
            raise LostStepsError(
                f"The last {LOST_IN_A_ROW} steps ran out of memory and were lost, the last one "
                f"under {self.applied.policy.format()}, next to which recompute can free no more. "
                "Give the job more memory for each layer: a smaller --micro-batch-size, more "
                "tensor, context or pipeline parallel ranks, or fewer other things on the device."
            )
        self.job.say("recompute auto: out of memory; this step's update was skipped.")
        return True

    @contextmanager
    def _observed(self, plan: Plan, reads_bytes: bool) -> Iterator[None]:
        """A step under the plan."""
        assert self._guard is not None, "a step under a plan before the guard is there"
        self._plan = plan
        read = self.memory.watching() if reads_bytes else nullcontext()
        with self._guard.step(), read:
            yield

    def _new_guard(self) -> StepGuard:
        return StepGuard(self.chunks, self.optimizer, self._is_short, self._leave_less)

    def _leave_less(self, why: str) -> None:
        """Before this rank's error ends the job: the next plan down, for the restart to begin with.

        The other ranks wait for this one, so it decides alone.
        """
        less = None
        if self._plan is not None:
            outcomes = [FINE] * self._plan.layout.num_stages
            outcomes[self.stage] = FAILED
            less = self._less(self._plan, outcomes)
        left = "no smaller plan could be left"
        if less is not None and self._store.leave(less):
            left = f"a restart begins with less, from {self._store.path}"
        logger.error(
            "recompute auto: out of memory on pipeline stage %d, and the other ranks cannot finish "
            "the step without this one: %s. The job ends; %s.",
            self.stage,
            why,
            left,
        )

    def _is_short(self) -> bool:
        """Whether this rank passed its budget in this step, or its allocator had to retry."""
        if self._plan is None:
            return False
        return self.memory.is_short(self._plan.budget_bytes[self.stage])

    def _less(self, plan: Plan, outcomes: Sequence[int]) -> Plan | None:
        """The best plan with a notch less for the stages that ran short; alike on every rank.

        A notch is a part of the way from the stage's peak to what its leanest policy needs. The
        budget stays what was asked for; what the prediction evidently misses is added to the
        stage, so that a restart, and a plan for other microbatches, count it too.
        """
        leanest = self._planner(plan.profile).evaluate(self._leanest).stages
        stages, notes = list(plan.profile.stages), list(plan.notes)
        for stage, outcome in enumerate(outcomes):
            peak, least = plan.cost.stages[stage].peak_high_bytes, leanest[stage].peak_high_bytes
            if outcome == FINE or peak <= least:
                continue
            notch = max(1, (peak - least) * self._notches() // NOTCHES)
            missed = plan.budget_bytes[stage] - peak + notch
            residual = stages[stage].residual_bytes + missed
            stages[stage] = replace(stages[stage], residual_bytes=residual)
            notes.append(
                f"step {self.steps}: stage {stage} short of memory, went down by {gib(notch)} GiB"
            )
        if len(notes) == len(plan.notes):
            return None
        planner = self._planner(replace(plan.profile, stages=tuple(stages)))
        return replace(make_plan(planner, plan.budget_bytes), notes=tuple(notes))

    def _notches(self) -> int:
        """How many at once: more with every step that is lost, so that they end."""
        lost = 0 if self._guard is None else self._guard.lost_in_a_row
        return int(min(NOTCHES, 2 ** max(0, lost - 1)))

    def _stepped_down(self, plan: Plan) -> Plan:
        assert self._guard is not None, "a step under a plan before the guard is there"
        outcomes = self._by_stage(self._guard.own_outcome, max)
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
        budgets = self._budgets(plan.profile)
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
        plan = self._solved(plan.profile, budgets)
        self._store.save(plan)
        return plan

    def _tell(self, plan: Plan) -> None:
        """A row per stage, and the writers that are on, once the plan has run a step."""
        full = self._planner(plan.profile).evaluate(self._leanest)
        peaks = self._peaks() if self.steps else None
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
