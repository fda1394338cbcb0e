"""Searches the number of layers per stage for the shortest step.

Steps of layouts are bounded, each time closer than before, without a search; the lowest ones are
solved until none that is left can be shorter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.planner.cost.arrays import Ints
from megatron_autorecompute.planner.cost.hybrid_pattern import pattern_of_job
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.layout_flags import (
    FIRST,
    LAST,
    all_layouts,
    layers_per_stage,
    layout_flags,
)
from megatron_autorecompute.planner.cost.stage_times import least_times, residual_times
from megatron_autorecompute.planner.cost.step_interval import StepErrors
from megatron_autorecompute.planner.cost.step_time import critical_paths, step_unit
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, CostTable
from megatron_autorecompute.planner.search.chunk_plans import SLACK
from megatron_autorecompute.planner.search.manual import fastest_whole, may_offload
from megatron_autorecompute.planner.search.master import length
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import (
    Solution,
    StepEvidence,
    gave_way,
    nearness,
)
from megatron_autorecompute.planner.search.solve import solve, try_solve


class LeastSteps:
    """No choices that fit make a shorter step than is said here; infinite: nothing fits.

    Args:
        problem: the problem of any layout of as many stages and chunks.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self._table = problem, problem.table
        least = [_least_ps(self._table, layer) for layer in range(problem.layout.num_layers)]
        self._before: Ints = np.array([0, *least], np.int64).cumsum()
        """What all layers before each take at least."""
        self._residual_ps = [
            min(0, round(stage.residual_ms * PS_PER_MS)) for stage in problem.profile.stages
        ]
        self._runs: dict[tuple[int, ...], object] = {}
        self._busy: dict[object, float] = {}

    def without_budget_ms(self, layout: Layout) -> float:
        """A bound from the busiest stage's decoder layers, without a budget."""
        last = layout.num_layers
        busiest = 0
        for stage in layout.stages:
            ends = [(c.layers[0], c.layers[-1] + 1) for c in stage if c.layers]
            own = sum(int(self._before[min(b, last)] - self._before[min(a, last)]) for a, b in ends)
            busiest = max(busiest, own)
        own_ps = max(0, busiest + min(self._residual_ps, default=0))
        return self._step_ms(own_ps)

    def busy_ms(self, layout: Layout) -> float:
        """A bound from the busiest stage's choices at prices of bytes."""
        if any(key not in self._busy for key in self._keys(layout)):
            self._price(replace(self.problem, layout=layout, known=()))
        busiest = max(self._busy[key] for key in self._keys(layout))
        return self._step_ms(busiest)

    def _step_ms(self, busiest_ps: float) -> float:
        return self.problem.schedule.num_microbatches * busiest_ps / PS_PER_MS

    def _price(self, problem: Problem) -> None:
        """Know how busy stages are at least, residuals included; those of like layers once."""
        residual = residual_times(self._table, problem.layout)
        once = np.ones((2, problem.layout.num_chunks))
        for stage, key in enumerate(self._keys(problem.layout)):
            if key not in self._busy:
                found = problem.stages.stage(stage).bound(problem.budgets[stage], once)
                more = int(residual.forward[stage].sum() + residual.backward[stage].sum())
                self._busy[key] = found + more

    def _keys(self, layout: Layout) -> list[object]:
        """The key of every stage: it differs between stages that cost differently."""
        return [
            (number, tuple(self._run(chunk.layers) for chunk in stage))
            for number, stage in enumerate(layout.stages)
        ]

    def _run(self, layers: tuple[int, ...]) -> object:
        if layers not in self._runs:
            profile, last = self.problem.profile, self.problem.layout.num_layers - 1
            kinds = (profile.kind_of(i).name for i in layers)
            ends = layers[-1:] == (last,), layers[:1] == (last + 1,)
            self._runs[layers] = tuple(kinds), ends, layers if profile.stages else None
        return self._runs[layers]

    def step_ms(self, problem: Problem) -> float:
        """A bound from the longest paths if every stage is only as busy as it must be, or from
        Megatron's offload of whole layers if that is shorter."""
        whole = fastest_whole(problem) if may_offload(problem) else None
        whole_ms = math.inf if whole is None else problem.cost(whole).step_ms
        return min(self._by_paths_ms(problem), whole_ms)

    def _by_paths_ms(self, problem: Problem) -> float:
        layout, schedule = problem.layout, problem.schedule
        self._price(problem)
        busy = [self._busy[key] for key in self._keys(layout)]
        if math.isinf(max(busy)):
            return math.inf
        residual = residual_times(self._table, layout).both
        least = [least_times(self._table, chunk) for stage in layout.stages for chunk in stage]
        times: Ints = np.array(least, np.int64).T.reshape(residual.shape) + residual
        more = np.maximum(np.array(busy) - times.sum(axis=(0, 2)), 0).astype(np.int64)
        times[1] += (more // layout.num_chunks)[:, None]
        times = np.maximum(times, 0)
        unit = step_unit(schedule, float(times.sum()))
        bounds_ps = [schedule.num_microbatches * max(busy)]
        for path in critical_paths(schedule, times[0] // unit, times[1] // unit):
            total_ps = length(path, residual)
            for stage, budget in enumerate(problem.budgets):
                weights = path[:, stage].astype(np.float64)
                total_ps += problem.stages.stage(stage).bound(budget, weights)
            bounds_ps.append(total_ps * (1 - SLACK) - unit * int(path.sum()) * (unit > 1))
        return max(bounds_ps) / PS_PER_MS


def _least_ps(table: CostTable, layer: int) -> int:
    """The least time of a layer, also as one of several in a measured checkpoint."""
    times = [table.layer(layer, choice).time_ps for choice in table.choices(layer)]
    for record in table.profile.kind_of(layer).choices:
        if record.policy.group > 1:
            whole_ms = record.forward_ms + record.backward_ms
            times.append(int(whole_ms * PS_PER_MS / record.policy.group))
    return min(times)


LAYERS_PER_STAGE = "no layers per stage"
INTERLEAVED = (
    f"Interleaved, only layouts that {FIRST} and {LAST} can say are searched; others are not "
    "offered."
)
_PARTITIONS = 2000
"""Up to which all are looked at."""
_SHOWN = 5e-5
"""A smaller share is 0.00% in the note."""
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
    gain = (now_ms - best.cost.step_ms) / now_ms
    less = f"{gain:.2%} less" if gain >= _SHOWN else "hardly less"
    return (
        f"Layers per stage {layers}: {best.cost.step_ms:.1f} ms a step against {now_ms:.1f} ms "
        f"with the asked layout, {less}."
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
