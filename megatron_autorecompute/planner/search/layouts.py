"""Searches the number of layers per stage for the shortest step."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.planner.cost.hybrid_pattern import pattern_of_job
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.layout_flags import (
    FIRST,
    LAST,
    all_layouts,
    layers_per_stage,
    layout_flags,
)
from megatron_autorecompute.planner.cost.step_interval import StepErrors
from megatron_autorecompute.planner.search.layout_steps import LeastSteps
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import Solution, StepEvidence, nearness
from megatron_autorecompute.planner.search.solve import solve, try_solve
from megatron_autorecompute.planner.search.within_errors import gave_way

LAYERS_PER_STAGE = "no layers per stage"
INTERLEAVED = (
    f"Interleaved, only layouts that {FIRST} and {LAST} can say are searched; others are not "
    "offered."
)
_PARTITIONS = 2000
"""Up to which all are looked at."""
_MOST_PRICED = 128
"""Layouts whose steps are bounded as closely as can be."""
_LAYERS_SOLVED = 1 << 10
"""The most layers of all solved layouts together; the others have looser bounds."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The plan of one candidate layout."""

    problem: Problem
    solution: Solution
    megatron_flags: Mapping[str, str]
    """Megatron's flags that give it, name to value."""
    note: str
    """One sentence on what it gains."""
    evidence: StepEvidence
    """How far its step is from the shortest one of all that were searched."""


@dataclass(frozen=True, slots=True)
class BestLayout:
    """The layout with the shortest step of those that were searched."""

    problem: Problem
    solution: Solution | None
    """The solution; None where none is found that fits and is shorter than asked for."""
    bound_ms: float
    """No layout has a shorter step, under any choices. Infinite if all layouts shorter than asked
    for are known, and there are none."""
    asked: Solution | None
    """The problem's own layout, solved; None where nothing fits it, or it is bounded to be no
    shorter than asked for."""


def search_layout(problem: Problem) -> SearchResult:
    """The layers per stage with the shortest step, the problem's own layout included.

    See `best_layout`. Raises: InfeasibleError when no layout is found that fits; ProfileError
    without per-kind static bytes.
    """
    found = best_layout(problem)
    if found.solution is None:
        solve(problem)  # raises with the reason
        raise AssertionError("an infeasible layout was solved")
    chosen, solution, gain = _if_surely_faster(problem, found, found.solution)
    evidence = StepEvidence.of(solution.cost.step_ms, found.bound_ms)
    pattern = pattern_of_job(problem.profile.model.facts)
    flags = {} if chosen is problem else layout_flags(chosen.layout, pattern)
    note = f"{gain} {_proof(problem.layout, evidence)}"
    return SearchResult(chosen, solution, flags, note, evidence)


def _if_surely_faster(
    problem: Problem, found: BestLayout, best: Solution
) -> tuple[Problem, Solution, str]:
    """The best layout, or the asked one if the best is not surely faster; and why."""
    asked = found.asked
    if asked is None or found.problem is problem:
        return found.problem, best, _gain(found.problem, best, asked)
    if StepErrors(found.problem.costs, best.policy).surely_shorter(
        StepErrors(problem.costs, asked.policy)
    ):
        return found.problem, best, _gain(found.problem, best, asked)
    taken, faster = (f"{layers_per_stage(one.layout)}" for one in (problem, found.problem))
    less = 1 - best.cost.step_ms / asked.cost.step_ms
    return problem, asked, gave_way(f"Layers per stage {taken}, as asked,", faster, less)


def best_layout(problem: Problem, below_ms: float = math.inf) -> BestLayout:
    """The layers per stage with the shortest step below so many milliseconds.

    One chunk per stage: all partitions of the decoder layers, if they are few; MTP depths stay with
    the loss. Otherwise all that the numbers of layers of the first and the last stage can give, see
    `uneven_layouts`; no others are searched. One stage: its own layout. Static bytes of stages that
    were not measured are added up from the profile's per-kind figures.
    Raises: ProfileError without per-kind static bytes, or for a model with a tower or an encoder on
    several stages.
    """
    model = problem.profile.model
    if model.encoder_layers and problem.layout.num_stages > 1:
        raise ProfileError(
            f"Layouts of a model with a block in front of its decoder ({model.encoder_name}, "
            f"{model.encoder_layers} layers) are not searched. Give the decoder's layers per stage "
            "by Megatron's flags, and leave --search-layout out."
        )
    asked = None
    if math.isinf(below_ms) or LeastSteps(problem).step_ms(problem) < below_ms:
        asked = try_solve(problem)
    first = asked if asked is not None and asked.cost.step_ms < below_ms else None
    if problem.layout.num_stages == 1:
        bound_ms = math.inf if asked is None else asked.step_evidence.bound_ms or 0.0
        return BestLayout(problem, first, bound_ms, asked)
    return BestLayout(*_best(problem, first, below_ms), asked)


