"""Bytes and time of a policy: a profile's records put on a schedule's moments.

A *unit* is what runs as one: a layer with its choice, one checkpoint around several layers, the
embedding, or the head. While unit i of a chunk runs, a stage holds

    static + overhead + boundary tensors + sum over chunks of in_flight * held(chunk)
           + held of units 0 .. i of the running chunk + transient of unit i

with the forward transient in a forward and the backward transient in a backward. So position
matters: in the backward of an early layer the later ones are already freed.

Times are whole picoseconds inside the planner, so that sums are exact and ties are ties; one
picosecond is far below what any timer resolves. This module does not choose: see `solve`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.boundary import Load, decisive_loads, extra_tensors
from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.pipeline import Chunk, Layout, Schedule, StepTime, replay_ms
from megatron_autorecompute.policy import FULL, NONE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerKind,
    Profile,
    ScheduleOverhead,
    StaticBytes,
    scaled_bytes,
)

Bound = Literal["low", "nominal", "high"]
Ints = NDArray[np.int64]

PS_PER_MS = 10**9
_SIGN: dict[Bound, int] = {"low": -1, "nominal": 0, "high": 1}


@dataclass(frozen=True, slots=True)
class Unit:
    """Costs of one unit for one microbatch."""

    name: str
    """`layer 7`, `layers 4-7`, `embedding`, `head`, `boundary`."""
    layers: tuple[int, ...]
    """Global layer indices; empty for what is no layer."""
    held_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int
    forward_ps: int
    backward_ps: int
    keeps_output_gradient: bool = False
    """Whether its backward holds the gradient of its output to the end, so that its transient
    counts it throughout. A checkpoint does: it is an argument of its backward. Other layers let
    it go once it is used."""

    @property
    def time_ps(self) -> int:
        """Forward plus backward, recompute included."""
        return self.forward_ps + self.backward_ps


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Costs of one checkpoint around the first g of some layers, `[g - 1]` for every g."""

    held_bytes: Ints
    forward_transient_bytes: Ints
    backward_transient_bytes: Ints
    forward_ps: Ints
    backward_ps: Ints


