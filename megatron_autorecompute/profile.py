"""What each recompute choice costs on each kind of layer: records only, no measuring.

*Base* is all live bytes that do not belong to the layer. A layer's input hidden state belongs to
the layer, whichever module saves it; its output belongs to the next layer.

- held_bytes: bytes that stay from the end of the layer's forward to the start of its backward,
  with the input, and without the output unless the layer itself saves it.
- forward_transient_bytes: max over the layer's forward of (live - base) - held_bytes. It includes
  the output.
- backward_transient_bytes: max over the layer's backward of (live - base) - held_bytes. It includes
  the incoming and outgoing gradient and everything recomputed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, Field

from megatron_autorecompute import json_records
from megatron_autorecompute.block_names import DECODER, ENCODER
from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.lines import Line, RecordLines
from megatron_autorecompute.policy import ALL, CHOICE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.work_order import contains, launches_more, ordered_ms

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA_VERSION = 1

# Above every existing device and model, and so low that the planner's sums stay within 64 bits.
MOST_BYTES = 1 << 44  # 16 TiB
MOST_MS = 1e6
MOST_LAYERS = 1 << 12
ROUNDING = 1e-3
"""A choice may be cheaper by this share than one whose work it contains: figures are rounded."""

MEASURED = "measured"
"""`ChoiceRecord.source` of what ran on a device."""
MEASURED_ON_ONE_DEVICE = "measured on one device; communication: modelled"
"""`ChoiceRecord.source` of what ran on a device alone, without the job's other ranks."""
IMBALANCE_PERCENTILE = 99.0
"""The default percentile for layers with experts: in auto, and if a profile states imbalance."""

Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES)]
SignedBytes = Annotated[int, Field(ge=-MOST_BYTES, le=MOST_BYTES)]
Milliseconds = Annotated[float, Field(ge=0, le=MOST_MS, allow_inf_nan=False)]
SignedMilliseconds = Annotated[float, Field(ge=-MOST_MS, le=MOST_MS, allow_inf_nan=False)]
StepMilliseconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
"""Milliseconds of a step with all its microbatches."""
Positive = Annotated[int, Field(ge=1, le=1 << 40)]
Version = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
Percentile = Annotated[float, Field(ge=0, le=100)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


def _choice(text: str) -> str:
    """The text, if it is that of a choice as `LayerPolicy` writes it."""
    try:
        written = str(LayerPolicy.parse(text))
    except PolicyError as error:
        # A file may have the same mistake in every layer: the grammar would be said each time.
        raise ValueError(str(error).partition(f" A choice is {CHOICE}")[0]) from error
    if written != text:
        raise ValueError(f"write it as {written}")
    return text


Choice = Annotated[str, AfterValidator(_choice)]


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """The three byte figures of a layer under a choice, as the module docstring defines them."""

    held_bytes: Bytes
    """Bytes kept from the forward to the backward."""
    forward_transient_bytes: Bytes
    """Further bytes of the forward."""
    backward_transient_bytes: Bytes
    """Further bytes of the backward."""

    @classmethod
    def of(cls, record: Any) -> LayerBytes:
        """The figures of a record."""
        return cls(*(getattr(record, each.name) for each in fields(cls)))

    def each(self, change: Callable[[int], int]) -> LayerBytes:
        """These figures after the same change to all three."""
        return LayerBytes(*map(change, astuple(self)))

    def into(self, record: _HasBytes) -> _HasBytes:
        """A copy of the record that has these figures."""
        return replace(record, **asdict(self))


@dataclass(frozen=True, slots=True)
class BytesAt:
    """What a layer with experts needs at a percentile of uneven routing."""

    percentile: Percentile
    """Percentage of the microbatches, on the rank that needs most, which need no more than this."""
    held_bytes: Bytes
    """The record's held_bytes at this percentile."""
    forward_transient_bytes: Bytes
    """The record's forward_transient_bytes at this percentile."""
    backward_transient_bytes: Bytes
    """The record's backward_transient_bytes at this percentile."""


@dataclass(frozen=True, slots=True)
class PartBytes:
    """A part of a layer that EP overlap runs beside a part of another microbatch. The parts are
    attention (with norms and router), dispatch, experts and combine. Figures are live bytes above
    the layer's base; the layer's input, its output and the gradients of both are among them."""

    forward_peak_bytes: Bytes
    """The most bytes alive while the part's forward runs."""
    forward_end_bytes: Bytes
    """The bytes alive when the part's forward has ended."""
    backward_peak_bytes: Bytes
    """The most bytes alive while the part's backward runs. The last part runs backward first."""
    backward_end_bytes: Bytes
    """The bytes alive when the part's backward has ended. The first part's figure includes what the
    layer keeps until its next forward, without what `ChoiceRecord.input_stays` says."""

    def each(self, change: Callable[[int], int]) -> PartBytes:
        """These figures after the same change to all."""
        return PartBytes(*(change(getattr(self, one.name)) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class OffloadGroup:
    """What a layer copies to host memory and back at once: one of Megatron's fine-grained
    offloading groups."""

    name: str
    """The module's name in Megatron's `offload_modules`: core_attn, moe_act, ..."""
    device_bytes: Bytes
    """Bytes that are free on the device once the copy out has ended."""
    host_bytes: Bytes
    """Bytes that are copied out, kept in host memory, and copied back."""
    forward_end: Share
    """When the copy out may begin, as a share of the layer's forward_ms."""
    backward_begin: Share
    """When the copy back must have ended, as a share of the layer's backward_ms."""
    backward_end: Share
    """When the next group's copy back may begin, as a share of the layer's backward_ms."""

    def __post_init__(self) -> None:
        if self.backward_end < self.backward_begin:
            raise ValueError(
                f"offload group {self.name!r}: backward_end {self.backward_end} is before "
                f"backward_begin {self.backward_begin}"
            )


@dataclass(frozen=True, slots=True)
class HostLink:
    """The link of one device to host memory, while the node's other devices copy as well."""

    to_host_gb_per_s: Rate
    """Rate from device to host, in 10^9 bytes per second, while copies also run back."""
    to_device_gb_per_s: Rate
    """Rate from host to device, in 10^9 bytes per second, while copies also run out."""
    host_bytes: Annotated[int, Field(ge=0, le=1 << 60)]
    """The most host memory that one device's copies may take."""


@dataclass(frozen=True, slots=True)
class HostTimes:
    """What the host takes to launch a layer for one microbatch, without waiting for the device."""

    forward_ms: Milliseconds
    """The forward's time: the lower quartile of all runs."""
    backward_ms: Milliseconds
    """The backward's time, recompute included: the lower quartile of all runs."""
    spread_ms: Milliseconds = 0.0
    """The spread of times within turns, as in the record."""
    turn_spread_ms: Milliseconds = 0.0
    """The spread of times between turns, as in the record."""
    forward_waits: bool = False
    """Whether the host waits for the device in the forward, for example to read how many tokens an
    expert got. The forward's time then contains the device's."""
    backward_waits: bool = False
    """Whether the host waits for the device in the backward."""

    def plus(self, other: HostTimes) -> HostTimes:
        """The figures of this one and then the other one."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return HostTimes(*(a or b if isinstance(a, bool) else a + b for a, b in pairs))


@dataclass(frozen=True, slots=True)
class ChoiceRecord:
    """Cost of one choice on one layer of a kind, for one microbatch."""

    choice: Choice
    """The choice as `str(LayerPolicy)` writes it: none, full, selective[core_attn+mlp],
    none+offload[core_attn]. The figures of `full/g` are those of the whole checkpoint of g
    layers."""
    held_bytes: Bytes
    """Bytes kept from the end of the forward to the start of the backward, input included."""
    forward_transient_bytes: Bytes
    """The most bytes that the forward needs on top of held_bytes, output included."""
    backward_transient_bytes: Bytes
    """The most bytes that the backward needs on top of held_bytes; gradients and what is recomputed
    are included."""
    forward_ms: Milliseconds
    """Forward time on the device, lower quartile."""
    backward_ms: Milliseconds
    """Backward time on the device, lower quartile, recompute included."""
    spread_ms: Milliseconds = 0.0
    """How far single runs spread within a turn of steps in a row: half the interquartile range of
    forward plus that of backward."""
    runs: Positive = 1
    """How many runs the times are lower quartiles of; 1: they err as much as one run does."""
    uncertainty_bytes: Bytes = 0
    """How far each of the three byte figures may be off. A budget is met with it added."""
    input_kept: bool = True
    """Whether held_bytes contains the layer's input. False: nothing saves the input. Then the first
    layer of a chunk holds `Profile.boundary_bytes` more, because the schedule keeps its input."""
    source: str = MEASURED
    """Where the figures come from: measured, counted, assumed, or a description."""
    communication_ms: Milliseconds = 0.0
    """The modelled communication in forward_ms + backward_ms, where arithmetic is measured; 0 where
    all is measured or all is modelled."""
    percentiles: tuple[BytesAt, ...] = ()
    """Byte figures of a measured layer with experts at percentiles of its microbatches. The
    record's own byte figures are then the maximum."""
    kept_gradient_bytes: Bytes | None = None
    """How much higher the backward reaches where the gradient of the layer's output stays alive to
    the backward's end, as in a chunk's last layer. None: not known. Then `Profile.boundary_bytes`
    is taken, and 0 under full, because a checkpoint keeps that gradient itself."""
    also_static_bytes: Bytes = 0
    """Bytes that both held_bytes and static bytes contain: what a MoE dispatcher keeps of its last
    microbatch. In the chunk with the head they count once."""
    lines: RecordLines | None = None
    """The figures as lines in the tokens of a microbatch. None: they hold for one length."""
    parts: tuple[PartBytes, ...] = ()
    """With EP overlap: the layer's parts, in the order of their forwards. Without parts the whole
    layer counts beside another microbatch."""
    input_stays: bool = False
    """With EP overlap: whether the layer's input and its gradient stay alive until the layer's next
    forward."""
    output_keeps_bytes: Bytes = 0
    """With EP overlap, in a chunk's last layer: bytes that the graph of its output keeps after its
    backward. The schedule refers to that graph until the chunk's backward ends."""
    graph: LayerBytes | None = None
    """With CUDA graphs of layers: the part of the byte figures that lies in the graphs' memory
    pool, or in the buffers that the graphs' inputs are copied to. Saved tensors, inputs and outputs
    of graphs are held. Nothing else can use the pool, so its highest point counts beside the
    highest point of everything else."""
    offload_groups: tuple[OffloadGroup, ...] = ()
    """What a choice with offload moves to host memory, in the order in which the copies out begin.
    held_bytes leave out all `device_bytes`, backward_transient_bytes contain them as they come
    back, and times contain no waiting for copies."""
    turns: Positive = 1
    """The number of turns in which the runs were made. A turn is a sequence of consecutive steps;
    other choices run between turns."""
    turn_spread_ms: Milliseconds = 0.0
    """How far turns spread: the standard deviation of their lower quartiles, of forward plus that
    of backward."""
    host: HostTimes | None = None
    """What the host takes; None: not known, or there is no device beside it."""

    def __post_init__(self) -> None:
        modules = self.policy.offload if self.offload_groups else ()
        for group in self.offload_groups:
            if group.name not in modules:
                raise ValueError(
                    f"{self.choice!r} has a group {group.name!r}; its groups can be of "
                    f"{', '.join(modules) or 'no module: it does not offload'}"
                )
        ends = [group.forward_end for group in self.offload_groups]
        if ends != sorted(ends):
            raise ValueError(
                f"{self.choice!r}: offload_groups must be in the order of forward_end; found {ends}"
            )

    @property
    def host_bytes(self) -> int:
        """Host bytes of all groups."""
        return sum(group.host_bytes for group in self.offload_groups)

    @property
    def policy(self) -> LayerPolicy:
        """`choice`, parsed."""
        return LayerPolicy.parse(self.choice)

    @property
    def knows_routing(self) -> bool:
        """Whether bytes were measured at percentiles; stated factors do not apply then."""
        return bool(self.percentiles) and self.source == MEASURED

    def at_percentile(self, percentile: float | None) -> ChoiceRecord:
        """The record with the bytes of the nearest percentile at or above; unchanged if none is."""
        asked = math.inf if percentile is None else percentile
        above = [point for point in self.percentiles if point.percentile >= asked]
        nearest = min(above, key=lambda point: point.percentile, default=None)
        return LayerBytes.of(nearest).into(self) if nearest else self


_HasBytes = TypeVar("_HasBytes", bound="DataclassInstance")
_HasTimes = TypeVar("_HasTimes", ChoiceRecord, HostTimes)


@dataclass(frozen=True, slots=True)
class Imbalance:
    """How much more a MoE layer holds when routing is uneven."""

    percentile: Percentile
    """Percentage of the microbatches on the fullest rank that need no more than this factor
    says."""
    factor: Annotated[float, Field(gt=0, le=1024, allow_inf_nan=False)]
    """Multiplies held and transient bytes of the kind's records; 1 changes nothing. Records with
    measured `percentiles` are not multiplied."""


@dataclass(frozen=True, slots=True)
class StaticBytes:
    """Bytes that live through the whole step."""

    parameter_bytes: Bytes = 0
    """Weights as the forward uses them."""
    gradient_bytes: Bytes = 0
    """Gradient buffers."""
    optimizer_state_bytes: Bytes = 0
    """Master weights and moments, this rank's shard."""
    buffer_bytes: Bytes = 0
    """Everything else: masks, rotary tables, communication buffers inside torch."""
    shared: dict[str, Bytes] = field(default_factory=dict)
    """Buffers by name that a stage has once, however many of its parts name them: workspaces of
    matrix products, dummy weight gradients of one shape."""

    @classmethod
    def sum(cls, parts: Iterable[StaticBytes]) -> StaticBytes:
        """The sum of all parts. Of a shared buffer that several parts name, the largest counts."""
        counted = list(parts)
        shared: dict[str, int] = {}
        for part in counted:
            for name, size in part.shared.items():
                shared[name] = max(size, shared.get(name, 0))
        names = [each.name for each in fields(cls) if each.name != "shared"]
        sums: dict[str, Any] = {n: sum(getattr(part, n) for part in counted) for n in names}
        return cls(**sums, shared=shared)

    @property
    def all_buffer_bytes(self) -> int:
        """Buffers, those that are shared included."""
        return self.buffer_bytes + sum(self.shared.values())

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        state_bytes = self.gradient_bytes + self.optimizer_state_bytes
        return self.parameter_bytes + state_bytes + self.all_buffer_bytes


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of equal structure, shapes and config: measured once, planned together."""

    name: str
    """A label: dense, moe, mtp, ..."""
    layers: tuple[Index, ...]
    """0-based global indices; MTP depth d is num_layers + d."""
    choices: tuple[ChoiceRecord, ...]
    """One record per choice that may be planned."""
    inert: dict[Choice, Choice] = field(default_factory=dict)
    """Choices that save nothing on this kind, each with the choice that it equals. They are never
    planned."""
    imbalance: tuple[Imbalance, ...] = ()
    """How uneven routing may be, stated by hand; for layers with experts."""
    static: StaticBytes | None = None
    """Static bytes of one such layer; needed only to plan layouts that were not measured."""

    def __post_init__(self) -> None:
        names = [record.choice for record in self.choices]
        if not names:
            raise ValueError(f"kind {self.name!r} has no choices; give at least one record")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"kind {self.name!r} has two records for {twice!r}; keep one")
        for name, equal in self.inert.items():
            if name in names:
                raise ValueError(f"kind {self.name!r}: {name!r} is both inert and a choice")
            if equal not in names:
                raise ValueError(f"kind {self.name!r}: inert {name!r} equals unknown {equal!r}")
        _check_order(self)

    def record(self, choice: LayerPolicy | str) -> ChoiceRecord | None:
        """The record of a choice (or its text), or of the choice it equals; None without one.

        Where nobody measured what Megatron's own checkpoints rerun (+all), the record of the same
        choice says the least that they take.
        """
        name = self.inert.get(str(choice), str(choice))
        names = [name, *[name.removesuffix(ALL)] * name.endswith(ALL)]
        found = {record.choice: record for record in self.choices if record.choice in names}
        return next((found[each] for each in names if each in found), None)

    def as_megatron(self) -> LayerKind:
        """The kind with Megatron's own choices alone, as its checkpoints run them; as ours run them
        where nobody measured the difference."""
        own = {LayerPolicy.parse(record.choice): record for record in self.choices}
        kept = tuple(
            record
            for choice, record in own.items()
            if choice.is_megatrons or (not choice.own and choice.as_megatron not in own)
        )
        names = {record.choice for record in kept}
        inert = {one: other for one, other in self.inert.items() if other in names}
        return replace(self, choices=kept, inert=inert)

    @property
    def equals(self) -> dict[LayerPolicy, LayerPolicy]:
        """`inert`, parsed."""
        return {LayerPolicy.parse(a): LayerPolicy.parse(b) for a, b in self.inert.items()}

    @property
    def knows_imbalance(self) -> bool:
        """Whether imbalance is stated or measured for any percentile."""
        return bool(self.imbalance) or any(record.knows_routing for record in self.choices)

    def imbalance_factor(self, percentile: float | None) -> float:
        """The factor of `imbalance_at`, 1 for None; not for records that know routing."""
        point = None if percentile is None else self.imbalance_at(percentile)
        return 1.0 if point is None else point.factor

    def imbalance_at(self, percentile: float) -> Imbalance | None:
        """The nearest stated point at or above a percentile, else the highest; None if none is."""
        points = sorted(self.imbalance, key=lambda point: point.percentile)
        return next(
            (p for p in points if p.percentile >= percentile), points[-1] if points else None
        )


@dataclass(frozen=True, slots=True)
class Deferred:
    """What the stage with the head keeps of microbatches whose backward has run, until the pipeline
    has drained (Megatron's `defer_embedding_wgrad_compute`)."""

    each_bytes: Bytes
    """Bytes of one run of the output layer: the gradient of its logits, its input, and what the
    chunk received with that input's gradient."""
    runs: Positive = 1
    """Runs of the output layer in a microbatch: one, and one for each MTP depth."""
    limit: Positive | None = None
    """The most runs that are kept, from the start of a step (`wgrad_deferral_limit`). None: all."""

    def waiting(self, microbatches: int) -> int:
        """How many runs are kept when so many microbatches have run backward."""
        runs = microbatches * self.runs
        return runs if self.limit is None else min(runs, self.limit)


@dataclass(frozen=True, slots=True)
class ScheduleOverhead:
    """Bytes alive besides static bytes, layers, and the boundary tensors of `p2p_tensors`."""

    forward_bytes: Bytes
    """The most such bytes in a forward: masks, token ids, what `forward_step` keeps."""
    backward_bytes: Bytes
    """The most such bytes in a backward."""
    forward_line: Line | None = None
    """forward_bytes as a line in the tokens of all microbatches of a call. None: one length."""
    backward_line: Line | None = None
    """backward_bytes as such a line."""

    def or_more(self, other: ScheduleOverhead) -> ScheduleOverhead:
        """The larger bytes of two, without lines."""
        return ScheduleOverhead(
            max(self.forward_bytes, other.forward_bytes),
            max(self.backward_bytes, other.backward_bytes),
        )


@dataclass(frozen=True, slots=True)
class StageRecord:
    """What one pipeline stage needs besides its layers' activations."""

    layers: tuple[Index, ...]
    """The layers of all chunks of the stage when it was measured. A stage with other layers does
    not use this record."""
    static: StaticBytes
    """Parameters, gradients, optimizer state, buffers of the stage."""
    optimizer_step_peak_bytes: Bytes = 0
    """The most bytes of the optimizer step on top of static bytes. No activation is alive then."""
    overhead: ScheduleOverhead | None = None
    """Measured bytes besides layers and boundary tensors. None counts as 0."""
    residual_bytes: SignedBytes = 0
    """The measured less the predicted activation peak. Predictions have it added."""
    uncertainty_bytes: Bytes = 0
    """How far the residual may be off."""
    residual_ms: SignedMilliseconds = 0.0
    """The measured less the predicted time of one microbatch on this stage."""
    available_bytes: Bytes | None = None
    """The device's memory less what lies outside torch, on the rank with the least. None: no
    device."""
    fragmentation_bytes: Bytes = 0
    """The most bytes reserved less the most bytes allocated, on the rank where this is largest."""
    others_bytes: Bytes | None = None
    """Bytes that were allocated when the job began and belong to neither model nor optimizer, such
    as a reference model, on the rank with the most. residual_bytes contains them. None: not
    read."""


@dataclass(frozen=True, slots=True)
class RankStep:
    """One training step as Megatron's timers and torch's statistics saw it on one rank.

    Times are what Megatron logs for the step: wall-clock time of all microbatches, with the device
    synchronised before and after. None: that timer did not run, or, for bytes, there is no CUDA.
    """

    rank: Annotated[int, Field(ge=0, le=1 << 24)]
    """The rank's number in the whole job."""
    stage: Index
    """The rank's pipeline stage."""
    forward_compute_ms: StepMilliseconds | None = None
    """Megatron's timer `forward-compute`."""
    backward_compute_ms: StepMilliseconds | None = None
    """Megatron's timer `backward-compute`."""
    optimizer_ms: StepMilliseconds | None = None
    """Megatron's timer `optimizer`."""
    max_memory_allocated_bytes: Bytes | None = None
    """`torch.cuda.max_memory_allocated` of the step."""
    max_memory_reserved_bytes: Bytes | None = None
    """`torch.cuda.max_memory_reserved` of the step. It is too low if the allocator returned memory
    in the middle of the step."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One whole measuring step, to compare with the sum of its layers.

    Of a plan only the interval of its step depends on it: residuals are those under its policy.

    It is the measuring step with the median forward plus backward time.
    """

    iteration: Positive
    """The step's number as Megatron logs it. A job without such numbers counts from its start."""
    recompute_policy: str
    """The policy that ran, as `RecomputePolicy.parse` reads it. Every choice has a record."""
    num_microbatches: Positive
    """Microbatches of the step."""
    ranks: tuple[RankStep, ...]
    """Every rank of the job."""


@dataclass(frozen=True, slots=True)
class Model:
    """Which model the shard belongs to."""

    name: str
    """A label."""
    num_layers: Index
    """Layers of the whole model, MTP excluded."""
    mtp_num_layers: Index = 0
    """MTP depths; depth d is layer num_layers + d."""
    encoder_layers: Index = 0
    """How many of num_layers belong to an encoder (T5) or to a vision tower. They come first."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Anything worth knowing: hidden_size, num_attention_heads, ..."""
    encoder_name: str = ENCODER
    """What a policy calls the block of the encoder's or the tower's layers."""

    @property
    def blocks(self) -> dict[str, int]:
        """Layers of each block by name, in the order of a policy; the decoder's with MTP depths."""
        first = {self.encoder_name: self.encoder_layers} if self.encoder_layers else {}
        return {**first, DECODER: self.num_layers + self.mtp_num_layers - self.encoder_layers}


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The shapes the shard was measured at. Bytes and times hold for these only."""

    micro_batch_size: Positive
    """Samples per microbatch on one data-parallel rank."""
    seq_length: Positive
    """Tokens per sample."""
    tensor_parallel: Positive = 1
    """Ranks of a tensor parallel group."""
    context_parallel: Positive = 1
    """Ranks of a context parallel group."""
    expert_parallel: Positive = 1
    """Ranks of an expert parallel group."""
    expert_tensor_parallel: Positive = 1
    """Ranks of an expert tensor parallel group."""
    sequence_parallel: bool = False
    """Whether activations between layers are split over the tensor parallel ranks."""
    dtype: str = "bfloat16"
    """The dtype of hidden states."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything the planner knows about a model on a machine. docs/files.md lists the fields."""

    model: Model
    """The model."""
    parallelism: Parallelism
    """The shapes at which the records hold."""
    kinds: tuple[LayerKind, ...]
    """The kinds of layers. Every layer is in exactly one kind."""
    embedding: ChoiceRecord
    """The pseudo-layer in front of the first layer. Its choice is none."""
    head: ChoiceRecord
    """The pseudo-layer after the last layer: final norm, output layer and loss. Its choice is none.
    With MTP depths it follows the last depth, contains every depth's loss, and leaves out the final
    norm."""
    boundary_bytes: Bytes
    """One tensor between two stages, as one rank has it."""
    stages: tuple[StageRecord, ...] = ()
    """Facts of each pipeline stage, first stage first, at the layout that was measured."""
    step_end_ms: StepMilliseconds = 0.0
    """Modelled time of a step outside its microbatches, for data-parallel collectives and the
    optimizer. 0: not known. The costs of policies leave it out."""
    measured_step: MeasuredStep | None = None
    """A whole step in Megatron's timers and torch's memory statistics. Planning does not use it.
    None: not recorded."""
    embedding_static: StaticBytes | None = None
    """Static bytes of the embedding. Layouts that were not measured need them."""
    head_static: StaticBytes | None = None
    """Static bytes of final norm and output layer. Layouts that were not measured need them."""
    final_norm: ChoiceRecord | None = None
    """With MTP depths only: the pseudo-layer after the last decoder layer, in that layer's chunk.
    Its choice is none."""
    deallocate_pipeline_outputs: bool = True
    """Megatron's setting of that name: outputs that were sent are freed at once."""
    overlap_p2p_comm: bool = True
    """Megatron's setting of that name, for interleaved schedules: tensors are received early."""
    deferred: Deferred | None = None
    """What waits on the head's stage until the pipeline has drained. None: nothing."""
    graph_of_iteration: bool = False
    """Whether all forwards and backwards of a step are one CUDA graph. The optimizer step cannot
    use the memory of the graph's pool, so its bytes count on top of every peak."""
    host_link: HostLink | None = None
    """The way to host memory. Without it no choice that offloads can be planned."""
    boundary_line: Line | None = None
    """boundary_bytes as a line in the tokens of a microbatch. None: lengths do not vary."""
    routed_line: Line | None = None
    """The number of tokens that plans allow for the experts of a rank in one layer, as a line in
    the tokens of a call's longest microbatch. None: no experts, or lengths do not vary."""
    times_error: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.0
    """The error that all device times share, as a share of them: one standard deviation, estimated
    from how far whole steps differed from turn to turn."""
    host_times_error: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.0
    """The error that all host times share, in the same measure as `times_error`."""
    fingerprint: dict[str, str] = field(default_factory=dict)
    """Versions, device, and settings of model, DDP and optimizer. A plan is used again only if all
    of them are equal."""
    assumptions: tuple[str, ...] = ()
    """One sentence for each assumption. Results made from the profile count or print them."""
    schema_version: Version = SCHEMA_VERSION
    """Major version of this schema; added fields do not raise it."""

    def __post_init__(self) -> None:
        _check_coverage(self)
        ends = {"embedding": self.embedding, "final_norm": self.final_norm, "head": self.head}
        for where, record in ends.items():
            if record is not None and record.choice != "none":
                raise ValueError(f"{where}.choice is {record.choice!r}; it must be 'none'")
        if self.measured_step is not None:
            _check_step(self, self.measured_step)

    @property
    def num_layers(self) -> int:
        """All layers with an index: decoder layers and MTP depths."""
        return self.model.num_layers + self.model.mtp_num_layers

    @property
    def num_gpus(self) -> int | None:
        """GPUs of the whole job; None if not known."""
        known = str(self.model.facts.get("num_gpus", self.fingerprint.get("world_size")))
        return int(known) if known.isdecimal() else None

    @property
    def stated_percentile(self) -> float | None:
        """The percentile to plan for by default: IMBALANCE_PERCENTILE if a kind states imbalance.

        Otherwise None, which takes records as they are: measured ones at their maximum.
        """
        return IMBALANCE_PERCENTILE if any(kind.imbalance for kind in self.kinds) else None

    @property
    def graphs_of_layers(self) -> bool:
        """Whether any record has a part in the memory pool of CUDA graphs."""
        return any(record.graph for record in self.all_records)

    @property
    def all_records(self) -> list[ChoiceRecord]:
        """The records of layers, and of what is outside of them."""
        outside = (self.embedding, self.head, self.final_norm)
        of_layers = [record for kind in self.kinds for record in kind.choices]
        return of_layers + [record for record in outside if record is not None]

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of a global 0-based layer index."""
        return next(kind for kind in self.kinds if layer in kind.layers)

    def each_record(self, changed: Callable[[ChoiceRecord], ChoiceRecord]) -> Profile:
        """The profile with every record changed: of layers, and of what is outside of them."""
        kinds = (replace(k, choices=tuple(map(changed, k.choices))) for k in self.kinds)
        return replace(
            self,
            kinds=tuple(kinds),
            embedding=changed(self.embedding),
            head=changed(self.head),
            final_norm=self.final_norm and changed(self.final_norm),
        )

    def as_megatron(self) -> Profile:
        """The profile with Megatron's own choices alone; see `LayerKind.as_megatron`."""
        return replace(self, kinds=tuple(kind.as_megatron() for kind in self.kinds))

    def to_json(self) -> str:
        """JSON text, checked against the schema."""
        return json_records.to_json(self)

    @classmethod
    def from_json(cls, text: str, source: str = "The profile") -> Profile:
        """Read and check; raises ProfileError with the path of each bad field."""
        return json_records.from_json(cls, text, source=source, major=SCHEMA_VERSION)

    def save(self, path: str | Path) -> None:
        """Write the profile to a file, as a whole or not at all."""
        json_records.write_atomically(self.to_json(), path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile file, or the profile in a plan file; raises ProfileError."""
        return json_records.load(cls, path, major=SCHEMA_VERSION, field="profile")


def scaled_bytes(count_bytes: int, factor: float) -> int:
    """Bytes times an imbalance factor, rounded up so that a budget stays met."""
    return count_bytes if factor == 1.0 else math.ceil(count_bytes * factor)


def in_order(records: Sequence[ChoiceRecord], weights: Sequence[float]) -> tuple[ChoiceRecord, ...]:
    """One kind's records with the nearest times in which more work is never faster.

    A record's `spread_ms` is at least the distance by which its time was moved.

    Args:
        records: one for each choice, all of single layers.
        weights: the weights of each record's times, above 0; for example the number of samples.
    """
    choices = [record.policy for record in records]

    hosts = [record.host for record in records if record.host is not None]
    waits = any(host.forward_waits or host.backward_waits for host in hosts)

    def ordered(times: Sequence[_HasTimes], of_host: bool) -> Iterator[_HasTimes]:
        forward_ms, backward_ms = [t.forward_ms for t in times], [t.backward_ms for t in times]
        is_more = launches_more if of_host else contains
        right = ordered_ms(choices, forward_ms, backward_ms, weights, is_more)
        return map(_with_times, times, *right)

    found = tuple(ordered(records, waits))
    if len(hosts) < len(found):
        return found
    pairs = zip(found, ordered(hosts, True), strict=True)
    return tuple(replace(record, host=host) for record, host in pairs)


def _with_times(times: _HasTimes, forward_ms: float, backward_ms: float) -> _HasTimes:
    moved_ms = abs(forward_ms + backward_ms - times.forward_ms - times.backward_ms)
    return replace(
        times,
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        spread_ms=max(times.spread_ms, moved_ms),
    )


def with_times_of(record: ChoiceRecord, other: ChoiceRecord) -> ChoiceRecord:
    """A record with the times of another one, and all that is known of them."""
    names = ("forward_ms", "backward_ms", "spread_ms", "runs", "turns", "turn_spread_ms", "host")
    return replace(record, **{name: getattr(other, name) for name in names})


def _check_order(kind: LayerKind) -> None:
    """Refuse a choice that is faster than one it contains: a planner would recompute needlessly.

    One checkpoint of a layer may be faster than several of its modules, where a host decides."""
    chosen = [(record, record.policy) for record in kind.choices]
    timed = [(own, (each.forward_ms + each.backward_ms) / own.group) for each, own in chosen]
    for larger, larger_ms in timed:
        for smaller, smaller_ms in timed:
            if larger_ms < smaller_ms * (1 - ROUNDING) and launches_more(larger, smaller):
                raise ValueError(
                    f"kind {kind.name!r}: {larger} takes {larger_ms:g} ms a layer (forward "
                    f"and backward), less than {smaller} with {smaller_ms:g} ms, although it does "
                    "the same work and more; measure both again, or leave one out"
                )


def _check_step(profile: Profile, step: MeasuredStep) -> None:
    """Refuse a step that cannot be compared with the sum of its layers."""
    policy = RecomputePolicy.parse(step.recompute_policy, num_layers=profile.num_layers)
    if not covers(profile.kinds, policy):
        raise ValueError("measured_step.recompute_policy has a choice of which there is no record")
    for number, rank in enumerate(step.ranks):
        if rank.stage >= len(profile.stages):
            raise ValueError(
                f"measured_step.ranks[{number}].stage is {rank.stage}; there are "
                f"{len(profile.stages)} stages"
            )


def covers(kinds: Sequence[LayerKind], policy: RecomputePolicy) -> bool:
    """Whether there is a record for every layer's choice under a policy."""
    return all(
        kind.record(policy.layers[index]) is not None for kind in kinds for index in kind.layers
    )


def with_missed_bytes(
    profile: Profile, predicted_bytes: Sequence[int], seen_bytes: Sequence[int]
) -> Profile:
    """The profile with each stage's residual raised by what a prediction missed of its peak.

    Both are the peaks of every stage; where a lower one was seen nothing changes.
    """
    stages = tuple(
        replace(stage, residual_bytes=stage.residual_bytes + max(0, seen - said))
        for stage, said, seen in zip(profile.stages, predicted_bytes, seen_bytes, strict=True)
    )
    return replace(profile, stages=stages)


def _check_coverage(profile: Profile) -> None:
    named = Counter(layer for kind in profile.kinds for layer in kind.layers)
    expected = Counter(range(profile.num_layers))
    if wrong := sorted((named - expected) | (expected - named)):
        raise ValueError(
            f"layers {wrong} are not in exactly one kind; the model has layers 0 to "
            f"{profile.num_layers - 1}"
        )
