"""Profiles of microbatches of other lengths, and the peak of a call whose microbatches differ.

No figure of a profile with lines falls with the length, so a plan for microbatches of T tokens
bounds every call of microbatches of at most T (docs/decisions/bytes.md has the proof).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.lines import Microbatch
from megatron_autorecompute.planner.cost.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.p2p_tensors import extra_owners
from megatron_autorecompute.planner.cost.peak_memory import StageBytes, every_moment, stage_base
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.unit_costs import CostTable
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerKind,
    Profile,
    ScheduleOverhead,
    StageRecord,
    in_order,
)


def varies(profile: Profile) -> bool:
    """Whether a profile holds for microbatches of every length."""
    return profile.boundary_line is not None


def profile_at(profile: Profile, one: Microbatch, call_tokens: int) -> Profile:
    """The profile of microbatches of one length, still with its lines; one without is as it was.
    Layers with experts get as many tokens as `routed_line` says.

    call_tokens: the tokens of all microbatches of a call together, on a rank.
    """
    if profile.boundary_line is None:
        return profile
    found = _bytes_at(profile, one, call_tokens, {})
    return replace(
        found,
        kinds=tuple(_with_times(kind, one) for kind in found.kinds),
        embedding=_timed(found.embedding, one),
        head=_timed(found.head, one),
        final_norm=found.final_norm and _timed(found.final_norm, one),
    )


def _bytes_at(
    profile: Profile, one: Microbatch, call_tokens: int, routed: Mapping[int, int]
) -> Profile:
    """As `profile_at`, with the times that the profile has, for as many routed tokens by layer;
    layers that are not named got what `routed_line` says."""
    assert profile.boundary_line is not None
    call = Microbatch(call_tokens, 0)
    if profile.routed_line is not None:
        one = replace(one, routed_tokens=profile.routed_line.at(one))
    sizes, boundary = profile.parallelism, profile.boundary_line.bytes_at(one)
    sample = max(1, one.tokens) * sizes.context_parallel
    found = profile.each_record(lambda record: _record_at(record, one, boundary))
    kinds = (each for kind in found.kinds for each in _split(kind, one, routed, boundary))
    return replace(
        found,
        parallelism=replace(sizes, micro_batch_size=1, seq_length=sample),
        kinds=tuple(kinds),
        boundary_bytes=boundary,
        stages=tuple(_stage_at(stage, call) for stage in profile.stages),
    )


def _split(
    kind: LayerKind, one: Microbatch, routed: Mapping[int, int], boundary_bytes: int
) -> Iterator[LayerKind]:
    """A kind; a layer of which it is known how many tokens it got is one alone."""
    rest = tuple(layer for layer in kind.layers if layer not in routed)
    if rest:
        yield replace(kind, layers=rest)
    for layer in sorted(set(kind.layers) - set(rest)):
        own = replace(one, routed_tokens=routed[layer])
        choices = tuple(_record_at(record, own, boundary_bytes) for record in kind.choices)
        yield replace(kind, name=f"{kind.name} {layer}", layers=(layer,), choices=choices)


def _with_times(kind: LayerKind, one: Microbatch) -> LayerKind:
    """Lines of two choices may cross: at one length more work would be faster."""
    timed = [_timed(record, one) for record in kind.choices]
    return replace(kind, choices=in_order(timed, [record.runs for record in timed]))


def _timed(record: ChoiceRecord, one: Microbatch) -> ChoiceRecord:
    lines = record.lines
    if lines is None:
        return record
    forward_ms, backward_ms = lines.forward_ms.at(one), lines.backward_ms.at(one)
    was_ms, now_ms = record.forward_ms + record.backward_ms, forward_ms + backward_ms
    spread_ms = record.spread_ms * (now_ms / was_ms if was_ms else 1.0)
    return replace(record, forward_ms=forward_ms, backward_ms=backward_ms, spread_ms=spread_ms)


def _record_at(record: ChoiceRecord, one: Microbatch, boundary_bytes: int) -> ChoiceRecord:
    lines = record.lines
    if lines is None:
        return record
    held = lines.held_bytes.bytes_at(one)
    backward = max(held, lines.backward_level_bytes.bytes_at(one))
    kept = None
    if lines.kept_level_bytes is not None:
        higher = lines.kept_level_bytes.bytes_at(one) - backward
        kept = min(boundary_bytes, max(0, higher))
    return replace(
        record,
        held_bytes=held,
        forward_transient_bytes=max(0, lines.forward_level_bytes.bytes_at(one) - held),
        backward_transient_bytes=backward - held,
        kept_gradient_bytes=kept,
    )


def _stage_at(stage: StageRecord, call: Microbatch) -> StageRecord:
    found = stage.overhead
    if found is None or found.forward_line is None or found.backward_line is None:
        return stage
    lines = found.forward_line, found.backward_line
    forward, backward = (line.bytes_at(call) for line in lines)
    return replace(stage, overhead=ScheduleOverhead(forward, backward, *lines))


@dataclass(frozen=True)
class Arrangement:
    """A call whose microbatches have lengths of their own, under a policy.

    Raises: ProfileError if the profile holds for one length only.
    """

    profile: Profile
    layout: Layout
    schedule: Schedule
    """Of as many microbatches as there are lengths."""
    policy: RecomputePolicy
    lengths: tuple[Microbatch, ...]
    """Of each microbatch, in the order in which the schedule runs them."""
    routed: tuple[Mapping[int, int], ...] = ()
    """For each microbatch, how many tokens the experts of a layer on this rank got, by layer; empty
    if not known. Layers that are not named got what the profile's `routed_line` says."""

    def __post_init__(self) -> None:
        if not varies(self.profile):
            raise ProfileError(
                "This profile holds for one length only. Give one that was measured with lengths "
                "that vary, by `attach` or by a job file with max_tokens_per_microbatch."
            )

    def peaks(self) -> list[int]:
        """Peak bytes of every stage."""
        return [self.stage_peak(stage) for stage in range(self.layout.num_stages)]

    def stage_peak(self, stage: int) -> int:
        """Peak bytes of one stage, over every event of its schedule."""
        each = [self._stage_bytes(stage, profile) for profile in self._profiles]
        best = each[0].base.static.total_bytes + each[0].base.optimizer_step_peak_bytes
        owners = extra_owners(
            self.schedule,
            stage,
            overlap_p2p=self.profile.overlap_p2p_comm,
            deallocated=self.profile.deallocate_pipeline_outputs,
        )
        in_flight: dict[tuple[int, int], int] = {}
        nothing = (0,) * self.layout.num_chunks
        moments = every_moment(self.profile, self.schedule, stage)
        for moment, extra in zip(moments, owners, strict=True):
            own, at = each[moment.microbatch], (moment.chunk, moment.microbatch)
            in_flight.pop(at, None)
            alone = replace(moment, in_flight=nothing, extra=0)
            others = sum(in_flight.values())
            others += sum(self._profiles[owner].boundary_bytes for owner in extra)
            best = max(best, others + own.most(alone))
            if moment.direction == "forward":
                in_flight[at] = own.held[moment.chunk]
        return best

    @cached_property
    def _profiles(self) -> list[Profile]:
        """The profile of each microbatch."""
        call_tokens = sum(one.tokens for one in self.lengths)
        if self.routed:
            each = zip(self.lengths, self.routed, strict=True)
            return [_bytes_at(self.profile, one, call_tokens, routed) for one, routed in each]
        found = {one: _bytes_at(self.profile, one, call_tokens, {}) for one in set(self.lengths)}
        return [found[one] for one in self.lengths]

    def _stage_bytes(self, stage: int, profile: Profile) -> StageBytes:
        table, chunks = CostTable(profile), self.layout.stages[stage]
        columns = [ChunkColumns(chunk, table.chunk_units(chunk, self.policy)) for chunk in chunks]
        return StageBytes(stage_base(profile, self.layout, stage), columns)