@dataclass(frozen=True)
class CostTable:
    """A profile's records as the planner uses them: imbalance applied, at one end of the interval.

    `low` and `high` shift every byte figure by its uncertainty; a budget is met at `high`.
    """

    profile: Profile
    percentile: float | None = None
    """MoE imbalance percentile to budget for; None is the measured routing."""
    bound: Bound = "nominal"

    @cached_property
    def _kinds(self) -> tuple[LayerKind, ...]:
        owner = {layer: kind for kind in self.profile.kinds for layer in kind.layers}
        return tuple(owner[layer] for layer in range(self.profile.num_layers))

    @cached_property
    def _records(self) -> dict[tuple[str, str], ChoiceRecord]:
        return {
            (kind.name, record.choice): self._shifted(
                record.at_percentile(self.percentile), kind.imbalance_factor(self.percentile)
            )
            for kind in self.profile.kinds
            for record in kind.choices
        }

    def _shifted(self, record: ChoiceRecord, factor: float) -> ChoiceRecord:
        shift = _SIGN[self.bound] * record.uncertainty_bytes
        sizes = (
            record.held_bytes,
            record.forward_transient_bytes,
            record.backward_transient_bytes,
        )
        held, forward, backward = (max(0, scaled_bytes(size + shift, factor)) for size in sizes)
        return replace(
            record,
            held_bytes=held,
            forward_transient_bytes=forward,
            backward_transient_bytes=backward,
        )

    def kind(self, layer: int) -> LayerKind:
        """The kind of a global layer index."""
        return self._kinds[layer]

    def record(self, layer: int, choice: str) -> ChoiceRecord | None:
        """The shifted record of one layer's choice; None where the profile has none."""
        kind = self._kinds[layer]
        return self._records.get((kind.name, kind.inert.get(choice, choice)))

    def choices(self, layer: int) -> tuple[LayerPolicy, ...]:
        """What one layer by itself may be given: every record but those of groups, in order."""
        policies = (LayerPolicy.parse(record.choice) for record in self._kinds[layer].choices)
        return tuple(policy for policy in policies if policy.group == 1)

    def layer(self, layer: int, policy: LayerPolicy, received: bool = False) -> Unit:
        """Costs of one layer; `received` if another stage sent its input, which then stays alive.

        Raises: ProfileError when the profile has no record of the choice.
        """
        record = self.record(layer, str(policy))
        if record is None:
            kind = self._kinds[layer]
            known = ", ".join(r.choice for r in kind.choices)
            raise ProfileError(
                f"The profile has no record of {policy} for layer {layer} (kind {kind.name!r}, "
                f"which has {known}). Measure it, or use one of these."
            )
        if received and not record.input_kept:
            record = self._with_input(record)
        return _unit(f"layer {layer}", (layer,), record, policy == FULL)

    def _with_input(self, record: ChoiceRecord) -> ChoiceRecord:
        """With the input held; in forward it was in the transient already."""
        size_bytes = self.profile.boundary_bytes
        return replace(
            record,
            held_bytes=record.held_bytes + size_bytes,
            forward_transient_bytes=max(0, record.forward_transient_bytes - size_bytes),
        )

    def pseudo_layers(self, chunk: Chunk) -> tuple[list[Unit], list[Unit]]:
        """Units before and after a chunk's layers.

        A pipeline output that is not deallocated, and the input that an empty chunk passes on,
        stay like a held tensor; as they outlive every backward of the chunk they stand first.
        """
        boundary = ChoiceRecord("none", self.profile.boundary_bytes, 0, 0, 0.0, 0.0)
        kept = not chunk.head and not self.profile.deallocate_pipeline_outputs
        passed_on = not (chunk.layers or chunk.embedding or chunk.head)
        before = [_unit("boundary", (), boundary)] * (kept + passed_on)
        if chunk.embedding:
            before.append(_unit("embedding", (), self._shifted(self.profile.embedding, 1.0)))
        after = [_unit("head", (), self._shifted(self.profile.head, 1.0))] if chunk.head else []
        return before, after

    def checkpoints(self, layers: Sequence[int]) -> Checkpoints:
        """Costs of checkpoints around the first g of `layers`, for each g that may be grouped.

        One checkpoint holds the input of its first layer. Its backward first runs all members'
        forward under grad and then their backwards from last to first, so on top of nothing it
        reaches max over members i of (none's held of 0..i + the larger transient of i). What a
        checkpoint keeps besides (the incoming gradient, saved random states) is what the measured
        `full` has more than this formula at g = 1. In forward the members run one at a time
        without grad, each with its own input alive. A measured record of `full/g` wins.
        The result is empty where the first layer has no record of `full`; MTP depths and layers
        without records of `none` and `full` end it, since they cannot be in a group, nor can
        decoder layers behind an encoder.
        """
        members = self._groupable(layers)
        if not members:
            empty = np.zeros(0, np.int64)
            return Checkpoints(empty, empty, empty, empty, empty)
        none, full = ([pair[side] for pair in members] for side in (0, 1))
        reach = _column(none, "held").cumsum() + np.maximum(
            _column(none, "forward_transient"), _column(none, "backward_transient")
        )
        alone = _column(none, "held") + np.maximum(
            _column(none, "forward_transient"), _column(none, "backward_transient")
        )
        held_full = _column(full, "held")
        extra = held_full + _column(full, "backward_transient") - alone
        backward = np.maximum.accumulate(reach) + np.maximum.accumulate(extra) - held_full[0]
        inputs = held_full.copy()
        inputs[0] = 0  # the group's own input is in held
        forward = np.maximum.accumulate(_column(full, "forward_transient") + inputs)
        costs = np.stack(
            [
                np.full(len(members), held_full[0]),
                forward,
                np.maximum(backward, 0),
                np.cumsum([_ps(record.forward_ms) for record in full]),
                np.cumsum([_ps(record.backward_ms) for record in full]),
            ]
        ).astype(np.int64)
        self._put_measured(costs, layers)
        return Checkpoints(*costs)

    def _groupable(self, layers: Sequence[int]) -> list[tuple[ChoiceRecord, ChoiceRecord]]:
        found: list[tuple[ChoiceRecord, ChoiceRecord]] = []
        model = self.profile.model
        for layer in layers:
            none, full = self.record(layer, str(NONE)), self.record(layer, str(FULL))
            if none is None or full is None or layer >= model.num_layers:
                break
            if found and 0 < model.encoder_layers <= layer:
                break
            found.append((none, full))
        return found

    def _put_measured(self, costs: Ints, layers: Sequence[int]) -> None:
        """Overwrite column g - 1 where the whole group is of one kind that has `full/g`."""
        kind = self._kinds[layers[0]]
        for measured in kind.choices:
            group = LayerPolicy.parse(measured.choice).group
            same = all(self._kinds[layer] is kind for layer in layers[:group])
            if measured.choice.startswith("full") and group <= costs.shape[1] and same:
                unit = _unit("", (), self._records[kind.name, measured.choice])
                costs[:, group - 1] = (
                    unit.held_bytes,
                    unit.forward_transient_bytes,
                    unit.backward_transient_bytes,
                    unit.forward_ps,
                    unit.backward_ps,
                )

    def checkpoint(self, layers: Sequence[int]) -> Unit:
        """Costs of one checkpoint around all of `layers`.

        Raises: ProfileError when a member cannot be grouped for lack of records.
        """
        costs = self.checkpoints(layers)
        if len(costs.held_bytes) < len(layers):
            lacking = layers[len(costs.held_bytes)]
            raise ProfileError(
                f"Layers {layers[0]}-{layers[-1]} in one checkpoint: layer {lacking} is an MTP "
                "depth, lacks a record of none or full, or is of the decoder behind an encoder, so "
                "the group's cost is not known. Measure both choices, or end the group before it."
            )
        held, forward, backward, *times = (int(column[-1]) for column in _columns(costs))
        name = f"layers {layers[0]}-{layers[-1]}"
        return Unit(name, tuple(layers), held, forward, backward, times[0], times[1], True)

    def chunk_units(self, chunk: Chunk, policy: RecomputePolicy) -> tuple[Unit, ...]:
        """The units of one chunk under a policy, in the order their forwards run.

        Raises: ProfileError (no record), PolicyError (a group spans two chunks).
        """
        before, after = self.pseudo_layers(chunk)
        units = before
        for run in policy.chunk_runs(chunk.layers):
            layers = chunk.layers[run.start : run.start + run.count]
            if run.policy.group == 1:
                first = None if chunk.embedding else chunk.layers[0]
                units += [self.layer(layer, run.policy, layer == first) for layer in layers]
                continue
            step = run.policy.group
            units += [self.checkpoint(layers[i : i + step]) for i in range(0, len(layers), step)]
        return (*units, *after)


