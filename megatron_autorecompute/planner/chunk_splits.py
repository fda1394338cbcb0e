"""Shortens the bubble by moving recompute between the chunks of a stage.

When two chunks of a stage exchange what they recompute, the stage is as busy as before, but in an
interleaved schedule other stages then wait longer or shorter. This is a local search: stage by
stage it makes the exchange that shortens the step most and keeps the stage in its budget, until
there is none. It proves nothing about splits that it did not reach: `step_search` begins with what
it finds. Instead of a long step it replays one of four groups of microbatches, which fills and
drains as the whole does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_autorecompute.planner.arrays import Ints
from megatron_autorecompute.planner.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.layout import Chunk, Layout
from megatron_autorecompute.planner.peak_memory import (
    StageBase,
    stage_base,
    stage_moments,
    stage_peak,
)
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.planner.stage_times import residual_times
from megatron_autorecompute.planner.step_time import finished, step_unit
from megatron_autorecompute.planner.unit_costs import CostTable
from megatron_autorecompute.policy import NONE, LayerPolicy, RecomputePolicy

Split = tuple[tuple[LayerPolicy, ...], ...]
"""A stage's choices, `[chunk][position]`."""
MOST_AT_ONCE = 1 << 22
"""Events replayed at once, 16 bytes each; candidates beyond them are not tried."""
MOST_EVENTS = 1 << 24
"""Events replayed in total, less than a second; then the search ends with the best split so far."""
_AS_MANY = 16
"""Candidates that are about as much work to replay as one."""
_EVENTS_OF_A_CANDIDATE = 1 << 10
"""It is as much work to set one up as to replay so many."""
_EVENTS_OF_A_PEAK = 1 << 14
"""The same for the peak of one."""


def with_exchanges(
    table: CostTable,
    layout: Layout,
    schedule: Schedule,
    policy: RecomputePolicy,
    budgets: Sequence[int],
) -> RecomputePolicy:
    """Exchange choices between chunks within stages; returns `policy` itself if nothing is gained.

    Args:
        table: what every choice costs, at the high end of every uncertain figure.
        layout: which stage and chunk holds which layers.
        schedule: the order of forwards and backwards.
        policy: the policy to begin with; every stage's busy time stays the same.
        budgets: bytes by stage.
    """
    if layout.num_chunks == 1:
        return policy
    search = _Search(table, layout, schedule, policy, budgets)
    before = search.whole_step()
    stages, unchanged = itertools.cycle(range(layout.num_stages)), 0
    while unchanged < layout.num_stages:
        unchanged = 0 if search.improved(next(stages)) else unchanged + 1
    return put_together(layout, search.splits) if search.whole_step() < before else policy


