"""Puts every event of a step into a slot, and says what each event waits for.

Forward k of stage s stands in slot `stride * s + 2 * k`, and its backward j in the slot after
forward `uncapped warm-up + j`. A stage then has at most one event per slot, in the right order, and
every event's input stands in an earlier slot: `stride` slots earlier, or more where a microbatch
goes from the last stage round to the first, because groups have at least p microbatches. While all
stages run both directions, slots repeat with a *period*: one group of microbatches through all
chunks.

With several chunks, in warm-up and cool-down, a stage goes on only when its message is received,
even with `overlap_p2p_comm`: a large message goes straight into the receiver's memory. The receiver
asks for it when it has done its own event two slots before the one that needs it. With one chunk a
stage never waits longer for its receiver than for what it receives.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_autorecompute.planner.cost import Bools, Ints
from megatron_autorecompute.planner.cost.schedule import Schedule

_NOTHING_CAME = -(1 << 62)


def first_backward(schedule: Schedule) -> int:
    """The slot of the last stage's first backward."""
    return schedule.stride * (schedule.num_stages - 1) + 2 * schedule.warmup_of_last_stage + 1


def num_slots(schedule: Schedule) -> int:
    """Slots of a whole step."""
    forwards = schedule.num_microbatches * schedule.num_chunks
    return first_backward(schedule) + schedule.stride * (schedule.num_stages - 1) + 2 * forwards


def lookback(schedule: Schedule) -> int:
    """How many slots back anything is that a slot may wait for."""
    round_trip = 2 * schedule.group_size - schedule.stride * (schedule.num_stages - 1)
    return max(schedule.stride, round_trip * (schedule.num_chunks > 1)) + 1


