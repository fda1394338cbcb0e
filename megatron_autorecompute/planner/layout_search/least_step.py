"""Bounds on the steps of layouts, each closer than the one before; none needs a search."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_autorecompute.planner.arrays import Ints
from megatron_autorecompute.planner.critical_path import critical_paths
from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.planner.layout_search.stage_costs import LayerTimes
from megatron_autorecompute.planner.planner import Planner
from megatron_autorecompute.planner.stage_search.limits import NEVER
from megatron_autorecompute.planner.stage_times import least_times, residual_times
from megatron_autorecompute.planner.step_search.stage_options import dot, priced_bound_ps
from megatron_autorecompute.planner.step_time import step_unit
from megatron_autorecompute.planner.unit_costs import PS_PER_MS, CostTable


class LeastSteps:
    """No choices that fit make a shorter step than is said here; infinite: nothing fits.

    Args:
        planner: of any layout of as many stages and chunks.
        budgets: bytes, of every stage.
    """

    def __init__(self, planner: Planner, budgets: Sequence[int]) -> None:
        self.planner, self.budgets = planner, budgets
        self._table = CostTable(planner.profile, planner.percentile, "high")
        self._before = LayerTimes(self._table, planner.layout).before[0]
        self._residual_ps = [
            min(0, round(stage.residual_ms * PS_PER_MS)) for stage in planner.profile.stages
        ]
        self._runs: dict[tuple[int, ...], object] = {}
        self._busy: dict[object, int] = {}

    def without_budget_ms(self, layout: Layout) -> float:
        """By the busiest stage's decoder layers, whatever they hold."""
        last = layout.num_layers
        busiest = 0
        for stage in layout.stages:
            ends = [(c.layers[0], c.layers[-1] + 1) for c in stage if c.layers]
            own = sum(int(self._before[min(b, last)] - self._before[min(a, last)]) for a, b in ends)
            busiest = max(busiest, own)
        own_ps = max(0, busiest + min(self._residual_ps, default=0))
        return self._step_ms(own_ps)

    def busy_ms(self, layout: Layout) -> float:
        """By the busiest stage's choices, as prices of bytes tell."""
        if any(key not in self._busy for key in self._keys(layout)):
            self._price(self.planner.replaced(layout=layout))
        busiest = max(self._busy[key] for key in self._keys(layout))
        return math.inf if busiest >= NEVER else self._step_ms(busiest)

    def _step_ms(self, busiest_ps: int) -> float:
        return self.planner.schedule.num_microbatches * busiest_ps / PS_PER_MS

    def _price(self, planner: Planner) -> None:
        """Know how busy stages are at least, residuals included; those of like layers once."""
        residual = residual_times(self._table, planner.layout)
        once: Ints = np.ones((2, planner.layout.num_chunks), np.int64)
        for stage, key in enumerate(self._keys(planner.layout)):
            if key not in self._busy:
                found = priced_bound_ps(planner.search(stage), self.budgets[stage], once)
                more = int(residual.forward[stage].sum() + residual.backward[stage].sum())
                self._busy[key] = found if found >= NEVER else found + more

    def _keys(self, layout: Layout) -> list[object]:
        """Of every stage what tells it apart from others that cost differently."""
        return [
            (number, tuple(self._run(chunk.layers) for chunk in stage))
            for number, stage in enumerate(layout.stages)
        ]

    def _run(self, layers: tuple[int, ...]) -> object:
        if layers not in self._runs:
            profile, last = self.planner.profile, self.planner.layout.num_layers - 1
            kinds = (profile.kind_of(i).name for i in layers)
            ends = layers[-1:] == (last,), layers[:1] == (last + 1,)
            self._runs[layers] = tuple(kinds), ends, layers if profile.stages else None
        return self._runs[layers]

    def step_ms(self, planner: Planner) -> float:
        """By the paths that are the longest where every stage is as busy as it is at least, or by
        Megatron's offload of whole layers where that is shorter."""
        whole = None if planner.offload is None else planner.offload.fastest_whole(self.budgets)
        return min(self._by_paths_ms(planner), math.inf if whole is None else whole[1].step_ms)

    def _by_paths_ms(self, planner: Planner) -> float:
        layout, schedule = planner.layout, planner.schedule
        self._price(planner)
        busy = [self._busy[key] for key in self._keys(layout)]
        if max(busy) >= NEVER:
            return math.inf
        own = residual_times(self._table, layout)
        residual = np.stack([own.forward, own.backward])
        least = [least_times(self._table, chunk) for stage in layout.stages for chunk in stage]
        times: Ints = np.array(least, np.int64).T.reshape(residual.shape) + residual
        more = np.maximum(np.array(busy) - times.sum(axis=(0, 2)), 0)
        times[1] += (more // layout.num_chunks)[:, None]
        times = np.maximum(times, 0)
        unit = step_unit(schedule, float(times.sum()))
        bounds_ps = [schedule.num_microbatches * max(busy)]
        for path in critical_paths(schedule, times[0] // unit, times[1] // unit):
            total_ps = dot(path, residual)
            for stage, budget in enumerate(self.budgets):
                total_ps += priced_bound_ps(planner.search(stage), budget, path[:, stage])
            bounds_ps.append(total_ps - unit * int(path.sum()) * (unit > 1))
        return max(bounds_ps) / PS_PER_MS
