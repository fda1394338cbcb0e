"""Bytes of a stage at every moment of its step, and the highest of them.

While unit i of a chunk runs, a stage holds

    static + overhead + boundary tensors + sum over chunks of in_flight * held(chunk)
           + held of units 0 .. i of the running chunk + transient of unit i

So position matters: in the backward of an early layer the later ones are already freed. Of a
forward beside a backward (EP overlap) `overlap` has the bytes of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from operator import mul
from typing import Any

import numpy as np

from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.planner.cost import Ints, overlap, p2p_tensors
from megatron_autorecompute.planner.cost.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.cost.copies import StageCopies
from megatron_autorecompute.planner.cost.layout import Chunk, Layout
from megatron_autorecompute.planner.cost.p2p_tensors import Moment, decisive_moments
from megatron_autorecompute.planner.cost.schedule import Direction, Schedule
from megatron_autorecompute.planner.cost.unit_costs import SIGN, Bound, hidden_states_received
from megatron_autorecompute.profile import (
    Deferred,
    LayerBytes,
    Profile,
    ScheduleOverhead,
    StaticBytes,
    scaled_bytes,
)

MOST_BYTES_OF_A_STAGE = 1 << 59
MOST_MS_OF_A_STEP = float(1 << 31)
"""25 days; in picoseconds 61 bits."""


def for_schedule(profile: Profile, schedule: Schedule) -> Profile:
    """The profile without `also_static_bytes` where several microbatches of the chunk with the head
    are in flight."""
    records = (record for kind in profile.kinds for record in kind.choices)
    if schedule.runs_head_alone or not any(record.also_static_bytes for record in records):
        return profile
    kinds = (
        replace(kind, choices=tuple(replace(r, also_static_bytes=0) for r in kind.choices))
        for kind in profile.kinds
    )
    return replace(profile, kinds=tuple(kinds))


def check_layout(profile: Profile, layout: Layout, schedule: Schedule) -> None:
    """Raise ProfileError if layout, schedule and profile have different layers or stages."""
    layers = layout.num_layers, layout.mtp_num_layers
    model = profile.model.num_layers, profile.model.mtp_num_layers
    if layers != model:
        raise ProfileError(
            f"The layout has {layers[0]} layers and {layers[1]} MTP depths, the profile's model "
            f"{model[0]} and {model[1]}. Give the layout of this model."
        )
    shape = layout.num_stages, layout.num_chunks
    if shape != (schedule.num_stages, schedule.num_chunks):
        raise ProfileError(
            f"The layout has {shape[0]} stages of {shape[1]} chunks, the schedule "
            f"{schedule.num_stages} of {schedule.num_chunks}. Give the same to both."
        )


def check_figures(profile: Profile, schedule: Schedule) -> None:
    """Raise ProfileError for figures whose sums may exceed 64 bits; no real device has such."""
    factors = [point.factor for kind in profile.kinds for point in kind.imbalance]
    records = profile.all_records
    most = max(sum(astuple(LayerBytes.of(each))) + 3 * each.uncertainty_bytes for each in records)
    units = profile.num_layers + 3
    size = units * (scaled_bytes(most, max([1.0, *factors])) + 8 * profile.boundary_bytes)
    size *= schedule.warmup(0) + 2
    time_ms = units * max(record.forward_ms + record.backward_ms for record in records)
    time_ms *= schedule.num_microbatches
    if size > MOST_BYTES_OF_A_STAGE or time_ms > MOST_MS_OF_A_STEP:
        raise ProfileError(
            f"The records add up to as much as {size:.2g} bytes of a stage and {time_ms:.2g} ms "
            f"for a step; at most {MOST_BYTES_OF_A_STAGE:.2g} bytes and {MOST_MS_OF_A_STEP:.2g} ms "
            "are planned. Correct the records or the number of microbatches: bytes are of one "
            "device, times in milliseconds."
        )


@dataclass(frozen=True, slots=True)
class StageBase:
    """What a stage needs under every policy."""

    static: StaticBytes
    optimizer_step_peak_bytes: int
    """The optimizer step's peak above static bytes, with what others in the process hold."""
    overhead: ScheduleOverhead
    boundary_bytes: int
    """One boundary tensor; `p2p_tensors` counts them. Also the gradient of a chunk's output."""
    residual_bytes: int = 0
    """Measured minus predicted, at the asked end of its interval."""
    measured: bool = False
    """Whether the profile has a record of this stage; otherwise static bytes were added up."""
    apart_bytes: int = 0
    """Memory that forwards and backwards cannot use: with one CUDA graph of all of them, whose pool
    nothing else uses, that of the optimizer step."""
    deferred_bytes: int = 0
    """The bytes of one deferred run of the output layer; `Moment.deferred` counts these runs."""
    posts_both: bool = False
    """Whether one call posts a forward's and a backward's receive, and waits for both: several
    chunks without overlap_p2p_comm. What is recomputed in that wait is there in the forward."""
    exchanged: int = 1
    """Hidden states in one tensor between this stage and its neighbours; more where MTP depths are
    on another stage than the loss."""

    def constant_bytes(self, direction: Direction, extra: int, deferred: int = 0) -> int:
        """Bytes taken throughout a forward or backward, with `extra` boundary tensors and so many
        deferred runs of the output layer."""
        overhead = self.overhead
        rest = overhead.forward_bytes if direction == "forward" else overhead.backward_bytes
        rest += extra * self.exchanged * self.boundary_bytes + deferred * self.deferred_bytes
        return self.static.total_bytes + self.residual_bytes + rest + self.apart_bytes


