"""The length of a step: every event starts when its stage is free and its input has arrived.

Messages take no time, but some are waited for until they are received (`slots.py`). Optimizer and
gradient reduction are not included. docs/decisions/search.md says why what repeats needs no replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.cost import Floats, Ints
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.slots import Block, block, num_slots, steady
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS


def replay_ms(
    schedule: Schedule,
    forward_ms: Sequence[Sequence[float]] | Floats,
    backward_ms: Sequence[Sequence[float]] | Floats,
    ahead_ms: Sequence[Sequence[float]] | Floats | None = None,
) -> float:
    """Milliseconds of a step: every event starts when its stage is free and its input has arrived.

    Args:
        schedule: the order of events.
        forward_ms: time of one forward, `[stage][chunk]`.
        backward_ms: time of one backward, recompute included, `[stage][chunk]`.
        ahead_ms: the part of it that begins before the gradient is there; None: nothing.

    Raises PipelineError for wrong shapes and for times that are negative or not finite.
    """
    times = _whole(schedule, forward_ms, backward_ms, ahead_ms)
    return float(finished(schedule, *times).max() / PS_PER_MS)


def event_ends_ms(
    schedule: Schedule,
    forward_ms: Sequence[Sequence[float]] | Floats,
    backward_ms: Sequence[Sequence[float]] | Floats,
    ahead_ms: Sequence[Sequence[float]] | Floats | None = None,
) -> list[Floats]:
    """When each event of each stage ends, in the stage's order; arguments as of `replay_ms`."""
    times = _whole(schedule, forward_ms, backward_ms, ahead_ms)
    slots = block(schedule, 0, num_slots(schedule))
    window = np.zeros((slots.lookback, schedule.num_stages), np.int64)
    ends = slots.table(window, *times)[slots.lookback :] / PS_PER_MS
    stands = slots.direction >= 0
    return [ends[stands[:, stage], stage] for stage in range(schedule.num_stages)]


def finished(schedule: Schedule, forward: Ints, backward: Ints, ahead: Ints | None = None) -> Ints:
    """When each stage ends its last event, `[stage, ...]`.

    Args:
        schedule: the order of events.
        forward: time of one forward, of shape [stage, chunk, ...], in any unit; further dimensions
            are candidates that are replayed together.
        backward: time of one backward.
        ahead: the part of it that needs no gradient to begin; None: nothing.
    """
    for part in parts(schedule, forward, backward, ahead):
        finish: Ints = part.after[-1]
    return finish


@dataclass(frozen=True, slots=True)
class Part:
    """Slots of a replay that were run at once, or a period that takes the same every time."""

    block: Block
    table: Ints
    """The table of the block, the first time; see `Block.table`."""
    step: Ints | None = None
    """The growth, each time, of what the block starts from; `[slot, stage, ...]`."""
    times: int = 1

    @property
    def after(self) -> Ints:
        """When each stage had finished its last few slots, after the last time."""
        following: Ints = self.table[self.block.shape[0] :]
        return following if self.step is None else following + (self.times - 1) * self.step


def parts(
    schedule: Schedule, forward: Ints, backward: Ints, ahead: Ints | None = None
) -> Iterator[Part]:
    """A replay in order; arguments as of `finished`. Periods that are known to take what the two
    before them took are one part."""
    times = forward, backward, ahead
    first, length, periods = steady(schedule)
    begin, end = block(schedule, 0, first), first + periods * length
    window = np.zeros((begin.lookback, schedule.num_stages, *forward.shape[2:]), np.int64)
    part, step, done = Part(begin, begin.table(window, *times)), None, 0
    yield part
    while done < periods:
        period, window, before = block(schedule, first, length), part.after, step
        part = Part(period, period.table(window, *times))
        yield part
        step, done = part.after - window, done + 1
        if before is not None and done < periods and np.array_equal(step, before):
            window, more = part.after, periods - done
            # Half as many until the last of them takes as long.
            while more:
                again = period.table(window + (more - 1) * step, *times)[length:]
                if np.array_equal(again, window + more * step):
                    break
                more //= 2
            if more:
                part = Part(period, period.table(window, *times), step, more)
                yield part
                step, done = None, done + more
    rest = block(schedule, end, num_slots(schedule) - end)
    yield Part(rest, rest.table(part.after, *times))