_Found = tuple[Problem, Solution | None, float]
"""The best layout, solved, and a bound on the step of all; None where none is found."""


def _best(problem: Problem, first: Solution | None, below_ms: float) -> _Found:
    """Layouts are solved as they come, until none that is left can be shorter."""
    chosen, best = problem, first
    limit_ms = below_ms if first is None else first.cost.step_ms
    bounds = [math.inf] if first is None else [first.step_evidence.bound_ms or 0.0]
    left = max(1, _LAYERS_SOLVED // problem.layout.num_layers)
    for bound_ms, candidate in _lowest_first(problem, bounds):
        if bound_ms >= limit_ms or (not left and math.isfinite(limit_ms)):
            bounds.append(bound_ms)
            break
        solution = try_solve(candidate) if candidate else None
        left -= left and candidate is not None
        if solution is None:
            continue
        bounds.append(solution.step_evidence.bound_ms or 0.0)
        if candidate and solution.cost.step_ms < limit_ms:
            chosen, best, limit_ms = candidate, solution, solution.cost.step_ms
    return chosen, best, min(bounds)


def _lowest_first(
    problem: Problem, unpriced: list[float]
) -> Iterator[tuple[float, Problem | None]]:
    """Bounds on the steps of other layouts, the lowest first, with the layout's problem where it is
    the closest one; after any other the layout is bounded more closely, and comes again. Where too
    many have been, the bound goes to the `unpriced`."""
    layouts = [own for own in all_layouts(problem.layout, _PARTITIONS) if own != problem.layout]
    least, priced = LeastSteps(problem), dict[int, Problem]()
    left = [(least.without_budget_ms(own), 0, number) for number, own in enumerate(layouts)]
    heapq.heapify(left)
    while left:
        bound_ms, step, number = heapq.heappop(left)
        yield bound_ms, priced.get(number)
        if step == 0:
            closer_ms = least.busy_ms(layouts[number])
        elif step == 1 and len(priced) < _MOST_PRICED:
            priced[number] = replace(problem, layout=layouts[number], known=())
            closer_ms = least.step_ms(priced[number])
        else:
            unpriced += [bound_ms] * (step == 1)
            continue
        heapq.heappush(left, (max(bound_ms, closer_ms), step + 1, number))


def _gain(chosen: Problem, best: Solution, asked: Solution | None) -> str:
    layers = layers_per_stage(chosen.layout)
    if asked is None:
        return f"Layers per stage {layers}: fits where the asked layout does not."
    if best is asked:
        return f"Layers per stage {layers}, as asked: no layout was found with a shorter step."
    now_ms = asked.cost.step_ms
    gain = 100 * (now_ms - best.cost.step_ms) / now_ms
    return (
        f"Layers per stage {layers}: {best.cost.step_ms:.1f} ms a step against {now_ms:.1f} ms "
        f"with the asked layout, {gain:.2f}% less."
    )


def _proof(layout: Layout, evidence: StepEvidence) -> str:
    if layout.num_chunks == 1:
        return proof_of_all("layouts", LAYERS_PER_STAGE, evidence)
    others = f"no others of {FIRST} and {LAST}"
    return f"{proof_of_all('layouts', others, evidence)} {INTERLEAVED}"


def proof_of_all(searched: str, others: str, evidence: StepEvidence) -> str:
    """What is proven of the step of all that was searched, in the words of docs/plan.md."""
    proven = nearness(evidence.gap or 0)
    by_more = " by more" if evidence.gap else ""
    return f"Proven {proven} of all {searched} searched: {others} make a shorter one{by_more}."
