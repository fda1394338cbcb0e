"""Step time and peaks of many policies of one model: `PolicyCosts.of` without its details.

A chunk's cost is computed once for each combination of choices, and all steps are replayed
together: a thousand policies of 126 layers take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.planner.cost.arrays import Ints
from megatron_autorecompute.planner.cost.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.cost.p2p_tensors import Moment
from megatron_autorecompute.planner.cost.peak_memory import (
    StageBase,
    constant_bytes,
    stage_base,
    stage_moments,
    stage_peak,
)
from megatron_autorecompute.planner.cost.policy_cost import PolicyCosts
from megatron_autorecompute.planner.cost.stage_times import residual_times
from megatron_autorecompute.planner.cost.step_time import finished, step_unit
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, CostTable
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy

_AT_ONCE = 64  # replayed together; more would only take memory


@dataclass(frozen=True, slots=True)
class Outcome:
    """Time and peaks of one policy."""

    step_ms: float
    """Time of the step."""
    busy_ms: tuple[float, ...]
    """Per stage, all microbatches."""
    peak_high_bytes: tuple[int, ...]
    """Per stage, high end."""


@dataclass(frozen=True, slots=True)
class _ChunkCost:
    forward_ps: int
    backward_ps: int
    held_bytes: int
    """High end."""
    reach_bytes: tuple[int, int]
    """Highest in a forward and in a backward, on top of everything else; high end."""
    columns: ChunkColumns


class Outcomes:
    """Evaluates policies in one model."""

    def __init__(self, costs: PolicyCosts) -> None:
        self._costs = costs
        self._nominal = CostTable(costs.profile, costs.percentile)
        self._high = CostTable(costs.profile, costs.percentile, "high")
        self._known: dict[tuple[int, int, tuple[LayerPolicy, ...]], _ChunkCost] = {}

    def of(
        self,
        policies: Sequence[RecomputePolicy],
        progress: Callable[[float], None] = lambda _: None,
    ) -> list[Outcome]:
        """One outcome for each policy; calls `progress` with the share that is done, 0 to 1.

        Policies that offload are evaluated one by one, with their copies.

        Raises: ProfileError if the profile lacks a record, PolicyError if a group spans two chunks.
        """
        copying = [index for index, policy in enumerate(policies) if policy.offloads]
        by_index = {}
        for done, index in enumerate(copying, start=1):
            by_index[index] = _evaluated(self._costs, policies[index])
            progress(done / len(policies))
        rest = [policy for policy in policies if not policy.offloads]
        share = len(copying) / len(policies) if policies else 0.0
        others = iter(self._without_copies(rest, lambda part: progress(share + (1 - share) * part)))
        return [by_index[i] if i in by_index else next(others) for i in range(len(policies))]

    def _without_copies(
        self, policies: Sequence[RecomputePolicy], progress: Callable[[float], None]
    ) -> list[Outcome]:
        if not policies:
            return []
        rows = [[self._stage(stage, p) for stage in range(len(self._moments))] for p in policies]
        schedule, layout = self._costs.schedule, self._costs.layout
        # `[side, stage, chunk, policy]`, the sides forward and backward
        times = np.array(
            [[[c.forward_ps, c.backward_ps] for s in p for c in s] for p in rows], np.int64
        )
        times = times.reshape(len(policies), layout.num_stages, layout.num_chunks, 2)
        residual = residual_times(self._nominal, layout)
        added = np.stack([residual.forward, residual.backward])
        times = np.maximum(times.transpose(3, 1, 2, 0) + added[..., None], 0)
        busy = schedule.num_microbatches * times.sum(axis=(0, 2)) / PS_PER_MS
        return [
            Outcome(step, tuple(stages), tuple(map(self._peak, range(len(chunks)), chunks)))
            for step, stages, chunks in zip(
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

    def _stage(self, stage: int, policy: RecomputePolicy) -> list[_ChunkCost]:
        return [self._chunk(stage, i, policy) for i in range(self._costs.layout.num_chunks)]

    def _chunk(self, stage: int, index: int, policy: RecomputePolicy) -> _ChunkCost:
        chunk = self._costs.layout.stages[stage][index]
        key = stage, index, tuple(policy.layers[layer] for layer in chunk.layers)
        if key not in self._known:
            units = self._nominal.chunk_units(chunk, policy)
            columns = ChunkColumns(chunk, self._high.chunk_units(chunk, policy))
            boundary = self._costs.profile.boundary_bytes
            self._known[key] = _ChunkCost(
                sum(unit.forward_ps for unit in units),
                sum(unit.backward_ps for unit in units),
                int(columns.held_bytes.sum()),
                (
                    int(columns.reach_bytes("forward", boundary).max()),
                    int(columns.reach_bytes("backward", boundary).max()),
                ),
                columns,
            )
        return self._known[key]

    def _peak(self, stage: int, chunks: Sequence[_ChunkCost]) -> int:
        moments = self._moments[stage]
        if moments.side_by_side or self._costs.profile.graphs_of_layers:
            columns = [chunk.columns for chunk in chunks]
            return stage_peak(moments.base, stage, columns, moments.moments).bytes
        held = np.array([chunk.held_bytes for chunk in chunks], np.int64)
        reach = np.array([chunk.reach_bytes for chunk in chunks], np.int64)
        highest = (
            moments.constant_bytes
            + moments.in_flight @ held
            + reach[moments.chunk, moments.backward]
        )
        return max(int(highest.max()), moments.optimizer_step_bytes)

    @cached_property
    def _moments(self) -> list[_Moments]:
        return [_moments(self._costs, s) for s in range(self._costs.layout.num_stages)]


def _evaluated(costs: PolicyCosts, policy: RecomputePolicy) -> Outcome:
    cost = costs.of(policy)
    return Outcome(
        cost.step_ms,
        tuple(stage.busy_ms for stage in cost.stages),
        tuple(stage.peak_high_bytes for stage in cost.stages),
    )


@dataclass(frozen=True, slots=True)
class _Moments:
    """A stage's moments as arrays."""

    backward: NDArray[np.intp]
    chunk: NDArray[np.intp]
    in_flight: NDArray[np.int64]
    constant_bytes: NDArray[np.int64]
    optimizer_step_bytes: int
    base: StageBase
    moments: tuple[Moment, ...]

    @property
    def side_by_side(self) -> bool:
        """Whether forwards run beside backwards (EP overlap)."""
        return any(moment.in_parts for moment in self.moments)


def _moments(costs: PolicyCosts, stage: int) -> _Moments:
    base = stage_base(costs.profile, costs.layout, stage, "high")
    moments = stage_moments(costs.profile, costs.schedule, stage)
    return _Moments(
        np.array([moment.direction == "backward" for moment in moments], np.intp),
        np.array([moment.chunk for moment in moments], np.intp),
        np.array([moment.in_flight for moment in moments], np.int64),
        np.array([constant_bytes(base, moment) for moment in moments], np.int64),
        base.static.total_bytes + base.optimizer_step_peak_bytes,
        base,
        moments,
    )
