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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_autorecompute.planner.arrays import Ints
from megatron_autorecompute.planner.layout import Chunk, Layout
from megatron_autorecompute.planner.peak_memory import (
    ChunkColumns,
    stage_base,
    stage_moments,
    stage_peak,
)
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.planner.stage_times import residual_times, times_of
from megatron_autorecompute.planner.step_time import finished, step_unit
from megatron_autorecompute.planner.unit_costs import CostTable, Unit
from megatron_autorecompute.policy import NONE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import Profile

Split = tuple[tuple[LayerPolicy, ...], ...]
"""A stage's choices, `[chunk][position]`."""
MOST_AT_ONCE = 1 << 22
"""Events replayed at once, 16 bytes each; candidates beyond them are not tried."""
MOST_EVENTS = 1 << 24
"""Events replayed in total, less than a second; then the search ends with the best split so far."""
_AS_MANY = 16
"""Candidates that are about as much work to replay as one."""


def with_exchanges(
    profile: Profile,
    layout: Layout,
    schedule: Schedule,
    policy: RecomputePolicy,
    budgets: Sequence[int],
    percentile: float | None = None,
) -> RecomputePolicy:
    """Exchange choices between chunks within stages; returns `policy` itself if nothing is gained.

    Args:
        profile: what every choice costs.
        layout: which stage and chunk holds which layers.
        schedule: the order of forwards and backwards.
        policy: the policy to begin with; every stage's busy time stays the same.
        budgets: bytes by stage, met by the high end of every uncertain figure.
        percentile: MoE imbalance to budget for, in percent.
    """
    if layout.num_chunks == 1:
        return policy
    search = _Search(profile, layout, schedule, policy, budgets, percentile)
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


