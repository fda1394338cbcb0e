"""The layers per stage, one chunk each, with the shortest step of all partitions of the layers.

The step of any partition is at least what it takes on any path through the schedule's events
(`critical_path`), whichever choices its stages have. So the partition that is shortest on the known
paths bounds all of them. Its runs are searched exactly, its step is replayed, its longest path is
added, until none is left that may be shorter than the best step known: that step is then proven to
be the shortest. Where paths tell no more, what is left is listed and solved one by one.

All is counted in integers, and ends by the work done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_autorecompute.planner.arrays import Ints
from megatron_autorecompute.planner.critical_path import critical_paths
from megatron_autorecompute.planner.layout_search.cheapest import Paths, Sizes
from megatron_autorecompute.planner.layout_search.stage_costs import NEVER, Place, StageCosts
from megatron_autorecompute.planner.planner import Planner, Solution
from megatron_autorecompute.planner.step_time import finished
from megatron_autorecompute.planner.unit_costs import PS_PER_MS


@dataclass(frozen=True, slots=True)
class Work:
    """How much work a search may be; what is left open is the gap of its answer."""

    rounds: int = 256
    """In which runs are searched, or a partition is looked at."""
    runs: int = 32
    """Searched in a round: those of the shortest partitions, as far as is known."""
    rounds_of_runs: int = 8
    """In which nothing else is done."""
    width: int = 64
    """Beginnings of partitions that are kept at a cut."""
    first_paths: int = 16
    """That go through a slow stage each."""
    layers: int = 1 << 10
    """Of all partitions together that are solved one by one."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best partition found."""

    sizes: Sizes | None
    """Its decoder layers of every stage; None where none is shorter than asked for."""
    bound_ms: float
    """No partition has a shorter step, whatever is chosen; infinite where none is shorter than this
    one, or than asked for."""


