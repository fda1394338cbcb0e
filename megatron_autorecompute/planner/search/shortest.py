"""The shortest step where no layer offloads: stages, the program over all of them, and a proof.

`Proof` solves the rest of a small problem by an integer program over all plans that may be better.
Paths are added to it when they turn out to be longer than it assumed.

The search begins with the choices that are the least busy, those with the lowest peaks, and the
best of Megatron's own settings that fits. Budgets are met by the high end of uncertain figures.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_autorecompute.planner.cost.arrays import Floats, Ints
from megatron_autorecompute.planner.cost.stage_times import residual_times
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.ahead import with_early
from megatron_autorecompute.planner.search.chunk_plans import undominated
from megatron_autorecompute.planner.search.manual import best_manual, fits
from megatron_autorecompute.planner.search.master import Replay
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import Solution, proven
from megatron_autorecompute.planner.search.stage_problem import Split, put_together
from megatron_autorecompute.planner.search.step import CHUNKS, StepSearch
from megatron_autorecompute.policy import RecomputePolicy

_PLANS = 4000
"""The most plans of the first chunks of a stage, together."""
_MOST = 1000
"""The most plans of a stage of which none is shorter everywhere than another."""
_ROUNDS = 60
"""Ends the few programs whose paths have no end in sight; half as many or twice as many change no
answer of 60 random problems, nor do the next one's."""
_NODES = 20_000
_TOLERANCE = 1e-7
"""The solver's tolerance, as a share of the step."""


class Proof:
    """A proof from what a search has left."""

    def __init__(self, search: StepSearch) -> None:
        self.search, self.master = search, search.master

    def run(self) -> None:
        """Shorten the best step, and raise the bound, where little is left."""
        stages = self.search.stages
        tables = [plans.table for stage in stages for plans in stage.plans]
        if len(tables) > CHUNKS or not all(table.complete for table in tables):
            return
        rows = [self._left(stage) for stage in range(len(stages))]
        if any(own is None for own in rows):
            return
        self._integers([own for own in rows if own is not None])

    def _left(self, stage: int) -> Ints | None:
        """All plans of a stage with which a step may be shorter; None where they are too many."""
        search, weights = self.search, self.master.best_weights
        more = (search.best_ps - self.master.bound) * (1 + 1e-6) + 2
        found = search.stages[stage].listed(weights[:, stage], more, _PLANS)
        if not found.whole:
            return None
        times = search.stages[stage].times(found.rows).reshape(-1, len(found.rows)).T
        search.put(stage, found.rows[undominated(times)])
        own = np.array(list(search.options[stage]), np.int64)
        return own if len(own) <= _MOST else None

    def _integers(self, rows: list[Ints]) -> None:
        """Solve, replay, and add paths, until the shortest combination on all known paths has no
        longer one."""
        search = self.search
        for _ in range(_ROUNDS):
            value, picks = self._solved(rows)
            if picks is None:
                return
            chosen = [tuple(own[at].tolist()) for own, at in zip(rows, picks, strict=True)]
            times = self.master.times(chosen)
            step = search.replay.step(times)
            if step < search.best[0]:
                search.best = step, chosen
            self.master.bound = max(self.master.bound, value * (1 - _TOLERANCE))
            if search.best_ps <= value * (1 + 1e-8) + 2:
                self.master.bound = float(search.best_ps)
                return
            if not self.master.know(search.replay.paths(times)):
                return

    def _solved(self, rows: list[Ints]) -> tuple[float, list[int] | None]:
        """What the best combination takes at least on known paths, in ps, and which it is."""
        paths, scale = np.array(self.master.paths, np.float64), self.master.scale
        residual = self.search.replay.residual
        parts = [self._lengths(paths, stage, own) for stage, own in enumerate(rows)]
        sizes = [len(own) for own in rows]
        number = sum(sizes)
        which = np.repeat(np.arange(len(sizes)), sizes)
        from scipy.optimize import Bounds, LinearConstraint, milp  # 0.2 s to import
        from scipy.sparse import csr_array

        one_each = csr_array(
            (np.ones(number), (which, np.arange(number))), (len(sizes), number + 1)
        )
        fixed = (paths * residual).sum(axis=(1, 2, 3)) / scale
        longer = np.hstack([np.concatenate(parts, 1) / scale, -np.ones((len(paths), 1))])
        found = milp(
            np.append(np.zeros(number), 1.0),
            constraints=[
                LinearConstraint(longer, -np.inf, -fixed),
                LinearConstraint(one_each, 1, 1),
            ],
            integrality=np.append(np.ones(number), 0),
            bounds=Bounds(0, np.append(np.ones(number), np.inf)),
            options={"mip_rel_gap": 1e-9, "node_limit": _NODES},
        )
        if found.x is None or found.status:
            return 0.0, None
        own = np.split(found.x[:number], np.cumsum(sizes)[:-1])
        return found.mip_dual_bound * scale, [int(one.argmax()) for one in own]

    def _lengths(self, paths: Floats, stage: int, rows: Ints) -> Floats:
        """What plans of a stage take on paths, without residuals, `[path, plan]`."""
        times = self.search.stages[stage].times(rows).astype(np.float64)
        found: Floats = np.einsum("qdc,dcp->qp", paths[:, :, stage], times)
        return found


