"""The first steps of a job: under the leanest policy, then with layers in turn at every choice."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megatron_autorecompute.compat.timers import BACKWARD, FORWARD, OPTIMIZER, running
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import MeasuredStep, Profile, RankStep, covers
from megatron_autorecompute.runtime.calls import AHEAD, SeenTokens
from megatron_autorecompute.runtime.decisions import Decisions
from megatron_autorecompute.runtime.lengths_seen import Points
from megatron_autorecompute.runtime.measurement import Measurement
from megatron_autorecompute.runtime.offload import OffloadCounter, host_link
from megatron_autorecompute.runtime.plan_in_force import RAISED, PlanInForce
from megatron_autorecompute.runtime.probe import DEVICE_CLOCK
from megatron_autorecompute.runtime.samples import lower_quartile

WHOLE_STEPS = 3
"""The number of steps under each of two policies in which only Megatron's timers are read."""
Steps = Generator[AbstractContextManager[None], None, None]
"""One context for each training step."""

SETTLING_STEPS = 2
"""Steps under the leanest policy before measuring. They allocate what stays (optimizer state,
communication buffers), and show what the leanest policy needs."""


class Measuring:
    """Measures a job in ordinary steps; every rank makes one in the same way. `in_force` has the
    policy in force, switched from step to step; `seen` the tokens of the running call."""

    def __init__(self, decisions: Decisions, in_force: PlanInForce, seen: SeenTokens) -> None:
        self.decisions, self.shard = decisions, decisions.shard
        self.memory, self.job = decisions.memory, decisions.job
        self.applied, self.in_force = in_force.applied, in_force
        self.points: Points | None = None
        """What was seen at which lengths, in a loop whose microbatches differ."""
        if self.job.calls is not None:
            self.points = Points()
        self._left_layers = OffloadCounter(self.shard.chunks, DEVICE_CLOCK, self.shard.may_offload)
        self.measurement = Measurement(
            self.shard,
            self.applied,
            points=self.points,
            routed=lambda: seen.routed,
            left=lambda: self._left_layers.found,
        )
        self.is_over_budget = False
        """Whether the last step under the leanest policy needed more than the budget."""
        self._left = 0
        """The most steps still to come, as printed; 0 while this is not known."""
        self._whole_steps: list[WholeStep] = []
        self._whole_steps_each = 0
        """Steps under each of two policies that only Megatron's timers watch; 0: they run in the
        timed steps."""

    def run(
        self, fingerprint: dict[str, str], ended_before: int = 0
    ) -> Generator[AbstractContextManager[None], None, Profile]:
        """Run all measuring steps; returns the profile, with the figures that budgets need.

        Args:
            fingerprint: the fingerprint of the job, for the profile.
            ended_before: number of earlier starts of this job that ran out of memory while
                measuring; each halves how many layers leave the leanest policy at once.

        Raises InfeasibleError: with plan only, the leanest policy needs more than the budget.
        """
        self.job.say("recompute auto: measuring in the first steps, from the leanest policy on")
        if ended_before:
            self.job.say(
                f"recompute auto: {ended_before} job(s) before this one ran out of memory while "
                "measuring; fewer layers at once leave the leanest policy this time."
            )
        self.memory.begin_measuring()
        lean = yield from self._settle()
        yield from self._all_choices(lean, ended_before)
        profile = self.measurement.profile(
            self.shard.model(),
            self.job.parallelism,
            self.memory.static(),
            fingerprint=fingerprint,
        )
        if any(record.offload_groups for kind in profile.kinds for record in kind.choices):
            profile = replace(profile, host_link=host_link())
        if self.points is not None:
            return self.decisions.with_lengths(profile, self.points)
        return self.decisions.with_others(self._with_whole_steps(profile), lean)

    def _settle(self) -> Generator[AbstractContextManager[None], None, tuple[int, ...]]:
        """Run the leanest policy until it has settled and is within the budget.

        Returns the bytes that every stage needed, or would have at the longest microbatch.
        """
        settled, said = 0, False
        longest: tuple[int, ...] = ()
        while settled < SETTLING_STEPS:
            yield from self._until_done(self._settling)
            over = self.decisions.too_lean(self.in_force.num_steps)
            self.is_over_budget = over is not None
            settled += over is None
            lean = self._at_longest(self.decisions.peaks())
            longest = tuple(map(max, longest, lean)) if longest else lean
            if over and not said:
                said = True
                self.job.say(
                    f"recompute auto: OVER BUDGET: {over} Training goes on under the leanest "
                    "policy; measuring begins when it is within the budget."
                )
        return self.decisions.peaks() if self.job.calls is None else longest

    def _at_longest(self, peaks: tuple[int, ...]) -> tuple[int, ...]:
        """What stages need at the longest microbatch, from their peaks in the last call."""
        calls = self.job.calls
        if calls is None or not calls.last:
            return peaks
        static = self.shard.by_stage(self.memory.static().total_bytes, max)
        longer = max(1.0, self._longest_tokens() / calls.last)
        return tuple(
            math.ceil(fixed + max(0, peak - fixed) * longer)
            for fixed, peak in zip(static, peaks, strict=True)
        )

    def _longest_tokens(self) -> int:
        """Tokens of the longest microbatch to come; 0 if lengths do not vary."""
        calls = self.job.calls
        return 0 if calls is None else calls.max_tokens or math.ceil(AHEAD * calls.seen)

    def _all_choices(self, lean: tuple[int, ...], ended_before: int) -> Steps:
        """Bytes, then times: to ask the allocator takes a host as long as a few launches do."""
        asked = self.decisions.options.recompute_measure_steps
        no_room = [0] * self.shard.layout.num_stages
        # One measured layer without recompute tells how many will fit at once.
        yield from self._bytes(no_room, 1)
        room = self._room(lean) if self.measurement.most_held_bytes() else no_room
        room = [layers >> ended_before for layers in room]
        self._left = max(1, asked - 1)
        yield from self._bytes(room, self._left // 2)
        if self.job.timers:
            spare = self._left - self.measurement.steps_to_show(room)
            self._whole_steps_each = max(0, min(WHOLE_STEPS, asked // 8, spare // 2))
        yield from self._times(room, self._left - 2 * self._whole_steps_each)
        yield from self._whole(room, self._whole_steps_each)
        if missing := self.measurement.unseen():
            names = ", ".join(f"{choice} ({kind.name})" for choice, kind in missing)
            self.job.say(
                f"recompute auto: {names}: not measured in {asked} step(s), and left out."
                + " More: --recompute-measure-steps." * (self.job.calls is None)
            )

    def _bytes(self, room: list[int], most_steps: int) -> Steps:
        """Steps in which layers take turns at every choice, and bytes are read: `most_steps` at
        most, and choices that are left stay unmeasured. `room`: how many layers of each stage may
        leave the leanest choice at once."""
        shown = self.measurement.policies(room=room, most_steps=most_steps)
        yield from self._in_turn(shown, self._read)

    def _times(self, room: list[int], most_steps: int) -> Steps:
        """Steps in which layers take turns at every choice, and are timed; as `_bytes`."""
        microbatches = self.job.num_microbatches()
        shown = self.measurement.turns(microbatches=microbatches, room=room, most_steps=most_steps)
        yield from self._in_turn(shown, self._timed)

    def _whole(self, room: list[int], each: int) -> Steps:
        """So many steps in which nothing but Megatron's own timers is read, under the leanest
        policy and under the richest that there is room for; of several the first does not count."""

        def shown() -> Iterator[bool]:
            for policy in (self.measurement.richest(room), self.decisions.leanest):
                self.applied.switch(policy)
                yield from (number > 0 or each == 1 for number in range(each))

        yield from self._in_turn(shown(), self._unwatched)

    def _in_turn(
        self,
        shown: Iterator[Any],
        watched: Callable[[Any], AbstractContextManager[None]],
    ) -> Steps:
        """Steps under the policies that `shown` switches through; what it yields before a step goes
        to `watched`, which makes the step's context."""
        for is_timed in shown:
            if self._left:
                self._left -= 1
                more = f"at most {self._left} more after this step"
                words = more if self._left else "this step is the last"
                self.job.say(f"recompute auto: measuring, {words}")
            yield from self._until_done(partial(watched, is_timed))

    def _room(self, lean: tuple[int, ...]) -> list[int]:
        """How many layers of each stage may leave the leanest policy in one measuring step.

        Each layer adds at most what a layer without recompute holds, for every microbatch in
        flight.
        """
        schedule = self.shard.schedule(self.job.num_microbatches())
        most_held = max(1, self._most_held_bytes())
        room = []
        budgets = self.decisions.found_budgets()
        for stage, (low, high) in enumerate(zip(lean, budgets, strict=True)):
            in_flight = schedule.warmup(stage) + 1
            room.append(max(0, high - low) // (most_held * in_flight))
        return room

    def _most_held_bytes(self) -> int:
        """The most that a layer holds of any microbatch."""
        if self.points is None:
            return self.measurement.most_held_bytes()
        per_token = max(self.shard.all_gather(self.points.most_held_per_token()))
        boundary_bytes = self.measurement.boundary_bytes
        return math.ceil(per_token * self._longest_tokens()) + boundary_bytes

    # --- one step ---------------------------------------------------------------------------------

    def _until_done(self, step: Callable[[], AbstractContextManager[None]]) -> Steps:
        """A step, made anew as long as it ends with an exception that the loop survives."""
        yield step()
        while self.in_force.outcome == RAISED:
            yield step()

    @contextmanager
    def _settling(self) -> Iterator[None]:
        with self.memory.measuring() as memory:
            with self.in_force.guarded():
                yield
            self.memory.note(memory, memory.peak_bytes)

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Watches what a step offloads."""
        if not self.applied.policy.offloads:
            yield
            return
        self._left_layers.begin()
        with self._left_layers.watching():
            yield
        self._left_layers.keep(self.applied.policy.layers)

    @contextmanager
    def _timed(self, is_timed: bool) -> Iterator[None]:
        watched = self.measurement.watch(None, times=is_timed)
        timers = running(None if self._whole_steps_each else self.job.timers)
        with timers as took_ms, self.memory.beside(), watched, self.in_force.guarded():
            yield
        if not self._whole_steps_each:
            self._note_whole_step(took_ms)

    @contextmanager
    def _unwatched(self, counts: bool) -> Iterator[None]:
        timers = running(self.job.timers)
        with timers as took_ms, self.memory.beside(), self.in_force.guarded():
            yield
        if counts:
            self._note_whole_step(took_ms)

    @contextmanager
    def _read(self, _: None) -> Iterator[None]:
        with self.memory.measuring() as memory:
            watched = self.measurement.watch(memory, times=False)
            with self._copying(), watched, self.in_force.guarded():
                yield
            self.memory.note(memory, self.measurement.peak_bytes)
            if self.points is not None:
                self.points.note_peak(self.applied.policy, self.memory.peak_bytes)

    def _note_whole_step(self, took_ms: Mapping[str, float]) -> None:
        """Keep Megatron's timers and torch's statistics of the step that has just run."""
        if self.applied.policy.offloads:
            return
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        number = self.in_force.num_steps if self.job.iteration is None else self.job.iteration() + 1
        allocated, reserved = self.memory.torch_peaks
        seen = RankStep(
            rank,
            self.shard.stage,
            took_ms.get(FORWARD),
            took_ms.get(BACKWARD),
            took_ms.get(OPTIMIZER),
            allocated,
            reserved,
        )
        microbatches = self.job.num_microbatches()
        self._whole_steps.append(WholeStep(number, self.applied.policy, microbatches, seen))

    def _with_whole_steps(self, profile: Profile) -> Profile:
        """The profile with two additions: each stage's residual time (Megatron's timers less the
        sum of layers), and the step of median time with the figures of every rank."""
        problem = self.decisions.problem(profile)
        # The last step may have choices without a record.
        steps = [step for step in self._whole_steps if covers(profile.kinds, step.policy)]
        ranks = self.shard.all_gather(steps)
        stages = zip(profile.stages, residuals_ms(problem, ranks), strict=True)
        return replace(
            profile,
            stages=tuple(replace(record, residual_ms=ms) for record, ms in stages),
            measured_step=median_step(ranks),
        )


# --- whole steps, in Megatron's own timers and torch's own statistics -----------------------------


@dataclass(frozen=True, slots=True)
class WholeStep:
    """One measuring step on one rank."""

    iteration: int
    """The iteration as Megatron logs it."""
    policy: RecomputePolicy
    """What ran."""
    num_microbatches: int
    """The number of microbatches of the step."""
    seen: RankStep
    """The figures."""

    @property
    def compute_ms(self) -> float | None:
        """Forward plus backward of all microbatches; None if a timer did not run."""
        forward_ms, backward_ms = self.seen.forward_compute_ms, self.seen.backward_compute_ms
        return None if forward_ms is None or backward_ms is None else forward_ms + backward_ms


def residuals_ms(problem: Problem, ranks: Sequence[Sequence[WholeStep]]) -> tuple[float, ...]:
    """Time of one microbatch that layers do not explain, for every stage; 0 if no timer ran.

    Of each policy's steps the lower quartile counts, and of policies the one that leaves least:
    what disturbs steps makes them longer. It is never negative, because no step takes less than its
    layers.

    Args:
        problem: the problem of a profile whose residual times are 0.
        ranks: the steps of every rank: at least one each, or none on all.
    """
    by_stage: list[list[float]] = [[] for _ in range(problem.layout.num_stages)]
    costs = {policy: problem.costs.met_ms(policy) for policy in {s.policy for s in ranks[0]}}
    for steps in ranks:
        left: dict[RecomputePolicy, list[float]] = defaultdict(list)
        for step in steps:
            if step.compute_ms is not None:
                took_ms = step.compute_ms / step.num_microbatches
                left[step.policy].append(took_ms - costs[step.policy][step.seen.stage])
        if left:
            by_stage[steps[0].seen.stage].append(min(map(lower_quartile, left.values())))
    return tuple(max(0.0, statistics.mean(values)) if values else 0.0 for values in by_stage)


def median_step(ranks: Sequence[Sequence[WholeStep]]) -> MeasuredStep | None:
    """The step of median time (forward plus backward, slowest rank), with all ranks' figures."""
    steps = list(zip(*ranks, strict=True))
    if not steps:
        return None
    slowest_ms = [max(step.compute_ms or 0.0 for step in by_rank) for by_rank in steps]
    chosen = steps[slowest_ms.index(statistics.median_low(slowest_ms))]
    return MeasuredStep(
        iteration=chosen[0].iteration,
        recompute_policy=chosen[0].policy.format(),
        num_microbatches=chosen[0].num_microbatches,
        ranks=tuple(step.seen for step in chosen),
    )