def stage_base(profile: Profile, layout: Layout, stage: int, bound: Bound = "nominal") -> StageBase:
    """Static bytes, overhead and residual of one stage.

    The record of a stage is used if it was measured with exactly these layers. Otherwise static
    bytes are added up from the kinds, the embedding and the head, and there is no residual.

    Raises: ProfileError when the profile has neither record nor static bytes of the kinds.
    """
    chunks = layout.stages[stage]
    layers = tuple(sorted(layer for chunk in chunks for layer in chunk.layers))
    shared: dict[str, Any] = {
        "boundary_bytes": profile.boundary_bytes,
        "deferred_bytes": profile.deferred.each_bytes if profile.deferred else 0,
        "posts_both": layout.num_chunks > 1 and not profile.overlap_p2p_comm,
        "exchanged": max(hidden_states_received(profile, chunk) for chunk in chunks),
    }
    nothing = ScheduleOverhead(0, 0)
    if stage < len(profile.stages) == layout.num_stages:
        found = profile.stages[stage]
        if tuple(sorted(found.layers)) == layers:
            return StageBase(
                found.static,
                found.optimizer_step_peak_bytes + (found.others_bytes or 0),
                found.overhead or nothing,
                residual_bytes=found.residual_bytes + SIGN[bound] * found.uncertainty_bytes,
                measured=True,
                apart_bytes=found.optimizer_step_peak_bytes * profile.graph_of_iteration,
                **shared,
            )
    return StageBase(_added_static(profile, chunks, stage), 0, nothing, **shared)


def stage_moments(profile: Profile, schedule: Schedule, stage: int) -> tuple[Moment, ...]:
    """The moments that can be a stage's peak, under the profile's settings."""
    return decisive_moments(schedule, stage, *_settings(profile))


def every_moment(profile: Profile, schedule: Schedule, stage: int) -> list[Moment]:
    """The moment of each event of a stage, under the profile's settings."""
    return p2p_tensors.every_moment(schedule, stage, *_settings(profile))


def _settings(profile: Profile) -> tuple[bool, bool, Deferred | None]:
    return profile.overlap_p2p_comm, profile.deallocate_pipeline_outputs, profile.deferred


