"""The time of a step whose layers copy activations to host memory, with its waits for copies.

All stages are replayed event by event, because a wait delays every event that needs the output. A
step of more than `MOST_EVENTS` is replayed for fewer microbatches. Each microbatch left out is
assumed to take as long as the last ones replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.planner.cost.copies import (
    Changes,
    ChunkWork,
    Copied,
    Kept,
    Ran,
    StageBytes,
    StageCopies,
    add,
    copy_ps,
    levels,
)
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.slots import block, num_slots
from megatron_autorecompute.planner.cost.stage_times import Times
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, Unit
from megatron_autorecompute.policy import WHOLE_LAYER
from megatron_autorecompute.profile import HostLink, OffloadGroup, Profile


def moves_whole_layers(units: Sequence[Unit]) -> bool:
    """Whether layers of a chunk leave as a whole."""
    return any(group.name == WHOLE_LAYER for unit in units for group in unit.offload_groups)


class WholeLayerCopies:
    """A model's events and copies with Megatron's `cpu_offloading`, event after event; as
    `copies.StageCopies`.

    As Transformer Engine's `DefaultOffloadSynchronizer` orders it (transformer_engine/pytorch/
    cpu_offload.py of August 2026), with N of L layers, one microbatch after the other:

    - A layer's copy out begins when its forward has run, on one stream for both directions.
    - Before the forward of layer L - N + i the device waits until layer i has left, and frees it.
    - When the backward of layer L - 1 - N + i begins, so does the copy back of layer i, for which
      layer i's backward waits.

    So at most L - N layers are there at once.

    Args:
        units: the units of the only chunk of the only stage.
        events: (is backward, chunk, microbatch), in the order of the schedule.
        link: to host memory.
        forward_ps: the time of a forward besides its units, at the end.
        backward_ps: the time of a backward besides its units, at the end.

    Raises PolicyError if other layers leave than the first ones.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        events: Sequence[tuple[bool, int, int]],
        link: HostLink,
        forward_ps: int,
        backward_ps: int,
    ) -> None:
        self._events, self._link = iter(events), link
        self._layers = [unit for unit in units if unit.layers]
        first = next(at for at, unit in enumerate(units) if unit.layers)
        ahead = [0, *accumulate(unit.forward_ps for unit in units)]
        behind = [0, *accumulate(unit.backward_ps for unit in reversed(units))][::-1]
        last = first + len(self._layers)
        self._forward_at, self._backward_at = ahead[first:last], behind[first + 1 : last + 1]
        self._forward_ps, self._backward_ps = ahead[-1] + forward_ps, behind[0] + backward_ps
        self._moved = [unit.offload_groups for unit in self._layers]
        self._number = sum(map(bool, self._moved))
        if not all(self._moved[: self._number]) or self._number == len(self._layers):
            raise PolicyError(
                f"Megatron's {WHOLE_LAYER} moves the first layers of a model and not all: write "
                "megatron:cpu_offloading/N."
            )
        self._out: dict[int, int] = {}  # when a layer has left
        self._back: dict[int, int] = {}  # when it is back
        self._stream = 0
        self.ran: list[Ran] = []
        """The run of every event so far."""
        self.device: Changes = {}
        """Bytes on the device that no record counts."""
        self.host: Changes = {}
        """Bytes in host memory."""
        self.copied: list[Copied] = []
        """The copies so far, in order; a layer is a group."""

    @property
    def stall_ps(self) -> int:
        """Time for which forwards and backwards waited for copies."""
        return sum(wait for ran in self.ran for _, wait in ran.waits)

    @property
    def host_bytes(self) -> int:
        """The most in host memory."""
        return max((level for _, level in levels(self.host)), default=0)

    def run(self, begin_ps: int) -> int:
        """Run the next event from a time on; returns when it ends."""
        is_backward, _, microbatch = next(self._events)
        waits = (self._backward if is_backward else self._forward)(begin_ps, microbatch)
        length = self._backward_ps if is_backward else self._forward_ps
        end = begin_ps + length + sum(wait for _, wait in waits)
        self.ran.append(Ran(begin_ps, end, tuple(waits)))
        return end

    def _forward(self, begin_ps: int, microbatch: int) -> list[tuple[int, int]]:
        waits, waited, kept = list[tuple[int, int]](), 0, len(self._layers) - self._number
        for layer, at in enumerate(self._forward_at):
            now = begin_ps + at + waited
            if 0 < layer <= self._number:
                self._leave(layer - 1, microbatch, now)
            leaving = layer - kept
            if leaving >= 0:
                wait = max(0, self._out[leaving] - now)
                waits += [(at, wait)] * bool(wait)
                waited += wait
                add(self.device, now + wait, -self._group(leaving).device_bytes)
        return waits

    def _leave(self, layer: int, microbatch: int, now: int) -> None:
        group = self._group(layer)
        self._out[layer] = self._copied(True, layer, microbatch, now)
        add(self.device, now, group.device_bytes)
        add(self.host, now, group.host_bytes)

    def _backward(self, begin_ps: int, microbatch: int) -> list[tuple[int, int]]:
        waits, waited, kept = list[tuple[int, int]](), 0, len(self._layers) - self._number
        for layer in reversed(range(len(self._layers))):
            at = self._backward_at[layer]
            now = begin_ps + at + waited
            returning = layer - (kept - 1)
            if 0 <= returning < self._number:
                self._return(returning, microbatch, now)
            if layer < self._number:
                wait = max(0, self._back[layer] - now)
                waits += [(at, wait)] * bool(wait)
                waited += wait
                add(self.device, now + wait, -self._group(layer).device_bytes)
                add(self.host, now + wait, -self._group(layer).host_bytes)
        return waits

    def _return(self, layer: int, microbatch: int, now: int) -> None:
        self._back[layer] = self._copied(False, layer, microbatch, now)
        add(self.device, now, self._group(layer).device_bytes)

    def _copied(self, to_host: bool, layer: int, microbatch: int, now: int) -> int:
        """Begin a copy as soon as the stream is free; returns when it ends."""
        begin, link = max(self._stream, now), self._link
        rate = link.to_host_gb_per_s if to_host else link.to_device_gb_per_s
        self._stream = begin + copy_ps(self._group(layer).host_bytes, rate)
        self.copied.append(Copied(to_host, 0, microbatch, layer, begin, self._stream))
        return self._stream

    def _group(self, layer: int) -> OffloadGroup:
        (group,) = self._moved[layer]
        return group


