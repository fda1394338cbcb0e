"""The shortest step where no layer offloads: stages, the program over all of them, and a proof.

The search begins with the choices that are the least busy, those with the lowest peaks, and the
best of Megatron's own settings that fits. Budgets are met by the high end of uncertain figures.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_autorecompute.planner.cost.stage_times import residual_times
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.ahead import with_early
from megatron_autorecompute.planner.search.manual import best_manual, fits
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.proof import Proof
from megatron_autorecompute.planner.search.replay import Replay
from megatron_autorecompute.planner.search.solution import Solution, proven
from megatron_autorecompute.planner.search.stage_problem import Split, put_together
from megatron_autorecompute.planner.search.step import StepSearch
from megatron_autorecompute.policy import RecomputePolicy


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
    if not fits(problem, cost):
        raise AssertionError(f"a plan was found that exceeds its budgets: {policy.format()}")
    return proven(problem, policy, cost.step_ms if found.proven else found.bound_ps / PS_PER_MS)


def _with_known(problem: Problem, found: Solution) -> Solution:
    """The plan, or one that is known, fits and is shorter."""
    best = found.policy
    for known in filter(problem.may_be, problem.known):
        cost = problem.cost(known)
        if fits(problem, cost) and cost.step_ms < problem.cost(best).step_ms:
            best = known
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