def _ps(time_ms: float) -> int:
    return round(time_ms * PS_PER_MS)


def _unit(
    name: str, layers: tuple[int, ...], record: ChoiceRecord, keeps_output_gradient: bool = False
) -> Unit:
    return Unit(
        name,
        layers,
        record.held_bytes,
        record.forward_transient_bytes,
        record.backward_transient_bytes,
        _ps(record.forward_ms),
        _ps(record.backward_ms),
        keeps_output_gradient,
    )


def _column(recorded: Sequence[ChoiceRecord], what: str) -> Ints:
    return np.array([getattr(record, f"{what}_bytes") for record in recorded], np.int64)


def _columns(costs: Checkpoints) -> tuple[Ints, ...]:
    return (
        costs.held_bytes,
        costs.forward_transient_bytes,
        costs.backward_transient_bytes,
        costs.forward_ps,
        costs.backward_ps,
    )


@dataclass(frozen=True, slots=True)
class StageBase:
    """What a stage needs whatever its policy."""

    static: StaticBytes
    optimizer_step_peak_bytes: int
    overhead: ScheduleOverhead
    boundary_bytes: int
    """One boundary tensor; `boundary` counts them. Also the gradient of a chunk's output."""
    residual_bytes: int
    """Measured minus predicted, at the asked end of its interval."""
    measured: bool
    """Whether the profile has this very stage, or its static bytes were added up."""

    def constant_bytes(self, kind: str, extra: int) -> int:
        """Alive throughout a forward or backward with so many extra boundary tensors."""
        overhead = self.overhead
        rest = overhead.forward_bytes if kind == "forward" else overhead.backward_bytes
        boundary = extra * self.boundary_bytes
        return self.static.total_bytes + self.residual_bytes + rest + boundary


