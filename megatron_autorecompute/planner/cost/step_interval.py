"""What the errors of a profile's times make of a step: its interval, and which of two is shorter.

The error of a record is shared by all layers and microbatches that it stands for; errors of
different records are independent (docs/decisions/search.md). A stage's residual is added under
every policy; it may as well be a share of the stage's work, and both readings count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from statistics import NormalDist

import numpy as np

from megatron_autorecompute.planner.cost import Floats, Ints
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.policy_cost import PolicyCosts
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.stage_times import (
    Times,
    least_times,
    residual_times,
    times_of,
)
from megatron_autorecompute.planner.cost.step_time import critical_paths, finished
from megatron_autorecompute.planner.cost.two_clocks import records_of
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, CostTable, StageUnits
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord, Profile

COVERAGE = 0.95
COVERS = f"It covers the step of the true times in at least {COVERAGE:.0%} of profiles."
"""What an interval says, in the words of docs/plan.md."""
_ENDS = NormalDist().inv_cdf((1 + COVERAGE) / 2)
_SURELY = NormalDist().inv_cdf(COVERAGE)
_OF_MIDDLE_HALF = 1 / NormalDist().inv_cdf(0.75)
"""Standard deviation of runs, as a multiple of half their interquartile range."""
_OF_QUARTILE = math.sqrt(0.25 * 0.75) / NormalDist().pdf(NormalDist().inv_cdf(0.25))
"""Standard deviation of the lower quartile of n runs, as a multiple of theirs divided by
sqrt(n)."""
_FEW_RUNS = 4
"""The spread of few runs is itself uncertain: n of them err by 1 + 4 / n times as much."""
_MOST_PATHS = 16
_Source = tuple[object, ...]
"""A record of the profile: micro-batch size, and kind and choice, or the name of what it is of."""
_Errors = Mapping[_Source, Floats]
"""One standard deviation of each record's error on every event, `[direction, stage, chunk]`."""
_Slopes = Mapping[_Source, float]
"""What one standard deviation of each record's error adds to a path."""


@dataclass(frozen=True, slots=True)
class StepInterval:
    """Where the step of the true times lies; docs/plan.md says what that means."""

    low_ms: float
    """The low end of the interval."""
    high_ms: float
    """The high end of the interval."""
    coverage: float = COVERAGE
    """The share of profiles, at least, whose interval contains the step of the true times."""


def deviation_ms(record: ChoiceRecord) -> float:
    """Standard deviation of the error of a record's forward plus backward.

    One run errs as runs spread. The lower quartile of n errs by 1.36 / sqrt(n) of that, and by more
    where runs are so few that they hardly say how they spread. Where turns spread by more than
    their runs explain, their number counts instead.
    """
    one = record.spread_ms * _OF_MIDDLE_HALF
    if record.runs > 1:
        one *= _OF_QUARTILE / math.sqrt(record.runs) * (1 + _FEW_RUNS / record.runs)
    turns = record.turn_spread_ms / math.sqrt(record.turns) * (1 + _FEW_RUNS / record.turns)
    return max(one, turns)


class StepErrors:
    """Errors of the step of one policy, which is made of recorded choices."""

    def __init__(self, costs: PolicyCosts, policy: RecomputePolicy) -> None:
        self._clocks = [_readings(costs, policy, table) for table in costs.clock_tables]
        """The clock of the device and, where it is known, that of the host."""
        longest_ms = max(first.step_ps for first, *_ in self._clocks) / PS_PER_MS
        self.waits_ms = max(0.0, costs.of(policy).step_ms - longest_ms)
        """For copies, and of the clocks for each other; the same at both ends."""

    def interval(self) -> StepInterval | None:
        """The interval of the step; None where no time of it is known to err."""
        lows, highs = [], []
        for readings in self._clocks:
            low_ps, high_ps = zip(*(reading.ends_ps() for reading in readings), strict=True)
            lows.append(min(low_ps))
            highs.append(max(high_ps))
        if max(lows) == max(highs):
            return None
        low_ms, high_ms = max(0.0, *lows) / PS_PER_MS, max(highs) / PS_PER_MS
        return StepInterval(low_ms + self.waits_ms, high_ms + self.waits_ms)

    def surely_shorter(self, other: StepErrors) -> bool:
        """Whether this step is shorter than the other one in at least 95% of profiles, by the clock
        that decides it.

        Errors that both share count only as far as they make a difference. True where this step is
        shorter and no time errs.
        """
        pairs = zip_longest(self._clocks, other._clocks, fillvalue=other._clocks[0])
        own, others = max(pairs, key=lambda pair: pair[0][0].step_ps)
        return all(  # one is read only where a residual is
            (one or own[0]).is_surely_shorter(two or others[0])
            for one, two in zip_longest(own, others)
        )


def _readings(costs: PolicyCosts, policy: RecomputePolicy, table: CostTable) -> list[_Reading]:
    """The step that the times of one clock alone decide: with residuals added to it and, where
    there are any, as shares of the work."""
    units = table.units(costs.layout, policy)
    own, residual = times_of(units), residual_times(table, costs.layout)
    errors = _errors_of(table.profile, policy, units, own)
    readings = [_Reading(costs.schedule, own.plus(residual), errors)]
    if residual.busy.any():
        grown = _grown(table, costs.layout, own, residual)
        readings.append(_Reading(costs.schedule, grown, errors))
    return readings


