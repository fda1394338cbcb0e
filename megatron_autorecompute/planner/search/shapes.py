"""Other layouts and micro-batch sizes: the shortest step of the most promising ones."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_autorecompute.errors import PipelineError, ProfileError
from megatron_autorecompute.planner.cost.hybrid_pattern import pattern_of_job
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.layout_flags import (
    layers_per_stage,
    layout_flags,
    uneven_layout,
    uneven_sizes,
)
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.step_interval import StepErrors
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import Solution, gave_way
from megatron_autorecompute.planner.search.solve import solve, try_solve
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import Profile

FLAG = "--micro-batch-size"
_CLOSEST = 100
"""Layouts that are estimated: those whose largest stage has the fewest layers."""
_LAYERS_ESTIMATED = 1 << 13
"""The most layers of all layouts that are estimated, which takes seconds."""
_LAYERS_SOLVED = 1 << 9
"""The most layers of all layouts that are solved after each other without a shorter step."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The plan of the layout and micro-batch size with the shortest step."""

    problem: Problem
    solution: Solution
    megatron_flags: Mapping[str, str]
    """Megatron's flags that give it, name to value."""
    notes: tuple[str, ...]
    """Sentences on what was tried and what it gains."""


Tried = tuple[Problem, Solution | None]
"""A layout or micro-batch size, and its solution; None where nothing fits."""


def search_shapes(problems: Sequence[Problem], *, layouts: bool) -> SearchResult:
    """The shortest step of some problems, or of their most promising layouts.

    Layouts are those that the numbers of layers of the first and the last stage can give. Static
    bytes of stages that were not measured are added up from the profile's per-kind figures.

    Args:
        problems: one for each micro-batch size, all of as many samples per step (see
            `same_samples`); the first one is what was asked for.
        layouts: whether the layers per stage of every problem are searched.

    Raises: InfeasibleError when nothing is found that fits; ProfileError without per-kind static
    bytes, or for a model with a tower or an encoder on several stages.
    """
    if layouts:
        _check_encoder(problems[0])
    sizes = [_tried(problem, layouts=layouts) for problem in problems]
    problem, solution = min((own for tried in sizes for own in tried), key=_step_ms)
    if solution is None:
        solution = solve(problem)  # raises with the reason
    notes, (first, asked) = [_said(tried, layouts=layouts) for tried in sizes], sizes[0][0]
    if asked is not None and _is_unsure(problem, solution, first, asked):
        less = 1 - solution.cost.step_ms / asked.cost.step_ms
        own, other = (_named(each, layouts=layouts) for each in (first, problem))
        notes.append(gave_way(f"{own}, as asked,", other, less))
        problem, solution = first, asked
    size = str(problem.profile.parallelism.micro_batch_size)
    flags = {FLAG: size} if len(problems) > 1 or not layouts else {}
    if all(problem is not own for own in problems):
        flags |= layout_flags(problem.layout, pattern_of_job(problem.profile.model.facts))
    return SearchResult(problem, solution, flags, tuple(notes))


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


def _check_encoder(problem: Problem) -> None:
    model = problem.profile.model
    if model.encoder_layers and problem.layout.num_stages > 1:
        raise ProfileError(
            f"Layouts of a model with a block in front of its decoder ({model.encoder_name}, "
            f"{model.encoder_layers} layers) are not searched. Give the decoder's layers per stage "
            "by Megatron's flags, and leave --search-layout out."
        )


def _step_ms(tried: Tried) -> float:
    return math.inf if tried[1] is None else tried[1].cost.step_ms


def _tried(problem: Problem, *, layouts: bool) -> list[Tried]:
    """A problem, and its most promising layouts until many in a row have no shorter step."""
    found, without_gain = [(problem, try_solve(problem))], 0
    for layout in promising(problem) if layouts else ():
        best_ms = min(map(_step_ms, found))
        if best_ms < math.inf and without_gain * layout.num_layers >= _LAYERS_SOLVED:
            break
        own = replace(problem, layout=layout)
        found.append((own, try_solve(own)))
        without_gain = 0 if _step_ms(found[-1]) < best_ms else without_gain + 1
    return found