def stage_base(profile: Profile, layout: Layout, stage: int, bound: Bound = "nominal") -> StageBase:
    """Static bytes, overhead and residual of one stage.

    A stage record is used when it was measured with exactly these layers; otherwise static bytes
    are added up from the kinds, the embedding and the head, and there is no residual.
    Raises: ProfileError when the profile has neither.
    """
    chunks = layout.stages[stage]
    layers = tuple(sorted(layer for chunk in chunks for layer in chunk.layers))
    boundary, nothing = profile.boundary_bytes, ScheduleOverhead(0, 0)
    if stage < len(profile.stages) == layout.num_stages:
        found = profile.stages[stage]
        if tuple(sorted(found.layers)) == layers:
            residual = found.residual_bytes + _SIGN[bound] * found.uncertainty_bytes
            peak = found.optimizer_step_peak_bytes
            rest = found.overhead or nothing
            return StageBase(found.static, peak, rest, boundary, residual, True)
    return StageBase(_added_static(profile, chunks, stage), 0, nothing, boundary, 0, False)


def stage_loads(profile: Profile, schedule: Schedule, stage: int) -> tuple[Load, ...]:
    """`boundary.decisive_loads` under the profile's settings."""
    return decisive_loads(
        schedule,
        stage,
        overlap_p2p=profile.overlap_p2p_comm,
        deallocated=profile.deallocate_pipeline_outputs,
    )


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
    parts = [static for _, static in named if static is not None]
    return StaticBytes(
        sum(part.parameter_bytes for part in parts),
        sum(part.gradient_bytes for part in parts),
        sum(part.optimizer_state_bytes for part in parts),
        sum(part.buffer_bytes for part in parts),
    )


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Bytes of one moment by what they are; they add up to the total."""

    static_bytes: int
    """Parameters, gradients, optimizer state, buffers."""
    in_flight_bytes: int
    """Held by layers of microbatches that wait for their backward."""
    running_bytes: int
    """Held by the layers of the chunk that runs, up to the one that runs."""
    transient_bytes: int
    """Of the unit that runs."""
    embedding_head_bytes: int
    """Held by embedding and head, in flight and running."""
    overhead_bytes: int
    """Pipeline boundary tensors, and the measured residual."""

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return (
            self.static_bytes
            + self.in_flight_bytes
            + self.running_bytes
            + self.transient_bytes
            + self.embedding_head_bytes
            + self.overhead_bytes
        )


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest moment of a stage."""

    bytes: int
    moment: str
    """For people: `stage 0, backward of layer 11, microbatch 3`."""
    breakdown: Breakdown


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
    """All microbatches, if every stage had the mean work and recomputed nothing."""
    imbalance_ms: float
    """What this stage's share of the model adds to ideal; may be negative."""
    recompute_ms: float
    """What the policy adds to it."""

    @property
    def busy_ms(self) -> float:
        """All microbatches: ideal + imbalance + recompute."""
        return self.ideal_ms + self.imbalance_ms + self.recompute_ms


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """Memory and time of a whole step under a policy."""

    stages: tuple[StageCost, ...]
    step_ms: float
    """Time of the step by dependency replay, messages free."""
    bubble_ms: float
    """Part of step_ms that the busiest stage waits."""
    recompute_ms: float
    """Part of step_ms that recompute adds: step_ms minus the replay without recompute."""
    step_low_ms: float | None = None
    """step_ms with every layer at the fast end of its spread at once; None without spreads."""
    step_high_ms: float | None = None
    """step_ms with every layer at the slow end of its spread at once; None without spreads."""

    @property
    def peak_high_bytes(self) -> int:
        """Of the fullest stage."""
        return max(stage.peak_high_bytes for stage in self.stages)