def put_together(layout: Layout, splits: Sequence[Split]) -> RecomputePolicy:
    """The policy of all layers from every stage's split."""
    choices = {
        layer: choice
        for chunks, split in zip(layout.stages, splits, strict=True)
        for chunk, policies in zip(chunks, split, strict=True)
        for layer, choice in zip(chunk.layers, policies, strict=True)
    }
    return RecomputePolicy(tuple(choices[layer] for layer in range(len(choices))))


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Two chunks of a stage exchange all of their choices, or those of one position."""

    one: int
    other: int
    at: int | None = None

    def made(self, split: Split) -> Split:
        """The split after it."""
        one, other = split[self.one], split[self.other]
        if self.at is not None:
            choices = one[self.at], other[self.at]
            one, other = _at(other, self.at, choices[0]), _at(one, self.at, choices[1])
        changed = {self.one: other, self.other: one}
        return tuple(changed.get(number, own) for number, own in enumerate(split))


def _at(
    policies: tuple[LayerPolicy, ...], position: int, choice: LayerPolicy
) -> tuple[LayerPolicy, ...]:
    return (*policies[:position], choice, *policies[position + 1 :])


class _Search:
    def __init__(
        self,
        table: CostTable,
        layout: Layout,
        schedule: Schedule,
        policy: RecomputePolicy,
        budgets: Sequence[int],
    ) -> None:
        self.table, self.profile = table, table.profile
        self.layout, self.schedule, self.budgets = layout, schedule, budgets
        group, number = schedule.group_size, schedule.num_microbatches
        self.short = replace(schedule, num_microbatches=min(number, 4 * group + number % group))
        self.events = 2 * self.short.num_microbatches * layout.num_chunks * layout.num_stages
        self.events_left = MOST_EVENTS
        self.splits: list[Split] = [
            tuple(tuple(policy.layers[layer] for layer in chunk.layers) for chunk in chunks)
            for chunks in layout.stages
        ]
        self._bases: dict[int, StageBase] = {}
        self._columns: dict[tuple[int, int], ChunkColumns] = {}
        self._of_layers: dict[tuple[int, LayerPolicy], tuple[int, int]] = {}
        residual = residual_times(self.table, layout)
        self.residual: Ints = np.stack([residual.forward, residual.backward])
        own = [
            [self.table.chunk_times_ps(chunk, policy) for chunk in chunks]
            for chunks in layout.stages
        ]
        self.own: Ints = np.moveaxis(np.array(own, np.int64), 2, 0)
        """`[direction, stage, chunk]` of the layers."""
        self.unit = step_unit(schedule, float(self._times().sum()))
        self.step = int(finished(self.short, *(self._times() // self.unit)).max())

    def _times(self) -> Ints:
        """`[direction, stage, chunk]` with residuals."""
        times: Ints = np.maximum(self.own + self.residual, 0)
        return times

    def whole_step(self) -> int:
        """The whole step, in units, with the present choices of all stages."""
        return int(finished(self.schedule, *(self._times() // self.unit)).max())

    def improved(self, stage: int) -> bool:
        """Make exchanges in a stage while they shorten the step; returns whether one did."""
        found = False
        while self._exchanged(stage):
            found = True
        return found

    def _exchanged(self, stage: int) -> bool:
        most = max(1, MOST_AT_ONCE // self.events)
        candidates = list(itertools.islice(self._exchanges(stage), most))
        each = self.events + _EVENTS_OF_A_CANDIDATE
        self.events_left -= each * max(len(candidates), _AS_MANY)
        if not candidates or self.events_left < 0:
            return False
        own = self._own_after(stage, candidates)
        steps = self._steps(stage, own)
        for best in np.argsort(steps, kind="stable").tolist():
            if steps[best] >= self.step or self.events_left < 0:
                return False
            self.events_left -= _EVENTS_OF_A_PEAK
            split = candidates[best].made(self.splits[stage])
            columns = self._columns_of(stage, split)
            if self._peak_bytes(stage, columns) <= self.budgets[stage]:
                self._columns.update(((stage, c), own) for c, own in enumerate(columns))
                self.own[:, stage], self.splits[stage] = own[..., best], split
                self.step = int(steps[best])
                return True
        return False

    def _exchanges(self, stage: int) -> Iterator[_Exchange]:
        """Between chunks of the same kinds."""
        split = self.splits[stage]
        for a, b in itertools.combinations(range(len(split)), 2):
            if self.kinds[stage][a] != self.kinds[stage][b] or split[a] == split[b]:
                continue
            yield _Exchange(a, b)
            for at, (one, other) in enumerate(zip(split[a], split[b], strict=True)):
                if one != other and one.group == other.group == 1 and len(split[a]) > 1:
                    yield _Exchange(a, b, at)

    @cached_property
    def kinds(self) -> list[list[list[str]]]:
        """Names of the layers' kinds, by stage and chunk."""
        owner = {layer: kind.name for kind in self.profile.kinds for layer in kind.layers}
        return [
            [[owner[layer] for layer in chunk.layers] for chunk in chunks]
            for chunks in self.layout.stages
        ]

    def _steps(self, stage: int, own: Ints) -> Ints:
        """The short step with each of some own times in a stage, the other stages unchanged."""
        times = np.repeat(self._times()[..., None], own.shape[-1], axis=-1)
        times[:, stage] = np.maximum(own + self.residual[:, stage, :, None], 0)
        steps: Ints = finished(self.short, *(times // self.unit)).max(axis=0)
        return steps

    def _own_after(self, stage: int, exchanges: Sequence[_Exchange]) -> Ints:
        """A stage's own times after each exchange, `[direction, chunk, exchange]`."""
        own = np.repeat(self.own[:, stage, :, None], len(exchanges), axis=-1)
        for number, exchange in enumerate(exchanges):
            pair = exchange.one, exchange.other
            for c, other in (pair, pair[::-1]):
                own[:, c, number] += self._added_ps(stage, c, other, exchange.at)
        return own

    def _added_ps(self, stage: int, c: int, other: int, at: int | None) -> tuple[int, int]:
        """What it adds to a chunk's forward and backward to get choices of another chunk."""
        chunk, split = self.layout.stages[stage][c], self.splits[stage]
        if at is not None:
            now, then = (self._layer_ps(chunk, at, split[i][at]) for i in (c, other))
            return then[0] - now[0], then[1] - now[1]
        forward, backward = self.table.chunk_times_ps(chunk, self._policy(chunk, split[other]))
        now_forward, now_backward = self.own[:, stage, c].tolist()
        return forward - now_forward, backward - now_backward

    def _layer_ps(self, chunk: Chunk, at: int, choice: LayerPolicy) -> tuple[int, int]:
        """Forward and backward of a layer."""
        asked = chunk.layers[at], choice
        if asked not in self._of_layers:
            unit = self.table.layer_in(chunk, chunk.layers[at], choice)
            self._of_layers[asked] = unit.forward_ps, unit.backward_ps
        return self._of_layers[asked]

    def _policy(self, chunk: Chunk, policies: tuple[LayerPolicy, ...]) -> RecomputePolicy:
        """Choices of a chunk, as a policy."""
        layers = [NONE] * self.profile.num_layers
        for layer, choice in zip(chunk.layers, policies, strict=True):
            layers[layer] = choice
        return RecomputePolicy(tuple(layers))

    def _columns_of(self, stage: int, split: Split) -> list[ChunkColumns]:
        return [
            self._columns[stage, c]
            if own is self.splits[stage][c] and (stage, c) in self._columns
            else ChunkColumns(chunk, self.table.chunk_units(chunk, self._policy(chunk, own)))
            for c, (chunk, own) in enumerate(zip(self.layout.stages[stage], split, strict=True))
        ]

    def _peak_bytes(self, stage: int, columns: Sequence[ChunkColumns]) -> int:
        if stage not in self._bases:
            self._bases[stage] = stage_base(self.profile, self.layout, stage, "high")
        moments = stage_moments(self.profile, self.schedule, stage)
        return stage_peak(self._bases[stage], stage, columns, moments).bytes
