"""The profile of a loop whose microbatches differ: with lines, and with what calls missed."""

from __future__ import annotations

from dataclasses import fields, replace

from megatron_autorecompute.lines import RecordLines
from megatron_autorecompute.planner.cost.lengths import Arrangement
from megatron_autorecompute.policy import NONE
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerKind,
    Profile,
    ScheduleOverhead,
    StageRecord,
    covers,
)
from megatron_autorecompute.runtime.model_shard import ModelShard
from megatron_autorecompute.runtime.points import AllPoints, Points


class Varying:
    """Puts lines into a profile; every rank makes one in the same way.

    Args:
        shard: this rank's model.
        mine: what this rank saw.
    """

    def __init__(self, shard: ModelShard, mine: Points) -> None:
        self._shard, self._mine = shard, mine
        experts = {kind.signature for kind in shard.kinds if kind.has_experts}
        self.points = AllPoints(mine, shard.all_gather, experts.__contains__)
        self._stages: list[int] = shard.all_gather(shard.stage)

    def with_lines(self, profile: Profile) -> Profile:
        """The profile with lines in place of percentiles, which hold for one length."""
        signatures = {kind.name: kind.signature for kind in self._shard.kinds}
        norm = profile.final_norm
        return replace(
            profile,
            kinds=tuple(self._kind(kind, signatures[kind.name]) for kind in profile.kinds),
            embedding=self._embedding(profile.embedding, bool(profile.model.encoder_layers)),
            head=self._record(profile.head, "head"),
            final_norm=None if norm is None else self._record(norm, "final_norm"),
            stages=tuple(self._stage(*each) for each in enumerate(profile.stages)),
            boundary_line=self.points.boundary(),
            routed_line=self.points.routed(),
        )

    def missed_bytes(self, profile: Profile) -> tuple[int, int]:
        """The least and the most by which calls of this rank needed more bytes than predicted for
        their lengths: what others hold on the device, for example. Negative: they needed less."""
        rank = self._mine
        found = [
            peak_bytes
            - Arrangement(
                profile,
                self._shard.layout,
                self._shard.schedule(len(rank.calls[call])),
                policy,
                tuple(rank.microbatch(call, number) for number in range(len(rank.calls[call]))),
                tuple(rank.routed[call]),
            ).stage_peak(self._shard.stage)
            for call, policy, peak_bytes in rank.peaks
            if covers(profile.kinds, policy)
        ]
        return min(found, default=0), max(found, default=0)

    def _kind(self, kind: LayerKind, signature: str) -> LayerKind:
        return replace(kind, choices=tuple(self._record(each, signature) for each in kind.choices))

    def _record(self, record: ChoiceRecord, signature: str) -> ChoiceRecord:
        return replace(record, lines=self.points.record((signature, record.policy)), percentiles=())

    def _embedding(self, record: ChoiceRecord, has_encoder: bool) -> ChoiceRecord:
        own, between = (self.points.record((place, NONE)) for place in ("embedding", "between"))
        if has_encoder and own is not None and between is not None:
            own = _both(own, between)
        return replace(record, lines=own)

    def _stage(self, number: int, stage: StageRecord) -> StageRecord:
        ranks = [rank for rank, own in enumerate(self._stages) if own == number]
        if stage.overhead is None:
            return stage
        sizes = stage.overhead.forward_bytes, stage.overhead.backward_bytes
        return replace(stage, overhead=ScheduleOverhead(*sizes, *self.points.overhead(ranks)))


def _both(one: RecordLines, other: RecordLines) -> RecordLines:
    """Of two places that count as one: at least what either needs."""
    names = [field.name for field in fields(one) if field.name != "kept_level_bytes"]
    return RecordLines(*(getattr(one, n).plus(getattr(other, n)) for n in names))