def _added_static(profile: Profile, chunks: Sequence[Chunk], stage: int) -> StaticBytes:
    named = [(kind.name, kind.static) for c in chunks for kind in map(profile.kind_of, c.layers)]
    named += [("embedding", profile.embedding_static) for c in chunks if c.embedding]
    named += [("head", profile.head_static) for c in chunks if c.head]
    if missing := sorted({name for name, static in named if static is None}):
        raise ProfileError(
            f"Stage {stage} of this layout was not measured, and the profile has no static bytes "
            f"of {', '.join(missing)} to add them up from. Plan the measured layout "
            f"({[len(s.layers) for s in profile.stages]} layers per stage), or add `static`."
        )
    return StaticBytes.sum(static for _, static in named if static is not None)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Bytes of one moment by cause; they add up to the total."""

    static_bytes: int
    """Parameters, gradients, optimizer state, buffers."""
    in_flight_bytes: int
    """Bytes that layers hold for microbatches that wait for their backward."""
    running_bytes: int
    """Bytes that layers of the running chunk hold, up to the running layer."""
    transient_bytes: int
    """Transient bytes of the layer, embedding or head that runs."""
    embedding_head_bytes: int
    """Bytes that embedding and head hold, in flight and running."""
    overhead_bytes: int
    """Pipeline boundary tensors, deferred runs of the output layer, and the measured residual."""
    copy_bytes: int = 0
    """Bytes of activations that have not left for host memory yet, that came back early, or that
    Megatron keeps although they could leave."""
    graph_bytes: int = 0
    """What CUDA graphs add: bytes in their memory pool and bytes outside it each count at their own
    highest moment, because neither can use the other's memory."""

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return sum(astuple(self))


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest moment of a stage."""

    bytes: int
    """All bytes alive at this moment."""
    moment: str
    """A label: `stage 0, backward of layer 11, microbatch 3`."""
    breakdown: Breakdown
    """What these bytes are."""
    pool_bytes: int = 0
    """The part of `bytes` that is in the memory pool and input buffers of CUDA graphs of layers."""


@dataclass(frozen=True)
class Running:
    """What is there while units run, in the order of time; of two events side by side, of both."""

    points: tuple[tuple[Direction, int], ...]
    """The direction, and the unit of its chunk."""
    own_bytes: Ints
    """Bytes of the microbatch that the unit runs, up to the unit."""
    other_bytes: Ints
    """Bytes of the microbatch beside it, and of a chunk that runs after it was idle."""
    late_bytes: Ints
    """Bytes of boundary tensors that come when the layers of two events have run."""

    @cached_property
    def bytes(self) -> Ints:
        """All of these."""
        return self.own_bytes + self.other_bytes + self.late_bytes

    @cached_property
    def most_bytes(self) -> dict[Direction, int]:
        """The most in each direction."""
        found: dict[Direction, int] = {}
        for (direction, _), size in zip(self.points, self.bytes.tolist(), strict=True):
            found[direction] = max(size, found.get(direction, size))
        return found


class StageBytes:
    """Bytes of one stage at any moment, under one policy: by the columns of every chunk."""

    def __init__(self, base: StageBase, columns: Sequence[ChunkColumns]) -> None:
        self.base, self.columns = base, columns
        self.held = [int(own.held_bytes.sum()) for own in columns]
        """What every chunk holds for a microbatch in flight."""
        self._known: dict[tuple[object, ...], Running] = {}

    def constant(self, moment: Moment) -> int:
        """Bytes alive throughout a moment; of two events side by side, the larger."""
        both: tuple[Direction, ...] = ("forward", "backward")
        directions = (moment.direction,) if moment.beside is None else both
        extra, deferred = moment.extra, moment.deferred
        return max(self.base.constant_bytes(each, extra, deferred) for each in directions)

    def kept(self, moment: Moment) -> int:
        """Bytes that chunks which do not run keep since their last backward, with EP overlap; in a
        forward also the most that has been recomputed for the backward after it, in the wait before
        it."""
        forward, _ = _running(moment)
        found = 0
        if moment.direction == "forward" and self.base.posts_both:
            found = max(own.early_bytes for own in self.columns)
        for chunk, idle in enumerate(moment.idle):
            if idle and chunk != forward:
                found += sum(self._idle(moment, chunk).values())
        return found

    def around(self, moment: Moment) -> int:
        """Bytes that are there whatever runs."""
        in_flight: int = sum(map(mul, moment.in_flight, self.held))
        return self.constant(moment) + in_flight + self.kept(moment)

    def most(self, moment: Moment) -> int:
        """The most at any point of a moment."""
        return self.around(moment) + max(self.running(moment).most_bytes.values())

    def running(self, moment: Moment) -> Running:
        """What is there besides while units run."""
        forward, backward = _running(moment)
        event: tuple[object, ...] = moment.direction, moment.chunk
        if moment.in_parts and backward is not None:
            idle = forward is not None and moment.idle[forward] and moment.idle_apart[forward]
            event += moment.beside, moment.in_flight[backward] > 0, idle, moment.late
        if event not in self._known:
            self._known[event] = self._in_parts(moment) if moment.in_parts else self._alone(moment)
        return self._known[event]

    def _alone(self, moment: Moment) -> Running:
        own = self.columns[moment.chunk]
        reach = own.reach_bytes(moment.direction, self.base.boundary_bytes)
        nothing = np.zeros_like(reach)
        points = tuple((moment.direction, unit) for unit in range(len(reach)))
        return Running(points, reach, nothing, nothing)

    def _in_parts(self, moment: Moment) -> Running:
        forward, backward = _running(moment)
        assert backward is not None
        is_idle = forward is not None and moment.idle[forward]
        points = list(
            overlap.points(
                None if forward is None else self.columns[forward],
                self.columns[backward],
                self.base.boundary_bytes,
                last=not moment.in_flight[backward],
                idle_bytes=self._idle(moment, forward) if is_idle and forward is not None else {},
            )
        )
        late = moment.late * self.base.exchanged * self.base.boundary_bytes
        sizes = [(point.own_bytes, point.other_bytes, late * point.late) for point in points]
        order = tuple((point.direction, point.unit) for point in points)
        return Running(order, *np.array(sizes, np.int64).T)

    def _idle(self, moment: Moment, chunk: int) -> dict[int, int]:
        apart = moment.idle_apart[chunk]
        return overlap.idle_bytes(self.columns[chunk], self.base.boundary_bytes, apart)

    def breakdown(self, moment: Moment, point: int) -> Breakdown:
        """Bytes at one point of what runs."""
        base, running = self.base, self.running(moment)
        direction, unit = running.points[point]
        chunk = moment.chunk if direction == moment.direction else moment.beside
        assert chunk is not None
        own, reach = self.columns[chunk], int(running.own_bytes[point])
        held = min(int(own.held_bytes[: unit + 1].sum()), reach)
        outside = int(own.outside_bytes[: unit + 1].sum())
        waiting_outside = sum(
            number * int(each.outside_bytes.sum())
            for number, each in zip(moment.in_flight, self.columns, strict=True)
        )
        waiting = self.around(moment) - self.constant(moment) + int(running.other_bytes[point])
        overhead = self.constant(moment) - base.static.total_bytes - base.apart_bytes
        return Breakdown(
            static_bytes=base.static.total_bytes,
            in_flight_bytes=waiting - waiting_outside,
            running_bytes=held - outside,
            transient_bytes=reach - held,
            embedding_head_bytes=waiting_outside + outside,
            overhead_bytes=overhead + int(running.late_bytes[point]),
            graph_bytes=base.apart_bytes,
        )


def stage_peak(
    base: StageBase,
    stage: int,
    columns: Sequence[ChunkColumns],
    moments: Sequence[Moment],
    copies: StageCopies | None = None,
) -> Peak:
    """The highest moment of a stage; the first one if several are equal.

    Args:
        moments: those that can be the highest; with copies, those of every event.
        copies: bytes beside those of records. Of two events side by side the most of the first one
            is added.
    """
    own = StageBytes(base, columns)
    most = base.static.total_bytes + base.optimizer_step_peak_bytes
    best: tuple[Moment, int, int] | None = None
    for number, moment in enumerate(moments):
        copied = copies.during(number) if copies else 0
        if own.most(moment) + copied <= most:
            continue
        running, around = own.running(moment), own.around(moment)
        by_point = np.full(len(running.points), copied)
        if copied and copies and not moment.in_parts:
            is_backward = moment.direction == "backward"
            by_point = copies.by_unit(number, moment.chunk, backward=is_backward)
        point = int((running.bytes + by_point).argmax())
        total = around + int(running.bytes[point] + by_point[point])
        if total > most:
            most, best = total, (moment, point, int(by_point[point]))
    split = Breakdown(base.static.total_bytes, 0, 0, base.optimizer_step_peak_bytes, 0, 0)
    name = f"stage {stage}, optimizer step"
    if best is not None:
        split = replace(own.breakdown(*best[:2]), copy_bytes=best[2])
        name = _named(own, stage, *best[:2])
    pooled = 0
    if any(unit.graph for chunk in columns for unit in chunk.units):
        outside, pooled = _with_graphs(own, moments)
        more = outside + pooled - split.total_bytes
        split = replace(split, graph_bytes=split.graph_bytes + more)
    return Peak(split.total_bytes, name, split, pooled)


def _named(own: StageBytes, stage: int, moment: Moment, point: int) -> str:
    direction, unit = own.running(moment).points[point]
    chunk, beside = moment.chunk, moment.beside
    if direction != moment.direction and beside is not None:
        chunk, beside = beside, chunk
    where = f"{direction} of {own.columns[chunk].units[unit].name}"
    several = len(own.columns) > 1
    name = f"stage {stage}{f', chunk {chunk}' if several else ''}, {where}"
    if beside is None:
        return f"{name}, microbatch {moment.microbatch}"
    other = "forward" if direction == "backward" else "backward"
    return f"{name} beside a {other}{f' of chunk {beside}' if several else ''}"


def _with_graphs(own: StageBytes, moments: Sequence[Moment]) -> tuple[int, int]:
    """The most outside the pool of CUDA graphs, and the most in it, which nothing else can use."""
    base = own.base
    pool = StageBytes(replace(base, boundary_bytes=0), [each.in_graphs() for each in own.columns])
    outside = [each.outside_graphs(base.boundary_bytes) for each in own.columns]
    rest = StageBytes(base, outside)
    least = base.static.total_bytes + base.optimizer_step_peak_bytes
    pooled = max(pool.most(moment) - pool.constant(moment) for moment in moments)
    return max(least, *map(rest.most, moments)), pooled


def _running(moment: Moment) -> tuple[int | None, int | None]:
    """The chunks that run forward and backward."""
    own, other = moment.chunk, moment.beside
    return (own, other) if moment.direction == "forward" else (other, own)
