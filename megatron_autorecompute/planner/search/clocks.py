"""The shortest step where both the device and the host may decide it.

A step takes at least what either clock alone takes, and so at least any mixture of the two. The
exact search finds the least mixture within a budget. The search finds plans for the device, for the
host, and for mixtures that give the deciding clock more weight. Each plan is replayed with both
clocks, and the largest bound is proven.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_autorecompute.planner.cost.two_clocks import mixed
from megatron_autorecompute.planner.search.evidence import proven
from megatron_autorecompute.planner.search.manual import fits
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.shortest import shortest
from megatron_autorecompute.planner.search.solution import Solution
from megatron_autorecompute.planner.search.stage_problem import put_together

NEAR = 0.001
"""A step within this share of its bound is not searched further: it is below what is measured."""
_MIXTURES = 4


def shortest_of_clocks(problem: Problem) -> Solution | None:
    """The best policy found under the problem's budgets, and what is proven of it; None if nothing
    fits. It is no slower than what is known to fit."""
    known = filter(problem.may_be, problem.known)
    best = [policy for policy in known if fits(problem, problem.cost(policy))]
    bound_ms = 0.0
    for solution in _solved(problem):
        bound_ms = max(bound_ms, solution.step_evidence.bound_ms or 0.0)
        best = [min((*best, solution.policy), key=lambda own: problem.cost(own).step_ms)]
        if problem.cost(best[0]).step_ms <= (1 + NEAR) * bound_ms:
            break
    if not best:
        return None
    return proven(problem, best[0], min(bound_ms, problem.cost(best[0]).step_ms))


def deciding(problem: Problem) -> Problem:
    """The problem of the clock that decides where memory is free."""
    fastest = put_together(problem.layout, [own.policies for own in problem.stages.fastest])
    return _on(problem, float(problem.cost(fastest).is_host_bound))


def _on(problem: Problem, share: float) -> Problem:
    """The problem of one clock: the device's (0), the host's (1), or a mixture."""
    return replace(problem, profile=mixed(problem.profile, share))


def _solved(problem: Problem) -> Iterator[Solution]:
    low, high = 0.0, 1.0
    for share in (low, high):
        solution = shortest(_on(problem, share))
        if solution is None:
            return
        yield solution
        if problem.cost(solution.policy).is_host_bound == bool(share):
            return  # the clock for which it is the best decides it
    for _ in range(_MIXTURES):
        share = (low + high) / 2
        solution = shortest(_on(problem, share))
        if solution is None:
            return
        yield solution
        is_host_bound = problem.cost(solution.policy).is_host_bound
        low, high = (share, high) if is_host_bound else (low, share)
