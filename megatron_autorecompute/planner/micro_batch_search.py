"""Searches the micro-batch size for the fastest step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.layout_search.search import SearchResult
from megatron_autorecompute.planner.planner import Budget, Planner, Solution
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.profile import Profile


def search_micro_batch(
    planners: Sequence[Planner], budget: Budget
) -> tuple[SearchResult, tuple[str, ...]]:
    """The micro-batch size with the fastest step, from one planner per profile.

    The first planner is the one that was asked for. Every planner's schedule must run the same
    number of samples per step (see `same_samples`). Returns the best, and one sentence for each
    planner.
    Raises: InfeasibleError when none fits.
    """
    solved = [(planner, planner.try_solve(budget)) for planner in planners]
    fitting = [(planner, s) for planner, s in solved if s is not None]
    if not fitting:
        planners[0].solve(budget)  # raises with the reason
    planner, solution = min(fitting, key=lambda pair: pair[1].cost.step_ms)
    notes = tuple(_micro_batch_note(p, s) for p, s in solved)
    size = planner.profile.parallelism.micro_batch_size
    flags = {"--micro-batch-size": str(size)}
    return SearchResult(planner, solution, flags, notes[0], solution.step_evidence), notes


def _micro_batch_note(planner: Planner, solution: Solution | None) -> str:
    size, m = planner.profile.parallelism.micro_batch_size, planner.schedule.num_microbatches
    result = "does not fit" if solution is None else f"{solution.cost.step_ms:.1f} ms a step"
    return f"Micro-batch size {size}, {m} microbatches: {result}."


def same_samples(schedule: Schedule, asked: Profile, other: Profile) -> Schedule:
    """The schedule with as many samples per step at the other profile's micro-batch size.

    Raises: PipelineError when the samples are not a multiple of the other micro-batch size.
    """
    samples = schedule.num_microbatches * asked.parallelism.micro_batch_size
    size = other.parallelism.micro_batch_size
    if samples % size:
        raise PipelineError(
            f"{samples} samples a step cannot be cut into micro-batches of {size}. Leave out that "
            "size or change --num-microbatches."
        )
    return replace(schedule, num_microbatches=samples // size)
