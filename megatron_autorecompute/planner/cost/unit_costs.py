"""Looks up in a profile's records what each unit of a chunk costs under a policy.

A *unit* is a layer with its choice, one checkpoint around several layers, the embedding, the final
norm, or the head. Times are whole picoseconds, so that sums are exact and equal times are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

import numpy as np

from megatron_autorecompute.block_names import ENCODER
from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.planner.cost import Bools, Ints
from megatron_autorecompute.planner.cost.layout import Chunk, Layout
from megatron_autorecompute.policy import FULL, NONE, WHOLE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerBytes,
    LayerKind,
    OffloadGroup,
    PartBytes,
    Profile,
    scaled_bytes,
)

Bound = Literal["low", "nominal", "high"]
PS_PER_MS = 10**9
OUTSIDE = ("embedding", "final norm", "head")
"""Names of units that are not layers."""
SIGN: dict[Bound, int] = {"low": -1, "nominal": 0, "high": 1}
_COLUMNS = (
    "held_bytes",
    "forward_transient_bytes",
    "backward_transient_bytes",
    "forward_ps",
    "backward_ps",
    "spread_ps",
)
"""A unit's costs, in the order of arrays."""
_HELD, _FORWARD, _BACKWARD, _TIMES = 0, 1, 2, slice(3, None)


@dataclass(frozen=True, slots=True)
class Ahead:
    """A unit whose recompute begins before the gradient is there."""

    time_ps: int
    """The recompute's part of its backward."""
    held_bytes: int
    """What it holds from then to its backward, on top of held_bytes."""
    transient_bytes: int
    """The most that the recompute needs on top of held_bytes."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Costs of one unit for one microbatch."""

    name: str
    """`layer 7`, `layers 4-7`, `embedding`, `final norm`, `head`, `boundary`."""
    layers: tuple[int, ...]
    """Global layer indices; empty for embedding, norm and head."""
    held_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int
    forward_ps: int
    backward_ps: int
    spread_ps: int = 0
    """How far single runs of it spread; of several records, their sum."""
    kept_gradient_bytes: int = 0
    """What its backward transient grows by as the chunk's last unit, because the schedule keeps the
    gradient of its output to the end. Nothing for a checkpoint, which keeps it itself."""
    # The record's fields of these names.
    parts: tuple[PartBytes, ...] = ()
    input_stays: bool = False
    output_keeps_bytes: int = 0
    offload_groups: tuple[OffloadGroup, ...] = ()
    graph: LayerBytes | None = None
    ahead: Ahead | None = None
    """What begins ahead; None: its recompute begins in its backward."""

    @property
    def time_ps(self) -> int:
        """Forward plus backward, recompute included."""
        return self.forward_ps + self.backward_ps

    @property
    def ahead_ps(self) -> int:
        """The part of its backward that begins before the gradient is there."""
        return self.ahead.time_ps if self.ahead else 0

    @property
    def costs(self) -> tuple[int, ...]:
        """All its columns, in the order of arrays."""
        return tuple(getattr(self, column) for column in _COLUMNS)


StageUnits = Sequence[Sequence[tuple[Unit, ...]]]
"""`[stage][chunk]`"""


class _Recorded:
    """The shifted records of one kind, of those that the profile has by choice."""

    def __init__(self, kind: LayerKind, found: dict[LayerPolicy, ChoiceRecord]) -> None:
        self.kind, self.planned = kind, tuple(found)
        """The kind, and the choices that have records of their own, groups included."""
        found = found | {inert: found[choice] for inert, choice in kind.equals.items()}
        # What was measured without Megatron's own checkpoints says the least that these take.
        others = {replace(c, rerun_all=True): r for c, r in found.items() if not c.keep}
        self.records = others | found
        self.modules = frozenset(module for choice in self.records for module in choice.modules)
        self.single = tuple(filter(self._of_one_layer, self.planned))
        """What `CostTable.choices` says."""

    def what_runs(self, choice: LayerPolicy) -> LayerPolicy:
        """As of `CostTable`."""
        if choice.granularity != "selective" or choice.in_time in self.records:
            return choice
        modules = tuple(module for module in choice.modules if module in self.modules)
        own = replace(choice, modules=modules, offload=()) if modules else NONE
        record = self.records.get(own.in_time)
        found = own if record is None else record.policy
        return replace(found, offload=choice.offload, rerun_all=choice.rerun_all)

    def _of_one_layer(self, choice: LayerPolicy) -> bool:
        needless = choice.rerun_all and replace(choice, rerun_all=False) in self.planned
        return choice.group == 1 and choice != WHOLE and not needless


