"""Fits lines through measurements at several lengths, and makes the profile of a loop whose
microbatches differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from megatron_autorecompute.lines import Line, Microbatch, Point, RecordLines, envelope, middle_line
from megatron_autorecompute.planner.cost.lengths import Arrangement
from megatron_autorecompute.policy import NONE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerKind,
    Profile,
    ScheduleOverhead,
    StageRecord,
    covers,
)
from megatron_autorecompute.runtime.model_shard import ModelShard

Key = tuple[str, LayerPolicy]
UNEVEN = 1.05
"""Plans are for experts that get more tokens than ever seen, by this factor."""
Where = tuple[int, int, int]
"""A call, a microbatch of it, and a layer; -1 outside of layers."""
Noted = Sequence[tuple[Where, float]]


@dataclass(slots=True)
class Points:
    """What one rank saw, in the order in which it came."""

    calls: list[list[tuple[int, int]]] = field(default_factory=list)
    """Tokens and `Microbatch.squares` of each microbatch of every call that counts."""
    routed: list[list[Mapping[int, int]]] = field(default_factory=list)
    """Rows that this rank's experts got in each microbatch of every call, by layer."""
    figures: dict[tuple[Key, str], list[tuple[Where, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By a name of `Samples`' bytes, `forward_ms` or `backward_ms`."""
    boundaries: list[tuple[Where, float]] = field(default_factory=list)
    """Bytes of a hidden state."""
    overheads: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    """By direction, a call and the most bytes in it besides layers and boundary tensors."""
    peaks: list[tuple[int, RecomputePolicy, int]] = field(default_factory=list)
    """A call, its policy, and the bytes it needed, static ones included."""

    def note_peak(self, policy: RecomputePolicy, peak_bytes: int) -> None:
        """Note what the call that began last needed."""
        if self.calls:
            self.peaks.append((len(self.calls) - 1, policy, peak_bytes))

    def most_held_per_token(self) -> float:
        """The most bytes that a layer held, for each token of its microbatch; 0 before any."""
        return max(
            (
                value / self.calls[call][number][0]
                for (_, figure), noted in self.figures.items()
                for (call, number, _), value in noted
                if figure == "held_bytes"
            ),
            default=0.0,
        )

    def microbatch(self, call: int, number: int, layer: int = -1) -> Microbatch:
        """The lengths of a microbatch, and what a layer's experts got of it."""
        tokens, squares = self.calls[call][number]
        routed = self.routed[call][number] if self.routed[call] else {}
        return Microbatch(tokens, squares, routed.get(layer, 0))


class Varying:
    """Puts lines through the points of all ranks into a profile; every rank makes one in the same
    way."""

    def __init__(self, shard: ModelShard, mine: Points) -> None:
        self._shard, self._mine = shard, mine
        self._experts = {kind.signature for kind in shard.kinds if kind.has_experts}
        gathered = shard.all_gather((shard.stage, replace(mine, figures=dict(mine.figures))))
        self._stages: list[int] = [stage for stage, _ in gathered]
        self._ranks: list[Points] = [points for _, points in gathered]
        self._boundary = envelope(self._points(lambda rank: rank.boundaries))

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
            boundary_line=self._boundary,
            routed_line=self._routed(),
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

    def _routed(self) -> Line | None:
        """The most rows to plan for that experts of a rank get in a layer, as a line in the tokens
        of the call's longest microbatch on any rank; None without experts."""
        points = []
        for call in range(min(len(rank.calls) for rank in self._ranks)):
            longest = max(tokens for rank in self._ranks for tokens, _ in rank.calls[call])
            rows = (n for rank in self._ranks for one in rank.routed[call] for n in one.values())
            points.append((Microbatch.longest(longest), UNEVEN * max(rows, default=0)))
        return envelope(points) if any(most for _, most in points) else None

    def _lines(self, key: Key) -> RecordLines | None:
        """The lines of one choice; None if some figure was never seen."""
        names = ("held", "forward_level", "backward_level", "kept_level")
        held, forward, backward, kept = (self._envelope(key, f"{name}_bytes") for name in names)
        backward = backward or kept
        times = [self._times(key, figure) for figure in ("forward_ms", "backward_ms")]
        if held is None or forward is None or backward is None or not all(times):
            return None
        with_input = held.plus(self._envelope(key, "input_bytes") or self._boundary)
        forward_ms, backward_ms = map(middle_line, times)
        return RecordLines(with_input, forward, backward, forward_ms, backward_ms, kept)

    def _overhead(self, stage: int, direction: str) -> Line:
        """Bytes of a stage besides layers and boundary tensors, by the tokens of a call."""
        points = [
            (Microbatch(sum(tokens for tokens, _ in rank.calls[call]), 0), value)
            for own, rank in zip(self._stages, self._ranks, strict=True)
            if own == stage
            for call, value in rank.overheads[direction]
        ]
        return envelope(points) if points else Line()

    def _envelope(self, key: Key, figure: str) -> Line | None:
        points = self._points(lambda rank: rank.figures.get((key, figure), []))
        return envelope(points, experts=key[0] in self._experts) if points else None

    def _times(self, key: Key, figure: str) -> list[Point]:
        """Times without every rank's first: on its first run code is compiled, tuned or loaded."""

        def settled(rank: Points) -> Noted:
            times = rank.figures.get((key, figure), [])
            return times[1:] or times

        return self._points(settled)

    def _points(self, noted: Callable[[Points], Noted]) -> list[Point]:
        return [(r.microbatch(*where), value) for r in self._ranks for where, value in noted(r)]

    def _kind(self, kind: LayerKind, signature: str) -> LayerKind:
        return replace(kind, choices=tuple(self._record(each, signature) for each in kind.choices))

    def _record(self, record: ChoiceRecord, signature: str) -> ChoiceRecord:
        return replace(record, lines=self._lines((signature, record.policy)), percentiles=())

    def _embedding(self, record: ChoiceRecord, has_encoder: bool) -> ChoiceRecord:
        own, between = (self._lines((place, NONE)) for place in ("embedding", "between"))
        if has_encoder and own is not None and between is not None:
            own = _both(own, between)
        return replace(record, lines=own)

    def _stage(self, number: int, stage: StageRecord) -> StageRecord:
        if stage.overhead is None:
            return stage
        sizes = stage.overhead.forward_bytes, stage.overhead.backward_bytes
        lines = (self._overhead(number, direction) for direction in ("forward", "backward"))
        return replace(stage, overhead=ScheduleOverhead(*sizes, *lines))


def _both(one: RecordLines, other: RecordLines) -> RecordLines:
    """One place for two that count as one: at least what either needs."""
    names = [field.name for field in fields(one) if field.name != "kept_level_bytes"]
    return RecordLines(*(getattr(one, n).plus(getattr(other, n)) for n in names))
