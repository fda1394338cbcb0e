"""`solve`: the policy with the shortest step that fits each stage's memory.

Where both the device and the host may decide the step, it takes at least what either clock alone
takes. The exact search finds the least of each. Each plan is replayed with both clocks, and the
larger bound is proven. A mixture of both could bound more where the best plan of each clock is
decided by the other one; that was so in none of 276 random problems.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_autorecompute.errors import InfeasibleError, OptionError
from megatron_autorecompute.planner.cost.two_clocks import knows_host, of_clock
from megatron_autorecompute.planner.search.manual import may_offload
from megatron_autorecompute.planner.search.offload import shortest_with_offload
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import Solution, proven
from megatron_autorecompute.planner.search.stage_problem import put_together
from megatron_autorecompute.planner.search.step import shortest
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.units import gib, gib_needed


def solve(problem: Problem) -> Solution:
    """Find the policy with the shortest step whose peak fits every stage, and prove it.

    Returns: the policy (one choice per layer), its cost (milliseconds and bytes, by stage), the
    proven distance of its step from the shortest one, and the least busy time of each stage.

    Raises: InfeasibleError if not even the leanest choices fit; it names the tightest stage.
    OptionError for anything else than a `Problem`.
    """
    if not isinstance(problem, Problem):
        raise OptionError(
            f"solve got {problem!r:.80}, and takes a Problem. Make one of a profile: "
            "Problem(profile, layout, schedule, budget)."
        )
    solution = try_solve(problem)
    if solution is None:
        raise _infeasible(problem)
    return solution


def try_solve(problem: Problem) -> Solution | None:
    """The solution, or None if nothing fits; for searches that try many problems."""
    if may_offload(problem):
        return shortest_with_offload(problem)
    search = shortest_of_clocks if knows_host(problem.profile) else shortest
    return search(problem)


def _infeasible(problem: Problem) -> InfeasibleError:
    leanest, budgets = problem.stages.leanest, problem.budgets
    over = [choice.peak_bytes - budget for choice, budget in zip(leanest, budgets, strict=True)]
    tightest = max(range(len(over)), key=over.__getitem__)
    budget, need = gib(budgets[tightest]), leanest[tightest].peak_bytes
    if over[tightest] <= 0:
        return InfeasibleError(
            f"The leanest choices fit the budget of {budget} GiB on stage "
            f"{tightest} only if copies to host memory took no time; with activations that are "
            "to leave or are back early, and with host memory as it is, no policy was found "
            "that fits. Raise the budget, or host_link.host_bytes if that is what lacks."
        )
    lean = RecomputePolicy(leanest[tightest].policies[0])
    return InfeasibleError(
        f"Stage {tightest} needs {gib_needed(need)} GiB even with its leanest "
        f"choices ({lean.format() or 'no layers'}{', …' * (problem.layout.num_chunks > 1)}); the "
        f"budget is {budget} GiB. Raise the budget, or change the model's "
        "split."
    )


NEAR = 0.001
"""A step within this share of its bound is not searched further: it is below what is measured."""


def shortest_of_clocks(problem: Problem) -> Solution | None:
    """The best policy found under the problem's budgets, and what is proven of it; None if nothing
    fits."""
    found, bound_ms = list[RecomputePolicy](), 0.0
    for host in (False, True):
        solution = shortest(_on(problem, host))
        if solution is None:
            return None
        found.append(solution.policy)
        bound_ms = max(bound_ms, solution.step_evidence.bound_ms or 0.0)
        best = min(found, key=lambda own: problem.cost(own).step_ms)
        decides = problem.cost(solution.policy).is_host_bound == host
        if decides or problem.cost(best).step_ms <= (1 + NEAR) * bound_ms:
            break
    return proven(problem, best, bound_ms)


def deciding(problem: Problem) -> Problem:
    """The problem of the clock that decides where memory is free."""
    fastest = put_together(problem.layout, [own.policies for own in problem.stages.fastest])
    return _on(problem, problem.cost(fastest).is_host_bound)


def _on(problem: Problem, host: bool) -> Problem:
    """The problem of one clock, the device's or the host's."""
    return replace(problem, profile=of_clock(problem.profile, host))
