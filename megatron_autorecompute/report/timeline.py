"""One step of a plan, event by event: when each runs, and the bytes that its stage then holds.

Bytes come from `planner.cost.peak_memory`, times from the step's replay. Events are entries of
arrays, not records: a step of 16 stages, 8 chunks and 256 microbatches has 65,536.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.planner.cost.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.cost.copies import OffloadedStep, StageCopies
from megatron_autorecompute.planner.cost.peak_memory import (
    StageBase,
    StageBytes,
    every_moment,
    stage_base,
)
from megatron_autorecompute.planner.cost.policy_cost import PolicyCosts
from megatron_autorecompute.planner.cost.step_time import event_ends_ms
from megatron_autorecompute.planner.cost.unit_costs import (
    PS_PER_MS,
    CostTable,
    Unit,
    fastest_choice,
)
from megatron_autorecompute.planner.plan import Plan

Bytes = NDArray[np.int64]
Numbers = NDArray[np.intp]
Times = NDArray[np.float64]


MOST_EVENTS = 1 << 18
"""Events of a step, all stages together, up to which the whole step is drawn."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One unit of one event."""

    event: int
    """The event's position in the stage's columns."""
    unit: int
    """The unit's position in the event's chunk."""


@dataclass(frozen=True, slots=True)
class StageTimeline:
    """One stage's step. Arrays have one entry for each event, in order."""

    stage: int
    """The stage's number."""
    budget_bytes: int
    """Bytes that torch may allocate."""
    units: tuple[tuple[Unit, ...], ...]
    """The units of every chunk, in the order in which their forwards run. Their backward transient
    contains the gradient of the chunk's output if that is kept."""
    recompute_ps: tuple[tuple[int, ...], ...]
    """The part of each unit's backward that recompute adds, without what begins early."""
    backward: NDArray[np.bool_]
    """Whether the event is a backward."""
    chunk: Numbers
    """Which chunk runs."""
    microbatch: Numbers
    """The microbatch of the event."""
    start_ms: Times
    """Since the step began."""
    end_ms: Times
    """Since the step began."""
    ahead_ms: Times
    """Time of the event's recompute that begins early, as soon as the event before ends."""
    in_flight_bytes: Bytes
    """Bytes held by layers for microbatches that wait for their backward. Two events side by side
    (EP overlap) have as much as makes the highest point of each right."""
    outside_bytes: Bytes
    """Bytes held by embedding and head for these microbatches."""
    overhead_bytes: Bytes
    """Boundary tensors, what the measured job itself kept, the measured residual, and what CUDA
    graphs take besides."""
    peak_bytes: Bytes
    """The most bytes alive, all of these included."""
    static_bytes: int
    """Parameters, gradients, optimizer state, buffers."""
    optimizer_step_peak_bytes: int
    """Bytes on top of static_bytes in the optimizer step, after the last event."""
    binding: Moment | None
    """The stage's fullest moment; None if it is the optimizer step."""
    copies: StageCopies | None = None
    """Copies to host memory and back. None where nothing leaves."""
    copy_bytes: tuple[Bytes, ...] = ()
    """For each event: the most bytes that copies add to those of records while each unit runs."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The events of a whole step."""

    stages: tuple[StageTimeline, ...]
    step_ms: float
    """The end of the last event, in ms."""
    num_microbatches: int
    """Microbatches of the drawn step: all, as many as show every moment of a very long step, or as
    many as were replayed with copies."""


def timeline(plan: Plan) -> Timeline:
    """Replay a plan's step; of a very long one, a step of fewer microbatches with its moments.

    Raises: ProfileError if its profile lacks a record.
    """
    schedule = plan.schedule
    if 2 * schedule.num_stages * schedule.num_chunks * schedule.num_microbatches > MOST_EVENTS:
        plan = replace(plan, schedule=schedule.shortened())
    costs = PolicyCosts(plan.profile, plan.layout, plan.schedule, plan.imbalance_percentile)
    copying = costs.copies(plan.policy) if plan.policy.offloads else None
    if copying is None:
        rows = [(c.forward_ms, c.backward_ms, c.ahead_ms) for c in plan.cost.stages]
        forward, backward, ahead = zip(*rows, strict=True)
        ends = event_ends_ms(plan.schedule, forward, backward, ahead if all(ahead) else None)
        stages = tuple(_stage(plan, stage, end_ms) for stage, end_ms in enumerate(ends))
    else:
        plan = replace(plan, schedule=copying.schedule)
        stages = tuple(_with_copies(plan, stage, copying) for stage in range(len(copying.stages)))
    step_ms = max(float(stage.end_ms.max()) for stage in stages)
    return Timeline(stages, step_ms, plan.schedule.num_microbatches)