@dataclass(frozen=True)
class ChunkColumns:
    """One chunk's units as columns, `[unit]`."""

    chunk: Chunk
    units: tuple[Unit, ...]

    @cached_property
    def held_bytes(self) -> Ints:
        """Held by each unit."""
        return np.array([unit.held_bytes for unit in self.units], np.int64)

    @cached_property
    def outside_bytes(self) -> Ints:
        """Held by each unit that is embedding or head, else 0."""
        outside = np.array([unit.name in ("embedding", "head") for unit in self.units])
        return np.where(outside, self.held_bytes, 0)

    def transient_bytes(self, kind: str, boundary_bytes: int) -> Ints:
        """Transient of each unit, with the chunk's output gradient where it is not yet counted.

        The schedule holds that gradient until the chunk's backward ends. The last unit is given
        this very tensor: only where the unit keeps it, too, is it counted already. Elsewhere a
        record whose highest point comes before the gradient is let go makes it count twice.
        """
        if kind == "forward":
            return np.array([unit.forward_transient_bytes for unit in self.units], np.int64)
        own = np.array([unit.backward_transient_bytes for unit in self.units], np.int64)
        gradient_bytes = 0 if self.chunk.head else boundary_bytes
        own[:-1] += gradient_bytes
        own[-1:] += 0 if self.units[-1].keeps_output_gradient else gradient_bytes
        return own

    def reach_bytes(self, kind: str, boundary_bytes: int) -> Ints:
        """While each unit runs: held of the units up to it plus its transient."""
        return self.held_bytes.cumsum() + self.transient_bytes(kind, boundary_bytes)


def evaluate(
    profile: Profile,
    layout: Layout,
    schedule: Schedule,
    policy: RecomputePolicy,
    *,
    percentile: float | None = None,
) -> PolicyCost:
    """Peak of every stage and time of the step under a policy.

    Raises: ProfileError where the profile lacks a record, or layout and profile disagree;
    PolicyError where a group spans two chunks.
    """
    check_layout(profile, layout, schedule)
    policy.checked_length(profile.num_layers, "The policy")
    units = {
        bound: [
            [CostTable(profile, percentile, bound).chunk_units(chunk, policy) for chunk in chunks]
            for chunks in layout.stages
        ]
        for bound in _SIGN
    }
    loads = [stage_loads(profile, schedule, stage) for stage in range(layout.num_stages)]
    peaks = {
        bound: [
            stage_peak(
                stage_base(profile, layout, stage, bound), schedule, stage, columns, loads[stage]
            )
            for stage, columns in enumerate(_all_columns(layout, units[bound]))
        ]
        for bound in _SIGN
    }
    return _with_times(profile, layout, schedule, policy, units["nominal"], peaks)


def check_layout(profile: Profile, layout: Layout, schedule: Schedule) -> None:
    """Refuse a layout of another model or a schedule of other stages; raises ProfileError."""
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


def _all_columns(
    layout: Layout, units: Sequence[Sequence[tuple[Unit, ...]]]
) -> list[list[ChunkColumns]]:
    return [
        [ChunkColumns(chunk, u) for chunk, u in zip(chunks, stage_units, strict=True)]
        for chunks, stage_units in zip(layout.stages, units, strict=True)
    ]


def stage_peak(
    base: StageBase,
    schedule: Schedule,
    stage: int,
    columns: Sequence[ChunkColumns],
    loads: Sequence[Load],
) -> Peak:
    """The highest moment of a stage; the first one where several are equal."""
    held = np.array([chunk.held_bytes.sum() for chunk in columns], np.int64)
    best: tuple[int, Load | None, int] = (
        base.static.total_bytes + base.optimizer_step_peak_bytes,
        None,
        0,
    )
    for load in loads:
        reach = columns[load.chunk].reach_bytes(load.kind, base.boundary_bytes)
        unit = int(reach.argmax())
        constant = base.constant_bytes(load.kind, load.extra)
        total = constant + int(held @ load.in_flight) + int(reach[unit])
        if total > best[0]:
            best = (total, load, unit)
    return _named_peak(base, schedule, stage, columns, best[1], best[2])


def _named_peak(
    base: StageBase,
    schedule: Schedule,
    stage: int,
    columns: Sequence[ChunkColumns],
    load: Load | None,
    unit: int,
) -> Peak:
    if load is None:
        peak = base.optimizer_step_peak_bytes
        split = Breakdown(base.static.total_bytes, 0, 0, peak, 0, 0)
        return Peak(split.total_bytes, f"stage {stage}, optimizer step", split)
    split = moment_bytes(base, columns, load, unit)
    microbatch = schedule.events(stage)[load.event].microbatch
    where = f"{load.kind} of {columns[load.chunk].units[unit].name}"
    chunk = f", chunk {load.chunk}" if len(columns) > 1 else ""
    name = f"stage {stage}{chunk}, {where}, microbatch {microbatch}"
    return Peak(split.total_bytes, name, split)


