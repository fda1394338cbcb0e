"""The time of a step whose layers copy activations to host memory, with its waits for copies.

All stages are replayed event by event, because a wait delays every event that needs the output.
docs/decisions/search.md says in which order Megatron and Transformer Engine copy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.planner.cost import Ints
from megatron_autorecompute.planner.cost.schedule import Event, Schedule
from megatron_autorecompute.planner.cost.slots import block, num_slots
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, StageUnits, Unit
from megatron_autorecompute.policy import WHOLE_LAYER
from megatron_autorecompute.profile import HostLink, OffloadGroup, Profile

MOST_EVENTS = 1 << 12
"""The most events of all stages together in a replay. Of a longer step fewer microbatches are
replayed; each that is left out is assumed to take as long as the last ones."""
PS_PER_NS = 1000


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """One group of a chunk."""

    record: OffloadGroup
    unit: str
    """The name of its layer."""
    unit_ps: int
    """Computing time from the beginning of the chunk's backward until that of the group's layer,
    whose record counts the group's device bytes from then on."""


class Turn(NamedTuple):
    """A place in a chunk's forward or backward where copies matter."""

    at_ps: int
    """Computing time since the event began."""
    group: int
    """The group of the chunk."""
    waits: bool
    """Whether the device waits for the group's copy; else a copy begins."""


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """What a chunk computes and copies for one microbatch."""

    units: tuple[Unit, ...]
    times_ps: tuple[int, int]
    """Of the forward and of the backward."""
    groups: tuple[CopyGroup, ...]
    """In the order of their copies out."""
    turns: tuple[tuple[Turn, ...], tuple[Turn, ...]]
    """The turns of the forward and of the backward, in order."""

    @classmethod
    def of(cls, units: Sequence[Unit], forward_ps: int = 0, backward_ps: int = 0) -> ChunkWork:
        """The copies of a chunk's units in forward order, with other time at the end.

        Raises PolicyError if whole layers leave, and others than the first ones.
        """
        ahead, behind = _begins(units)
        groups, forward, backward = list[CopyGroup](), list[Turn](), list[Turn]()
        for unit, begin, after in zip(units, ahead, behind, strict=True):
            for group in unit.offload_groups:
                number = len(groups)
                commit = begin + round(group.forward_end * unit.forward_ps)
                forward.append(Turn(commit, number, waits=False))
                for share, waits in ((group.backward_begin, True), (group.backward_end, False)):
                    at = after + round(share * unit.backward_ps)
                    backward.append(Turn(at, number, waits))
                groups.append(CopyGroup(group, unit.name, after))
        backward.sort(key=lambda turn: (turn.at_ps, -turn.group, not turn.waits))
        if moves_whole_layers(units):
            forward, backward = _turns_of_whole_layers(units)
        own = sum(unit.forward_ps for unit in units), sum(unit.backward_ps for unit in units)
        times_ps = max(own[0] + forward_ps, 0), max(own[1] + backward_ps, 0)
        return cls(tuple(units), times_ps, tuple(groups), (tuple(forward), tuple(backward)))


def _begins(units: Sequence[Unit]) -> tuple[list[int], list[int]]:
    """Computing time until each unit's forward begins, and its backward."""
    ahead = accumulate((unit.forward_ps for unit in units), initial=0)
    behind = accumulate((unit.backward_ps for unit in reversed(units)), initial=0)
    return list(ahead)[:-1], list(behind)[-2::-1]


def moves_whole_layers(units: Sequence[Unit]) -> bool:
    """Whether layers of a chunk leave as a whole."""
    return any(group.name == WHOLE_LAYER for unit in units for group in unit.offload_groups)


def _turns_of_whole_layers(units: Sequence[Unit]) -> tuple[list[Turn], list[Turn]]:
    """The turns of the forward and of the backward; a layer is a group."""
    layers = [at for at, unit in enumerate(units) if unit.layers]
    moved = [bool(units[at].offload_groups) for at in layers]
    number = sum(moved)
    kept = len(layers) - number
    if not all(moved[:number]) or not kept:
        raise PolicyError(
            f"Megatron's {WHOLE_LAYER} moves the first layers of a model and not all: write "
            "megatron:cpu_offloading/N."
        )
    ahead, behind = ([begins[at] for at in layers] for begins in _begins(units))
    forward, backward = list[Turn](), list[Turn]()
    for layer in range(number):
        forward.append(Turn(ahead[layer + 1], layer, waits=False))
        forward.append(Turn(ahead[layer + kept], layer, waits=True))
        backward.append(Turn(behind[layer + kept - 1], layer, waits=False))
        backward.append(Turn(behind[layer], layer, waits=True))
    forward.sort(key=lambda turn: (turn.at_ps, turn.waits))
    backward.sort(key=lambda turn: (turn.at_ps, turn.waits, -turn.group))
    return forward, backward


