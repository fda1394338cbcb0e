"""One linear program for all stages: mixtures of plans of chunks, paths of the step, and moments.

A step is at least as long as any path through its events, and a stage's bytes are at most its
budget at every moment. The program knows some plans, paths and moments; its duals price time and
bytes. Each chunk then adds its cheapest plan at these prices, and the fractional times add their
longest paths. Any non-negative prices give a bound on every step: the cost of each chunk's cheapest
plan, less the budgets' price. The program's tolerance does not matter for this bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_autorecompute.planner.cost.arrays import Floats, Ints
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.step_time import (
    critical_paths,
    finished,
    one_path_each,
    step_unit,
)
from megatron_autorecompute.planner.search.chunk_plans import SLACK
from megatron_autorecompute.planner.search.stage_plans import StagePlans
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


_TOLERANCE = 1e-7
_IDLE = 4
"""Rounds after which a path that has no share may go."""
_PATHS = 80
"""Beyond which paths go. With all of them the largest program takes a quarter longer, and steps of
Llama 3.1 405B are up to 0.15% longer or shorter."""
_CLOSE = 3e-4
"""A step of fractional times so near its bound has all paths that matter."""
_FEW_STAGES = 32
"""Up to which every stage is tried as the slow one. Without, gaps are up to 1.6% for 0.7%."""


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """The answer of the linear program."""

    step: float
    """The step in ps."""
    shares: Floats
    """The shares of paths."""
    price: list[Floats]
    """The price of a byte at each moment, by stage."""
    times: Ints
    """Fractional ones with residuals, `[direction, stage, chunk]`."""
    duals: dict[tuple[int, int], float]
    """The duals by stage and chunk."""


class Master:
    """The linear program of one problem.

    Args:
        replay: the replay of its schedule.
        stages: what each may do.
    """

    def __init__(self, replay: Replay, stages: Sequence[StagePlans]) -> None:
        self.replay, self.stages = replay, stages
        self.paths: list[Ints] = []
        self._idle: list[int] = []
        self.keys = [(s, c) for s, stage in enumerate(stages) for c in stage.chunks]
        self.pool: dict[tuple[int, int], list[int]] = {key: [] for key in self.keys}
        """Plans in the program, by stage and chunk."""
        self.bound = 0.0
        """No step is shorter, in ps."""
        lean = self.times([stage.lean for stage in stages])
        self.center = (1 << 62, lean)
        """The shortest step of fractional times, in units, and these times."""
        self.scale = float(max(1, replay.step(lean))) * replay.unit
        self.last: Solved | None = None
        for stage, known in enumerate(stages):
            self.put(stage, known.lean)
        self._begin()

    def times(self, chosen: Sequence[Sequence[int]]) -> Ints:
        """The times of one plan of each stage, with residuals, `[direction, stage, chunk]`."""
        own = [
            stage.times(np.array([rows], np.int64))[..., 0]
            for stage, rows in zip(self.stages, chosen, strict=True)
        ]
        return self.replay.times(np.stack(own, 1))

    def put(self, stage: int, rows: Sequence[int]) -> None:
        """Let the program mix the plans of a stage's chunks."""
        for chunk, row in enumerate(rows):
            if row not in self.pool[stage, chunk]:
                self.pool[stage, chunk].append(int(row))

    def _begin(self) -> None:
        """Plans of every chunk from the fastest to the leanest, and paths of the fastest."""
        fastest = []
        for s, stage in enumerate(self.stages):
            fastest.append([0] * len(stage.plans))
            for c, fits in enumerate(stage.fits):
                rows = stage.plans[c].rows[fits].astype(np.float64)
                time, need = rows[:, :HELD].sum(axis=1), rows[:, HELD:].sum(axis=1)
                steep = np.ptp(time) / max(1.0, float(np.ptp(need)))
                for price in (0.0, steep / 4, steep, 4 * steep):
                    self.pool[s, c].append(int(fits[(time + price * need).argmin()]))
                fastest[s][c] = self.pool[s, c][1]
                self.pool[s, c] = list(dict.fromkeys(self.pool[s, c]))
        times = self.times(fastest)
        self.center = 1 << 62, times
        paths = self.replay.paths(times)
        if self._tries_slow_stages:
            paths += self.replay.paths_if_slower(times, 4)
        self.know(paths)

    @property
    def _tries_slow_stages(self) -> bool:
        return len(self.keys) > len(self.stages) and len(self.stages) <= _FEW_STAGES

    def know(self, paths: Sequence[Ints]) -> int:
        """Add paths that are not known; how many."""
        known = {path.tobytes() for path in self.paths}
        fresh = list(
            {path.tobytes(): path for path in paths if path.tobytes() not in known}.values()
        )
        self.paths += fresh
        self._idle += [0] * len(fresh)
        return len(fresh)

    # --- the program ------------------------------------------------------------------------------

    def solve(self) -> Solved | None:
        """The program over what is known; None where the solver gives none."""
        sizes = [len(self.pool[key]) for key in self.keys]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        plans, paths = int(starts[-1]), np.array(self.paths, np.float64)
        fixed = (paths * self.replay.residual).sum(axis=(1, 2, 3)) / self.scale
        cost = np.hstack([self._lengths(paths), np.full((len(paths), 1), -1.0)])
        moments, room = self._moments(starts)
        from scipy.optimize import linprog  # 0.2 s to import
        from scipy.sparse import csr_array, hstack, vstack

        found = linprog(
            np.append(np.zeros(plans), 1.0),
            A_ub=vstack([csr_array(cost), hstack([moments, csr_array((len(room), 1))])]).tocsr(),
            b_ub=np.concatenate([-fixed, room]),
            A_eq=csr_array(
                (np.ones(plans), (np.repeat(np.arange(len(sizes)), sizes), np.arange(plans))),
                (len(sizes), plans + 1),
            ),
            b_eq=np.ones(len(sizes)),
            method="highs",
        )
        if found.x is None:
            return None
        return self._read(found.x, found.ineqlin.marginals, found.eqlin.marginals, starts)

    def _lengths(self, paths: Floats) -> Floats:
        """What plans take on paths, `[path, plan]`."""
        parts = []
        for s, c in self.keys:
            own = self.stages[s].plans[c].rows[self.pool[s, c], :HELD]
            parts.append(paths[:, :, s, c] @ own.T / self.scale)
        return np.concatenate(parts, axis=1)

    def _moments(self, starts: Ints) -> tuple[Any, Floats]:
        """Bytes of plans at all stages' moments as shares of budgets, and the room there."""
        rows, columns, data = [], [], []
        first = np.cumsum([0, *(len(stage.room) for stage in self.stages)])
        for (s, c), start in zip(self.keys, starts.tolist(), strict=False):
            stage = self.stages[s]
            load = stage.loads(c, stage.plans[c].rows[self.pool[s, c]]) / stage.budget
            plan, moment = np.nonzero(load)
            rows.append(first[s] + moment)
            columns.append(start + plan)
            data.append(load[plan, moment])
        where = np.concatenate(rows), np.concatenate(columns)
        shape = int(first[-1]), int(starts[-1])
        room = np.concatenate([stage.room / stage.budget for stage in self.stages])
        from scipy.sparse import coo_array

        return coo_array((np.concatenate(data), where), shape).tocsr(), room

    def _read(self, x: Floats, duals: Floats, of_chunks: Floats, starts: Ints) -> Solved:
        number = len(self.paths)
        shares = np.maximum(-duals[:number], 0)
        shares = shares / shares.sum() if shares.any() else np.eye(1, number)[0]
        first = number + np.cumsum([0, *(len(stage.room) for stage in self.stages)])
        price = [
            np.maximum(-duals[first[s] : first[s + 1]], 0) * self.scale / stage.budget
            for s, stage in enumerate(self.stages)
        ]
        own = np.zeros((2, *self.replay.residual.shape[1:]))
        for (s, c), a, b in zip(self.keys, starts.tolist(), starts[1:].tolist(), strict=False):
            own[:, s, c] = x[a:b] @ self.stages[s].plans[c].rows[self.pool[s, c], :HELD]
        times = self.replay.times(np.rint(own).astype(np.int64))
        of_key = dict(zip(self.keys, (of_chunks * self.scale).tolist(), strict=True))
        return Solved(float(x[-1]) * self.scale, shares, price, times, of_key)

    # --- prices and bounds ------------------------------------------------------------------------

    def weights(self, solved: Solved) -> Floats:
        """How often each event counts, `[direction, stage, chunk]`."""
        found: Floats = np.tensordot(solved.shares, np.array(self.paths, np.float64), 1)
        return found

    def _price_out(self, weights: Floats, solved: Solved) -> tuple[int, float]:
        """Adds each chunk's cheapest plan; how many are new, and the bound at these prices."""
        new, total = 0, float((weights * self.replay.residual).sum())
        size = abs(total)
        for s, stage in enumerate(self.stages):
            prices = stage.prices(weights[:, s], solved.price[s])
            paid, least = float(solved.price[s] @ stage.room), stage.bounds(prices)
            total += float(least.sum()) - paid
            size += float(np.abs(least).sum()) + abs(paid)
            for c in stage.chunks:
                own = stage.plans[c].rows[stage.fits[c]] @ prices[c]
                dual, best = solved.duals[s, c], int(stage.fits[c][own.argmin()])
                if own.min() < dual - _TOLERANCE * abs(dual) and best not in self.pool[s, c]:
                    self.pool[s, c].append(best)
                    new += 1
        return new, total - SLACK * size

    def relax(self, most: int) -> None:
        """Paths and plans in turn, so often at most."""
        for _ in range(most):
            solved = self.solve()
            if solved is None:
                break
            self._idle = [
                0 if share > 1e-9 else idle + 1
                for share, idle in zip(solved.shares, self._idle, strict=True)
            ]
            weights = self.weights(solved)
            new, bound = self._price_out(weights, solved)
            if bound >= self.bound or self.last is None:
                self.bound, self.last, self.best_weights = max(self.bound, bound), solved, weights
            fresh = self.cut(solved.times, solved.step)
            near = self.center[0] * self.replay.unit <= (1 + _CLOSE) * self.bound
            if not new and (not fresh or near):
                break

    def cut(self, times: Ints, step: float) -> int:
        """Add paths that are longer than a step at some times, or half way to the best ones; how
        many were not known."""
        points = [times]
        if self.center[0] < 1 << 62:
            points.append((times + self.center[1]) // 2)
        found = [path for one in points for path in self.replay.paths(one)]
        if self._tries_slow_stages:
            found += self.replay.paths_if_slower(points[-1], 20)
        for one in points:
            self.center = min(self.center, (self.replay.step(one), one), key=lambda own: own[0])
        self._forget()
        found.sort(key=lambda path: -length(path, times))
        return self.know([path for path in found if length(path, times) > step * (1 + 1e-6)])

    def _forget(self) -> None:
        if len(self.paths) > _PATHS:
            used = [at for at, idle in enumerate(self._idle) if idle < _IDLE]
            self.paths = [self.paths[at] for at in used]
            self._idle = [self._idle[at] for at in used]