def shortest(problem: Problem) -> Solution | None:
    """The best policy under the problem's budgets; None if nothing fits."""
    pairs = zip(problem.stages.leanest, problem.budgets, strict=True)
    if any(choice.peak_bytes > budget for choice, budget in pairs):
        return None
    found = _searched(problem)
    return _with_known(problem, with_early(problem, found) if problem.may_begin_early else found)


def _searched(problem: Problem) -> Solution:
    """The result of the search; it does not depend on earlier searches."""
    stages, budgets = problem.stages.all, problem.budgets
    least_busy = [own.afresh(budget) for own, budget in zip(stages, budgets, strict=True)]
    search = StepSearch(_replay(problem), stages, budgets)
    search.start([choice.policies for choice in least_busy if choice is not None])
    search.start([choice.policies for choice in problem.stages.leanest])
    if not search.begin():
        for simple in _megatrons(problem):
            search.start(_splits(problem, simple))
        if not search.go_on():
            Proof(search).run()
    found = search.answer()
    policy = put_together(problem.layout, found.splits)
    cost = problem.cost(policy)
    if not fits(problem, policy):
        raise AssertionError(f"a plan was found that exceeds its budgets: {policy.format()}")
    return proven(problem, policy, cost.step_ms if found.proven else found.bound_ps / PS_PER_MS)


def _with_known(problem: Problem, found: Solution) -> Solution:
    """The plan, or one that is known, fits and is shorter."""
    best = found.policy
    for known in filter(problem.may_be, problem.known):
        shorter = problem.cost(known).step_ms < problem.cost(best).step_ms
        best = known if shorter and fits(problem, known) else best
    bound_ms = found.step_evidence.bound_ms
    return found if best is found.policy else proven(problem, best, bound_ms)


def _megatrons(problem: Problem) -> Iterator[RecomputePolicy]:
    """The best of Megatron's own settings that fits, if it is allowed."""
    manual = best_manual(problem)
    if manual is not None:
        simple = problem.table.without_dead_work(manual.policy)
        if problem.may_be(simple):
            yield simple


def _splits(problem: Problem, policy: RecomputePolicy) -> list[Split]:
    own = problem.table.recorded(policy).layers
    return [
        tuple(tuple(own[layer] for layer in chunk.layers) for chunk in chunks)
        for chunks in problem.layout.stages
    ]


def _replay(problem: Problem) -> Replay:
    residual = residual_times(problem.table, problem.layout).both
    # Of the leanest choices, with room: others may be slower, and one stage at a time is slowed.
    most_ps = sum(choice.time_ps for choice in problem.stages.leanest) * 4.0
    return Replay(problem.schedule, residual, most_ps + float(np.maximum(residual, 0).sum()))