_Place = tuple[int, int, int]
"""(chunk, microbatch, group)"""


def _kept(order: Sequence[tuple[int, int]], chunks: Sequence[ChunkWork]) -> set[_Place]:
    """Groups that never leave after the first step: the one of each name whose backward is first,
    of as many names as a chunk has most; `order`: (chunk, microbatch) of backwards with groups."""
    names = [[group.record.name for group in work.groups] for work in chunks]
    last: dict[str, _Place] = {}
    for chunk, microbatch in reversed(order):
        for number, name in enumerate(names[chunk]):
            last[name] = chunk, microbatch, number
    most = max((len(set(names[chunk])) for chunk, _ in order), default=0)
    kept = set(list(last.values())[:most])
    for chunk, microbatch, first in list(kept):
        if names[chunk][first] == "core_attn":
            following = range(first, len(names[chunk]))
            needs = (number for number in following if names[chunk][number] == "attn_proj")
            kept |= {(chunk, microbatch, number) for number in needs}
    return kept


@dataclass(frozen=True, slots=True)
class Copied:
    """One group's copy, of one microbatch."""

    to_host: bool
    chunk: int
    microbatch: int
    group: CopyGroup
    begin_ps: int
    end_ps: int

    @property
    def name(self) -> str:
        """`core_attn of layer 7`; a whole layer is `layer 7`."""
        name = self.group.record.name
        return self.group.unit if name == WHOLE_LAYER else f"{name} of {self.group.unit}"


@dataclass(frozen=True, slots=True)
class Ran:
    """The times at which an event began and ended."""

    begin_ps: int
    end_ps: int
    waits: tuple[tuple[int, int], ...] = ()
    """Computing time before each wait, and the length of the wait."""

    def after(self, computed_ps: int) -> int:
        """When the event has computed so much."""
        waited = sum(wait for at, wait in self.waits if at < computed_ps)
        return self.begin_ps + computed_ps + waited