def _grown(table: CostTable, layout: Layout, own: Times, residual: Times) -> Times:
    """The times if what layers leave unexplained is a share of a stage's measured work, or of the
    least work where none was measured."""
    step, profile = table.profile.measured_step, table.profile
    forward, backward = own.forward.copy(), own.backward.copy()
    for stage, chunks in enumerate(layout.stages):
        residual_ps = int(residual.busy[stage])
        if not residual_ps:
            continue
        if step is None:
            measured_ps = sum(sum(least_times(table, chunk)) for chunk in chunks)
        else:
            ran = RecomputePolicy.parse(step.recompute_policy, num_layers=profile.num_layers)
            units = [unit for chunk in chunks for unit in table.chunk_units(chunk, ran)]
            measured_ps = sum(unit.time_ps for unit in units)
        for times in (forward, backward):
            times[stage] += residual_ps * times[stage] // max(1, measured_ps)
    nothing = np.zeros_like(forward)
    return Times(forward, backward, own.ahead).plus(Times(nothing, nothing))


def _errors_of(profile: Profile, policy: RecomputePolicy, units: StageUnits, own: Times) -> _Errors:
    """A unit's error is shared by forward and backward as its time is."""
    found: dict[_Source, Floats] = {}
    size = profile.parallelism.micro_batch_size  # another size was measured on its own
    for stage, chunks in enumerate(units):
        for chunk, unit in ((at, unit) for at, each in enumerate(chunks) for unit in each):
            for name, record in records_of(profile, policy, unit):
                error_ps = deviation_ms(record) * PS_PER_MS
                if error_ps:
                    share = unit.forward_ps / unit.time_ps if unit.time_ps else 0.0
                    error = found.setdefault((size, *name), np.zeros(own.both.shape))
                    error[:, stage, chunk] += share * error_ps, (1 - share) * error_ps
    if profile.times_error:
        found["all times",] = profile.times_error * own.both.astype(np.float64)
    return found


class _Reading:
    """A step of some times, each of which errs.

    Its paths are those of the step in which nothing begins ahead, less what that saves: so errors
    of recompute that waits hide count as others.
    """

    def __init__(self, schedule: Schedule, times: Times, errors: _Errors) -> None:
        self.schedule, self.times, self.errors = schedule, times, errors
        self.step_ps = self._step_ps(times)

    @cached_property
    def saved_ps(self) -> float:
        """What beginning ahead takes off the step."""
        return self._step_ps(replace(self.times, ahead=None)) - self.step_ps

    @cached_property
    def paths(self) -> list[Ints]:
        """The longest paths of the step."""
        return self._paths_of(self.times)

    def ends_ps(self) -> tuple[float, float]:
        """Low and high end."""
        low_ps, high_ps, paths = -math.inf, self.step_ps, list(self.paths)
        for path in self.paths:
            low_ps = max(low_ps, self._length_ps(path) - _ENDS * _size(self._slopes(path)))
        for number, path in enumerate(paths):
            slopes = self._slopes(path)
            worst = self._moved(slopes)
            far_ps = self._length_ps(path) + _ENDS * _size(slopes)
            high_ps = max(high_ps, far_ps, self._step_ps(worst))
            if number < _MOST_PATHS:
                paths += [p for p in self._paths_of(worst) if not _among(p, paths)]
        return min(low_ps, self.step_ps), high_ps

    def is_surely_shorter(self, other: _Reading) -> bool:
        """See `StepErrors.surely_shorter`."""
        more_ps = other.step_ps - self.step_ps
        if more_ps <= 0 or not (self.errors or other.errors):
            return more_ps > 0
        own, others = self._slopes(self.paths[0]), other._slopes(other.paths[0])
        apart = {s: own.get(s, 0.0) - others.get(s, 0.0) for s in {**own, **others}}
        return more_ps > _SURELY * _size(apart)

    def _paths_of(self, times: Times) -> list[Ints]:
        return critical_paths(self.schedule, times.forward, times.backward)

    def _step_ps(self, times: Times) -> float:
        return float(finished(self.schedule, times.forward, times.backward, times.ahead).max())

    def _length_ps(self, path: Ints) -> float:
        length_ps = (path[0] * self.times.forward + path[1] * self.times.backward).sum()
        return float(length_ps) - self.saved_ps

    def _slopes(self, path: Ints) -> _Slopes:
        return {source: float((path * error).sum()) for source, error in self.errors.items()}

    def _moved(self, slopes: _Slopes) -> Times:
        """The times at the errors that make a path longest, of so improbable a size."""
        size = _size(slopes)
        if not size:
            return self.times
        added = np.zeros((2, *self.times.forward.shape))
        for source, error in self.errors.items():
            added += _ENDS * slopes[source] / size * error
        forward, backward = np.rint(added).astype(np.int64)
        return self.times.plus(Times(forward, backward))


def _size(slopes: _Slopes) -> float:
    """Standard deviation of a sum of independent errors."""
    return math.hypot(*slopes.values())


def _among(path: Ints, paths: Sequence[Ints]) -> bool:
    return any(np.array_equal(path, known) for known in paths)