@dataclass(frozen=True)
class CostTable:
    """A profile's records as the planner uses them: with imbalance, at one end of their interval.

    `low` and `high` shift every byte figure by its uncertainty; a budget is met at `high`.
    """

    profile: Profile
    percentile: float | None = None
    """Imbalance percentile to budget for; None takes the records as they are."""
    bound: Bound = "nominal"

    @cached_property
    def _of_kinds(self) -> tuple[_Recorded, ...]:
        """The shifted records of every kind."""
        return tuple(_Recorded(kind, self._records_of(kind)) for kind in self.profile.kinds)

    @cached_property
    def _of_layers(self) -> tuple[_Recorded, ...]:
        """The shifted records of every layer's kind."""
        owner = {layer: own for own in self._of_kinds for layer in own.kind.layers}
        return tuple(owner[layer] for layer in range(self.profile.num_layers))

    def _records_of(self, kind: LayerKind) -> dict[LayerPolicy, ChoiceRecord]:
        factor = kind.imbalance_factor(self.percentile)
        return {
            record.policy: self._shifted(
                record.at_percentile(self.percentile), 1.0 if record.knows_routing else factor
            )
            for record in kind.choices
        }

    def _shifted(self, record: ChoiceRecord, factor: float) -> ChoiceRecord:
        shift = SIGN[self.bound] * record.uncertainty_bytes

        def shifted(size: int) -> int:
            return max(0, scaled_bytes(size + shift, factor))

        record = LayerBytes.of(record).each(shifted).into(record)
        return replace(
            record,
            parts=tuple(part.each(shifted) for part in record.parts),
            offload_groups=tuple(_scaled(group, factor) for group in record.offload_groups),
        )

    def record(self, layer: int, choice: LayerPolicy) -> ChoiceRecord | None:
        """The shifted record of one layer's choice; None if the profile has none."""
        return self._of_layers[layer].records.get(choice.in_time)

    def choices(self, layer: int) -> tuple[LayerPolicy, ...]:
        """The choices of one layer that have records, without groups, in the profile's order; not
        whether it leaves as a whole (Megatron moves the first N), nor what reruns more for nothing.
        """
        return self._of_layers[layer].single

    def without_dead_work(self, policy: RecomputePolicy) -> RecomputePolicy:
        """The policy that holds the same and reruns nothing that no backward reads, if known."""
        plain = (replace(choice, rerun_all=False) for choice in policy.layers)
        pairs = enumerate(zip(policy.layers, plain, strict=True))
        return RecomputePolicy(
            tuple(
                less if self.record(layer, replace(less, group=1)) else choice
                for layer, (choice, less) in pairs
            )
        )

    def recorded(self, policy: RecomputePolicy) -> RecomputePolicy:
        """The policy in recorded choices, in place of inert ones that equal them."""
        records = (self.record(*pair) for pair in enumerate(policy.layers))
        pairs = zip(policy.layers, records, strict=True)
        return RecomputePolicy(tuple(own if one is None else one.policy for own, one in pairs))

    @cached_property
    def depth_layers(self) -> int:
        """Layers of the stack inside an MTP depth that the profile has choices for."""
        return max((c.inner for own in self._of_kinds for c in own.records), default=0)

    def what_runs(self, choice: LayerPolicy) -> RecomputePolicy:
        """What Megatron runs when a setting is given to all layers: on each without modules that
        are in none of its kind's records, such as `moe` on a dense layer."""
        known = {own.kind.name: own.what_runs(choice) for own in self._of_kinds}
        return RecomputePolicy(tuple(known[own.kind.name] for own in self._of_layers))

    def names(self, layer: int, choice: LayerPolicy) -> frozenset[LayerPolicy]:
        """A choice, and the inert choices that equal it on this layer."""
        equals = self._of_layers[layer].kind.equals
        return frozenset([choice, *(inert for inert, other in equals.items() if other == choice)])

    def layer(
        self, layer: int, policy: LayerPolicy, received: bool = False, alone: bool = False
    ) -> Unit:
        """Costs of one layer; `received` if another stage sent its input, which then stays alive,
        `alone` if no other microbatch ever is in flight.

        Raises: ProfileError when the profile has no record of the choice.
        """
        return self._units(layer, policy, received, alone)

    @cached_property
    def _units(self) -> Callable[[int, LayerPolicy, bool, bool], Unit]:
        return cache(self._unit_of)

    def _unit_of(self, layer: int, policy: LayerPolicy, received: bool, alone: bool) -> Unit:
        record = self.record(layer, policy)
        if record is None:
            kind = self._of_layers[layer].kind
            known = ", ".join(r.choice for r in kind.choices)
            raise ProfileError(
                f"The profile has no record of {policy} for layer {layer} (kind {kind.name!r}, "
                f"which has {known}). Measure it, or use one of these."
            )
        if received and not record.input_kept:
            record = self._with_input(record)
        if alone:
            record = _counted_once(record)
        kept = record.kept_gradient_bytes
        if kept is None:
            whole = policy.granularity == "full" and not policy.inner
            kept = 0 if whole else self.profile.boundary_bytes
        return _unit(f"layer {layer}", (layer,), record, kept)

    def layer_in(self, chunk: Chunk, layer: int, policy: LayerPolicy) -> Unit:
        """Costs of a layer at its place in a chunk; if it has both the final norm and the first MTP
        depth, the norm is part of the depth. Raises: as `layer`."""
        first, norm = layer == chunk.layers[0], self.profile.final_norm
        if layer != self.profile.model.num_layers:
            unit = self.layer(layer, policy.in_time, first and not chunk.embedding, chunk.head)
            return self._early(unit, chunk) if policy.ahead else unit
        unit = self.layer(layer, policy, alone=chunk.head)
        return unit if first or norm is None else _behind(self._shifted(norm, 1.0), unit)

    def _early(self, unit: Unit, chunk: Chunk) -> Unit:
        """A unit of full layers whose recompute begins early; the same under the loss, where no
        stage waits. Then its layers hold what they do under `none`, beside the checkpoint's input.
        In the backward the recomputed output is gone.

        While a stage recomputes it has posted a receive, what it sends next is still there, and of
        the microbatch before the last gradient and, if there is a stage before, what it got.

        Raises: ProfileError without a record of `none`.
        """
        if chunk.head or unit.layers[0] >= self.profile.model.num_layers:
            return unit
        units = [self.layer(layer, NONE) for layer in unit.layers]
        first, boundary_bytes = self.record(unit.layers[0], NONE), self.profile.boundary_bytes
        shared = unit.held_bytes if first and first.input_kept else 0
        held, highest = -shared, 0
        for none in units:
            held += none.held_bytes
            highest = max(highest, held + none.forward_transient_bytes)
        highest += (3 - chunk.embedding) * boundary_bytes
        time_ps = unit.backward_ps - sum(none.backward_ps for none in units)
        return replace(
            unit,
            backward_transient_bytes=max(0, unit.backward_transient_bytes - boundary_bytes),
            ahead=Ahead(max(0, time_ps), max(0, held), highest),
        )

    def units_in(
        self, chunk: Chunk, layer: int, choices: tuple[LayerPolicy, ...]
    ) -> tuple[Ints, Ints]:
        """Costs of choices of a layer at its place in a chunk, `[column, choice]`, and for each
        its `kept_gradient_bytes`. Raises: as `layer`."""
        first, depth = layer == chunk.layers[0], layer == self.profile.model.num_layers
        alike = self._of_layers[layer].kind.name, first, depth, chunk.embedding, chunk.head, choices
        if alike not in self._alike:
            units = [self.layer_in(chunk, layer, choice) for choice in choices]
            kept = np.array([unit.kept_gradient_bytes for unit in units], np.int64)
            self._alike[alike] = np.array([unit.costs for unit in units], np.int64).T, kept
        return self._alike[alike]

    @cached_property
    def _alike(self) -> dict[tuple[object, ...], tuple[Ints, Ints]]:
        """What `units_in` found, by what decides it."""
        return {}

    def _with_input(self, record: ChoiceRecord) -> ChoiceRecord:
        """The record with the input held; its forward transient already contained the input."""
        size_bytes = self.profile.boundary_bytes
        return replace(
            record,
            held_bytes=record.held_bytes + size_bytes,
            forward_transient_bytes=max(0, record.forward_transient_bytes - size_bytes),
            parts=tuple(part.each(lambda size: size + size_bytes) for part in record.parts),
        )

    def pseudo_layers(self, chunk: Chunk) -> tuple[list[Unit], list[Unit]]:
        """Units before and after a chunk's layers.

        A pipeline output that is not deallocated, and the input that an empty chunk passes on,
        count as held. They come first, because they outlive every backward of the chunk.
        """
        boundary_bytes = self.profile.boundary_bytes
        boundary = ChoiceRecord("none", boundary_bytes, 0, 0, 0.0, 0.0)
        kept = not chunk.head and not self.profile.deallocate_pipeline_outputs
        passed_on = not (chunk.layers or chunk.embedding or chunk.head)
        wide = hidden_states_received(self.profile, chunk)
        received = wide * (wide > 1)  # the loss reads them, and no record of another stage counts
        number = kept + passed_on + self._is_cloned(chunk) + received
        before = [_unit("boundary", (), boundary, boundary_bytes)] * number
        if chunk.embedding:
            before.append(self._outside("embedding", self.profile.embedding))
        after = []
        norm = self.profile.final_norm
        if norm is not None and chunk.layers[-1:] == (self.profile.model.num_layers - 1,):
            after.append(self._outside("final norm", norm))
        if chunk.head:
            after.append(self._outside("head", self.profile.head))
        return before, after

    def _outside(self, name: str, record: ChoiceRecord) -> Unit:
        return _unit(name, (), self._shifted(record, 1.0), self.profile.boundary_bytes)

    def _is_cloned(self, chunk: Chunk) -> bool:
        """Whether a chunk's layers get a copy of the received tensor, which itself stays alive: a
        decoder block without layers, before MTP depths, returns a copy of its input."""
        return chunk.layers[:1] == (self.profile.model.num_layers,)

    def checkpoints(self, layers: Sequence[int], choice: LayerPolicy = FULL) -> Ints:
        """Costs of checkpoints around the first g of `layers`, for each g that may be grouped,
        `[column, g - 1]`.

        choice: full or full+all, of which the last layer of a group reruns more.

        Held: the input of the first layer.
        Forward: the layers run one at a time without grad, each with its own input alive.
        Backward: all forwards run again, then the backwards from last to first. While layer i runs
        in either direction, the held bytes of layers 0 to i under `none` are alive, and the
        transient of layer i. A checkpoint keeps more (the incoming gradient, saved random states):
        this is the difference between the record of `full` and the same sum for one layer.
        A recorded `full/g` replaces all of this.

        The result ends before the first layer that cannot be in a group: a layer without records of
        `none` and `full`, an MTP depth, or a decoder layer after an encoder.
        """
        own = np.array(layers, np.int64)
        own = own[: self._groupable(own)]
        if not len(own):
            return np.zeros((len(_COLUMNS), 0), np.int64)
        none, full, whole = (costs[:, own] for costs in self._alone[1:])
        alone = none[_HELD] + np.maximum(none[_FORWARD], none[_BACKWARD])
        reach = none[_HELD].cumsum() + np.maximum(none[_FORWARD], none[_BACKWARD])
        extra = full[_HELD] + full[_BACKWARD] - alone
        backward = np.maximum.accumulate(reach) + np.maximum.accumulate(extra) - full[_HELD, 0]
        inputs = full[_HELD].copy()
        inputs[0] = 0  # the group's own input is in held
        costs = np.empty_like(full)
        costs[_HELD] = full[_HELD, 0]
        costs[_FORWARD] = np.maximum.accumulate(full[_FORWARD] + inputs)
        costs[_BACKWARD] = np.maximum(backward, 0)
        # Of a group the last layer alone ends with work that nothing reads.
        last = whole if choice.rerun_all else full
        costs[_TIMES] = last[_TIMES] + whole[_TIMES].cumsum(axis=1) - whole[_TIMES]
        self._put_measured(costs, layers, choice)
        return costs

    @cached_property
    def _alone(self) -> tuple[Bools, Ints, Ints, Ints]:
        """Which layers may be in a group, and costs of `none`, `full` and `full+all`,
        `[column, layer]`."""
        layers = self.profile.model.num_layers
        may = np.zeros(self.profile.num_layers, np.bool_)
        none, full, whole = (np.zeros((len(_COLUMNS), len(may)), np.int64) for _ in range(3))
        for kind in self._of_kinds:
            records = kind.records
            all_of_it = records.get(FULL.as_megatron)
            found = [records.get(NONE), records.get(FULL, all_of_it), all_of_it]
            members = np.array([layer for layer in kind.kind.layers if layer < layers], np.int64)
            for costs, record in zip((none, full, whole), found, strict=True):
                if record is not None:
                    costs[:, members] = np.array(_unit("", (), record).costs, np.int64)[:, None]
            may[members] = None not in found
        return may, none, full, whole

    @cached_property
    def full(self) -> LayerPolicy:
        """What layers have in a group: full, or full+all where no layer has a record of less."""
        known = any(FULL in own.records for own in self._of_kinds)
        return FULL if known else FULL.as_megatron

    def _groupable(self, layers: Ints) -> int:
        """How many may be in one group, from the first one on."""
        ends = ~self._alone[0][layers]
        model = self.profile.model
        if model.encoder_layers:
            behind = layers[1:] - model.encoder_layers
            ends[1:] |= behind >= 0 if model.encoder_name == ENCODER else behind == 0
        return int(np.append(ends, True).argmax())

    def _put_measured(self, costs: Ints, layers: Sequence[int], like: LayerPolicy) -> None:
        """Overwrite column g - 1 if the whole group is of one kind with a record of `full/g`."""
        own = self._of_layers[layers[0]]
        for choice in own.planned:
            group = choice.group
            same = all(self._of_layers[layer] is own for layer in layers[:group])
            if choice == replace(like, group=group) and group <= costs.shape[1] and same:
                costs[:, group - 1] = _unit("", (), own.records[choice]).costs

    def checkpoint(self, layers: Sequence[int], choice: LayerPolicy = FULL) -> Unit:
        """Costs of one checkpoint around all of `layers`, under full or full+all.

        Raises: ProfileError when a layer cannot be in a group (see `checkpoints`), or keeps parts.
        """
        if choice.keep:
            raise ProfileError(
                f"{choice} on layers {layers[0]}-{layers[-1]}: what a checkpoint around several "
                f"layers costs is not known with kept parts. Give each layer its own: "
                f"{replace(choice, group=1)}."
            )
        costs = self.checkpoints(layers, replace(choice, group=1))
        if costs.shape[1] < len(layers):
            lacking = layers[costs.shape[1]]
            raise ProfileError(
                f"Layers {layers[0]}-{layers[-1]} in one checkpoint: layer {lacking} is an MTP "
                "depth, lacks a record of none or full, or is a decoder layer after an encoder, so "
                "the group's cost is not known. Measure both choices, or end the group before it."
            )
        return Unit(f"layers {layers[0]}-{layers[-1]}", tuple(layers), *costs[:, -1].tolist())

    def chunk_units(self, chunk: Chunk, policy: RecomputePolicy) -> tuple[Unit, ...]:
        """The units of one chunk under a policy, in the order their forwards run.

        Raises: ProfileError (no record), PolicyError (a group spans two chunks).
        """
        before, after = self.pseudo_layers(chunk)
        units = before
        for run in policy.chunk_runs(chunk.layers):
            layers = chunk.layers[run.start : run.start + run.count]
            if run.policy.group == 1:
                units += [self.layer_in(chunk, layer, run.policy) for layer in layers]
                continue
            step = run.policy.group
            cut = (layers[i : i + step] for i in range(0, len(layers), step))
            together = [self.checkpoint(each, run.policy.in_time) for each in cut]
            units += [self._early(u, chunk) if run.policy.ahead else u for u in together]
        return (*units, *after)

    def units(self, layout: Layout, policy: RecomputePolicy) -> StageUnits:
        """The units of every stage and chunk, `[stage][chunk]`; raises as `chunk_units`."""
        return [[self.chunk_units(chunk, policy) for chunk in own] for own in layout.stages]


