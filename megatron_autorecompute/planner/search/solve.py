"""`solve`: the policy with the shortest step that fits each stage's memory."""

from __future__ import annotations

from megatron_autorecompute.errors import InfeasibleError, OptionError
from megatron_autorecompute.planner.cost.two_clocks import knows_host
from megatron_autorecompute.planner.search.clocks import shortest_of_clocks
from megatron_autorecompute.planner.search.offload import OffloadSearch, leanest_whole
from megatron_autorecompute.planner.search.offload_settings import may_offload
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.shortest import shortest
from megatron_autorecompute.planner.search.solution import Solution
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
        return OffloadSearch(problem).solve()
    return shortest_of_clocks(problem) if knows_host(problem.profile) else shortest(problem)


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
    whole = leanest_whole(problem) if may_offload(problem) else None
    if whole is not None and whole[1].peak_high_bytes < need:
        lean, need = whole[0], whole[1].peak_high_bytes
    return InfeasibleError(
        f"Stage {tightest} needs {gib_needed(need)} GiB even with its leanest "
        f"choices ({lean.format() or 'no layers'}{', …' * (problem.layout.num_chunks > 1)}); the "
        f"budget is {budget} GiB. Raise the budget, or change the model's "
        "split."
    )
