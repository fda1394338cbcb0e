"""How long a step takes: every event starts when its stage is free and its input has arrived.

Messages take no time (as with Megatron's `overlap_p2p_comm`). A forward and a backward that EP
overlap runs side by side are replayed one after the other. Optimizer and gradient reduction are not
included.

The steady state of a step repeats, so a long step takes hardly longer to replay. Every event has a
*slot*: forward k of stage s is in slot `stride * s + 2 * k`, and backward j in the slot after
forward `uncapped warm-up + j`. A stage then has at most one event per slot, in the right order.
Every event's input comes from an earlier slot: `stride` slots earlier, or, if a microbatch goes
from the last stage round to the first, more, because groups have at least p microbatches. While all
stages run forwards and backwards, slots repeat with a *period*: one group of microbatches through
all chunks. A period maps the times at which each stage finished its last few slots to later such
times; this map is convex, a maximum of sums. So if two periods in a row took the same time on every
stage, and the n-th period after them takes it again, all periods between took it as well and need
not be replayed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.arrays import Floats, Ints
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.planner.unit_costs import PS_PER_MS

MOST = 1 << 61
"""Sums of times stay below this."""
_NOTHING_CAME = -(1 << 62)
_FEW_PERIODS = 4


def replay_ms(
    schedule: Schedule,
    forward_ms: Sequence[Sequence[float]] | Floats,
    backward_ms: Sequence[Sequence[float]] | Floats,
) -> float:
    """Milliseconds of a step: every event starts when its stage is free and its input has arrived.

    Args:
        schedule: the order of events.
        forward_ms: time of one forward, `[stage][chunk]`.
        backward_ms: time of one backward, recompute included, `[stage][chunk]`.

    Raises PipelineError for wrong shapes and for times that are negative or not finite.
    """
    forward = _times(schedule, forward_ms, "forward_ms")
    backward = _times(schedule, backward_ms, "backward_ms")
    per_ms = PS_PER_MS / step_unit(schedule, float((forward + backward).sum()) * PS_PER_MS)
    finish = finished(schedule, _rounded(forward * per_ms), _rounded(backward * per_ms))
    return float(finish.max() / per_ms)


def step_unit(schedule: Schedule, all_ps: float) -> int:
    """The unit of time, in ps, in which sums stay exact: 1, or more for steps of weeks.

    `all_ps` is the time of one microbatch on all stages together.
    """
    return 1 << max(0, math.ceil(math.log2(max(schedule.num_microbatches * all_ps, 1) / MOST)))


def finished(schedule: Schedule, forward: Ints, backward: Ints) -> Ints:
    """When each stage ends its last event, `[stage, ...]`.

    Args:
        schedule: the order of events.
        forward: time of one forward, of shape [stage, chunk, ...]; further dimensions are
            candidates that are replayed together. In any unit; see `step_unit`.
        backward: time of one backward, of the same shape and unit.
    """
    steady = _Steady.of(schedule)
    shape = (_lookback(schedule), schedule.num_stages, *forward.shape[2:])
    window, slot = np.zeros(shape, np.int64), 0
    if steady.periods >= _FEW_PERIODS:
        window = _block(schedule, 0, steady.first).run(window, forward, backward)
        period = _block(schedule, steady.first, steady.length)
        window = _repeated(lambda now: period.run(now, forward, backward), window, steady.periods)
        slot = steady.first + steady.periods * steady.length
    rest = _block(schedule, slot, _num_slots(schedule) - slot)
    finish: Ints = rest.run(window, forward, backward)[-1]
    return finish


def _times(schedule: Schedule, times: Sequence[Sequence[float]] | Floats, name: str) -> Floats:
    shape = (schedule.num_stages, schedule.num_chunks)
    found = [len(row) for row in times]
    if found != [shape[1]] * shape[0]:
        raise PipelineError(
            f"{name} must have {shape[0]} stages of {shape[1]} chunks; found chunks {found}."
        )
    values = np.array(times, np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise PipelineError(f"{name} must be finite and not negative; found {values.tolist()}.")
    return values


def _rounded(values: Floats) -> Ints:
    return np.rint(values).astype(np.int64)


def _first_backward(schedule: Schedule) -> int:
    return schedule.stride * (schedule.num_stages - 1) + 2 * schedule.warmup_of_last_stage + 1


def _num_slots(schedule: Schedule) -> int:
    forwards = schedule.num_microbatches * schedule.num_chunks
    return _first_backward(schedule) + schedule.stride * (schedule.num_stages - 1) + 2 * forwards


def _lookback(schedule: Schedule) -> int:
    """The most slots that lie between an event and the event it waits for."""
    round_trip = 2 * schedule.group_size - schedule.stride * (schedule.num_stages - 1)
    return max(schedule.stride, round_trip * (schedule.num_chunks > 1)) + 1


@dataclass(frozen=True, slots=True)
class _Steady:
    """The slots that repeat: every stage does forwards of whole groups, and backwards."""

    first: int
    length: int
    """Slots of one period."""
    periods: int

    @classmethod
    def of(cls, schedule: Schedule) -> _Steady:
        p, v, m = schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
        size = schedule.group_size if v > 1 else 1
        length = 2 * size * v if v > 1 else 2 * max(p, 8)
        first = _first_backward(schedule) + schedule.stride * (p - 1)
        last = 2 * v * (m - m % size)
        return cls(first, length, max(0, (last - first) // length))


def _repeated(run: Callable[[Ints], Ints], window: Ints, periods: int) -> Ints:
    """The window after so many periods."""
    done, before = 0, None
    while done < periods:
        following = run(window)
        step, done = following - window, done + 1
        ahead = 0
        if before is not None and done < periods and np.array_equal(step, before):
            ahead = _ahead(run, following, step, periods - done)
        window, done, before = following + ahead * step, done + ahead, None if ahead else step
    return window


def _ahead(run: Callable[[Ints], Ints], window: Ints, step: Ints, most: int) -> int:
    """How many of the next `most` periods take as long as the last two."""

    def still(count: int) -> bool:
        return np.array_equal(run(window + (count - 1) * step), window + count * step)

    if still(most):
        return most
    right, wrong = 0, most
    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (middle, wrong) if still(middle) else (right, middle)
    return right


@dataclass(frozen=True, slots=True)
class _Wait:
    """What the stages wait for in one slot, in one direction."""

    view: int
    before: slice
    after: slice
    round_trip: int | None
    """Row in which the last stage has run the event whose output the first stage waits for."""


class _Block:
    """Consecutive slots: the events in them, and what each waits for.

    In the table of a run, column `stage + 1` is the time at which the stage has finished its events
    up to the slot. Columns 0 and p + 1 are the times of arrival at the first stage and, in
    backward, at the last. Backwards seen from the last stage look like forwards seen from the
    first, so there are two views.
    """

    def __init__(self, schedule: Schedule, first: int, count: int) -> None:
        self.stride, self.lookback = schedule.stride, _lookback(schedule)
        self.shape, self.last = (count, schedule.num_stages), schedule.num_chunks - 1
        self.waits: list[list[_Wait]] = [[] for _ in range(count)]
        found: tuple[list[Ints], list[Ints]] = ([], [])
        for view, start in enumerate((0, _first_backward(schedule))):
            for number in range(count):
                since = first + number - start
                stages = _active(since, schedule)
                if stages:
                    self.waits[number].append(self._wait(schedule, view, number, since, stages))
                    own = np.array(stages, np.int64)
                    events = (since - schedule.stride * own) // 2
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

    def run(self, window: Ints, forward: Ints, backward: Ints) -> Ints:
        """The last `lookback` rows after the block, from those before it."""
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
        views = (finish, finish[:, ::-1])
        for number, waits in enumerate(self.waits):
            row = self.lookback + number
            now = finish[row, 1:-1]
            now[...] = finish[row - 1, 1:-1]
            for wait in waits:
                view = views[wait.view]
                if wait.round_trip is not None:
                    view[row - self.stride, 0] = view[wait.round_trip, stages]
                here = view[row, wait.after]
                np.maximum(here, view[row - self.stride, wait.before], out=here)
            now += duration[number]
        return finish[count:, 1:-1]


_block = functools.lru_cache(maxsize=32)(_Block)


def _active(since: int, schedule: Schedule) -> range:
    """The stages that have a forward (backward) in the slot `since` slots after the first one."""
    stride, p = schedule.stride, schedule.num_stages
    last = 2 * (schedule.num_microbatches * schedule.num_chunks - 1)
    low, high = max(0, -((last - since) // stride)), min(p - 1, since // stride)
    if stride == 2:
        return range(low, high + 1) if since % 2 == 0 else range(0)
    return range(low + (since - low) % 2, high + 1, 2)


def _chunk(schedule: Schedule, events: Ints) -> Ints:
    """The chunks of forwards, by their numbers; for backwards counted from the last chunk."""
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