def hidden_states_received(profile: Profile, chunk: Chunk) -> int:
    """In the tensor that a chunk gets: those of the decoder, and if it has the loss without the MTP
    depths, of each of them (megatron-core multi_token_prediction.py, `torch.cat`)."""
    depths = profile.model.mtp_num_layers
    has_depths = any(layer >= profile.model.num_layers for layer in chunk.layers)
    return 1 if not chunk.head or has_depths else 1 + depths


def _counted_once(record: ChoiceRecord) -> ChoiceRecord:
    """The record without what static bytes contain as well; the backward's highest point counts
    what the dispatcher keeps after it as static."""
    size_bytes = min(record.also_static_bytes, record.held_bytes)
    return replace(
        record,
        held_bytes=record.held_bytes - size_bytes,
        backward_transient_bytes=record.backward_transient_bytes + size_bytes,
    )


def _scaled(group: OffloadGroup, factor: float) -> OffloadGroup:
    return replace(
        group,
        device_bytes=scaled_bytes(group.device_bytes, factor),
        host_bytes=scaled_bytes(group.host_bytes, factor),
    )


def _ps(time_ms: float) -> int:
    return round(time_ms * PS_PER_MS)


_SAME = (
    *("held_bytes", "forward_transient_bytes", "backward_transient_bytes", "parts", "graph"),
    *("input_stays", "output_keeps_bytes", "offload_groups"),
)
"""Fields that a unit has from its record."""