def promising(problem: Problem) -> list[Layout]:
    """Other layouts of a problem, those that likely fit and have the shortest step first."""
    number = min(_CLOSEST, _LAYERS_ESTIMATED // problem.layout.num_layers)
    sizes = heapq.nsmallest(number, uneven_sizes(problem.layout), key=max)
    layouts = (uneven_layout(problem.layout, first, last) for first, _, last in sizes)
    others = [own for own in layouts if own is not None and own != problem.layout]
    ends = [_least(problem, figure) for figure in ("time_ps", "held_bytes")]
    return sorted(others, key=lambda own: _estimated(replace(problem, layout=own), *ends))


def _least(problem: Problem, figure: str) -> RecomputePolicy:
    """Of every layer the choice with the least of a figure."""
    chosen, table = list[LayerPolicy](), problem.table
    for layer in range(problem.profile.num_layers):
        own = [choice for choice in table.choices(layer) if problem.allows(layer, choice)]
        own = [choice for choice in own if not choice.offload] or own  # copies are long to replay
        figures = [getattr(table.layer(layer, choice), figure) for choice in own]
        chosen.append(own[figures.index(min(figures))])
    return RecomputePolicy(tuple(chosen))


def _estimated(
    problem: Problem, fastest: RecomputePolicy, leanest: RecomputePolicy
) -> tuple[bool, float]:
    """Whether the leanest choices exceed a budget; and the step in ms if each stage saves the bytes
    it lacks at their price, and the busiest one works without a pause once the pipeline is full."""
    costs, busy_ms, is_short = problem.costs, list[float](), False
    both = (costs.met_ms(policy) for policy in (fastest, leanest))
    for stage, (fast_ms, lean_ms) in enumerate(zip(*both, strict=True)):
        fast, lean = (costs.peak_alone(stage, policy).bytes for policy in (fastest, leanest))
        share = max(0, fast - problem.budgets[stage]) / max(1, fast - lean)
        busy_ms.append(fast_ms + share * (lean_ms - fast_ms))
        is_short |= lean > problem.budgets[stage]
    filled = (problem.schedule.num_microbatches - 1) * max(busy_ms)
    return is_short, filled + sum(busy_ms) / problem.layout.num_chunks


def _said(tried: list[Tried], *, layouts: bool) -> str:
    """What the search has of one micro-batch size."""
    problem, asked = tried[0]
    said = f"Micro-batch size {problem.profile.parallelism.micro_batch_size}, "
    said += f"{problem.schedule.num_microbatches} microbatches"
    chosen, solution = min(tried, key=_step_ms)
    if solution is None:
        return f"{said}: does not fit{f' with any of {len(tried)} layouts' * layouts}."
    said += f": {solution.cost.step_ms:.1f} ms a step"
    if layouts:
        said += f" with layers per stage {layers_per_stage(chosen.layout)}"
    if asked is not None and asked is not solution:
        said += f", {asked.cost.step_ms:.1f} ms as asked"
    none = f" Of {len(tried)} layouts that were solved none has a shorter step." * layouts
    return f"{said}.{none}"


def _named(problem: Problem, *, layouts: bool) -> str:
    size = f"Micro-batch size {problem.profile.parallelism.micro_batch_size}"
    return f"{size}{f' with layers per stage {layers_per_stage(problem.layout)}' * layouts}"


def _is_unsure(problem: Problem, best: Solution, asked: Problem, known: Solution) -> bool:
    """Whether the best is another one than what was asked for, and not surely shorter."""
    if problem is asked:
        return False
    own, others = StepErrors(problem.costs, best.policy), StepErrors(asked.costs, known.policy)
    return not own.surely_shorter(others)
