"""The choices with the shortest step, and a proven bound on it.

A step takes as long as its longest path of events (`critical_path`). On any one path an event of
stage s and chunk c counts n times, so the step of any choices is at least the sum over stages of
n * time. Budgets are met stage by stage: so the least of that sum over each stage's own fitting
choices, which `stage_search` finds exactly for any weights, bounds the step of every policy. So
does the same for a mixture of paths.

Paths, mixtures of them and stages' choices are collected in turn until the bound meets the shortest
step found. What is still open then is searched one by one: what each stage may choose if the step
is to be shorter, and all their combinations, every path ruling out those that are too slow on it.
All is counted in integers and ends by the work done, so that every machine finds the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.planner.arrays import Ints
from megatron_autorecompute.planner.critical_path import critical_paths, one_path_each
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.planner.step_search.mixtures import BITS, PARTS, played
from megatron_autorecompute.planner.step_search.one_by_one import Combination, OneByOne
from megatron_autorecompute.planner.step_search.stage_options import Least, StageOptions
from megatron_autorecompute.planner.step_time import finished

_ALIKE = (2, 16)
"""By how much chunks count alike where the next one counts by 1 more than the one before."""
_WORK_OF_A_PATH = 300
"""For each event, as `Tally` counts."""
_WORK_OF_A_PLAY = 4
"""For each length."""
_PERIODS = 8
"""Groups of microbatches, beyond which a step is hardly more work to replay."""


@dataclass(frozen=True, slots=True)
class Work:
    """How much work a search may be; what is left open is the gap of its answer."""

    mixing: int = 7 * 10**8
    """In mixtures of paths and searches for stages' fastest choices on them, as `Tally` counts it:
    about a second. So much again may be the searches that prove the bound of one mixture."""
    least_mixtures: int = 2
    """That are tried however much work they are."""
    most_mixtures: int = 12
    """That are tried however little work they are."""
    most_proofs: int = 2
    """Of mixtures that seem to prove that the step is the shortest, and of the best one."""
    plays: int = 512
    """Of the game that finds a mixture."""
    events: int = 1 << 21
    """Replayed while single stages' options are exchanged, about."""
    at_once: int = 1 << 22
    """Events replayed side by side, 16 bytes each."""
    labels: int = 2048
    """Of a position of a chunk, where all choices of a stage are looked for."""
    options: int = 1 << 14
    """Choices of a stage that are searched one by one."""
    nodes: int = 10_000
    """Combinations of stages' choices, whole or in part, that are looked at."""


@dataclass(frozen=True, slots=True)
class Shortest:
    """The shortest step found, in units of the replay."""

    chosen: Combination
    step: int
    bound: int
    """No choices that fit make a shorter one."""