class StageCopies:
    """One stage's events and copies, event after event, in the order of the schedule."""

    def __init__(
        self, chunks: Sequence[ChunkWork], events: Sequence[Event], link: HostLink
    ) -> None:
        self.chunks, self._events, self._link = chunks, events, link
        self._whole = any(moves_whole_layers(work.units) for work in chunks)
        self._order = [
            (chunk, microbatch)
            for direction, chunk, microbatch in events
            if direction == "backward" and chunks[chunk].groups
        ]
        self._kept, self._next = _kept(self._order, chunks), 0
        self._out_until: dict[_Place, int] = {}
        """When the copy out of a group ends."""
        self._waiting = defaultdict[tuple[int, int], list[_Place]](list)
        """Groups of a microbatch in host memory, the last one to leave last."""
        self._asked: dict[_Place, tuple[int, int] | None] = {}
        """When the copy back of a group was asked for, and when it ends; None where it came back
        without."""
        self._due = defaultdict[tuple[int, int], list[_Place]](list)
        """Groups of a microbatch whose copy back no backward has waited for yet."""
        self._free = {True: 0, False: 0}
        """When the stream of each direction is free; of whole layers, the first is for both."""
        self.ran: list[Ran] = []
        """The run of every event so far."""
        self.device: dict[int, int] = {}
        """Bytes on the device more (fewer) from a time on, in ps, that no record counts: copies
        under way, groups that stay, and groups that come back before their layer's backward."""
        self.copied: list[Copied] = []
        """The copies so far, in the order in which they were asked for."""

    @property
    def stall_ps(self) -> int:
        """Time for which the device waited for copies."""
        return sum(wait for ran in self.ran for _, wait in ran.waits)

    def run(self, begin_ps: int) -> int:
        """Run the next event from a time on; returns when it ends."""
        direction, chunk, microbatch = self._events[len(self.ran)]
        work, waits, waited = self.chunks[chunk], list[tuple[int, int]](), 0
        is_backward, layers = direction == "backward", dict[int, int]()
        self._next += is_backward and bool(work.groups)
        for turn in work.turns[is_backward]:
            place, now = (chunk, microbatch, turn.group), begin_ps + turn.at_ps + waited
            ready, group = now, self._group(place)
            if is_backward and turn.waits:
                # When the backward of the group's layer began.
                layer = layers.setdefault(group.unit_ps, now - turn.at_ps + group.unit_ps)
                self._count(place, layer)
                ready = self._ready(place, now)
            elif is_backward:
                self._ask((chunk, microbatch), now)
            elif turn.waits:
                ready = max(now, self._out_until[place])
                self._add(ready, -group.record.device_bytes)
            else:
                self._leave(place, now)
            if ready > now:
                waits.append((turn.at_ps, ready - now))
                waited += ready - now
        end_ps = begin_ps + work.times_ps[is_backward] + waited
        self.ran.append(Ran(begin_ps, end_ps, tuple(waits)))
        return end_ps

    def _leave(self, place: _Place, now: int) -> None:
        """Begin to copy a group out, unless it stays."""
        device_bytes = self._group(place).record.device_bytes
        self._add(now, device_bytes)
        if not self._stays(place):
            self._out_until[place] = end = self._streamed(place, now, to_host=True)
            self._waiting[place[:2]].append(place)
            if not self._whole:
                self._add(end, -device_bytes)

    def _stays(self, place: _Place) -> bool:
        """Whether a group stays: one that never leaves, or the last of its name in the microbatch
        whose backward is the next with this name."""
        if self._whole:
            return False
        if place in self._kept:
            return True
        names = [[group.record.name for group in work.groups] for work in self.chunks]
        own, name = names[place[0]], self._group(place).record.name
        if name in own[place[2] + 1 :]:
            return False
        return next(one for one in self._order[self._next :] if name in names[one[0]]) == place[:2]

    def _count(self, place: _Place, layer: int) -> None:
        """Count device bytes of a group that was there when its layer's backward began."""
        size, asked = self._group(place).record.device_bytes, self._asked.get(place)
        if place not in self._out_until:
            self._add(layer, -size)
        elif asked and asked[0] < layer:
            self._add(asked[0], size)
            self._add(layer, -size)

    def _ready(self, place: _Place, now: int) -> int:
        """When a group's backward may begin. As in `on_group_commit_backward`, it waits for the
        first group of its name that was asked for; another one if it stayed itself."""
        name, due = self._group(place).record.name, self._due[place[:2]]
        first = next((one for one in due if self._group(one).record.name == name), None)
        if first is not None:
            due.remove(first)
            asked = self._asked[first]
            now = max(now, asked[1] if asked else 0)
        if place in self._out_until and place not in self._asked:
            self._asked[place] = None
            now = self._copy(place, max(now, self._out_until[place]), to_host=False)
        return now

    def _ask(self, own: tuple[int, int], now: int) -> None:
        """Begin one more copy back, of this microbatch or of the next one."""
        waiting = self._waiting[own]
        if not waiting and self._next < len(self._order):
            waiting = self._waiting[self._order[self._next]]
        place = waiting.pop() if waiting else None
        if place and place not in self._asked:
            may_begin = max(now, self._out_until[place])
            self._asked[place] = now, self._streamed(place, may_begin, to_host=False)
            self._due[place[:2]].append(place)

    def _streamed(self, place: _Place, now: int, *, to_host: bool) -> int:
        """Copy a group as soon as the stream is free; returns when that ends."""
        stream = to_host or self._whole
        begin = max(now, self._free[stream])
        self._free[stream] = self._copy(place, begin, to_host=to_host)
        return self._free[stream]

    def _copy(self, place: _Place, begin: int, *, to_host: bool) -> int:
        group, link = self._group(place), self._link
        rate = link.to_host_gb_per_s if to_host else link.to_device_gb_per_s
        end = begin + round(group.record.host_bytes * PS_PER_NS / rate)
        self.copied.append(Copied(to_host, *place[:2], group, begin, end))
        return end

    def _group(self, place: _Place) -> CopyGroup:
        return self.chunks[place[0]].groups[place[2]]

    def _add(self, now: int, size: int) -> None:
        self.device[now] = self.device.get(now, 0) + size

    @property
    def host_bytes(self) -> int:
        """Host memory that pools come to hold, and keep: the most of each group's name and size, in
        the first step, in which all groups leave. With several chunks it may be one of each less.
        """
        there, most = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        for direction, chunk, _ in self._events:
            for group in self.chunks[chunk].groups:
                key = group.record.name, group.record.host_bytes
                there[key] += key[1] if direction == "forward" else -key[1]
                most[key] = max(most[key], there[key])
        return most.total()

    # ---------------------------------------------- bytes beside those of records, once all has run

    def during(self, event: int) -> int:
        """The most during an event."""
        return self.most(self.ran[event].begin_ps, self.ran[event].end_ps)

    def by_unit(self, event: int, chunk: int, *, backward: bool) -> Ints:
        """The most while each unit of the chunk runs."""
        after, units = self.ran[event].after, self.chunks[chunk].units
        found = []
        for at, unit in zip(_begins(units)[backward], units, strict=True):
            time = unit.backward_ps if backward else unit.forward_ps
            found.append(self.most(after(at), after(at + time)))
        return np.array(found, np.int64)

    def after(self, event: int) -> int:
        """The most from the end of an event to the next one."""
        end = self.ran[event].end_ps
        last = event + 1 == len(self.ran)
        return self.most(end, end if last else self.ran[event + 1].begin_ps)

    def most(self, first: int, last: int) -> int:
        """The most from one time to another, in picoseconds."""
        times, sizes = self._levels
        low = int(np.searchsorted(times, first, "right")) - 1
        high = int(np.searchsorted(times, last, "left"))
        return int(sizes[max(low, 0) : max(high, low + 1)].max(initial=0))

    @cached_property
    def _levels(self) -> tuple[Ints, Ints]:
        """When bytes on the device change, and the bytes from then on."""
        times = sorted(self.device)
        sizes = accumulate(self.device[now] for now in times)
        return np.array(times, np.int64), np.array(list(sizes), np.int64)


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
    stages: tuple[StageCopies, ...]


