"""How a plan changes if the assumed shares of a device's peaks are wrong by a fifth."""

from __future__ import annotations

from collections.abc import Callable

from megatron_autorecompute.meta.devices import SHARES, Device, Efficiency
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.planner.search.problem import NO_LIMIT, Budget, Problem
from megatron_autorecompute.planner.search.solve import solve
from megatron_autorecompute.policy import RecomputePolicy

MOVED = 0.2
SHOWN = 5e-5
"""The least loss that is not written 0.00%; with less the original choices count as the best."""


def problem_of(
    job: Job, device: Device, efficiency: Efficiency | None = None, budget: Budget = NO_LIMIT
) -> Problem:
    """The problem of the job's own layout and schedule over a fresh profile."""
    return Problem(profile_job(job, device, efficiency), job.layout(), job.schedule(), budget)


def sensitivity(
    job: Job,
    device: Device,
    efficiency: Efficiency,
    budget_bytes: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """One sentence for each share moved up or down: which layers would get another choice, and what
    it would cost to keep the original plan.

    Raises InfeasibleError if nothing fits the budget.
    """
    progress(f"{job.name}: planning")
    assumed = solve(problem_of(job, device, efficiency, budget_bytes))
    lines = []
    for name in SHARES:
        for factor in (1 - MOVED, 1 + MOVED):
            progress(f"{job.name}: {name} x {factor:g}")
            there = problem_of(job, device, efficiency.scaled(name, factor), budget_bytes)
            best = solve(there)
            loss = max(0.0, there.cost(assumed.policy).step_ms / best.cost.step_ms - 1)
            other = best.policy if loss > SHOWN else assumed.policy
            said = f"{_changed(assumed.policy, other)}; keeping the plan costs {loss:.2%}"
            lines.append(f"{name} share x {factor:g}: {said}")
    return lines


def _changed(one: RecomputePolicy, other: RecomputePolicy) -> str:
    """Changes in the number of layers per choice; layers of a kind are interchangeable."""
    counts = [
        {choice: list(policy.layers).count(choice) for choice in {*one.layers, *other.layers}}
        for policy in (one, other)
    ]
    parts = [
        f"{choice} on {counts[0][choice]} -> {counts[1][choice]} layers"
        for choice in sorted(counts[0])
        if counts[0][choice] != counts[1][choice]
    ]
    return ", ".join(parts) or "the same choices"