def moment_bytes(
    base: StageBase, columns: Sequence[ChunkColumns], load: Load, unit: int
) -> Breakdown:
    """Bytes while one unit of the load's chunk runs."""
    running, pairs = columns[load.chunk], list(zip(load.in_flight, columns, strict=True))
    waiting = sum(n * int(c.held_bytes.sum()) for n, c in pairs)
    outside_waiting = sum(n * int(c.outside_bytes.sum()) for n, c in pairs)
    outside_running = int(running.outside_bytes[: unit + 1].sum())
    return Breakdown(
        static_bytes=base.static.total_bytes,
        in_flight_bytes=waiting - outside_waiting,
        running_bytes=int(running.held_bytes[: unit + 1].sum()) - outside_running,
        transient_bytes=int(running.transient_bytes(load.kind, base.boundary_bytes)[unit]),
        embedding_head_bytes=outside_waiting + outside_running,
        overhead_bytes=base.constant_bytes(load.kind, load.extra) - base.static.total_bytes,
    )


def timeline(
    profile: Profile,
    layout: Layout,
    schedule: Schedule,
    policy: RecomputePolicy,
    stage: int,
    *,
    percentile: float | None = None,
) -> list[tuple[str, Breakdown]]:
    """Every moment of one stage's step in order: its name and its bytes.

    A forward passes the units from first to last, a backward from last to first.
    Raises: as `evaluate`.
    """
    check_layout(profile, layout, schedule)
    table = CostTable(profile, percentile)
    base = stage_base(profile, layout, stage)
    columns = [ChunkColumns(c, table.chunk_units(c, policy)) for c in layout.stages[stage]]
    moments = []
    for load, event in zip(
        _every_load(profile, schedule, stage), schedule.events(stage), strict=True
    ):
        order = range(len(columns[event.chunk].units))
        for unit in order if event.kind == "forward" else reversed(order):
            name = f"{event.kind} of {columns[event.chunk].units[unit].name}"
            split = moment_bytes(base, columns, load, unit)
            moments.append((f"{name}, microbatch {event.microbatch}", split))
    return moments


def _every_load(profile: Profile, schedule: Schedule, stage: int) -> list[Load]:
    extra = extra_tensors(
        schedule,
        stage,
        overlap_p2p=profile.overlap_p2p_comm,
        deallocated=profile.deallocate_pipeline_outputs,
    )
    rows = zip(schedule.events(stage), schedule.in_flight(stage).tolist(), extra, strict=True)
    return [
        Load(event.kind, event.chunk, tuple(in_flight), count, number)
        for number, (event, in_flight, count) in enumerate(rows)
    ]


def _with_times(
    profile: Profile,
    layout: Layout,
    schedule: Schedule,
    policy: RecomputePolicy,
    units: Sequence[Sequence[tuple[Unit, ...]]],
    peaks: dict[Bound, list[Peak]],
) -> PolicyCost:
    forward, backward = chunk_times_ms(units)
    plain = _without_recompute(CostTable(profile), layout)
    plain_forward, plain_backward = chunk_times_ms(plain)
    for stage in range(layout.num_stages):
        residual = residual_ms(profile, layout, stage)
        backward[stage][-1] += residual
        plain_backward[stage][-1] += residual
    m = schedule.num_microbatches
    work = [sum(f) + sum(b) for f, b in zip(plain_forward, plain_backward, strict=True)]
    mean = sum(work) / len(work)
    stages = tuple(
        StageCost(
            stage=stage,
            peak=peaks["nominal"][stage],
            peak_low_bytes=peaks["low"][stage].bytes,
            peak_high_bytes=peaks["high"][stage].bytes,
            forward_ms=tuple(forward[stage]),
            backward_ms=tuple(backward[stage]),
            ideal_ms=m * mean,
            imbalance_ms=m * (work[stage] - mean),
            recompute_ms=m * (sum(forward[stage]) + sum(backward[stage]) - work[stage]),
        )
        for stage in range(layout.num_stages)
    )
    step = step_time(schedule, forward, backward)
    plain_step = step_time(schedule, plain_forward, plain_backward)
    bubble = step.total_ms - max(step.busy_ms)
    spread = _spread_ms(CostTable(profile), layout, policy)
    low, high = (
        step_time(schedule, forward, _shifted_ms(backward, spread, sign)).total_ms
        if any(map(any, spread))
        else None
        for sign in (-1, 1)
    )
    recompute_ms = step.total_ms - plain_step.total_ms
    return PolicyCost(stages, step.total_ms, bubble, recompute_ms, low, high)