def offloaded_step(
    schedule: Schedule, units: StageUnits, residual: Ints, link: HostLink
) -> OffloadedStep:
    """Replay a step with its copies; `residual`: time of every event besides its units, in ps,
    `[direction, stage, chunk]`.

    Raises PolicyError for whole layers that leave where Megatron refuses it.
    """
    if sum(map(len, units)) > 1 and any(moves_whole_layers(c) for own in units for c in own):
        raise PolicyError(f"Megatron refuses {WHOLE_LAYER} with several pipeline stages.")
    works = [
        [ChunkWork.of(*own) for own in zip(of_stage, *each, strict=True)]
        for of_stage, *each in zip(units, *residual.tolist(), strict=True)
    ]
    period = schedule.group_size if schedule.num_chunks > 1 else schedule.num_stages
    short = _short(schedule, period)
    stages, finish_ps = _replay(short, works, link)
    more = schedule.num_microbatches - short.num_microbatches
    if more:
        shorter = replace(short, num_microbatches=short.num_microbatches - period)
        finish_ps += (finish_ps - _replay(shorter, works, link)[1]) * more / period
    return OffloadedStep(short, finish_ps / PS_PER_MS, stages)


def _short(schedule: Schedule, period: int) -> Schedule:
    """The schedule, or one of fewer microbatches with the same begin and end; a long one repeats
    after `period` microbatches."""
    each = 2 * schedule.num_chunks * schedule.num_stages
    m = schedule.num_microbatches
    most = max(MOST_EVENTS // each, schedule.shortened().num_microbatches + 2 * period)
    if m <= most:
        return schedule
    return replace(schedule, num_microbatches=most - (most - m) % period)


def _replay(
    schedule: Schedule, works: Sequence[Sequence[ChunkWork]], link: HostLink
) -> tuple[tuple[StageCopies, ...], float]:
    """Every stage with all its events, and when the last one ends, in ps."""
    stages = []
    for stage, chunks in enumerate(works):
        stages.append(StageCopies(chunks, schedule.events(stage), link))
    slots = block(schedule, 0, num_slots(schedule))
    finish = [0] * (slots.lookback * len(stages))
    waited = (slots.before, slots.made, slots.taken)
    for slot, stands in enumerate((slots.direction >= 0).ravel().tolist()):
        begin = max(finish[each.item(slot)] for each in waited)
        finish.append(stages[slot % len(stages)].run(begin) if stands else begin)
    return tuple(stages), max(finish[-len(stages) :])
