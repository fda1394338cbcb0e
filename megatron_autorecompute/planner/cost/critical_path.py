"""Which events a step waits for: its critical path, as counts.

A step takes as long as its longest path of events, each of which waits for the one before it. The
schedule decides which events wait for which; choices change only their times. So the events on any
one path never take longer than the step, and the counts of a path give a bound for all choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_autorecompute.planner.cost.arrays import Ints
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.slots import Block
from megatron_autorecompute.planner.cost.step_time import Part, parts

_Place = tuple[int, int]
"""(row of a window, stage)"""


def critical_paths(schedule: Schedule, forward: Ints, backward: Ints) -> list[Ints]:
    """How often each event is on a longest path, `[direction, stage, chunk]`, forwards first.

    Where an event could start neither sooner for its stage nor for another one, one path goes on
    with the stage's event before it, and the other with where its input was made, or where what the
    stage sent was received. Two, or one where they are the same.

    Args:
        schedule: the order of events.
        forward: time of one forward, `[stage, chunk]`, as of `finished`.
        backward: the same of one backward.
    """
    replayed = [(part, part.table[:, 1:-1]) for part in parts(schedule, forward, backward)]
    last = replayed[-1][0].after
    walks = _Walk(forward, backward, True), _Walk(forward, backward, False)
    one, other = (walk.whole(replayed, last) for walk in walks)
    return [one] if np.array_equal(one, other) else [one, other]


def one_path_each(schedule: Schedule, forward: Ints, backward: Ints) -> list[Ints]:
    """A longest path for each of some times, `[stage, chunk, candidate]`; as in `critical_paths`.

    They are replayed together, which is less work.
    """
    found, together = [], list(parts(schedule, forward, backward))
    for i in range(forward.shape[-1]):
        replayed = [(part, part.table[:, 1:-1, i]) for part in together]
        walk = _Walk(forward[..., i], backward[..., i], True)
        found.append(walk.whole(replayed, together[-1].after[..., i]))
    return found


class _Walk:
    """Goes back through a replay and counts the events it meets."""

    def __init__(self, forward: Ints, backward: Ints, own_first: bool) -> None:
        self.own_first = own_first
        self.times = (forward.tolist(), backward.tolist())
        self.counts = np.zeros((2, *forward.shape), np.int64)

    def whole(self, replayed: Sequence[tuple[Part, Ints]], last: Ints) -> Ints:
        """The paths from the end of a replay to its beginning; `[direction, stage, chunk]`."""
        place = last.shape[0] - 1, int(last[-1].argmax())
        for part, table in reversed(replayed):
            place = self.through(part, table, place)
        return self.counts

    def through(self, part: Part, table: Ints, place: _Place) -> _Place:
        """From a place after a part to one before it.

        What a period that repeats starts from grows evenly. A path through it that is a longest one
        once, with times before and after that are none shorter, is so every time: how far a path
        falls short is a line over the times, nowhere below zero. The time before the first is the
        period that the part repeats.
        """
        known: dict[_Place, tuple[_Place, Ints]] = {}
        seen: dict[_Place, tuple[int, Ints]] = {}
        left = part.times
        while left:
            if place in seen:
                # It goes in a circle: so many rounds of it at once.
                before, counts = seen.pop(place)
                rounds = left // (before - left)
                self.counts += rounds * (self.counts - counts)
                left -= rounds * (before - left)
                seen.clear()
                if not left:
                    break
            seen[place] = left, self.counts.copy()
            if place not in known:
                known[place] = self._once(part.block, table, place)
            place, own = known[place]
            self.counts += own
            left -= 1
        return place

    def _once(self, block: Block, table: Ints, place: _Place) -> tuple[_Place, Ints]:
        counts = np.zeros_like(self.counts)
        row, stage = place[0] + block.shape[0], place[1]
        while row >= block.lookback:
            event = block.input(row - block.lookback, stage)
            if event is not None:
                counts[event.direction, stage, event.chunk] += 1
                start = table.item(row, stage) - self.times[event.direction][stage][event.chunk]
                own = table.item(row - 1, stage) == start
                others = [(event.row, event.stage), (row - 2, event.receiver)]
                met = [
                    (before, by)
                    for before, by in others
                    if before is not None and by is not None and table.item(before, by) == start
                ]
                if met and not (own and self.own_first):
                    row, stage = met[0]
                    continue
            row -= 1
        return (row, stage), counts