def _unit(
    name: str, layers: tuple[int, ...], record: ChoiceRecord, kept_gradient_bytes: int = 0
) -> Unit:
    return Unit(
        name,
        layers,
        forward_ps=_ps(record.forward_ms),
        backward_ps=_ps(record.backward_ms),
        spread_ps=_ps(record.spread_ms),
        kept_gradient_bytes=kept_gradient_bytes,
        **{field: getattr(record, field) for field in _SAME},
    )


def _behind(norm: ChoiceRecord, unit: Unit) -> Unit:
    """A layer with the final norm in front of it, as one unit."""

    def transient_bytes(way: str) -> int:
        return int(max(getattr(unit, way), getattr(norm, way) - unit.held_bytes))

    return replace(
        unit,
        held_bytes=norm.held_bytes + unit.held_bytes,
        forward_transient_bytes=transient_bytes("forward_transient_bytes"),
        backward_transient_bytes=transient_bytes("backward_transient_bytes"),
        forward_ps=unit.forward_ps + _ps(norm.forward_ms),
        backward_ps=unit.backward_ps + _ps(norm.backward_ms),
        spread_ps=unit.spread_ps + _ps(norm.spread_ms),
    )


def fastest_choice(table: CostTable, layer: int) -> LayerPolicy:
    """`none` where the profile has it, otherwise the choice with the least time."""
    if table.record(layer, NONE) is not None:
        return NONE
    return min(table.choices(layer), key=lambda policy: table.layer(layer, policy).time_ps)