@dataclass(frozen=True, slots=True)
class Steady:
    """The slots that repeat: every stage does forwards of whole groups, and backwards."""

    first: int
    length: int
    """Slots of one period."""
    periods: int

    @classmethod
    def of(cls, schedule: Schedule) -> Steady:
        """The slots of a schedule; without periods where it is too short for one."""
        p, v, m = schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
        size = schedule.group_size if v > 1 else 1
        length = 2 * size * v if v > 1 else 2 * max(p, 8)
        first = first_backward(schedule) + schedule.stride * (p - 1)
        last = 2 * v * (m - m % size)
        return cls(first, length, max(0, (last - first) // length))


@dataclass(frozen=True, slots=True)
class _Wait:
    """What stages wait for in one slot, in one direction."""

    view: int
    before: slice
    after: slice
    round_trip: int | None
    """Row in which the last stage has done the event whose output the first one waits for."""


@dataclass(frozen=True, slots=True)
class Input:
    """What stands in one slot of one stage, and where its input was made."""

    direction: int
    """0 is a forward, 1 a backward."""
    chunk: int
    row: int | None
    """The row in a block's table; None where the input comes from no other stage."""
    stage: int
    receiver: int | None = None
    """The stage that must have done its event two slots before, to take what this one sent then."""


class Block:
    """Some slots in a row: which events stand in them, and what each waits for.

    In the table of a run column `stage + 1` is when the stage has finished what it has to do up to
    the slot, and columns 0 and p + 1 are what arrives at the first stage and, backward, at the
    last. Seen from the last stage, backwards are as forwards are from the first: hence two views.
    """

    def __init__(self, schedule: Schedule, first: int, count: int) -> None:
        self.stride, self.lookback = schedule.stride, lookback(schedule)
        self.shape, self.last = (count, schedule.num_stages), schedule.num_chunks - 1
        self.waits: list[list[_Wait]] = [[] for _ in range(count)]
        self._inputs: dict[tuple[int, int], Input | None] = {}
        self.receivers: list[list[tuple[Ints, Ints]]] = [[] for _ in range(count)]
        """The columns of stages whose event waits for a receiver, and of receivers, by slot."""
        found: tuple[list[Ints], list[Ints]] = ([], [])
        for view, start in enumerate((0, first_backward(schedule))):
            for number in range(count):
                since = first + number - start
                stages = _active(since, schedule)
                if stages:
                    self.waits[number].append(self._wait(schedule, view, number, since, stages))
                    own = np.array(stages, np.int64)
                    events = (since - schedule.stride * own) // 2
                    self.receivers[number] += _receivers(schedule, view, own, events)
                    found[view].append(
                        np.stack([np.full(len(own), number), own, _chunk(schedule, events)])
                    )
        none = np.zeros((3, 0), np.int64)
        self.events = [np.concatenate([none, *part], axis=1) for part in found]

    def _wait(self, schedule: Schedule, view: int, number: int, since: int, stages: range) -> _Wait:
        before = slice(stages.start, stages.stop, stages.step)
        after = slice(stages.start + 1, stages.stop + 1, stages.step)
        round_trip = None
        event = since // 2
        if stages.start == 0 and _chunk(schedule, np.array([event]))[0] > 0:
            hops = schedule.stride * (schedule.num_stages - 1)
            round_trip = self.lookback + number + hops - 2 * _group_size(schedule, event)
        return _Wait(view, before, after, round_trip)

    def run(self, window: Ints, forward: Ints, backward: Ints, ahead: Ints | None = None) -> Ints:
        """The last `lookback` rows after the block, from those before it."""
        return self.table(window, forward, backward, ahead)[self.shape[0] :, 1:-1]

    def table(self, window: Ints, forward: Ints, backward: Ints, ahead: Ints | None = None) -> Ints:
        """The whole table: `[lookback + slot, column, ...]`."""
        count, stages = self.shape
        finish = np.empty((self.lookback + count, stages + 2, *forward.shape[2:]), np.int64)
        finish[: self.lookback, 1:-1] = window
        finish[:, 0] = finish[:, -1] = _NOTHING_CAME
        duration = np.zeros((*self.shape, *forward.shape[2:]), np.int64)
        number, stage, chunk = self.events[0]
        duration[number, stage] = forward[stage, chunk]
        number, stage, chunk = self.events[1]
        stage = stages - 1 - stage
        duration[number, stage] = backward[stage, self.last - chunk]
        early = None if ahead is None else np.zeros_like(duration)
        if early is not None and ahead is not None:
            early[number, stage] = ahead[stage, self.last - chunk]
        views = (finish, finish[:, ::-1])
        for number, waits in enumerate(self.waits):
            row = self.lookback + number
            now = finish[row, 1:-1]
            now[...] = finish[row - 1, 1:-1]
            if early is not None:
                now += early[number]
                duration[number] -= early[number]
            for own, receivers in self.receivers[number]:
                finish[row, own] = np.maximum(finish[row, own], finish[row - 2, receivers])
            for wait in waits:
                view = views[wait.view]
                if wait.round_trip is not None:
                    view[row - self.stride, 0] = view[wait.round_trip, stages]
                here = view[row, wait.after]
                np.maximum(here, view[row - self.stride, wait.before], out=here)
            now += duration[number]
        return finish

    @cached_property
    def _standing(self) -> Ints:
        """`[direction or chunk, slot, stage]` of what stands there; -1 where nothing does."""
        standing = np.full((2, *self.shape), -1)
        for view, (number, place, chunk) in enumerate(self.events):
            stage, own = (self.shape[1] - 1 - place, self.last - chunk) if view else (place, chunk)
            standing[:, number, stage] = np.stack([np.full_like(own, view), own])
        return standing

    @property
    def stands(self) -> Bools:
        """Whether anything stands there, `[slot, stage]`."""
        found: Bools = self._standing[0] >= 0
        return found

    def input(self, number: int, stage: int) -> Input | None:
        """What stands in a slot of a stage; None where nothing does."""
        place = number, stage
        if place not in self._inputs:
            view, chunk = self._standing[:, number, stage].tolist()
            self._inputs[place] = None if view < 0 else self._input(number, stage, view, chunk)
        return self._inputs[place]

    def _input(self, number: int, stage: int, view: int, chunk: int) -> Input:
        pairs = (pair.T.tolist() for pair in map(np.array, self.receivers[number]))
        receiver = {own - 1: by - 1 for own, by in itertools.chain.from_iterable(pairs)}.get(stage)
        before = stage + 1 if view else stage - 1
        if 0 <= before < self.shape[1]:
            return Input(view, chunk, self.lookback + number - self.stride, before, receiver)
        rows = (wait.round_trip for wait in self.waits[number] if wait.view == view)
        return Input(view, chunk, next(rows), self.shape[1] - 1 - stage, receiver)


block = functools.lru_cache(maxsize=32)(Block)


def _active(since: int, schedule: Schedule) -> range:
    """The stages that have a forward (backward) so many slots after the first one."""
    stride, p = schedule.stride, schedule.num_stages
    last = 2 * (schedule.num_microbatches * schedule.num_chunks - 1)
    low, high = max(0, -((last - since) // stride)), min(p - 1, since // stride)
    if stride == 2:
        return range(low, high + 1) if since % 2 == 0 else range(0)
    return range(low + (since - low) % 2, high + 1, 2)


def _receivers(
    schedule: Schedule, view: int, places: Ints, events: Ints
) -> list[tuple[Ints, Ints]]:
    """Columns of the stages whose events wait until what they sent last is received, and of those
    that receive it. Backwards are seen from the last stage."""
    p, every = schedule.num_stages, schedule.num_microbatches * schedule.num_chunks
    if schedule.num_chunks == 1:
        return []
    stages = p - 1 - places if view else places
    warmup = np.array([schedule.warmup(stage) for stage in stages.tolist()])
    waits = events > every - warmup if view else (events >= 1) & (events <= warmup)
    is_last = _chunk(schedule, events - 1) == schedule.num_chunks - 1
    waits &= ~((places == p - 1) & is_last)
    own, receivers = stages[waits], (stages[waits] + (-1 if view else 1)) % p
    return [(own + 1, receivers + 1)] if len(own) else []


def _chunk(schedule: Schedule, events: Ints) -> Ints:
    """The chunk of forwards by their numbers; of backwards counted from the end."""
    if schedule.num_chunks == 1:
        return np.zeros_like(events)
    size, m = schedule.group_size, schedule.num_microbatches
    whole = (m - m % size) * schedule.num_chunks
    in_last = (events - whole) // max(m % size, 1)
    return np.where(events < whole, events // size % schedule.num_chunks, in_last)


def _group_size(schedule: Schedule, event: int) -> int:
    """Microbatches in the group of a forward (backward)."""
    size, m = schedule.group_size, schedule.num_microbatches
    return size if event < (m - m % size) * schedule.num_chunks else m % size