def _whole(
    schedule: Schedule, forward_ms: Any, backward_ms: Any, ahead_ms: Any
) -> tuple[Ints, Ints, Ints | None]:
    """The times in picoseconds."""

    def whole(times: Any, name: str) -> Ints:
        shape = (schedule.num_stages, schedule.num_chunks)
        found = [len(row) for row in times]
        if found != [shape[1]] * shape[0]:
            raise PipelineError(
                f"{name} must have {shape[0]} stages of {shape[1]} chunks; found chunks {found}."
            )
        values = np.array(times, np.float64)
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise PipelineError(f"{name} must be finite and not negative; found {values.tolist()}.")
        return np.rint(values * PS_PER_MS).astype(np.int64)

    ahead = None if ahead_ms is None else whole(ahead_ms, "ahead_ms")
    return whole(forward_ms, "forward_ms"), whole(backward_ms, "backward_ms"), ahead


def critical_paths(schedule: Schedule, forward: Ints, backward: Ints) -> list[Ints]:
    """How often each event is on a longest path, `[direction, stage, chunk]`, forwards first; times
    `[stage, chunk]`, as of `finished`.

    Where an event could start neither sooner for its stage nor for another one, one path goes on
    with the stage's event before it, and the other with where its input was made, or where what the
    stage sent was received. Two, or one where they are the same.
    """
    times = forward[..., None], backward[..., None]
    replayed = list(parts(schedule, *times))
    one, other = (_Walk(replayed, *times, own).whole(0) for own in (True, False))
    return [one] if np.array_equal(one, other) else [one, other]


def one_path_each(schedule: Schedule, forward: Ints, backward: Ints) -> tuple[Ints, list[Ints]]:
    """The steps with some times, `[stage, chunk, candidate]`, and a longest path of each; as of
    `finished` and `critical_paths`.

    They are replayed together, which is less work.
    """
    replayed = list(parts(schedule, forward, backward))
    walk = _Walk(replayed, forward, backward, True)
    steps: Ints = replayed[-1].after[-1].max(axis=0)
    return steps, [walk.whole(i) for i in range(forward.shape[-1])]


class _Walk:
    """Goes back through a replay of candidates and counts the events it meets."""

    def __init__(
        self, replayed: Sequence[Part], forward: Ints, backward: Ints, own_first: bool
    ) -> None:
        self.replayed, self.shape = replayed, (2, *forward.shape[:2])
        self.sources = [
            part.block.sources(part.table, forward, backward, own_first) for part in replayed
        ]

    def whole(self, candidate: int) -> Ints:
        """The path from the end of a replay to its beginning; `[direction, stage, chunk]`."""
        last, counts = self.replayed[-1], np.zeros(self.shape, np.int64)
        finish = last.table[-1, :, candidate]
        place = (last.block.lookback - 1) * len(finish) + int(finish.argmax())
        for part, own in zip(reversed(self.replayed), reversed(self.sources), strict=True):
            place = self._through(part, own[..., candidate].ravel(), place, counts)
        return counts

    def _through(self, part: Part, sources: Ints, place: int, counts: Ints) -> int:
        """From a place after a part to one before it.

        What a period that repeats starts from grows evenly. A path through it that is a longest one
        once, with times before and after that are none shorter, is so every time: how far a path
        falls short is a line over the times, nowhere below zero. The time before the first is the
        period that the part repeats.
        """
        known: dict[int, tuple[int, Ints]] = {}
        seen: dict[int, tuple[int, Ints]] = {}
        left = part.times
        while left:
            if place in seen:  # it goes in a circle: so many rounds of it at once
                before, met = seen[place]
                rounds, left = divmod(left, before - left)
                counts += rounds * (counts - met)
                seen.clear()
                continue
            seen[place] = left, counts.copy()
            if place not in known:
                known[place] = self._once(part.block, sources, place)
            place, own = known[place]
            counts += own
            left -= 1
        return place

    def _once(self, block: Block, sources: Ints, place: int) -> tuple[int, Ints]:
        """The place from which a path comes to one after a block, and its events between."""
        before, met, counts = block.lookback * self.shape[1], list[int](), np.zeros(self.shape, int)
        slot = place + sources.size - before
        while slot >= 0:
            met.append(slot)
            slot = sources.item(slot) - before
        slots = np.array(met, np.int64)
        slots = slots[block.direction.ravel()[slots] >= 0]
        event = block.direction.ravel()[slots], slots % self.shape[1], block.chunk.ravel()[slots]
        np.add.at(counts, event, 1)
        return slot + before, counts
