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
from megatron_autorecompute.planner.search.simpler import gave_way
from megatron_autorecompute.planner.search.solve import Budget, Planner, StepEvidence
from megatron_autorecompute.profile import Profile

FLAG = "--micro-batch-size"


def search_micro_batch(
    planners: Sequence[Planner], budget: Budget, *, layouts: bool = False
) -> tuple[SearchResult, tuple[str, ...]]:
    """The micro-batch size with the fastest step, from one planner per profile.

    Every planner's schedule must run the same number of samples per step (see `same_samples`).

    Args:
        planners: one for each size; the first is the one that was asked for.
        budget: bytes, one for all stages or one each.
        layouts: whether the layers per stage of every size are searched with it, see
            `best_layout`.

    Returns: the best, with a bound on the step of all; and one sentence for each planner.
    Raises: InfeasibleError when none fits; as `best_layout`.
    """
    best, asked, best_ms, bound_ms, notes = None, None, math.inf, math.inf, list[str]()
    for number, planner in enumerate(planners):
        found = best_layout(planner, budget, best_ms) if layouts else _alone(planner, budget)
        bound_ms = min(bound_ms, found.bound_ms)
        notes.append(_note(found, best_ms, layouts))
        if number == 0:
            asked = found.asked
        if found.solution is not None and found.solution.cost.step_ms < best_ms:
            best, best_ms = (planner, found.planner, found.solution), found.solution.cost.step_ms
    if best is None:
        planners[0].solve(budget)  # raises with the reason
        raise AssertionError("an infeasible micro-batch size was solved")
    planner, chosen, solution = best
    if asked is not None and chosen is not planners[0]:
        own, others = (
            StepErrors(chosen.costs, solution.policy),
            StepErrors(planners[0].costs, asked.policy),
        )
        if not own.surely_shorter(others):
            less = 1 - best_ms / asked.cost.step_ms
            notes.append(gave_way(_named(planners[0], layouts), _named(chosen, layouts), less))
            planner, chosen, solution = planners[0], planners[0], asked
    evidence = StepEvidence.of(solution.cost.step_ms, bound_ms)
    flags = {FLAG: str(chosen.profile.parallelism.micro_batch_size)}
    if chosen is not planner:
        flags |= layout_flags(chosen.layout, pattern_of_job(chosen.profile.model.facts))
    note = _proof(chosen, evidence, layouts)
    return SearchResult(chosen, solution, flags, note, evidence), (*notes, note)


def _alone(planner: Planner, budget: Budget) -> BestLayout:
    """The planner's own layout."""
    solution = planner.try_solve(budget)
    bound_ms = math.inf if solution is None else solution.step_evidence.bound_ms or 0.0
    return BestLayout(planner, solution, bound_ms, solution)


def _named(planner: Planner, layouts: bool) -> str:
    size = f"Micro-batch size {planner.profile.parallelism.micro_batch_size}"
    return f"{size} with layers per stage {layers_per_stage(planner.layout)}" if layouts else size


def _note(found: BestLayout, below_ms: float, layouts: bool) -> str:
    size = found.planner.profile.parallelism.micro_batch_size
    number = found.planner.schedule.num_microbatches
    if found.solution is not None:
        result = f"{found.solution.cost.step_ms:.1f} ms a step"
        if layouts:
            result += f" with layers per stage {layers_per_stage(found.planner.layout)}"
    elif layouts and math.isfinite(below_ms):
        result = f"no layers per stage are found that fit and take less than {below_ms:.1f} ms"
    else:
        result = "does not fit"
    return f"Micro-batch size {size}, {number} microbatches: {result}."


def _proof(planner: Planner, evidence: StepEvidence, layouts: bool) -> str:
    if not layouts:
        return proof_of_all("micro-batch sizes", "no other sizes", evidence)
    others = f"no other sizes and {LAYERS_PER_STAGE}"
    proof = proof_of_all("micro-batch sizes and layouts", others, evidence)
    return f"{proof} {INTERLEAVED}" if planner.layout.num_chunks > 1 else proof


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