Copies = StageCopies | WholeLayerCopies
MOST_EVENTS = 1 << 12
"""The most events of all stages together in a replay."""
_FEW = 3
"""Microbatches that show all there is where each is like the one before."""
StageUnits = Sequence[Sequence[tuple[Unit, ...]]]
"""`[stage][chunk]`"""


def offloads(units: StageUnits) -> bool:
    """Whether any unit copies anything."""
    return any(unit.offload_groups for stage in units for chunk in stage for unit in chunk)


def host_link(profile: Profile) -> HostLink:
    """The profile's; raises ProfileError where it has none."""
    if profile.host_link is None:
        raise ProfileError(
            "The policy offloads activations, and the profile has no host_link, so that nobody "
            "knows how long copies take. Add host_link (docs/files.md), or leave offload out."
        )
    return profile.host_link


@dataclass(frozen=True)
class OffloadedStep:
    """A step replayed with its copies."""

    schedule: Schedule
    """The replayed schedule; a long step has fewer microbatches in it."""
    step_ms: float
    stages: tuple[Copies, ...]
    units: StageUnits

    def bytes_of(self, stage: int) -> StageBytes:
        """Bytes beside those of records on one stage."""
        copies = self.stages[stage]
        return StageBytes.of(self.units[stage], copies.ran, copies.device)


