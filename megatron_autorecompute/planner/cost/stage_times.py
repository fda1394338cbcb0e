"""Time of one microbatch on every stage and chunk, in whole picoseconds.

What a stage was measured to take besides its layers is its *residual*. It is divided over forwards
and backwards in proportion to the least time of each, so that none becomes negative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_autorecompute.planner.cost import Ints
from megatron_autorecompute.planner.cost.layout import Chunk, Layout
from megatron_autorecompute.planner.cost.peak_memory import stage_base
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, CostTable, StageUnits, Unit


@dataclass(frozen=True, slots=True)
class Times:
    """Forward and backward, recompute included."""

    forward: Ints
    """`[stage, chunk]`"""
    backward: Ints
    """`[stage, chunk]`"""
    ahead: Ints | None = None
    """The part of the backward that may begin before the gradient is there; None: nothing."""

    def plus(self, other: Times) -> Times:
        """The sum with other times; negative results become 0."""
        backward = np.maximum(self.backward + other.backward, 0)
        ahead = None if self.ahead is None else np.minimum(self.ahead, backward)
        return Times(np.maximum(self.forward + other.forward, 0), backward, ahead)

    @property
    def both(self) -> Ints:
        """Forward and backward, `[direction, stage, chunk]`."""
        return np.stack([self.forward, self.backward])

    @property
    def busy(self) -> Ints:
        """Forward plus backward of all chunks, of shape [stage]."""
        busy: Ints = self.forward.sum(axis=1) + self.backward.sum(axis=1)
        return busy


def times_of(units: StageUnits) -> Times:
    """Times of the units of every stage and chunk, `[stage][chunk]`."""

    def sums(figure: Callable[[Unit], int]) -> Ints:
        return np.array([[sum(map(figure, own)) for own in stage] for stage in units], np.int64)

    ahead = sums(lambda unit: unit.ahead_ps)
    forward, backward = sums(lambda unit: unit.forward_ps), sums(lambda unit: unit.backward_ps)
    return Times(forward, backward, ahead if ahead.any() else None)


def residual_times(table: CostTable, layout: Layout) -> Times:
    """The residuals, which are added to the times of every policy."""
    found = np.zeros((2, layout.num_stages, layout.num_chunks), np.int64)
    for stage, chunks in enumerate(layout.stages):
        if not stage_base(table.profile, layout, stage).measured:
            continue
        residual = round(table.profile.stages[stage].residual_ms * PS_PER_MS)
        if residual:
            least = np.array([least_times(table, chunk) for chunk in chunks]).T
            if not least.any():
                least[1, -1] = 1  # all in the last backward
            share = max(residual / int(least.sum()), -1.0)
            found[:, stage] = np.rint(share * least)
    return Times(*found)


def least_times(table: CostTable, chunk: Chunk) -> tuple[int, int]:
    """The least time of a chunk's forward, and of its backward, without groups."""
    before, after = table.pseudo_layers(chunk)
    options = [
        [table.layer_in(chunk, layer, choice) for choice in table.choices(layer)]
        for layer in chunk.layers
    ]
    options += [[unit] for unit in (*before, *after)]
    return (
        sum(min(unit.forward_ps for unit in units) for units in options),
        sum(min(unit.backward_ps for unit in units) for units in options),
    )
