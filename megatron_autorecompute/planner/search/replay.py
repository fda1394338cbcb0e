"""Replays the steps of many choices at once, in a unit in which sums stay exact."""

from __future__ import annotations

import numpy as np

from megatron_autorecompute.planner.cost.arrays import Floats, Ints
from megatron_autorecompute.planner.cost.critical_path import critical_paths, one_path_each
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.step_time import finished, step_unit

_GROUPS = 8
"""The groups of microbatches beyond which a step mostly repeats."""
_EVENTS = 1 << 21
"""Replayed at once."""


class Replay:
    """Replays one schedule.

    Args:
        schedule: the order of events.
        residual: added to the time of every event, `[direction, stage, chunk]`, ps.
        most_ps: more than one microbatch takes on all stages together.
    """

    def __init__(self, schedule: Schedule, residual: Ints, most_ps: float) -> None:
        self.schedule, self.residual = schedule, residual
        self.unit = step_unit(schedule, most_ps)
        """Picoseconds that steps are counted in."""

    def times(self, own: Ints) -> Ints:
        """Own times with the residual, `[direction, stage, chunk]`, ps."""
        found: Ints = np.maximum(own + self.residual, 0)
        return found

    def step(self, times: Ints) -> int:
        """The step in units."""
        return int(self.steps(times[..., None])[0])

    def steps(self, times: Ints) -> Ints:
        """The steps of candidates, which are the last dimension of the times."""
        forward, backward = times // self.unit
        found: Ints = finished(self.schedule, forward, backward).max(axis=0)
        return found

    @property
    def candidates(self) -> int:
        """How many are replayed at once."""
        return max(8, _EVENTS // self.events)

    @property
    def events(self) -> int:
        """The events of a step, without what repeats."""
        schedule = self.schedule
        microbatches = min(schedule.num_microbatches, _GROUPS * schedule.group_size)
        return 2 * microbatches * schedule.num_stages * schedule.num_chunks

    def paths(self, times: Ints) -> list[Ints]:
        """How often each event is on a longest path, `[direction, stage, chunk]`."""
        return critical_paths(self.schedule, *(times // self.unit))

    def paths_if_slower(self, times: Ints, share: int) -> list[Ints]:
        """The longest paths if one stage after another took a share more."""
        slower = np.repeat(times[..., None], times.shape[1], axis=-1)
        for stage in range(times.shape[1]):
            slower[:, stage, :, stage] += slower[:, stage, :, stage] // share
        return one_path_each(self.schedule, *(slower // self.unit))


def length(path: Ints, times: Ints | Floats) -> float:
    """The time of a path through the schedule, in the unit of `times`."""
    return float((path.astype(np.float64) * times).sum())
