"""The layers per stage that are shortest on all known paths.

A partition gives every stage a run of layers. On one path it takes the sum over its stages of
what their runs take there; as a whole, at least what it takes on its longest path. Costs are arrays
of shape [path, stage, first layer, number of layers].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_autorecompute.planner.arrays import Bools, Ints
from megatron_autorecompute.planner.layout_search.stage_costs import NEVER

Sizes = tuple[int, ...]
"""Decoder layers of every stage."""


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The least that any partition takes on its longest path."""

    time: int
    """`limit + 1` where none takes at most the limit."""
    sizes: Sizes | None
    """A partition of that time; None where none takes at most the limit, or it was cut off."""


class Paths:
    """Costs on every path, and what the stages before and after a cut take on it at least.

    Args:
        costs: `[path, stage, first layer, number of layers]`; `NEVER` where there is no such run.
        weights: `[path, direction, stage]`; tells after which stages paths go on alike.
        limit: partitions that take longer on some path are of no interest.
    """

    def __init__(self, costs: Ints, weights: Ints, limit: int) -> None:
        self.costs, self.weights, self.limit = costs, weights, limit
        self.number, self.stages, width, most = costs.shape
        self.layers, self.most = width - 1, most - 1
        self.after = self._least_after()
        self.scores = self._scores()
        self.open: Bools = self.scores <= limit
        """Runs that may be part of a partition that takes at most the limit."""

    def _least_after(self) -> Ints:
        """`[path, stage, first layer]` the least that this stage and all after it take."""
        least = np.full((self.number, self.stages + 1, self.layers + 1), NEVER, np.int64)
        least[:, self.stages, self.layers] = 0
        for stage in reversed(range(self.stages)):
            for count in range(self.most + 1):
                stop = self.layers + 1 - count
                found = self.costs[:, stage, :stop, count] + least[:, stage + 1, count:]
                np.minimum(least[:, stage, :stop], found, out=least[:, stage, :stop])
        return least

    def _least_before(self) -> Ints:
        """`[path, stage, first layer]` the least that all stages before this one take."""
        least = np.full((self.number, self.stages + 1, self.layers + 1), NEVER, np.int64)
        least[:, 0, 0] = 0
        for stage in range(self.stages):
            for count in range(self.most + 1):
                stop = self.layers + 1 - count
                found = self.costs[:, stage, :stop, count] + least[:, stage, :stop]
                following = least[:, stage + 1, count:]
                np.minimum(following, found, out=following)
        return least

    def _scores(self) -> Ints:
        """The least that a partition with a run takes, by its longest path; `costs` without it."""
        before, scores = self._least_before(), np.full(self.costs.shape[1:], NEVER, np.int64)
        for count in range(self.most + 1):
            stop = self.layers + 1 - count
            whole = before[:, : self.stages, :stop] + self.costs[:, :, :stop, count]
            whole += self.after[:, 1:, count:]
            scores[:, :stop, count] = np.minimum(whole.max(axis=0), NEVER)
        return scores

    # --- partitions -------------------------------------------------------------------------------

    def cheapest(self, width: int) -> Cheapest:
        """The best partition; of its beginnings the `width` likeliest are kept at every cut."""
        ends, cut = {0: _Beginnings(np.zeros((1, self.number), np.int64), [()])}, NEVER
        for stage in range(self.stages):
            longer: dict[int, list[_Beginnings]] = {}
            for first, beginnings in ends.items():
                for count in np.flatnonzero(self.open[stage, first]).tolist():
                    cost = self.costs[:, stage, first, count]
                    longer.setdefault(first + count, []).append(beginnings.with_run(cost, count))
            ends, alike = {}, self._alike_after(stage)
            for layer, found in sorted(longer.items()):
                after = self.after[:, stage + 1, layer]
                ends[layer], left = _Beginnings.best(found, after, alike, self.limit, width)
                cut = min(cut, left)
        times, sizes = self.limit + 1, None
        if self.layers in ends and ends[self.layers].sizes:
            longest = ends[self.layers].times.max(axis=1)
            times, sizes = int(longest.min()), ends[self.layers].sizes[int(longest.argmin())]
        return Cheapest(min(times, cut), sizes)

    def lengths(self, sizes: Sizes) -> Ints:
        """What a partition takes on every path."""
        first, found = 0, np.zeros(self.number, np.int64)
        for stage, count in enumerate(sizes):
            found += self.costs[:, stage, first, count]
            first += count
        return found

    def _alike_after(self, stage: int) -> list[list[int]]:
        """Paths that count the same on all stages after this one, together."""
        rest = self.weights[:, :, stage + 1 :]
        together: dict[bytes, list[int]] = {}
        for path in range(self.number):
            together.setdefault(rest[path].tobytes(), []).append(path)
        return list(together.values())

    def all(self, most: int) -> list[Sizes] | None:
        """All partitions that take at most the limit, as far as paths say; None if over `most`."""
        found = list(itertools.islice(self._all((), 0, np.zeros(self.number, np.int64)), most + 1))
        return None if len(found) > most else found

    def _all(self, sizes: Sizes, first: int, times: Ints) -> Iterator[Sizes]:
        stage = len(sizes)
        if stage == self.stages:
            yield sizes
            return
        for count in np.flatnonzero(self.open[stage, first]).tolist():
            longer = times + self.costs[:, stage, first, count]
            if (longer + self.after[:, stage + 1, first + count] <= self.limit).all():
                yield from self._all((*sizes, count), first + count, longer)


@dataclass(frozen=True, slots=True)
class _Beginnings:
    """Runs of the first stages that end with the same layer."""

    times: Ints
    """`[beginning, path]`"""
    sizes: list[Sizes]

    def with_run(self, cost: Ints, count: int) -> _Beginnings:
        """Each with one more stage of so many layers, which takes so long on every path."""
        return _Beginnings(self.times + cost, [(*own, count) for own in self.sizes])

    @classmethod
    def best(
        cls,
        found: Sequence[_Beginnings],
        after: Ints,
        alike: Sequence[Sequence[int]],
        limit: int,
        width: int,
    ) -> tuple[_Beginnings, int]:
        """Those that may become the best partition, and how short others may be that are left out.

        Args:
            found: with any times.
            after: what all stages after them take at least, `[path]`.
            alike: paths that are alike after them, of which only the longest counts.
            limit: partitions that take longer are of no interest.
            width: how many are kept.
        """
        times = np.concatenate([one.times for one in found])
        sizes = [own for one in found for own in one.sizes]
        whole = (times + after).max(axis=1)
        order = np.argsort(whole, kind="stable")
        order = order[whole[order] <= limit]
        longest = np.stack([times[:, own].max(axis=1) for own in alike], axis=1)
        kept: list[int] = []
        for at in order.tolist():
            if kept and (longest[kept] <= longest[at]).all(axis=1).any():
                continue
            if len(kept) == width:
                return cls._of(times, alike, longest, sizes, kept), int(whole[at])
            kept.append(at)
        return cls._of(times, alike, longest, sizes, kept), NEVER

    @classmethod
    def _of(
        cls,
        times: Ints,
        alike: Sequence[Sequence[int]],
        longest: Ints,
        sizes: Sequence[Sizes],
        kept: Sequence[int],
    ) -> _Beginnings:
        own = np.empty((len(kept), times.shape[1]), np.int64)
        for number, paths in enumerate(alike):
            own[:, paths] = longest[kept, number][:, None]
        return cls(own, [sizes[at] for at in kept])