def offloaded_step(
    schedule: Schedule,
    units: StageUnits,
    residual: Times,
    link: HostLink,
    kept: Kept | None = None,
) -> OffloadedStep:
    """Replay a step with its copies.

    Args:
        schedule: the order of events.
        units: the units of every stage and chunk.
        residual: time of every forward and backward besides its units, `[stage, chunk]`.
        link: to host memory.
        kept: which groups stay; by default as Megatron keeps them.
    """
    rest = residual.forward.tolist(), residual.backward.tolist()
    short = _short(schedule)
    if any(moves_whole_layers(chunk) for stage in units for chunk in stage):
        make = _of_whole_layers(units, rest, link)
        # No copy outlives its microbatch, so that each takes as long as the one before.
        short = replace(schedule, num_microbatches=min(schedule.num_microbatches, _FEW))
    else:
        works = [
            [ChunkWork.of(*own) for own in zip(of_stage, *each, strict=True)]
            for of_stage, *each in zip(units, *rest, strict=True)
        ]
        make = _of_groups(works, link, kept or Kept())
    stages, finish_ps = _replay(short, make)
    more = schedule.num_microbatches - short.num_microbatches
    if more:
        fewer = _period(schedule)
        shorter = replace(short, num_microbatches=short.num_microbatches - fewer)
        before_ps = _replay(shorter, make)[1]
        return OffloadedStep(
            short,
            (finish_ps + (finish_ps - before_ps) * more / fewer) / PS_PER_MS,
            stages,
            units,
        )
    return OffloadedStep(short, finish_ps / PS_PER_MS, stages, units)


def _period(schedule: Schedule) -> int:
    """Microbatches after which a long schedule repeats."""
    return schedule.group_size if schedule.num_chunks > 1 else schedule.num_stages


def _short(schedule: Schedule) -> Schedule:
    """The schedule, or one of fewer microbatches with the same begin and end."""
    each = 2 * schedule.num_chunks * schedule.num_stages
    period, m = _period(schedule), schedule.num_microbatches
    most = max(MOST_EVENTS // each, schedule.shortened().num_microbatches + 2 * period)
    if m <= most:
        return schedule
    return replace(schedule, num_microbatches=most - (most - m) % period)


Events = Sequence[tuple[bool, int, int]]
Make = Callable[[int, Events], Copies]
"""Makes the copies of a stage, from its number and its events."""


def _of_groups(works: Sequence[Sequence[ChunkWork]], link: HostLink, kept: Kept) -> Make:
    return lambda stage, events: StageCopies(stage, works[stage], events, link, kept)


def _of_whole_layers(units: StageUnits, rest: Sequence[Any], link: HostLink) -> Make:
    if len(units) > 1 or len(units[0]) > 1:
        raise PolicyError(f"Megatron refuses {WHOLE_LAYER} with several pipeline stages.")
    (forward_ps,), (backward_ps,) = (each[0] for each in rest)
    return lambda _, events: WholeLayerCopies(
        units[0][0], events, link, int(forward_ps), int(backward_ps)
    )


def _replay(schedule: Schedule, make: Make) -> tuple[tuple[Copies, ...], int]:
    """Every stage with all its events, and when the last one ends."""
    stages = []
    for stage in range(schedule.num_stages):
        order = zip(*(part.tolist() for part in schedule.order(stage)), strict=True)
        stages.append(make(stage, list(order)))
    slots = block(schedule, 0, num_slots(schedule))
    finish = [[0] * len(stages) for _ in range(slots.lookback + slots.shape[0])]
    for number in range(slots.shape[0]):
        row = slots.lookback + number
        for stage, copies in enumerate(stages):
            finish[row][stage] = finish[row - 1][stage]
            event = slots.input(number, stage)
            if event is not None:
                arrived = 0 if event.row is None else finish[event.row][event.stage]
                taken = 0 if event.receiver is None else finish[row - 2][event.receiver]
                finish[row][stage] = copies.run(max(finish[row - 1][stage], arrived, taken))
    return tuple(stages), max(finish[-1])