def _with_copies(plan: Plan, stage: int, step: OffloadedStep) -> StageTimeline:
    copies = step.stages[stage]
    spans = np.array([(one.begin_ps, one.end_ps) for one in copies.ran]) / PS_PER_MS
    copy_bytes = tuple(
        np.full(len(copies.chunks[moment.chunk].units), copies.during(event))
        if moment.in_parts
        else copies.by_unit(event, moment.chunk, backward=moment.direction == "backward")
        for event, moment in enumerate(every_moment(plan.profile, plan.schedule, stage))
    )
    found = _stage(plan, stage, spans[:, 1], copy_bytes)
    return replace(found, start_ms=spans[:, 0], copies=copies)


def _stage(
    plan: Plan, stage: int, end_ms: Times, copy_bytes: tuple[Bytes, ...] = ()
) -> StageTimeline:
    table = CostTable(plan.profile, plan.imbalance_percentile)
    policy, chunks = plan.policy, plan.layout.stages[stage]
    base = stage_base(plan.profile, plan.layout, stage)
    columns = [ChunkColumns(chunk, table.chunk_units(chunk, policy)) for chunk in chunks]
    moments = every_moment(plan.profile, plan.schedule, stage)
    backward = np.array([moment.direction == "backward" for moment in moments])
    chunk = np.array([moment.chunk for moment in moments], np.intp)
    in_flight = np.array([moment.in_flight for moment in moments], np.int64)
    outside = np.array([c.outside_bytes.sum() for c in columns], np.int64)
    held = np.array([c.held_bytes.sum() for c in columns], np.int64)
    own = StageBytes(base, columns)
    constant = np.array([own.constant(moment) for moment in moments], np.int64)
    reach = [
        [c.reach_bytes(direction, base.boundary_bytes) for c in columns]
        for direction in ("forward", "backward")
    ]
    running = [reach[of][at] for of, at in zip(backward.astype(int), chunk, strict=True)]
    # What is beside the units of an event in parts.
    other = np.array([own.running(m).most_bytes[m.direction] + own.kept(m) for m in moments])
    other -= _highest(running)
    if copy_bytes:
        running = [own + copied for own, copied in zip(running, copy_bytes, strict=True)]
    peaks = constant + in_flight @ held + other + _highest(running)
    binding = None
    if peaks.max() > base.static.total_bytes + base.optimizer_step_peak_bytes:
        event = int(peaks.argmax())
        binding = Moment(event, int(running[event].argmax()))
    cost = plan.cost.stages[stage]
    apart = cost.peak.breakdown.graph_bytes - base.apart_bytes
    taken = np.where(backward, np.array(cost.backward_ms)[chunk], np.array(cost.forward_ms)[chunk])
    ahead = np.where(backward, np.array(cost.ahead_ms or (0.0,) * len(chunks))[chunk], 0.0)
    return StageTimeline(
        stage=stage,
        budget_bytes=plan.budget_bytes[stage],
        units=tuple(tuple(_in_place(column, base)) for column in columns),
        recompute_ps=tuple(tuple(_recompute_ps(table, column)) for column in columns),
        backward=backward,
        chunk=chunk,
        microbatch=np.array([e.microbatch for e in plan.schedule.events(stage)], np.intp),
        start_ms=end_ms - (taken - ahead),
        end_ms=end_ms,
        ahead_ms=ahead,
        in_flight_bytes=in_flight @ (held - outside) + other,
        outside_bytes=in_flight @ outside,
        overhead_bytes=constant + apart - base.static.total_bytes,
        peak_bytes=peaks + apart,
        static_bytes=base.static.total_bytes,
        optimizer_step_peak_bytes=base.optimizer_step_peak_bytes,
        binding=binding,
        copy_bytes=copy_bytes,
    )


def _highest(units: Sequence[Bytes]) -> Bytes:
    return np.array([own.max() for own in units], np.int64)


def _in_place(columns: ChunkColumns, base: StageBase) -> Iterator[Unit]:
    """The units of a chunk with the transients that they have at their place."""
    transients = columns.transient_bytes("backward", base.boundary_bytes).tolist()
    for unit, backward in zip(columns.units, transients, strict=True):
        yield replace(unit, backward_transient_bytes=backward)


def _recompute_ps(table: CostTable, columns: ChunkColumns) -> Iterator[int]:
    for unit in columns.units:
        plain = (
            table.layer_in(columns.chunk, i, fastest_choice(table, i)).backward_ps
            for i in unit.layers
        )
        without = sum(plain) if unit.layers else unit.backward_ps
        yield max(0, unit.backward_ps - without) - unit.ahead_ps