def _spread_ms(table: CostTable, layout: Layout, policy: RecomputePolicy) -> list[list[float]]:
    """Half the width of the time of one microbatch, `[stage][chunk]`, if all layers err alike."""
    return [
        [
            sum(_layer_spread_ms(table, layer, policy.layers[layer]) for layer in chunk.layers)
            + table.profile.embedding.spread_ms * chunk.embedding
            + table.profile.head.spread_ms * chunk.head
            for chunk in chunks
        ]
        for chunks in layout.stages
    ]


def _layer_spread_ms(table: CostTable, layer: int, choice: LayerPolicy) -> float:
    """A group that was not measured as a whole has the spread of its layers' own checkpoints."""
    whole = table.record(layer, str(choice))
    record = whole or table.record(layer, str(FULL))
    return record.spread_ms / (choice.group if whole else 1) if record else 0.0


def _shifted_ms(
    times: Sequence[Sequence[float]], spread: Sequence[Sequence[float]], sign: int
) -> list[list[float]]:
    return [
        [max(0.0, time + sign * half) for time, half in zip(*rows, strict=True)]
        for rows in zip(times, spread, strict=True)
    ]


def chunk_times_ms(
    units: Sequence[Sequence[tuple[Unit, ...]]],
) -> tuple[list[list[float]], list[list[float]]]:
    """Forward and backward times of one microbatch, `[stage][chunk]`, from exact sums."""
    forward = [[sum(u.forward_ps for u in chunk) / PS_PER_MS for chunk in s] for s in units]
    backward = [[sum(u.backward_ps for u in chunk) / PS_PER_MS for chunk in s] for s in units]
    return forward, backward


def step_time(
    schedule: Schedule,
    forward_ms: Sequence[Sequence[float]],
    backward_ms: Sequence[Sequence[float]],
) -> StepTime:
    """Time of the step by dependency replay; see `pipeline.replay_ms`."""
    return replay_ms(schedule, forward_ms, backward_ms)


def residual_ms(profile: Profile, layout: Layout, stage: int) -> float:
    """Measured minus predicted time of one microbatch, where this very stage was measured."""
    measured = stage_base(profile, layout, stage).measured
    return profile.stages[stage].residual_ms if measured else 0.0


def _without_recompute(table: CostTable, layout: Layout) -> list[list[tuple[Unit, ...]]]:
    """Every layer at `none`, or, where none was not measured, at its fastest choice."""
    policy = RecomputePolicy(
        tuple(fastest_choice(table, layer) for layer in range(table.profile.num_layers))
    )
    return [[table.chunk_units(chunk, policy) for chunk in chunks] for chunks in layout.stages]


def fastest_choice(table: CostTable, layer: int) -> LayerPolicy:
    """`none` where the profile has it, otherwise the choice with the least time."""
    if table.record(layer, str(NONE)) is not None:
        return NONE
    return min(table.choices(layer), key=lambda policy: table.layer(layer, policy).time_ps)


def uniform_chunk_bytes(
    input_bytes: float, intermediate_bytes: float, num_layers: int, num_chunks: float
) -> float:
    """`c * A_input + (l / c) * A_intermediate`: checkpoints of equal size, one microbatch.

    Narayanan et al. 2021, section 3.5. The special case of this module where every layer is alike,
    holds only its input under full, and nothing is transient but what a checkpoint recomputes.
    """
    return num_chunks * input_bytes + num_layers / num_chunks * intermediate_bytes


def best_uniform_chunks(input_bytes: float, intermediate_bytes: float, num_layers: int) -> float:
    """`sqrt(l * A_intermediate / A_input)`: the number of chunks with the least bytes above."""
    return math.sqrt(num_layers * intermediate_bytes / input_bytes)
