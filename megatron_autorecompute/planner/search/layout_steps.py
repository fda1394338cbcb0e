"""Bounds on the steps of layouts, each closer than the one before; none needs a search."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from megatron_autorecompute.planner.cost.arrays import Ints
from megatron_autorecompute.planner.cost.critical_path import critical_paths
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.stage_times import least_times, residual_times
from megatron_autorecompute.planner.cost.step_time import step_unit
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, CostTable
from megatron_autorecompute.planner.search.chunk_plans import SLACK
from megatron_autorecompute.planner.search.offload_settings import fastest_whole, may_offload
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.replay import length


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
