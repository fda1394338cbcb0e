"""The linear program of all stages: mixtures of plans of chunks, paths of the step, and moments.

A step is at least as long as any path through its events, and a stage's bytes are at most its
budget at every moment. The program knows some plans, paths and moments; its duals price time and
bytes. Each chunk then adds its cheapest plan at these prices, and the fractional times add their
longest paths. Any non-negative prices give a bound on every step: the cost of each chunk's cheapest
plan, less the budgets' price. The program's tolerance does not matter for this bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_autorecompute.planner.cost import Floats, Ints
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.step_time import (
    critical_paths,
    finished,
    one_path_each,
)
from megatron_autorecompute.planner.search.chunk_plans import SLACK
from megatron_autorecompute.planner.search.stage_plans import Mixture, Program, StagePlans
from megatron_autorecompute.planner.search.stage_problem import HELD

_GROUPS = 8
"""The groups of microbatches beyond which a step mostly repeats."""
_EVENTS = 1 << 21
"""Replayed at once."""


class Replay:
    """Replays one schedule.

    Args:
        schedule: the order of events.
        residual: added to the time of every event, `[direction, stage, chunk]`, ps.
    """

    def __init__(self, schedule: Schedule, residual: Ints) -> None:
        self.schedule, self.residual = schedule, residual

    def times(self, own: Ints) -> Ints:
        """Own times with the residual, `[direction, stage, chunk]`, ps."""
        found: Ints = np.maximum(own + self.residual, 0)
        return found

    def step(self, times: Ints) -> int:
        """The step in ps."""
        return int(self.steps(times[..., None])[0])

    def steps(self, times: Ints) -> Ints:
        """The steps of candidates, which are the last dimension of the times."""
        found: Ints = finished(self.schedule, *times).max(axis=0)
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
        return critical_paths(self.schedule, *times)

    def one_path_each(self, times: Sequence[Ints]) -> tuple[Ints, list[Ints]]:
        """The steps with some times, and a longest path of each."""
        return one_path_each(self.schedule, *np.stack(times, axis=-1))


def length(path: Ints, times: Ints | Floats) -> float:
    """The time of a path through the schedule, in the unit of `times`."""
    return float((path.astype(np.float64) * times).sum())


_IDLE = 4
"""Rounds after which a path that has no share may go."""
_PATHS = 160
"""Beyond which paths go. With half as many an interleaved step of `benchmarks/solve_speed.py` is
0.1% longer; with all of them the largest program takes a quarter longer."""
_FROM_BEST, _FROM_FASTEST = (0.5, 0.25, 0.12, 0.06), (0.5, 0.1)
"""How far on the way to the program's times other times are, whose longest paths are added, too.
Without them gaps of large interleaved rows are up to three times as wide."""
_RARELY = 3
"""Cuts for each with one slow stage at a time. With these every time one gap is 0.05% less, and
another 0.2% more."""
_CLOSE = 3e-4
"""A step of fractional times so near its bound has all paths that matter."""
_FEW_STAGES = 32
"""Up to which every stage is tried as the slow one. Without, gaps are up to twice as wide."""


class Master:
    """The linear program of one problem."""

    def __init__(self, replay: Replay, stages: Sequence[StagePlans]) -> None:
        self.replay, self.stages = replay, stages
        self.bound = self._of_prices = 0.0
        """No step is shorter, in ps; and what prices alone say of this."""
        lean = self.times([stage.lean for stage in stages])
        self.last: Mixture | None = None
        self.program = Program(stages, replay.residual, replay.step(lean))
        self.chunks = self.program.chunks
        self._idle: list[int] = []
        """Rounds since each path had a share."""
        self._cuts = 0
        for stage, known in enumerate(stages):
            self.put(stage, known.lean)
        self.fastest = self._begin()
        """Times that no plans have that fit together."""
        self.center = (1 << 62, self.fastest)
        """The shortest step of fractional times, in ps, and these times."""

    def times(self, chosen: Sequence[Sequence[int]]) -> Ints:
        """The times of one plan of each stage, with residuals, `[direction, stage, chunk]`."""
        own = [
            stage.times(np.array([rows], np.int64))[..., 0]
            for stage, rows in zip(self.stages, chosen, strict=True)
        ]
        return self.replay.times(np.stack(own, 1))

    def put(self, stage: int, rows: Sequence[int]) -> None:
        """Let the program mix the plans of a stage's chunks."""
        for c, row in enumerate(rows):
            self.program.put(stage, c, row)

    def _begin(self) -> Ints:
        """Plans of every chunk from the fastest to the leanest, and paths of the fastest, whose
        times it returns."""
        fastest = []
        for s, stage in enumerate(self.stages):
            fastest.append([0] * len(stage.plans))
            for c, fits in enumerate(stage.fits):
                rows = stage.plans[c].rows[fits].astype(np.float64)
                time, need = rows[:, :HELD].sum(axis=1), rows[:, HELD:].sum(axis=1)
                steep = np.ptp(time) / max(1.0, float(np.ptp(need)))
                for price in (0.0, steep / 4, steep, 4 * steep):
                    self.program.put(s, c, fits[(time + price * need).argmin()])
                fastest[s][c] = int(fits[time.argmin()])
        self.know(self.replay.paths(self.times(fastest)))
        return self.times(fastest)

    def know(self, paths: Sequence[Ints]) -> int:
        """Add paths that are not known; how many."""
        fresh = self.program.know(paths)
        self._idle += [0] * fresh
        return fresh

    # --- prices and bounds ------------------------------------------------------------------------

    def _bound(self, weights: Floats, solved: Mixture) -> tuple[float, list[Floats]]:
        """What prices bound every step to, and what figures of plans cost, by stage."""
        total = float((weights * self.replay.residual).sum())
        total -= SLACK * abs(total)
        prices = [
            stage.prices(weights[:, s], solved.price[s]) for s, stage in enumerate(self.stages)
        ]
        parts = zip(self.stages, prices, solved.price, strict=True)
        return total + sum(stage.base(own, price) for stage, own, price in parts), prices

    def left(self, step: float, most: int) -> Program | None:
        """The program of the plans with which a step may be shorter than this one, in ps; None of
        more than so many."""
        assert self.last is not None
        bound, prices = self._bound(self.best_weights, self.last)
        found = Program(self.stages, self.replay.residual, step)
        for s, (stage, own) in enumerate(zip(self.stages, prices, strict=True)):
            for c, (plans, fits) in enumerate(zip(stage.plans, stage.fits, strict=True)):
                costs = plans.rows[fits] @ own[c]
                near = fits[costs <= costs.min() + step - bound]
                most -= len(near)
                for row in near if most >= 0 else ():
                    found.put(s, c, row)
        found.know(self.program.paths)
        return found if most >= 0 else None

    def relax(self, most: int) -> None:
        """Paths and plans in turn, so often at most."""
        for _ in range(most):
            solved = self.program.mixture()
            if solved is None:
                break
            self._idle = [
                0 if share > 1e-9 else idle + 1
                for share, idle in zip(solved.shares, self._idle, strict=True)
            ]
            paths = np.array(self.program.paths, np.float64)
            weights = np.tensordot(solved.shares, paths, 1)
            bound, prices = self._bound(weights, solved)
            new = False
            for s, stage in enumerate(self.stages):
                new |= stage.grow(self.program, s, stage.fits, prices[s], solved.duals[s])
            if bound >= self._of_prices or self.last is None:
                self._of_prices, self.last, self.best_weights = bound, solved, weights
                self.bound = max(self.bound, bound)
            times = self.replay.times(np.rint(solved.times).astype(np.int64))
            fresh = self.cut(times, solved.step)
            near = self.center[0] <= (1 + _CLOSE) * self._of_prices
            if not new and (not fresh or near):
                break

    def cut(self, times: Ints, step: float) -> int:
        """Add paths that are longer than a step, in ps, at some times, or at others on the way to
        them; how many were not known."""
        shares = _FROM_BEST if self.center[0] < 1 << 62 else ()
        points = [times, *(_between(self.center[1], times, share) for share in shares)]
        beyond = [_between(self.fastest, times, share) for share in _FROM_FASTEST]
        steps, found = self.replay.one_path_each([*points, *beyond])
        self._cuts += 1
        several = len(self.chunks) > len(self.stages)
        if several and len(self.stages) <= _FEW_STAGES and self._cuts % _RARELY == 0:
            found += self._paths_if_slower(points[min(1, len(shares))])
        best = int(steps[: len(points)].argmin())
        if steps[best] < self.center[0]:
            self.center = int(steps[best]), points[best]
        self._forget()
        found.sort(key=lambda path: -length(path, times))
        return self.know([path for path in found if length(path, times) > step * (1 + 1e-6)])

    def _paths_if_slower(self, times: Ints) -> list[Ints]:
        """The longest paths if one stage after another took a twentieth more."""
        slower = [times.copy() for _ in self.stages]
        for stage, own in enumerate(slower):
            own[:, stage] += own[:, stage] // 20
        return self.replay.one_path_each(slower)[1]

    def _forget(self) -> None:
        if len(self._idle) > _PATHS:
            self.program.forget([at for at, idle in enumerate(self._idle) if idle >= _IDLE])
            self._idle = [idle for idle in self._idle if idle < _IDLE]


def _between(times: Ints, others: Ints, share: float) -> Ints:
    """Times on the way to others."""
    found: Ints = times + np.rint((others - times) * share).astype(np.int64)
    return found