class StepSearch:
    """Searches the choices of all stages for the shortest step.

    Args:
        schedule: the order of events.
        stages: what each may choose; all of one unit.
        work: how much may be done.
    """

    def __init__(
        self, schedule: Schedule, stages: Sequence[StageOptions], work: Work | None = None
    ) -> None:
        self.schedule, self.stages, self.work = schedule, stages, work or Work()
        self.unit = stages[0].unit
        self.mixed_paths: list[Ints] = []
        """Of which mixtures are made."""
        self.all_paths: list[Ints] = []
        self.chosen: Combination = ()
        self.step, self.bound = 1 << 62, 0
        self._paths_seen: set[bytes] = set()
        self._steps: dict[Combination, int] = {}
        microbatches = min(schedule.num_microbatches, _PERIODS * schedule.group_size)
        self.events = 2 * microbatches * schedule.num_stages * schedule.num_chunks
        self._events_left = self.work.events
        self._proofs_left = self.work.most_proofs
        self._own_work = 0

    def shortest(self, starts: Sequence[Combination]) -> Shortest:
        """What is best of all that is found, beginning with some combinations.

        Where another does not make the step shorter, stages keep what the first one gives them.
        """
        self.replay(starts)
        weights, parts = self._close_in()
        if self.bound < self.step:
            self._look_at_the_rest(weights, parts)
        self._give_back(starts[0])
        return Shortest(self.chosen, self.step, min(self.bound, self.step))

    def aligned(self) -> Combination | None:
        """The best of some combinations whose slow chunks are the same ones on all stages.

        A microbatch waits least where all stages take alike for it. The first chunks, whose
        activations are held the longest, are mostly the ones to save at: so later ones count for
        more, by more or less. None where there is one chunk a stage.
        """
        chunks = np.arange(self.schedule.num_chunks)
        if len(chunks) == 1:
            return None
        found = [
            tuple(one.option for one in self._least(self._on_all_stages(chunks + alike)))
            for alike in _ALIKE
        ]
        self.replay(found)
        return min(found, key=self._steps.__getitem__)

    def _on_all_stages(self, weights: NDArray[np.intp]) -> Ints:
        shape = 2, len(self.stages), len(weights)
        return np.broadcast_to(weights, shape).astype(np.int64)

    # --- from both sides --------------------------------------------------------------------------

    def _close_in(self) -> tuple[Ints, int]:
        """Raise the bound and shorten the step in turn; the mixture of the best bound."""
        self._add_first_paths()
        weights, parts = self.mixed_paths[0], 1
        best, best_bound = (weights, parts), -1
        done = self._worked()
        for number in range(self.work.most_mixtures):
            if number >= self.work.least_mixtures and self._worked() - done > self.work.mixing:
                break
            sizes = self._sizes()
            bound, response = self._bound(weights, parts)
            if bound > best_bound:
                best, best_bound = (weights, parts), bound
            self.replay([response])
            if self.bound >= self.step:
                break
            self._mix_in(self.times_of(response))
            weights, parts, mean, near = self._mixture()
            self._mix_in(mean)
            self._exchange(near)
            if sizes == self._sizes():
                break
        if self.bound < self.step:
            self._bound_by(*best, self._least(best[0], proof=True))
        return best

    def _worked(self) -> int:
        return self._own_work + sum(own.work for own in self.stages)

    def _sizes(self) -> tuple[int, int]:
        return len(self.mixed_paths), sum(map(len, self.stages))

    def _add_first_paths(self) -> None:
        """Of the best start; and, interleaved, of what it would be if one stage were slower."""
        times = self.times_of(self.chosen)
        self._mix_in(times)
        if self.schedule.num_chunks == 1:
            return
        slower = np.repeat(times[..., None], len(self.stages), axis=-1)
        for stage in range(len(self.stages)):
            slower[:, stage, :, stage] += slower[:, stage, :, stage] // 4
        size = max(1, self.work.at_once // self.events)
        for start in range(0, len(self.stages), size):
            some = slower[..., start : start + size]
            self.mixed_paths += self._fresh(one_path_each(self.schedule, some[0], some[1]))

    def _bound(self, weights: Ints, parts: int) -> tuple[int, Combination]:
        """A bound on the step by a sum of so many paths, and the choices that are fastest on it."""
        least = self._least(weights)
        seems_proven = sum(one.time_ps for one in least) > parts * (self.step - 1) * self.unit
        if seems_proven and self._proofs_left:
            self._proofs_left -= 1
            least = self._least(weights, proof=True)
        return self._bound_by(weights, parts, least), tuple(one.option for one in least)

    def _bound_by(self, weights: Ints, parts: int, least: Sequence[Least]) -> int:
        total = sum(one.bound_ps for one in least)
        if self.unit > 1:  # which every event is rounded down to
            bound = (total // self.unit - int(weights.sum())) // parts
        else:
            bound = -(-total // parts)
        self.bound = max(self.bound, bound)
        return bound

    def _least(self, weights: Ints, *, proof: bool = False) -> list[Least]:
        searches = len(self.stages) * (1 if proof else self.work.most_mixtures)
        most = self.work.mixing // searches
        return [own.least(weights[:, s], most, exact=proof) for s, own in enumerate(self.stages)]

    def _mix_in(self, times: Ints) -> None:
        """Let the critical paths of some times be part of mixtures."""
        self.mixed_paths += self._fresh_paths(times)

    def _fresh_paths(self, times: Ints) -> list[Ints]:
        self._own_work += self.events * _WORK_OF_A_PATH
        return self._fresh(critical_paths(self.schedule, times[0], times[1]))

    def _fresh(self, paths: Sequence[Ints]) -> list[Ints]:
        fresh = [path for path in paths if path.tobytes() not in self._paths_seen]
        self._paths_seen.update(path.tobytes() for path in fresh)
        self.all_paths += fresh
        return fresh

    def _mixture(self) -> tuple[Ints, int, Ints, Combination]:
        """A sum of paths that is long whatever is chosen of the known options.

        Returns the sum, of how many paths it is, times of a mixture of options that is short on all
        of them, and a combination that comes near to that.
        """
        lengths = self._scaled_lengths()
        paths, options = played(lengths, self.work.plays)
        self._own_work += self.work.plays * lengths.size * _WORK_OF_A_PLAY
        pairs = zip(paths.tolist(), self.mixed_paths, strict=True)
        weights: Ints = np.sum([share * path for share, path in pairs if share], axis=0)
        spare = max(0, (self.step * PARTS).bit_length() - 60)
        mean = np.zeros_like(self.times_of(self.chosen))
        for stage, own in enumerate(self.stages):
            for share, option in zip(options[stage].tolist(), own.found, strict=False):
                mean[:, stage] += share * (option.times >> spare)
        return weights, PARTS, mean, self._near(lengths, options)

    def _near(self, lengths: Ints, options: Ints) -> Combination:
        """Stage by stage the option with which, others mixed, the longest path is shortest."""
        mixed = (lengths * options[:, None, :]).sum(axis=2) // PARTS
        together, chosen = mixed.sum(axis=0), list[int]()
        for stage, own in enumerate(self.stages):
            others = (together - mixed[stage])[:, None] + lengths[stage, :, : len(own)]
            chosen.append(int(others.max(axis=0).argmin()))
            together = others[:, chosen[-1]]
        return tuple(chosen)

    def _scaled_lengths(self) -> Ints:
        """`[stage, path, option]` as `played` takes it."""
        shape = len(self.stages), len(self.mixed_paths), max(map(len, self.stages))
        lengths = np.zeros(shape, np.int64)
        for stage, own in enumerate(self.stages):
            found = self.lengths(stage, range(len(own)), self.mixed_paths)
            lengths[stage] = found.max()  # of options that there are not
            lengths[stage, :, : len(own)] = found
        return lengths >> max(0, int(lengths.max(axis=(1, 2)).sum()).bit_length() - BITS)

    # --- combinations -----------------------------------------------------------------------------

    def times_of(self, combination: Combination) -> Ints:
        """`[direction, stage, chunk]` in units."""
        pairs = zip(self.stages, combination, strict=True)
        return np.stack([stage.found[option].times for stage, option in pairs], axis=1)

    def lengths(self, stage: int, options: Sequence[int], paths: Sequence[Ints]) -> Ints:
        """`[path, option]` what options of a stage take on each path."""
        times = np.stack([self.stages[stage].found[option].times for option in options])
        return np.stack([(times * path[:, stage]).sum(axis=(1, 2)) for path in paths])

    def look_at(self, combination: Combination) -> None:
        """Add its critical paths to all paths."""
        self._fresh_paths(self.times_of(combination))

    def replay(self, combinations: Sequence[Combination]) -> None:
        """Work out steps that are not known yet, and keep the best combination."""
        fresh = [c for c in dict.fromkeys(combinations) if c not in self._steps]
        size = max(1, self.work.at_once // self.events)
        for first in range(0, len(fresh), size):
            some = fresh[first : first + size]
            times = np.stack([self.times_of(combination) for combination in some], axis=-1)
            steps = finished(self.schedule, times[0], times[1]).max(axis=0).tolist()
            self._steps.update(zip(some, steps, strict=True))
        for combination in combinations:
            if self._steps[combination] < self.step:
                self.chosen, self.step = combination, self._steps[combination]

    def _exchange(self, start: Combination) -> None:
        """Exchange one stage's option at a time while that shortens the step."""
        self.replay([start])
        now, stage, unchanged = start, 0, 0
        while unchanged < len(self.stages) and self._events_left > 0:
            others = self._promising(now, stage)
            self.replay(others)
            self._events_left -= self.events * (len(others) + 1)
            best = min(others, key=self._steps.__getitem__, default=now)
            unchanged += 1
            if self._steps[best] < self._steps[now]:
                now, unchanged = best, 0
                self.look_at(now)
            stage = (stage + 1) % len(self.stages)

    def _promising(self, now: Combination, stage: int) -> list[Combination]:
        """With another option of a stage, unless some path is then as long as the step is now."""
        options = range(len(self.stages[stage]))
        own = self.lengths(stage, options, self.all_paths)
        times = self.times_of(now)
        together = np.array([int((path * times).sum()) for path in self.all_paths])
        others = (together - own[:, now[stage]])[:, None] + own
        shorter = np.flatnonzero((others < self._steps[now]).all(axis=0))
        return [_with(now, stage, option) for option in shorter.tolist()]

    def _give_back(self, first: Combination) -> None:
        """Give stages back what they began with, where the step is then no longer.

        That is their least busy time: other choices are worth theirs only for a shorter step.
        """
        for stage, option in enumerate(first):
            combination = _with(self.chosen, stage, option)
            self.replay([combination])
            if self._steps[combination] <= self.step:
                self.chosen, self.step = combination, self._steps[combination]

    # --- the rest ---------------------------------------------------------------------------------

    def _look_at_the_rest(self, weights: Ints, parts: int) -> None:
        """Look at all that may still make a shorter step; the bound is the step where that ends."""
        least = self._least(weights, proof=True)
        if self.unit > 1 or not all(one.whole for one in least):
            return
        spare = parts * (self.step - 1) - sum(one.bound_ps for one in least)
        if parts * self.step + len(self.stages) * spare >= 1 << 62:
            return
        options: list[list[int]] = []
        for stage, own in enumerate(self.stages):
            most_ps = least[stage].bound_ps + spare
            limits = self.work.labels, self.work.options
            found = own.all_within(weights[:, stage], most_ps, *limits)
            if found is None:
                return
            options.append(found)
        if not all(options) or OneByOne(self, options, weights, parts, self.work.nodes).done():
            self.bound = self.step


def _with(combination: Combination, stage: int, option: int) -> Combination:
    return (*combination[:stage], option, *combination[stage + 1 :])
