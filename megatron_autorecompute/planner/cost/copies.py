"""Copies to host memory and back beside one stage's forwards and backwards.

As Megatron's `PipelineOffloadManager` orders them (fine_grained_activation_offload.py of
megatron-core 0.19; 0.16 is the same but for its two settings):

- A group's copy out begins when its forward has run, after all earlier copies out.
- When a group's backward has run, the copy back of one more group begins: of the microbatch's group
  that left last, or, if none is left, of the microbatch whose backward is next.
- A group's backward waits for its copy back. If none was begun, it copies then and there.
- Some groups never leave: `Kept`. Where `core_attn`'s stays, so does its layer's `attn_proj`'s,
  which needs it; this package sees to that (`compat/offload_modules.py`), Megatron does not.

Both directions at once are taken to be as fast as one. A tensor's memory is free when its copy out
has ended; memory for a copy back is taken when the copy is asked for. The host is taken to run
ahead of the device, so that it delays no copy. `StageBytes` says what copies under way hold beside
the bytes of records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from megatron_autorecompute.planner.cost.arrays import Ints
from megatron_autorecompute.planner.cost.unit_costs import Unit
from megatron_autorecompute.profile import HostLink

Changes = dict[int, int]
"""Bytes more (fewer) from a time on, in picoseconds."""
PS_PER_NS = 1000


@dataclass(frozen=True, slots=True)
class CopyGroup:
    """One group of a chunk. Times are of computing alone, without waits."""

    name: str
    device_bytes: int
    host_bytes: int
    commit_ps: int
    """Time from the beginning of the chunk's forward until the copy out may begin."""
    unit_ps: int
    """Time from the beginning of the chunk's backward until that of the group's layer, whose record
    counts the group's device bytes from then on."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A place in a chunk's backward where copies matter."""

    at_ps: int
    """Computing time since the backward began."""
    group: int
    """The group of the chunk."""
    is_end: bool
    """Whether the group's backward has run; else it is about to."""


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """What a chunk computes and copies for one microbatch."""

    forward_ps: int
    backward_ps: int
    groups: tuple[CopyGroup, ...] = ()
    """In the order of their copies out."""
    turns: tuple[Turn, ...] = ()
    """The turns in the order of the backward."""

    @classmethod
    def of(cls, units: Sequence[Unit], forward_ps: int = 0, backward_ps: int = 0) -> ChunkWork:
        """The copies of a chunk's units in forward order, with other time at the end."""
        groups, turns = list[CopyGroup](), list[Turn]()
        after, begin = sum(unit.backward_ps for unit in units), 0
        for unit in units:
            after -= unit.backward_ps
            for group in unit.offload_groups:
                commit = begin + round(group.forward_end * unit.forward_ps)
                for share, is_end in ((group.backward_begin, False), (group.backward_end, True)):
                    at = after + round(share * unit.backward_ps)
                    turns.append(Turn(at, len(groups), is_end))
                groups.append(
                    CopyGroup(group.name, group.device_bytes, group.host_bytes, commit, after)
                )
            begin += unit.forward_ps
        turns.sort(key=lambda turn: (turn.at_ps, -turn.group, turn.is_end))
        own_ps = sum(unit.backward_ps for unit in units)
        return cls(
            max(begin + forward_ps, 0), max(own_ps + backward_ps, 0), tuple(groups), tuple(turns)
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """Which groups stay on the device although they could leave: Megatron's settings."""

    fraction: float = 1.0
    """`activation_offload_fraction`: the share of a chunk's groups that leave, the first ones."""
    delta_bytes: int = 0
    """`delta_offload_bytes_across_pp_ranks`: what each stage keeps more than the one before it."""
    first_step: bool = False
    """The copies of the first step, which counts: all groups leave."""

    def groups(
        self, stage: int, order: Sequence[tuple[int, int]], chunks: Sequence[ChunkWork]
    ) -> set[tuple[int, int, int]]:
        """(chunk, microbatch, group) of those that stay.

        Args:
            stage: the pipeline rank.
            order: (chunk, microbatch) of backwards that have groups.
            chunks: the chunks of the stage.
        """
        if self.first_step:
            return set()
        kept = self._last_of_each_name(order, chunks)
        left = stage * self.delta_bytes
        for chunk, microbatch in order:
            for number, group in enumerate(chunks[chunk].groups):
                if left > 0 and (chunk, microbatch, number) not in kept:
                    left -= group.host_bytes
                    kept.add((chunk, microbatch, number))
        for chunk, microbatch in order:
            own = [(chunk, microbatch, number) for number in range(len(chunks[chunk].groups))]
            may = [one for one in own if one not in kept]
            stay = int(len(may) * (1 - self.fraction))
            kept |= set(may[len(may) - stay :])
        for chunk, microbatch in order:
            stays = False
            for number, group in enumerate(chunks[chunk].groups):
                stays = (chunk, microbatch, number) in kept if group.name == "core_attn" else stays
                if group.name == "attn_proj" and stays:
                    kept.add((chunk, microbatch, number))
        return kept

    @staticmethod
    def _last_of_each_name(
        order: Sequence[tuple[int, int]], chunks: Sequence[ChunkWork]
    ) -> set[tuple[int, int, int]]:
        """The group of each name whose backward is first, of as many names as a chunk has most."""
        last: dict[str, tuple[int, int, int]] = {}
        for chunk, microbatch in reversed(order):
            for number, group in enumerate(chunks[chunk].groups):
                last[group.name] = chunk, microbatch, number
        most = max((len({g.name for g in chunks[chunk].groups}) for chunk, _ in order), default=0)
        return set(list(last.values())[:most])


@dataclass(slots=True)
class _Microbatch:
    """What one forward of one chunk left."""

    chunk: int
    microbatch: int
    waiting: list[int] = field(default_factory=list)
    """Groups in host memory, the last one to leave last."""
    out_until: dict[int, int] = field(default_factory=dict)
    """When the copy out of a group ends."""
    back_at: dict[int, int] = field(default_factory=dict)
    """When the copy back of a group ends."""
    asked_at: dict[int, int] = field(default_factory=dict)
    """When that copy was asked for."""
    asked: list[int] = field(default_factory=list)
    """Groups whose copy back no backward has waited for yet."""
    back: set[int] = field(default_factory=set)
    """Groups that came back without having been asked for."""


@dataclass(frozen=True, slots=True)
class Copied:
    """One group's copy, of one microbatch."""

    to_host: bool
    chunk: int
    microbatch: int
    group: int
    """The group of the chunk, in the order of copies out."""
    begin_ps: int
    end_ps: int


@dataclass(frozen=True, slots=True)
class Ran:
    """The times at which an event began and ended."""

    begin_ps: int
    end_ps: int
    waits: tuple[tuple[int, int], ...] = ()
    """Computing time before each wait, and the length of the wait."""


class StageCopies:
    """One stage's events and copies, event after event.

    Args:
        stage: the pipeline rank.
        chunks: what each chunk computes and copies.
        events: (is backward, chunk, microbatch), in the order of the schedule.
        link: to host memory.
        kept: which groups stay.
    """

    def __init__(
        self,
        stage: int,
        chunks: Sequence[ChunkWork],
        events: Sequence[tuple[bool, int, int]],
        link: HostLink,
        kept: Kept,
    ) -> None:
        self.chunks, self._events, self._link = chunks, iter(events), link
        self._order = [
            (chunk, microbatch)
            for is_backward, chunk, microbatch in events
            if is_backward and chunks[chunk].groups
        ]
        self._in_flight = _in_flight(events, len(chunks))
        self._stay = kept.groups(stage, self._order, chunks)
        self._first_step, self._next = kept.first_step, 0
        self._alive: dict[tuple[int, int], _Microbatch] = {}
        self._out_free = self._back_free = 0
        self.ran: list[Ran] = []
        """The run of every event so far."""
        self.device: Changes = {}
        """Bytes on the device that no record counts: copies under way, groups that stay, and groups
        that come back before their layer's backward."""
        self.host: dict[tuple[str, int], Changes] = {}
        """Bytes in host memory by group's name and size, as pools keep them."""
        self.copied: list[Copied] = []
        """The copies so far, in the order in which they were asked for."""

    @property
    def stall_ps(self) -> int:
        """Time for which backwards waited for copies."""
        return sum(wait for ran in self.ran for _, wait in ran.waits)

    def run(self, begin_ps: int) -> int:
        """Run the next event from a time on; returns when it ends."""
        is_backward, chunk, microbatch = next(self._events)
        work = self.chunks[chunk]
        if not work.groups:
            length = work.backward_ps if is_backward else work.forward_ps
            self.ran.append(Ran(begin_ps, begin_ps + length))
        elif is_backward:
            self._backward(chunk, microbatch, begin_ps)
        else:
            self._forward(chunk, microbatch, begin_ps)
            self.ran.append(Ran(begin_ps, begin_ps + work.forward_ps))
        return self.ran[-1].end_ps

    def _forward(self, chunk: int, microbatch: int, begin_ps: int) -> None:
        own = self._alive[chunk, microbatch] = _Microbatch(chunk, microbatch)
        for number, group in enumerate(self.chunks[chunk].groups):
            now = begin_ps + group.commit_ps
            add(self.device, now, group.device_bytes)
            if self._stays(chunk, microbatch, number):
                continue
            begin = max(self._out_free, now)
            self._out_free = begin + copy_ps(group.host_bytes, self._link.to_host_gb_per_s)
            self.copied.append(Copied(True, chunk, microbatch, number, begin, self._out_free))
            own.waiting.append(number)
            own.out_until[number] = self._out_free
            add(self.device, self._out_free, -group.device_bytes)
            self._add_host(now, group, group.host_bytes)

    def _stays(self, chunk: int, microbatch: int, number: int) -> bool:
        if self._first_step:
            return False
        if (chunk, microbatch, number) in self._stay:
            return True
        names = [group.name for group in self.chunks[chunk].groups]
        name = names[number]
        following = (self._order[at] for at in range(self._next, len(self._order)))
        front = next(one for one in following if self._has(one[0], name))
        return front == (chunk, microbatch) and name not in names[number + 1 :]

    def _has(self, chunk: int, name: str) -> bool:
        return any(group.name == name for group in self.chunks[chunk].groups)

    def _backward(self, chunk: int, microbatch: int, begin_ps: int) -> None:
        work, own = self.chunks[chunk], self._alive.pop((chunk, microbatch))
        self._next = self._order.index((chunk, microbatch), self._next) + 1
        waited, waits = 0, list[tuple[int, int]]()
        layers: dict[int, int] = {}
        for turn in work.turns:
            unit_ps = work.groups[turn.group].unit_ps
            layers.setdefault(unit_ps, begin_ps + unit_ps + waited)
            now = begin_ps + turn.at_ps + waited
            if turn.is_end:
                self._ask(own, chunk, now)
                continue
            ready = self._ready(own, work, turn.group, now)
            if ready > now:
                waits.append((turn.at_ps, ready - now))
                waited += ready - now
        self._count(own, work, layers)
        self.ran.append(Ran(begin_ps, begin_ps + work.backward_ps + waited, tuple(waits)))

    def _ready(self, own: _Microbatch, work: ChunkWork, number: int, now: int) -> int:
        """When a group's backward may begin. As in `on_group_commit_backward`, it waits for the
        first group of its name that was asked for, which may be another one if it stayed itself."""
        group = work.groups[number]
        named = (one for one in own.asked if work.groups[one].name == group.name)
        first = next(named, None)
        if first is not None:
            own.asked.remove(first)
            now = max(now, own.back_at[first])
        if number in own.out_until and number not in own.back_at:
            own.back.add(number)
            self._add_host(now, group, -group.host_bytes)
            begin = max(now, own.out_until[number])
            now = begin + copy_ps(group.host_bytes, self._link.to_device_gb_per_s)
            self._note_back(own, number, begin, now)
        return now

    def _ask(self, own: _Microbatch, chunk: int, now: int) -> None:
        """Begin one more copy back, of this microbatch or of the next one."""
        self._back_free = max(self._back_free, now)
        if not own.waiting:
            if self._next == len(self._order):
                return
            chunk, microbatch = self._order[self._next]
            following = self._alive.get((chunk, microbatch))
            if following is None or not following.waiting:
                return
            own = following
        number = own.waiting.pop()
        if number in own.back:
            return
        group = self.chunks[chunk].groups[number]
        begin = max(self._back_free, own.out_until[number])
        own.back_at[number] = begin + copy_ps(group.host_bytes, self._link.to_device_gb_per_s)
        self._back_free = own.back_at[number]
        self._note_back(own, number, begin, self._back_free)
        own.asked_at[number] = now
        own.asked.append(number)
        self._add_host(now, group, -group.host_bytes)

    def _note_back(self, own: _Microbatch, number: int, begin_ps: int, end_ps: int) -> None:
        copied = Copied(False, own.chunk, own.microbatch, number, begin_ps, end_ps)
        self.copied.append(copied)

    def _count(self, own: _Microbatch, work: ChunkWork, layers: Mapping[int, int]) -> None:
        """Device bytes of groups that were there when their layer's backward began."""
        for number, group in enumerate(work.groups):
            layer = layers[group.unit_ps]
            if number not in own.out_until:
                add(self.device, layer, -group.device_bytes)
            elif own.asked_at.get(number, layer) < layer:
                add(self.device, own.asked_at[number], group.device_bytes)
                add(self.device, layer, -group.device_bytes)

    def _add_host(self, now: int, group: CopyGroup, size: int) -> None:
        add(self.host.setdefault((group.name, group.host_bytes), {}), now, size)

    @property
    def host_bytes(self) -> int:
        """Host memory that pools come to hold, and keep: the most of each group's name and size, in
        the first step, in which all groups leave. On a stage of several chunks one group of each
        may be counted that is back by then."""
        own = [Counter((g.name, g.host_bytes) for g in work.groups) for work in self.chunks]
        most = Counter[tuple[str, int]]()
        for in_flight in self._in_flight:
            for key in set().union(*own):
                there = sum(n * groups[key] for n, groups in zip(in_flight, own, strict=True))
                most[key] = max(most[key], there)
        return sum(size * count for (_, size), count in most.items())


def _in_flight(events: Sequence[tuple[bool, int, int]], num_chunks: int) -> set[tuple[int, ...]]:
    """Microbatches of every chunk whose forward has run and whose backward has not, after each
    forward."""
    now, found = [0] * num_chunks, set()
    for is_backward, chunk, _ in events:
        now[chunk] += -1 if is_backward else 1
        if not is_backward:
            found.add(tuple(now))
    return found


def copy_ps(host_bytes: int, gb_per_s: float) -> int:
    """How long so many bytes take one way, in picoseconds."""
    return round(host_bytes * PS_PER_NS / gb_per_s)


def add(changes: Changes, now: int, size: int) -> None:
    """Note so many bytes more from a time on."""
    changes[now] = changes.get(now, 0) + size


def levels(changes: Changes) -> Iterator[tuple[int, int]]:
    """Times at which bytes change, in order, and the bytes from then on."""
    total = 0
    for now in sorted(changes):
        total += changes[now]
        yield now, total


@dataclass(frozen=True)
class StageBytes:
    """Bytes beside those of records, at any time of one stage's step."""

    chunks: Sequence[tuple[Unit, ...]]
    ran: Sequence[Ran]
    """The run of every event."""
    times: Ints
    """When bytes change."""
    bytes: Ints
    """The bytes from then on."""

    @classmethod
    def of(
        cls, chunks: Sequence[tuple[Unit, ...]], ran: Sequence[Ran], changes: Changes
    ) -> StageBytes:
        """The bytes of a stage's units, events and changes."""
        times, sizes = zip(*levels(changes), strict=True) if changes else ((), ())
        return cls(chunks, ran, np.array(times, np.int64), np.array(sizes, np.int64))

    def during(self, event: int) -> int:
        """The most during an event."""
        ran = self.ran[event]
        return self.most(ran.begin_ps, ran.end_ps)

    def by_unit(self, event: int, chunk: int, *, backward: bool) -> Ints:
        """The most while each unit of the chunk runs."""
        ran, offsets = self.ran[event], self._offsets[chunk][backward]
        found = [
            self.most(ran.begin_ps + _waited(ran, first), ran.begin_ps + _waited(ran, last))
            for first, last in offsets
        ]
        return np.array(found, np.int64)

    @cached_property
    def _offsets(self) -> list[tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
        return [_windows(units) for units in self.chunks]

    def most(self, first: int, last: int) -> int:
        """The most from one time to another, in picoseconds."""
        low = int(np.searchsorted(self.times, first, "right")) - 1
        high = int(np.searchsorted(self.times, last, "left"))
        found = self.bytes[max(low, 0) : max(high, low + 1)]
        return int(found.max(initial=0))


def _windows(
    units: Sequence[Unit],
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """When each unit computes, in a forward and in a backward."""
    forward = [0, *accumulate(unit.forward_ps for unit in units)]
    backward = [0, *accumulate(unit.backward_ps for unit in reversed(units))]
    ahead = list(pairwise(forward))
    return ahead, list(pairwise(backward))[::-1]


def _waited(ran: Ran, at_ps: int) -> int:
    """How long after an event's begin it has computed so much."""
    return at_ps + sum(wait for waited_at, wait in ran.waits if waited_at < at_ps)