class PartitionSearch:
    """Searches all partitions whose step is shorter than some time.

    Args:
        planner: of any layout with one chunk per stage.
        budgets: bytes, of every stage.
        below_ms: what the step must be shorter than.
        work: how much may be done.
    """

    def __init__(
        self, planner: Planner, budgets: Sequence[int], below_ms: float, work: Work | None = None
    ) -> None:
        self.planner, self.budgets, self.work = planner, budgets, work or Work()
        self.schedule = planner.schedule
        self.costs = StageCosts(planner, budgets, below_ms)
        self.below = min(NEVER, round(below_ms * PS_PER_MS / self.costs.unit))
        self.sizes: Sizes | None = None
        self.weights: list[Ints] = []
        """Of known paths, `[direction, stage]`."""
        self._solutions: dict[Sizes, tuple[Planner, Solution]] = {}
        self._replayed: set[Sizes] = set()
        for times in self._slow_stages():
            self._add_paths(*times)

    def best(self) -> Best:
        """The best partition that is found, and how short any may be."""
        bound = 0
        for number in range(self.work.rounds):
            paths = self._paths()
            if self._search_runs(paths) and number < self.work.rounds_of_runs:
                continue
            found = paths.cheapest(self.work.width)
            bound = found.time
            if found.time > paths.limit or found.sizes is None:
                break
            if not self._know_more(paths, found.sizes):
                bound = self._one_by_one(paths, found.time)
                break
        return self._answer(bound)

    def _answer(self, bound: int) -> Best:
        proven = bound >= self.below
        return Best(self.sizes, math.inf if proven else bound * self.costs.unit / PS_PER_MS)

    # --- paths ------------------------------------------------------------------------------------

    def _slow_stages(self) -> Iterator[tuple[Ints, Ints]]:
        """Forwards and backwards of stages that are alike but for one."""
        stages = self.costs.stages
        every = -(-stages // self.work.first_paths)
        forward, backward = self.costs.mean_times()
        for slow in [None, *range(0, stages, every)]:
            times = np.repeat(np.array([[[forward]], [[backward]]]), stages, axis=1)
            if slow is not None:
                times[:, slow] += times[:, slow] // 4
            yield times[0], times[1]

    def _add_paths(self, forward: Ints, backward: Ints) -> bool:
        """Know the longest paths of some times, `[stage, 1]`; whether they were not known."""
        fresh = [path[:, :, 0] for path in critical_paths(self.schedule, forward, backward)]
        fresh = [path for path in fresh if not any(np.array_equal(path, w) for w in self.weights)]
        self.weights += fresh
        return bool(fresh)

    def _paths(self) -> Paths:
        weights = np.stack(self.weights)
        return Paths(self.costs.on_paths(weights), weights, self.below - 1)

    # --- runs and partitions ----------------------------------------------------------------------

    def _search_runs(self, paths: Paths) -> bool:
        """Search runs of the shortest partitions; whether there were any that were not searched."""
        scores = np.where(self.costs.searched, NEVER, paths.scores)
        order = np.argsort(scores, axis=None, kind="stable")
        searched = 0
        for at in order[: int((scores <= paths.limit).sum())].tolist():
            stage, first, count = map(int, np.unravel_index(at, scores.shape))
            if not self.costs.searched[stage, first, count]:
                self.costs.search((stage, first, count))
                searched += 1
            if searched == self.work.runs:
                break
        return searched > 0

    def _know_more(self, paths: Paths, sizes: Sizes) -> bool:
        """Know more of what a partition takes; whether there was more to know."""
        places = list(_places(sizes))
        fresh = [place for place in places if not self.costs.searched[place]]
        for place in fresh:
            self.costs.search(place)
        if fresh:
            return True
        if sizes not in self._replayed:
            self._replayed.add(sizes)
            if self._replay(sizes, places):
                return True
        weights = self.weights[int(paths.lengths(sizes).argmax())]
        closer = [
            self.costs.look_closer(place, (int(forward), int(backward)))
            for place, (forward, backward) in zip(places, weights.T, strict=True)
        ]
        return any(closer) or self._solve(sizes)

    def _replay(self, sizes: Sizes, places: Sequence[Place]) -> bool:
        """The step with every stage's least busy choices; whether it is shorter, or a path new."""
        times = [self.costs.times(place) for place in places]
        forward, backward = np.array(times, np.int64).T[:, :, None]
        step = int(finished(self.schedule, forward, backward).max())
        shorter = step < self.below
        if shorter:
            self.sizes, self.below = sizes, step
        return self._add_paths(forward, backward) or shorter

    def solved(self, sizes: Sizes) -> tuple[Planner, Solution]:
        """A partition that fits, solved."""
        if sizes not in self._solutions:
            planner = self.planner.replaced(layout=self.costs.layout(sizes))
            self._solutions[sizes] = planner, planner.solve(self.budgets)
        return self._solutions[sizes]

    def _solve(self, sizes: Sizes) -> bool:
        """Solve a partition; whether it was not solved before."""
        fresh = sizes not in self._solutions
        _, solution = self.solved(sizes)
        step = round(solution.cost.step_ms * PS_PER_MS / self.costs.unit)
        if step < self.below:
            self.sizes, self.below = sizes, step
        return fresh

    def _one_by_one(self, paths: Paths, bound: int) -> int:
        """Solve all that may be shorter, if they are not many; how short any may be."""
        left = paths.all(self.work.layers // max(1, self.costs.layers))
        if left is None:
            return bound
        bounds = [self.below]
        for sizes in left:
            if all(self.costs.search(place) is not None for place in _places(sizes)):
                self._solve(sizes)
                _, solution = self.solved(sizes)
                found_ms = solution.step_evidence.bound_ms or 0.0
                bounds.append(round(found_ms * PS_PER_MS / self.costs.unit))
        return min(bounds)


def _places(sizes: Sizes) -> Iterator[Place]:
    first = 0
    for stage, count in enumerate(sizes):
        yield stage, first, count
        first += count
