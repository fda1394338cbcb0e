"""Memory and time of a given policy: the peak of every stage, and the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.planner.offloaded_step import (
    OffloadedStep,
    StageUnits,
    host_link,
    offloaded_step,
    offloads,
)
from megatron_autorecompute.planner.peak_memory import (
    ChunkColumns,
    Peak,
    check_layout,
    every_moment,
    stage_base,
    stage_moments,
    stage_peak,
)
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.planner.stage_times import Times, residual_times, times_of
from megatron_autorecompute.planner.step_time import replay_ms
from megatron_autorecompute.planner.unit_costs import (
    PS_PER_MS,
    SIGN,
    Bound,
    CostTable,
    Unit,
    fastest_choice,
)
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Profile


@dataclass(frozen=True, slots=True)
class StageCost:
    """Memory and time of one stage under a policy."""

    stage: int
    peak: Peak
    peak_low_bytes: int
    """Peak with every figure at the low end of its interval."""
    peak_high_bytes: int
    """Peak with every figure at the high end; this is what must fit the budget."""
    forward_ms: tuple[float, ...]
    """Per chunk, for one microbatch."""
    backward_ms: tuple[float, ...]
    """Per chunk, for one microbatch, recompute included."""
    ideal_ms: float
    """Time of all microbatches if every stage had the mean work and recomputed nothing."""
    imbalance_ms: float
    """Added because this stage's share of the model is above the mean; may be negative."""
    recompute_ms: float
    """Added by recompute."""
    stall_ms: float = 0.0
    """For which its backwards wait for copies from host memory, all microbatches."""
    host_bytes: int = 0
    """Of host memory that its copies come to take, on one device."""

    @property
    def busy_ms(self) -> float:
        """All microbatches: ideal + imbalance + recompute."""
        return self.ideal_ms + self.imbalance_ms + self.recompute_ms


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """Memory and time of a whole step under a policy."""

    stages: tuple[StageCost, ...]
    step_ms: float
    """Time of the step, by a replay in which messages take no time."""
    bubble_ms: float
    """The part of step_ms in which the busiest stage waits."""
    recompute_ms: float
    """The part of step_ms that recompute adds: step_ms without waits for copies, minus a replay
    without recompute."""
    stall_ms: float = 0.0
    """The part of step_ms that waits for copies from host memory add."""

    @property
    def peak_high_bytes(self) -> int:
        """Of the fullest stage."""
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
    check_layout(profile, layout, schedule)
    policy.checked_length(profile.num_layers, "The policy")
    tables = {bound: CostTable(profile, percentile, bound) for bound in SIGN}
    units = {
        bound: [[table.chunk_units(chunk, policy) for chunk in chunks] for chunks in layout.stages]
        for bound, table in tables.items()
    }
    step = _offloaded(profile, layout, schedule, units["nominal"])
    stages = range(layout.num_stages)
    if step is None:
        moments = [stage_moments(profile, schedule, stage) for stage in stages]
    else:
        moments = [tuple(every_moment(profile, step.schedule, stage)) for stage in stages]
    copied = [None if step is None else step.bytes_of(stage) for stage in stages]
    peaks = {
        bound: [
            stage_peak(
                stage_base(profile, layout, stage, bound),
                stage,
                columns,
                moments[stage],
                copied[stage],
            )
            for stage, columns in enumerate(_all_columns(layout, units[bound]))
        ]
        for bound in SIGN
    }
    return _with_times(profile, layout, schedule, units["nominal"], peaks, step)


def _offloaded(
    profile: Profile, layout: Layout, schedule: Schedule, units: StageUnits
) -> OffloadedStep | None:
    """The step replayed with its copies; None where nothing is copied."""
    if not offloads(units):
        return None
    residual = residual_times(CostTable(profile), layout)
    return offloaded_step(schedule, units, residual, host_link(profile))


def _all_columns(
    layout: Layout, units: Sequence[Sequence[tuple[Unit, ...]]]
) -> list[list[ChunkColumns]]:
    return [
        [ChunkColumns(chunk, u) for chunk, u in zip(chunks, stage_units, strict=True)]
        for chunks, stage_units in zip(layout.stages, units, strict=True)
    ]


def _with_times(
    profile: Profile,
    layout: Layout,
    schedule: Schedule,
    units: Sequence[Sequence[tuple[Unit, ...]]],
    peaks: dict[Bound, list[Peak]],
    step: OffloadedStep | None,
) -> PolicyCost:
    table = CostTable(profile)
    residual = residual_times(table, layout)
    times = times_of(units).plus(residual)
    plain = times_of(_without_recompute(table, layout)).plus(residual)
    m = schedule.num_microbatches
    busy_ms, work_ms = ((part.busy / PS_PER_MS * m).tolist() for part in (times, plain))
    mean_ms = sum(work_ms) / len(work_ms)
    stages = tuple(
        StageCost(
            stage=stage,
            peak=peaks["nominal"][stage],
            peak_low_bytes=peaks["low"][stage].bytes,
            peak_high_bytes=peaks["high"][stage].bytes,
            forward_ms=tuple((times.forward[stage] / PS_PER_MS).tolist()),
            backward_ms=tuple((times.backward[stage] / PS_PER_MS).tolist()),
            ideal_ms=mean_ms,
            imbalance_ms=work_ms[stage] - mean_ms,
            recompute_ms=busy_ms[stage] - work_ms[stage],
        )
        for stage in range(layout.num_stages)
    )
    step_ms = _step_ms(schedule, times)
    recompute_ms = step_ms - _step_ms(schedule, plain)
    cost = PolicyCost(stages, step_ms, step_ms - max(busy_ms), recompute_ms)
    return cost if step is None else _with_copies(cost, step, m)


def _with_copies(cost: PolicyCost, step: OffloadedStep, num_microbatches: int) -> PolicyCost:
    times = num_microbatches / step.schedule.num_microbatches / PS_PER_MS
    stages = tuple(
        replace(stage, stall_ms=copies.stall_ps * times, host_bytes=copies.host_bytes)
        for stage, copies in zip(cost.stages, step.stages, strict=True)
    )
    stall_ms = max(0.0, step.step_ms - cost.step_ms)
    return replace(cost, stages=stages, step_ms=step.step_ms, stall_ms=stall_ms)


def _step_ms(schedule: Schedule, times: Times) -> float:
    return replay_ms(schedule, times.forward / PS_PER_MS, times.backward / PS_PER_MS)


def _without_recompute(table: CostTable, layout: Layout) -> list[list[tuple[Unit, ...]]]:
    """Units with every layer at `none`, or at its fastest choice if `none` has no record."""
    policy = RecomputePolicy(
        tuple(fastest_choice(table, layer) for layer in range(table.profile.num_layers))
    )
    return [[table.chunk_units(chunk, policy) for chunk in chunks] for chunks in layout.stages]
