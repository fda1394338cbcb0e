"""Puts every event of a step into a slot, and says what each event waits for.

Forward k of stage s stands in slot `stride * s + 2 * k`, and its backward j in the slot after
forward `uncapped warm-up + j` (docs/decisions/search.md). While all stages run both directions,
slots repeat with a *period*: one group of microbatches through all chunks.
"""

from __future__ import annotations

import functools

import numpy as np

from megatron_autorecompute.planner.cost import Ints
from megatron_autorecompute.planner.cost.schedule import Schedule


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


def steady(schedule: Schedule) -> tuple[int, int, int]:
    """The slots that repeat, in which every stage does forwards of whole groups, and backwards: the
    first one, how many a period has, and the periods; none where the schedule is too short."""
    p, v, m = schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
    size = schedule.group_size if v > 1 else 1
    length = 2 * size * v if v > 1 else 2 * max(p, 8)
    first = first_backward(schedule) + schedule.stride * (p - 1)
    last = 2 * v * (m - m % size)
    return first, length, max(0, (last - first) // length)


class Block:
    """Some slots in a row: which events stand in them, and what each waits for.

    In the table of a run a row is a slot, after `lookback` rows from before the block, and a column
    is a stage: when the stage has finished what it has to do up to the slot. A *place* is the
    number of an entry, row by row. Every array is of shape [slot, stage].
    """

    def __init__(self, schedule: Schedule, first: int, count: int) -> None:
        p = schedule.num_stages
        self.lookback, self.shape = lookback(schedule), (count, p)
        self.direction = np.full(self.shape, -1)
        """0 is a forward, 1 a backward; -1 where nothing stands."""
        self.chunk = np.zeros(self.shape, np.int64)
        stages, slots = np.arange(p), np.arange(count)[:, None]
        self.before = (self.lookback - 1 + slots) * p + stages
        """The place of the slot before."""
        self.made = self.before.copy()
        """The place where an event's input is made; `before` if it comes from no other stage."""
        self.taken = self.before.copy()
        """The place two slots before, of the stage that must have done its event there to take what
        this one sent then; `before` where it does not wait."""
        self._put(schedule, 0, first + slots, stages)
        self._put(schedule, 1, first + slots - first_backward(schedule), stages[::-1])
        self._waits = (self.taken != self.before).any(axis=1).tolist()

    def _put(self, schedule: Schedule, direction: int, since: Ints, places: Ints) -> None:
        """Put all forwards (direction 0) or backwards; `since`: slots since the first of a step,
        `[slot, 1]`; `places`: of the stages, in the order in which a microbatch passes them."""
        p, last, stride = schedule.num_stages, schedule.num_chunks - 1, schedule.stride
        total, step = schedule.num_microbatches * schedule.num_chunks, -1 if direction else 1
        since = since - stride * places
        there = (since % 2 == 0) & (since >= 0) & (since < 2 * total)
        events, place = since[there] // 2, np.broadcast_to(places, there.shape)[there]
        stage = np.flatnonzero(there) % p
        row = self.before[there] - stage + p
        chunk = _chunk(schedule, events)
        self.direction[there] = direction
        self.chunk[there] = last - chunk if direction else chunk
        back = np.where(place > 0, stride, 2 * _group_size(schedule, events) - stride * (p - 1))
        made = row - back * p + (stage - step) % p
        self.made[there] = np.where((place > 0) | (chunk > 0), made, self.before[there])
        if last:
            warmup = np.array([schedule.warmup(own) for own in range(p)])[stage]
            waits = events > total - warmup if direction else (events >= 1) & (events <= warmup)
            waits &= (place < p - 1) | (_chunk(schedule, events - 1) < last)
            taken = row - 2 * p + (stage + step) % p
            self.taken[there] = np.where(waits, taken, self.before[there])

    def table(self, window: Ints, forward: Ints, backward: Ints, ahead: Ints | None = None) -> Ints:
        """The whole table: `[lookback + slot, stage, ...]`."""
        count, candidates = self.shape[0], forward.shape[2:]
        finish = np.empty((self.lookback + count, self.shape[1], *candidates), np.int64)
        finish[: self.lookback] = window
        places, own = finish.reshape(-1, *candidates), np.empty_like(finish[0])
        events, times = self._events(forward.shape[1]), _by_event(forward, backward)
        early = None if ahead is None else _by_event(np.zeros_like(ahead), ahead)
        times = times if early is None else times - early
        for number in range(count):
            now, before = finish[self.lookback + number], finish[self.lookback + number - 1]
            if early is not None:
                before = before + early.take(events[number], 0)
            np.maximum(before, places.take(self.made[number], 0, own, "clip"), out=now)
            if self._waits[number]:
                np.maximum(now, places.take(self.taken[number], 0, own, "clip"), out=now)
            now += times.take(events[number], 0, own, "clip")
        return finish

    def _events(self, chunks: int) -> Ints:
        """The number of what stands in each slot: by direction, 2 for nothing, stage and chunk."""
        stages = self.shape[1]
        found: Ints = ((self.direction % 3) * stages + np.arange(stages)) * chunks + self.chunk
        return found

    def sources(self, table: Ints, forward: Ints, backward: Ints, own_first: bool) -> Ints:
        """The places from which longest paths come to every slot, `[slot, stage, candidate]`.

        Where both the stage's slot before and another stage's are as late as the event's start:
        the former with `own_first`, else the latter.
        """
        ends = table.reshape(-1, table.shape[-1])
        events = self._events(forward.shape[1])
        start = table[self.lookback :] - _by_event(forward, backward).take(events, 0)
        found = np.broadcast_to(self.before[..., None], start.shape)
        for each in (self.taken, self.made):
            elsewhere = (each % self.shape[1] != np.arange(self.shape[1]))[..., None]
            found = np.where(elsewhere & (ends.take(each, 0) == start), each[..., None], found)
        if own_first:
            found = np.where(ends.take(self.before, 0) == start, self.before[..., None], found)
        return found


def _by_event(forward: Ints, backward: Ints) -> Ints:
    """Times by the numbers of events, `[event, ...]`."""
    found = np.concatenate([forward, backward, np.zeros_like(forward)])
    return found.reshape(-1, *forward.shape[2:])


block = functools.lru_cache(maxsize=32)(Block)


def _chunk(schedule: Schedule, events: Ints) -> Ints:
    """The chunk of forwards by their numbers; of backwards counted from the end."""
    if schedule.num_chunks == 1:
        return np.zeros_like(events)
    size, m = schedule.group_size, schedule.num_microbatches
    whole = (m - m % size) * schedule.num_chunks
    in_last = (events - whole) // max(m % size, 1)
    return np.where(events < whole, events // size % schedule.num_chunks, in_last)


def _group_size(schedule: Schedule, events: Ints) -> Ints:
    """Microbatches in the group of forwards (backwards)."""
    size, m = schedule.group_size, schedule.num_microbatches
    return np.where(events < (m - m % size) * schedule.num_chunks, size, m % size)
