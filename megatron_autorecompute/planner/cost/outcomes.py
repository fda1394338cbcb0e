"""Step time and peaks of many policies of one model: `PolicyCosts.of` without its details.

A chunk's cost is computed once for each combination of choices, and all steps are replayed
together: a thousand policies of 126 layers take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_autorecompute.planner.cost.arrays import Ints
from megatron_autorecompute.planner.cost.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.cost.peak_memory import stage_base, stage_moments, stage_peak
from megatron_autorecompute.planner.cost.policy_cost import PolicyCosts
from megatron_autorecompute.planner.cost.stage_times import residual_times
from megatron_autorecompute.planner.cost.step_time import finished, step_unit
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, CostTable
from megatron_autorecompute.policy import RecomputePolicy

_AT_ONCE = 64  # replayed together; more would only take memory


@dataclass(frozen=True, slots=True)
class Outcome:
    """Time and peaks of one policy."""

    step_ms: float
    """Time of the step."""
    busy_ms: tuple[float, ...]
    """The busy time of each stage with all its microbatches."""
    peak_high_bytes: tuple[int, ...]
    """The high end of each stage's peak."""


@dataclass(frozen=True, slots=True)
class _StageCost:
    times_ps: tuple[tuple[int, int], ...]
    """Forward and backward of every chunk."""
    peak_bytes: int
    """High end."""


class Outcomes:
    """Evaluates policies in one model."""

    def __init__(self, costs: PolicyCosts) -> None:
        self._costs = costs
        self._table = CostTable(costs.profile, costs.percentile, "high")
        stages = range(costs.layout.num_stages)
        self._bases = [stage_base(costs.profile, costs.layout, s, "high") for s in stages]
        self._moments = [stage_moments(costs.profile, costs.schedule, s) for s in stages]
        self._known: dict[tuple[object, ...], _StageCost] = {}
        """What is known, by the choices of a stage's layers."""

    def of(
        self,
        policies: Sequence[RecomputePolicy],
        progress: Callable[[float], None] = lambda _: None,
    ) -> list[Outcome]:
        """One outcome for each policy; calls `progress` with the share that is done, 0 to 1.

        Policies that offload or recompute ahead are evaluated one by one.

        Raises: ProfileError if the profile lacks a record, PolicyError if a group spans two chunks.
        """
        copying = [index for index, policy in enumerate(policies) if _is_apart(policy)]
        by_index = {}
        for done, index in enumerate(copying, start=1):
            by_index[index] = _evaluated(self._costs, policies[index])
            progress(done / len(policies))
        rest = [policy for policy in policies if not _is_apart(policy)]
        share = len(copying) / len(policies) if policies else 0.0
        others = iter(self._without_copies(rest, lambda part: progress(share + (1 - share) * part)))
        return [by_index[i] if i in by_index else next(others) for i in range(len(policies))]

    def _without_copies(
        self, policies: Sequence[RecomputePolicy], progress: Callable[[float], None]
    ) -> list[Outcome]:
        if not policies:
            return []
        schedule, layout = self._costs.schedule, self._costs.layout
        rows = [[self._stage(s, policy) for s in range(layout.num_stages)] for policy in policies]
        # `[side, stage, chunk, policy]`, the sides forward and backward
        times = np.array([[stage.times_ps for stage in own] for own in rows], np.int64)
        added = residual_times(self._table, layout).both
        times = np.maximum(times.transpose(3, 1, 2, 0) + added[..., None], 0)
        busy = schedule.num_microbatches * times.sum(axis=(0, 2)) / PS_PER_MS
        return [
            Outcome(step, tuple(stages), tuple(stage.peak_bytes for stage in own))
            for step, stages, own in zip(
                self._steps_ms(times, progress), busy.T.tolist(), rows, strict=True
            )
        ]

    def check(self, policy: RecomputePolicy) -> None:
        """Raise what `of` would for this policy."""
        for stage in range(self._costs.layout.num_stages):
            self._stage(stage, policy)

    def _steps_ms(self, times: Ints, progress: Callable[[float], None]) -> list[float]:
        """Step times of all policies, in ms; equal sets of chunk times are replayed once."""
        schedule = self._costs.schedule
        rows = times.reshape(-1, times.shape[-1])
        different, which = np.unique(rows, axis=1, return_inverse=True)
        unit = step_unit(schedule, float(different.sum(axis=0).max()))
        steps = np.empty(different.shape[1])
        for first in range(0, len(steps), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            forward, backward = (different[:, some] // unit).reshape(*times.shape[:3], -1)
            steps[some] = finished(schedule, forward, backward).max(axis=0) * (unit / PS_PER_MS)
            progress(min(1.0, some.stop / len(steps)))
        return [float(step) for step in steps[which.reshape(-1)]]

    def _stage(self, stage: int, policy: RecomputePolicy) -> _StageCost:
        chunks = self._costs.layout.stages[stage]
        key = stage, *(policy.layers[layer] for chunk in chunks for layer in chunk.layers)
        if key not in self._known:
            columns = [ChunkColumns(c, self._table.chunk_units(c, policy)) for c in chunks]
            times = [
                (sum(u.forward_ps for u in own.units), sum(u.backward_ps for u in own.units))
                for own in columns
            ]
            peak = stage_peak(self._bases[stage], stage, columns, self._moments[stage])
            self._known[key] = _StageCost(tuple(times), peak.bytes)
        return self._known[key]


def _is_apart(policy: RecomputePolicy) -> bool:
    return policy.offloads or policy.is_ahead


def _evaluated(costs: PolicyCosts, policy: RecomputePolicy) -> Outcome:
    cost = costs.of(policy)
    return Outcome(
        cost.step_ms,
        tuple(stage.busy_ms for stage in cost.stages),
        tuple(stage.peak_high_bytes for stage in cost.stages),
    )