class _Search:
    def __init__(
        self,
        profile: Profile,
        layout: Layout,
        schedule: Schedule,
        policy: RecomputePolicy,
        budgets: Sequence[int],
        percentile: float | None,
    ) -> None:
        self.profile, self.layout, self.schedule, self.budgets = profile, layout, schedule, budgets
        self.units = _units_of(CostTable(profile, percentile), profile.num_layers)
        self.high_units = _units_of(CostTable(profile, percentile, "high"), profile.num_layers)
        group, number = schedule.group_size, schedule.num_microbatches
        self.short = replace(schedule, num_microbatches=min(number, 4 * group + number % group))
        self.events = 2 * self.short.num_microbatches * layout.num_chunks * layout.num_stages
        self.events_left = MOST_EVENTS
        self.splits: list[Split] = [
            tuple(tuple(policy.layers[layer] for layer in chunk.layers) for chunk in chunks)
            for chunks in layout.stages
        ]
        self.residual = residual_times(CostTable(profile), layout)
        own = [self._units_of_stage(self.units, *pair) for pair in enumerate(self.splits)]
        self.times = times_of(own).plus(self.residual)
        self.unit = step_unit(schedule, float(self.times.busy.sum()))
        self.step = int(self._steps(0, [self.splits[0]])[0])

    def whole_step(self) -> int:
        """Picoseconds of the whole step, with the present choices of all stages."""
        forward, backward = self.times.forward // self.unit, self.times.backward // self.unit
        return int(finished(self.schedule, forward, backward).max())

    def improved(self, stage: int) -> bool:
        """Make exchanges in a stage while they shorten the step; returns whether one did."""
        found = False
        while self._exchanged(stage):
            found = True
        return found

    def _exchanged(self, stage: int) -> bool:
        most = max(1, MOST_AT_ONCE // self.events)
        candidates = list(itertools.islice(self._exchanges(stage), most))
        self.events_left -= self.events * max(len(candidates), _AS_MANY)
        if not candidates or self.events_left < 0:
            return False
        steps = self._steps(stage, candidates)
        for best in np.argsort(steps, kind="stable"):
            if steps[best] >= self.step:
                return False
            if self._peak_bytes(stage, candidates[best]) <= self.budgets[stage]:
                self._put(self.times.forward, self.times.backward, stage, candidates[best])
                self.splits[stage] = candidates[best]
                self.step = int(steps[best])
                return True
        return False

    def _exchanges(self, stage: int) -> Iterator[Split]:
        """Between chunks of the same kinds: all of their choices, or those of one position."""
        chunks, split = self.layout.stages[stage], self.splits[stage]
        kinds = [[self.profile.kind_of(i).name for i in chunk.layers] for chunk in chunks]
        for a, b in itertools.combinations(range(len(chunks)), 2):
            if kinds[a] != kinds[b] or split[a] == split[b]:
                continue
            yield _with(split, {a: split[b], b: split[a]})
            for at, (one, other) in enumerate(zip(split[a], split[b], strict=True)):
                if one != other and one.group == other.group == 1 and len(split[a]) > 1:
                    yield _with(split, {a: _at(split[a], at, other), b: _at(split[b], at, one)})

    def _steps(self, stage: int, splits: Sequence[Split]) -> Ints:
        """Time of the short step with each of the splits in a stage, the other stages unchanged."""
        forward, backward = (
            np.repeat(times[:, :, None], len(splits), axis=2)
            for times in (self.times.forward, self.times.backward)
        )
        for number, split in enumerate(splits):
            self._put(forward[..., number], backward[..., number], stage, split)
        steps: Ints = finished(self.short, forward // self.unit, backward // self.unit).max(axis=0)
        return steps

    def _put(self, forward: Ints, backward: Ints, stage: int, split: Split) -> None:
        """Set one stage's times where its choices change."""
        before = zip(self.layout.stages[stage], split, self.splits[stage], strict=True)
        for c, (chunk, own, now) in enumerate(before):
            if own is not now:
                units = self.units(chunk, own)
                forward_ps = sum(unit.forward_ps for unit in units)
                backward_ps = sum(unit.backward_ps for unit in units)
                forward[stage, c] = max(forward_ps + int(self.residual.forward[stage, c]), 0)
                backward[stage, c] = max(backward_ps + int(self.residual.backward[stage, c]), 0)

    def _peak_bytes(self, stage: int, split: Split) -> int:
        units = self._units_of_stage(self.high_units, stage, split)
        chunks = self.layout.stages[stage]
        columns = [ChunkColumns(chunk, own) for chunk, own in zip(chunks, units, strict=True)]
        base = stage_base(self.profile, self.layout, stage, "high")
        moments = stage_moments(self.profile, self.schedule, stage)
        return stage_peak(base, stage, columns, moments).bytes

    def _units_of_stage(self, of: _UnitsOf, stage: int, split: Split) -> list[tuple[Unit, ...]]:
        return [of(*pair) for pair in zip(self.layout.stages[stage], split, strict=True)]


_UnitsOf = Callable[[Chunk, tuple[LayerPolicy, ...]], tuple[Unit, ...]]


def _units_of(table: CostTable, num_layers: int) -> _UnitsOf:
    """A function for the units of a chunk under its layers' choices; it computes each pair once."""
    known: dict[tuple[Chunk, tuple[LayerPolicy, ...]], tuple[Unit, ...]] = {}

    def units(chunk: Chunk, policies: tuple[LayerPolicy, ...]) -> tuple[Unit, ...]:
        if (chunk, policies) not in known:
            layers = [NONE] * num_layers
            for layer, choice in zip(chunk.layers, policies, strict=True):
                layers[layer] = choice
            known[chunk, policies] = table.chunk_units(chunk, RecomputePolicy(tuple(layers)))
        return known[chunk, policies]

    return units


def _with(split: Split, changed: dict[int, tuple[LayerPolicy, ...]]) -> Split:
    return tuple(changed.get(number, own) for number, own in enumerate(split))


def _at(
    policies: tuple[LayerPolicy, ...], position: int, choice: LayerPolicy
) -> tuple[LayerPolicy, ...]:
    return (*policies[:position], choice, *policies[position + 1 :])
