"""Searches the micro-batch size for the fastest step, alone or with the layers per stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.cost.hybrid_pattern import pattern_of_job
from megatron_autorecompute.planner.cost.layout_flags import layers_per_stage, layout_flags
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.step_interval import StepErrors
from megatron_autorecompute.planner.search.layouts import (
    INTERLEAVED,
    LAYERS_PER_STAGE,
    BestLayout,
    SearchResult,
    best_layout,
    proof_of_all,
)
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import StepEvidence, gave_way
from megatron_autorecompute.planner.search.solve import solve, try_solve
from megatron_autorecompute.profile import Profile

FLAG = "--micro-batch-size"


def search_micro_batch(
    problems: Sequence[Problem], *, layouts: bool = False
) -> tuple[SearchResult, tuple[str, ...]]:
    """The micro-batch size with the fastest step, from one problem per profile.

    Every problem's schedule must run the same number of samples per step (see `same_samples`).

    Args:
        problems: one for each size; the first is the one that was asked for.
        layouts: whether the layers per stage of every size are searched with it, see
            `best_layout`.

    Returns: the best, with a bound on the step of all; and one sentence for each problem.
    Raises: InfeasibleError when none fits; as `best_layout`.
    """
    best, asked, best_ms, bound_ms, notes = None, None, math.inf, math.inf, list[str]()
    for number, problem in enumerate(problems):
        found = best_layout(problem, best_ms) if layouts else _alone(problem)
        bound_ms = min(bound_ms, found.bound_ms)
        notes.append(_note(found, best_ms, layouts))
        if number == 0:
            asked = found.asked
        if found.solution is not None and found.solution.cost.step_ms < best_ms:
            best, best_ms = (problem, found.problem, found.solution), found.solution.cost.step_ms
    if best is None:
        solve(problems[0])  # raises with the reason
        raise AssertionError("an infeasible micro-batch size was solved")
    problem, chosen, solution = best
    if asked is not None and chosen is not problems[0]:
        own, others = (
            StepErrors(chosen.costs, solution.policy),
            StepErrors(problems[0].costs, asked.policy),
        )
        if not own.surely_shorter(others):
            less = 1 - best_ms / asked.cost.step_ms
            notes.append(gave_way(_named(problems[0], layouts), _named(chosen, layouts), less))
            problem, chosen, solution = problems[0], problems[0], asked
    evidence = StepEvidence.of(solution.cost.step_ms, bound_ms)
    flags = {FLAG: str(chosen.profile.parallelism.micro_batch_size)}
    if chosen is not problem:
        flags |= layout_flags(chosen.layout, pattern_of_job(chosen.profile.model.facts))
    note = _proof(chosen, evidence, layouts)
    return SearchResult(chosen, solution, flags, note, evidence), (*notes, note)


def _alone(problem: Problem) -> BestLayout:
    """The problem's own layout."""
    solution = try_solve(problem)
    bound_ms = math.inf if solution is None else solution.step_evidence.bound_ms or 0.0
    return BestLayout(problem, solution, bound_ms, solution)


def _named(problem: Problem, layouts: bool) -> str:
    size = f"Micro-batch size {problem.profile.parallelism.micro_batch_size}"
    return f"{size} with layers per stage {layers_per_stage(problem.layout)}" if layouts else size


def _note(found: BestLayout, below_ms: float, layouts: bool) -> str:
    size = found.problem.profile.parallelism.micro_batch_size
    number = found.problem.schedule.num_microbatches
    if found.solution is not None:
        result = f"{found.solution.cost.step_ms:.1f} ms a step"
        if layouts:
            result += f" with layers per stage {layers_per_stage(found.problem.layout)}"
    elif layouts and math.isfinite(below_ms):
        result = f"no layers per stage are found that fit and take less than {below_ms:.1f} ms"
    else:
        result = "does not fit"
    return f"Micro-batch size {size}, {number} microbatches: {result}."


def _proof(problem: Problem, evidence: StepEvidence, layouts: bool) -> str:
    if not layouts:
        return proof_of_all("micro-batch sizes", "no other sizes", evidence)
    others = f"no other sizes and {LAYERS_PER_STAGE}"
    proof = proof_of_all("micro-batch sizes and layouts", others, evidence)
    return f"{proof} {INTERLEAVED}" if problem.layout.num_chunks > 1 else proof


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
