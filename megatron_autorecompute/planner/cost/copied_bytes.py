"""Counts bytes that no record counts, because copies to host memory are under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from megatron_autorecompute.planner.cost.arrays import Ints
from megatron_autorecompute.planner.cost.copies import Changes, Ran, levels
from megatron_autorecompute.planner.cost.unit_costs import Unit


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
