"""Memory and time of a given policy: the peak of every stage, and the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_autorecompute.planner.cost import two_clocks
from megatron_autorecompute.planner.cost.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.cost.copies import (
    OffloadedStep,
    host_link,
    offloaded_step,
    offloads,
)
from megatron_autorecompute.planner.cost.layout import Chunk, Layout
from megatron_autorecompute.planner.cost.peak_memory import (
    Peak,
    StageBase,
    check_layout,
    every_moment,
    for_schedule,
    stage_base,
    stage_moments,
    stage_peak,
)
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.stage_times import Times, residual_times, times_of
from megatron_autorecompute.planner.cost.step_time import finished
from megatron_autorecompute.planner.cost.unit_costs import (
    PS_PER_MS,
    SIGN,
    Bound,
    CostTable,
    StageUnits,
    Unit,
    fastest_choice,
)
from megatron_autorecompute.policy import RecomputePolicy, check_length
from megatron_autorecompute.profile import Profile

_AT_ONCE = 256
"""Steps replayed together: their tables stay small."""
HOST_BOUND = 0.01
"""Share of a step that waits for launches: below it the first kernels of a step make it up."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """Memory and time of one stage under a policy."""

    stage: int
    """The stage's number, from 0."""
    peak: Peak
    """The fullest moment of the stage's step."""
    peak_low_bytes: int
    """The peak with every figure at the low end of its interval."""
    peak_high_bytes: int
    """The peak with every figure at the high end. This is what must fit the budget."""
    forward_ms: tuple[float, ...]
    """Forward time of each chunk, for one microbatch."""
    backward_ms: tuple[float, ...]
    """Backward time of each chunk, for one microbatch, recompute included."""
    ideal_ms: float
    """Time of all microbatches if every stage had the mean work and recomputed nothing."""
    imbalance_ms: float
    """Time added because this stage has more than the mean work; negative if it has less."""
    recompute_ms: float
    """Time that recompute adds, for all microbatches."""
    stall_ms: float = 0.0
    """Time that backwards wait for copies from host memory, for all microbatches."""
    host_bytes: int = 0
    """Host memory that one device's copies take at most."""
    ahead_ms: tuple[float, ...] = ()
    """The recompute of each chunk that begins before the gradient is there; it is part of
    backward_ms. Empty where none does."""

    @property
    def busy_ms(self) -> float:
        """All microbatches: ideal + imbalance + recompute."""
        return self.ideal_ms + self.imbalance_ms + self.recompute_ms


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """Memory and time of a whole step under a policy."""

    stages: tuple[StageCost, ...]
    """The cost of each stage, first stage first."""
    step_ms: float
    """Time of the step, by a replay in which messages take no time."""
    bubble_ms: float
    """The part of step_ms in which the busiest stage waits."""
    recompute_ms: float
    """The part of step_ms that recompute adds: step_ms minus stall_ms, minus the same step without
    recompute."""
    stall_ms: float = 0.0
    """The part of step_ms that is added by waits for copies from host memory."""
    ahead_ms: float = 0.0
    """The time that step_ms saves because recompute begins before its gradient is there."""
    launch_ms: float = 0.0
    """The part of step_ms in which the device waits for the host to launch its kernels."""

    @property
    def is_host_bound(self) -> bool:
        """Whether the host decides how long the step is."""
        return self.launch_ms > HOST_BOUND * self.step_ms

    @property
    def peak_high_bytes(self) -> int:
        """The high end of the fullest stage's peak."""
        return max(stage.peak_high_bytes for stage in self.stages)


def evaluate(
    profile: Profile,
    layout: Layout,
    schedule: Schedule,
    policy: RecomputePolicy,
    *,
    percentile: float | None = None,
) -> PolicyCost:
    """Peak of every stage and time of the step under a policy.

    Raises: ProfileError if the profile lacks a record, or layout and profile disagree; PolicyError
    if a group spans two chunks.
    """
    return PolicyCosts(profile, layout, schedule, percentile).of(policy)


