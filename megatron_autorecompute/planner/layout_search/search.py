"""Searches the number of layers per stage for the shortest step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.planner.layout_search.flags import (
    FIRST,
    LAST,
    layers_per_stage,
    layout_flags,
    uneven_layouts,
)
from megatron_autorecompute.planner.layout_search.partitions import PartitionSearch
from megatron_autorecompute.planner.planner import Budget, Planner, Solution, StepEvidence
from megatron_autorecompute.planner.unit_costs import PS_PER_MS, CostTable

_QUARTERS = (5, 6, 8, 12, 16, 32, 64)
_MOST_UNEVEN = 32
"""Interleaved layouts that are solved; the others' bounds are less close."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """One candidate, solved."""

    planner: Planner
    solution: Solution
    megatron_flags: Mapping[str, str]
    """Megatron's flags that give it, name to value."""
    note: str
    """One sentence on what it gains."""
    evidence: StepEvidence
    """How far its step is from the shortest one of all that were searched."""


def search_layout(planner: Planner, budget: Budget) -> SearchResult:
    """The layers per stage with the shortest step, the planner's own layout included.

    One chunk per stage: all partitions of the decoder layers; MTP depths stay with the loss.
    Several chunks: all that the numbers of layers of the first and the last stage can give, see
    `uneven_layouts`; no others are searched. Static bytes of stages that were not measured are
    added up from the profile's per-kind figures.
    Raises: InfeasibleError when no layout is found that fits; ProfileError without per-kind static
    bytes.
    """
    asked = planner.try_solve(budget)
    search = _best_uneven if planner.layout.num_chunks > 1 else _best_partition
    chosen, best, bound_ms = search(planner, budget, asked)
    if best is None:
        planner.solve(budget)  # raises with the reason
        raise AssertionError("an infeasible layout was solved")
    evidence = StepEvidence.of(best.cost.step_ms, bound_ms)
    flags = {} if chosen is planner else layout_flags(chosen.layout)
    note = f"{_gain(chosen, best, asked)} {_proof(chosen.layout, evidence)}"
    return SearchResult(chosen, best, flags, note, evidence)


_Found = tuple[Planner, Solution | None, float]
"""The best layout, solved, and a bound on the step of all; None where none fits."""


def _best_partition(planner: Planner, budget: Budget, asked: Solution | None) -> _Found:
    budgets = planner.budgets(budget)
    for below_ms in [asked.cost.step_ms] if asked else _rising_ms(planner):
        search = PartitionSearch(planner, budgets, below_ms)
        best = search.best()
        if best.sizes is not None:
            chosen, solution = search.solved(best.sizes)
            if asked is None or solution.cost.step_ms < asked.cost.step_ms:
                return chosen, solution, min(best.bound_ms, solution.cost.step_ms)
        if asked is not None:
            return planner, asked, min(best.bound_ms, asked.cost.step_ms)
    return planner, None, math.inf


def _rising_ms(planner: Planner) -> Iterator[float]:
    """What a step may be shorter than, from about what equal stages without recompute take on."""
    layers = sum(
        _fastest_ps(CostTable(planner.profile), i) for i in range(planner.profile.num_layers)
    )
    ends = planner.profile.embedding, planner.profile.head
    whole_ms = layers / PS_PER_MS + sum(one.forward_ms + one.backward_ms for one in ends)
    slots = planner.schedule.num_microbatches + planner.layout.num_stages
    for quarters in _QUARTERS:
        yield quarters * slots * whole_ms / planner.layout.num_stages / 4


def _best_uneven(planner: Planner, budget: Budget, asked: Solution | None) -> _Found:
    """All layouts, those first whose busiest stage is least busy."""
    chosen, best = planner, asked
    bounds = [] if asked is None else [asked.step_evidence.bound_ms or 0.0]
    layouts = [layout for layout in uneven_layouts(planner.layout) if layout != planner.layout]
    least = sorted((_least_ms(planner, layout), number) for number, layout in enumerate(layouts))
    for count, (least_ms, number) in enumerate(least):
        if best is not None and (least_ms >= best.cost.step_ms or count == _MOST_UNEVEN):
            bounds.append(least_ms)
            break
        candidate = planner.replaced(layout=layouts[number])
        solution = candidate.try_solve(budget)
        if solution is None:
            continue
        bounds.append(solution.step_evidence.bound_ms or 0.0)
        if best is None or solution.cost.step_ms < best.cost.step_ms:
            chosen, best = candidate, solution
    return chosen, best, min(bounds, default=math.inf)


def _least_ms(planner: Planner, layout: Layout) -> float:
    """Time of the busiest stage without recompute: a lower bound on the step of this layout."""
    table = CostTable(planner.profile)
    stages = [[layer for chunk in stage for layer in chunk.layers] for stage in layout.stages]
    busiest = max(sum(_fastest_ps(table, layer) for layer in layers) for layers in stages)
    return planner.schedule.num_microbatches * busiest / PS_PER_MS


def _fastest_ps(table: CostTable, layer: int) -> int:
    return min(table.layer(layer, choice).time_ps for choice in table.choices(layer))


def _gain(chosen: Planner, best: Solution, asked: Solution | None) -> str:
    layers = layers_per_stage(chosen.layout)
    if asked is None:
        return f"Layers per stage {layers}: fits where the asked layout does not."
    if best is asked:
        return f"Layers per stage {layers}, as asked: none is found that makes the step shorter."
    now_ms = asked.cost.step_ms
    gain = 100 * (now_ms - best.cost.step_ms) / now_ms
    return (
        f"Layers per stage {layers}: {best.cost.step_ms:.1f} ms a step against {now_ms:.1f} ms "
        f"with the asked layout, {gain:.2f}% less."
    )


def _proof(layout: Layout, evidence: StepEvidence) -> str:
    """What is proven of the step, in the words of docs/plan.md."""
    others = "no layers per stage make a shorter one"
    searched = ""
    if layout.num_chunks > 1:
        others = f"no others of {FIRST} and {LAST} make a shorter one"
        searched = " Interleaved, only layouts of these two flags are searched."
    if not evidence.gap:
        return f"Proven optimal of all layouts searched: {others}.{searched}"
    most = math.ceil(1e5 * evidence.gap) / 1e3
    return f"Proven within {most:.3f}% of the optimum: {others} by more.{searched}"