class PolicyCosts:
    """Costs of policies in one model; what they have in common is worked out once.

    Args: as of `evaluate`, but the policy; `percentile` is of imbalance, in percent, and None takes
    the records as they are. Raises: ProfileError if layout and profile disagree.
    """

    def __init__(
        self,
        profile: Profile,
        layout: Layout,
        schedule: Schedule,
        percentile: float | None = None,
    ) -> None:
        check_layout(profile, layout, schedule)
        profile = for_schedule(profile, schedule)
        self.profile, self.layout, self.schedule = profile, layout, schedule
        self.percentile = percentile
        bounds: tuple[Bound, ...] = tuple(SIGN) if _is_uncertain(profile) else ("nominal",)
        self._tables = {bound: CostTable(profile, percentile, bound) for bound in bounds}
        host = [two_clocks.of_clock(profile, host=True)] if two_clocks.knows_host(profile) else []
        self.clocks = profile, *host
        """The profile, and where the host's times are known, that of the host alone."""
        self._bases: dict[tuple[int, Bound], StageBase] = {}
        self._known: dict[RecomputePolicy, PolicyCost] = {}
        self._peaks_alone: dict[tuple[object, ...], Peak] = {}
        """Peaks of stages without copies, by the choices of the stage's layers."""
        self._known_units: dict[tuple[object, ...], tuple[Unit, ...]] = {}
        """Units of chunks, by the choices of their layers."""
        self._steps_ms: dict[tuple[bytes, ...], float] = {}
        """Steps, by the times of all stages."""

    def of(self, policy: RecomputePolicy) -> PolicyCost:
        """Peak of every stage and time of the step. Raises: as `evaluate`."""
        if policy not in self._known:
            self._known[policy] = self._of(policy)
        return self._known[policy]

    @property
    def high(self) -> CostTable:
        """What must fit a budget: the high end of every figure."""
        return self._tables.get("high", self._tables["nominal"])

    def replay(self, policies: Iterable[RecomputePolicy]) -> None:
        """Replay the steps of many policies together, for `of`. Raises: as `evaluate`."""
        found = {}
        for policy in policies:
            if not policy.is_ahead:
                times = self._times(policy)
                found[_key(times)] = times.both
        keys = [key for key in found if key not in self._steps_ms]
        for first in range(0, len(keys), _AT_ONCE):
            some = keys[first : first + _AT_ONCE]
            both = np.stack([found[key] for key in some], axis=-1)
            steps = finished(self.schedule, *both).max(axis=0) / PS_PER_MS
            self._steps_ms.update(zip(some, steps.tolist(), strict=True))

    def step_ms(self, policy: RecomputePolicy) -> float:
        """Time of the step without waits for copies and for the host. Raises: as `evaluate`."""
        return self._step_ms(self._times(policy))

    def peak_alone(self, stage: int, policy: RecomputePolicy, bound: Bound = "high") -> Peak:
        """The peak of a stage by the choices of its own layers, without bytes of copies under way.
        Raises: as `evaluate`."""
        bound = bound if bound in self._tables else "nominal"
        chunks = self.layout.stages[stage]
        key = bound, stage, *(policy.layers[layer] for chunk in chunks for layer in chunk.layers)
        if key not in self._peaks_alone:
            moments = stage_moments(self.profile, self.schedule, stage)
            columns = self._columns(stage, policy, bound)
            self._peaks_alone[key] = stage_peak(self._base(stage, bound), stage, columns, moments)
        return self._peaks_alone[key]

    def _of(self, policy: RecomputePolicy) -> PolicyCost:
        check_length(len(policy.layers), self.profile.num_layers, "The policy")
        step, stages = self.copies(policy), range(self.layout.num_stages)
        peaks = {
            bound: [self._peak(stage, policy, bound, step) for stage in stages]
            for bound in self._tables
        }
        cost = self._with_times(self._times(policy), peaks, step)
        both_ms = self._both_ms(policy)
        if both_ms is None:
            return cost
        launch_ms = max(0.0, both_ms - cost.step_ms)
        step_ms = cost.step_ms + launch_ms
        if policy.is_ahead:
            later_ms = self._both_ms(policy, begins_early=False) or 0.0
            cost = replace(cost, ahead_ms=max(0.0, later_ms - step_ms))
        recompute_ms = step_ms - cost.stall_ms - self._plain_both_ms
        return replace(cost, step_ms=step_ms, launch_ms=launch_ms, recompute_ms=recompute_ms)

    def met_ms(self, policy: RecomputePolicy) -> tuple[float, ...]:
        """Forward plus backward of one microbatch on each stage, if host and device meet before and
        after each, as Megatron's timers make them."""
        host = self._on_host(policy)
        if host is None:
            return tuple((self._times(policy).busy / PS_PER_MS).tolist())
        return two_clocks.met_ms(self.profile, policy, (self.units(policy), host), self._residual)

    def _both_ms(self, policy: RecomputePolicy, begins_early: bool = True) -> float | None:
        """The step of both clocks; None where the host's is not known."""
        host = self._on_host(policy)
        if host is None:
            return None
        shared, both = (self.profile, self.schedule, policy), (self.units(policy), host)
        return two_clocks.step_ms(*shared, both, self._residual, begins_early=begins_early)

    @cached_property
    def _plain_both_ms(self) -> float:
        """The step of both clocks without recompute; 0 where the host's is not known."""
        return self._both_ms(self._fastest) or 0.0

    @cached_property
    def clock_tables(self) -> tuple[CostTable, ...]:
        """The records as they are, of each of `clocks`."""
        return tuple(map(CostTable, self.clocks))

    def _on_host(self, policy: RecomputePolicy) -> StageUnits | None:
        """The units with the host's times."""
        return self.clock_tables[1].units(self.layout, policy) if len(self.clocks) > 1 else None

    def units(self, policy: RecomputePolicy) -> StageUnits:
        """The units of every stage and chunk, `[stage][chunk]`. Raises: as `evaluate`."""
        return [
            [self._chunk_units("nominal", chunk, policy) for chunk in chunks]
            for chunks in self.layout.stages
        ]

    def _chunk_units(self, bound: Bound, chunk: Chunk, policy: RecomputePolicy) -> tuple[Unit, ...]:
        key = bound, chunk, tuple([policy.layers[layer] for layer in chunk.layers])
        if key not in self._known_units:
            self._known_units[key] = self._tables[bound].chunk_units(chunk, policy)
        return self._known_units[key]

    def copies(self, policy: RecomputePolicy) -> OffloadedStep | None:
        """The step replayed with its copies; None where nothing is copied."""
        units = self.units(policy)
        if not offloads(units):
            return None
        return offloaded_step(self.schedule, units, self._residual.both, host_link(self.profile))

    def _peak(
        self, stage: int, policy: RecomputePolicy, bound: Bound, step: OffloadedStep | None
    ) -> Peak:
        """The peak of a stage, with the copies of a step."""
        if step is None:
            return self.peak_alone(stage, policy, bound)
        moments = every_moment(self.profile, step.schedule, stage)
        base, columns = self._base(stage, bound), self._columns(stage, policy, bound)
        return stage_peak(base, stage, columns, moments, step.stages[stage])

    def _columns(self, stage: int, policy: RecomputePolicy, bound: Bound) -> list[ChunkColumns]:
        chunks = self.layout.stages[stage]
        return [ChunkColumns(c, self._chunk_units(bound, c, policy)) for c in chunks]

    def _base(self, stage: int, bound: Bound) -> StageBase:
        if (stage, bound) not in self._bases:
            self._bases[stage, bound] = stage_base(self.profile, self.layout, stage, bound)
        return self._bases[stage, bound]

    @cached_property
    def _residual(self) -> Times:
        return residual_times(self._tables["nominal"], self.layout)

    @cached_property
    def _fastest(self) -> RecomputePolicy:
        """Every layer at `none`, or at its fastest choice if `none` has no record."""
        layers = range(self.profile.num_layers)
        return RecomputePolicy(tuple(fastest_choice(self.high, layer) for layer in layers))

    @cached_property
    def _plain(self) -> Times:
        """Times without recompute."""
        return self._times(self._fastest)

    def _with_times(
        self, times: Times, peaks: dict[Bound, list[Peak]], step: OffloadedStep | None
    ) -> PolicyCost:
        m = self.schedule.num_microbatches
        busy_ms, work_ms = ((part.busy / PS_PER_MS * m).tolist() for part in (times, self._plain))
        mean_ms = sum(work_ms) / len(work_ms)
        nominal = peaks["nominal"]
        low, high = peaks.get("low", nominal), peaks.get("high", nominal)
        ahead_ms = () if times.ahead is None else (times.ahead / PS_PER_MS).tolist()
        stages = tuple(
            StageCost(
                stage=stage,
                peak=nominal[stage],
                peak_low_bytes=low[stage].bytes,
                peak_high_bytes=high[stage].bytes,
                forward_ms=tuple((times.forward[stage] / PS_PER_MS).tolist()),
                backward_ms=tuple((times.backward[stage] / PS_PER_MS).tolist()),
                ideal_ms=mean_ms,
                imbalance_ms=work_ms[stage] - mean_ms,
                recompute_ms=busy_ms[stage] - work_ms[stage],
                ahead_ms=tuple(ahead_ms[stage]) if ahead_ms else (),
            )
            for stage in range(self.layout.num_stages)
        )
        step_ms, plain_ms = self._step_ms(times), self._step_ms(self._plain)
        cost = PolicyCost(stages, step_ms, step_ms - max(busy_ms), step_ms - plain_ms)
        if times.ahead is not None:
            cost = replace(cost, ahead_ms=self._step_ms(replace(times, ahead=None)) - step_ms)
        return cost if step is None else _with_copies(cost, step, m)

    def _times(self, policy: RecomputePolicy) -> Times:
        return times_of(self.units(policy)).plus(self._residual)

    def _step_ms(self, times: Times) -> float:
        key = _key(times)
        if key not in self._steps_ms:
            step_ps = finished(self.schedule, times.forward, times.backward, times.ahead).max()
            self._steps_ms[key] = float(step_ps / PS_PER_MS)
        return self._steps_ms[key]


def _key(times: Times) -> tuple[bytes, ...]:
    own = times.forward, times.backward, times.ahead
    return tuple(b"" if part is None else part.tobytes() for part in own)


def _is_uncertain(profile: Profile) -> bool:
    """Whether any bytes have an interval."""
    records, stages = profile.all_records, profile.stages
    return any(one.uncertainty_bytes for each in (records, stages) for one in each)


def _with_copies(cost: PolicyCost, step: OffloadedStep, num_microbatches: int) -> PolicyCost:
    times = num_microbatches / step.schedule.num_microbatches / PS_PER_MS
    stages = tuple(
        replace(stage, stall_ms=copies.stall_ps * times, host_bytes=copies.host_bytes)
        for stage, copies in zip(cost.stages, step.stages, strict=True)
    )
    stall_ms = max(0.0, step.step_ms - cost.step_ms)
    return replace(cost, stages=stages, step_ms=step.step_ms, stall_ms=stall_ms)
