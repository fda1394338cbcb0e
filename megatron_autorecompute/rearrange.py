"""Of equally fast splits of a stage's recompute over its chunks, one with a shorter bubble.

When two chunks of a stage exchange what they recompute, the stage is as busy as before, but in an
interleaved schedule other stages wait for other chunks. This is a local search: of every stage in
turn the exchange that shortens the step most and keeps the stage in its budget, until none does. It
proves nothing about splits that it did not reach. In place of a long step it replays one of four
groups of microbatches, which fills and drains as the whole does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.cost_model import (
    ChunkColumns,
    CostTable,
    Unit,
    chunk_times_ms,
    residual_ms,
    stage_base,
    stage_loads,
    stage_peak,
)
from megatron_autorecompute.pipeline import Chunk, Layout, Schedule, finished_ms
from megatron_autorecompute.policy import NONE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import Profile

Split = tuple[tuple[LayerPolicy, ...], ...]
"""What a stage does, `[chunk][position]`."""
MOST_AT_ONCE = 1 << 22
"""Events replayed at once, 16 bytes each; candidates beyond them are not tried."""
MOST_EVENTS = 1 << 27
"""Events replayed in all, some seconds: the search ends there with what it has found."""


def rearranged(
    profile: Profile,
    layout: Layout,
    schedule: Schedule,
    policy: RecomputePolicy,
    budgets: Sequence[int],
    percentile: float | None = None,
) -> RecomputePolicy:
    """The policy with chunks' choices exchanged within stages; as it is where nothing is gained.

    Args:
        policy: what to begin with; every stage's busy time stays what it is in it.
        budgets: bytes by stage, kept at the high end of every uncertain figure.
        percentile: MoE imbalance to budget for, in percent.
    """
    if layout.num_chunks == 1:
        return policy
    search = _Search(profile, layout, schedule, policy, budgets, percentile)
    before_ms = search.whole_step_ms()
    stages, unchanged = itertools.cycle(range(layout.num_stages)), 0
    while unchanged < layout.num_stages:
        unchanged = 0 if search.improved(next(stages)) else unchanged + 1
    return put_together(layout, search.splits) if search.whole_step_ms() < before_ms else policy


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
        self.times = _units_of(CostTable(profile, percentile), profile.num_layers)
        self.bytes = _units_of(CostTable(profile, percentile, "high"), profile.num_layers)
        group, number = schedule.group_size, schedule.num_microbatches
        self.short = replace(schedule, num_microbatches=min(number, 4 * group + number % group))
        self.events = 2 * self.short.num_microbatches * layout.num_chunks * layout.num_stages
        self.events_left = MOST_EVENTS
        self.splits: list[Split] = [
            tuple(tuple(policy.layers[layer] for layer in chunk.layers) for chunk in chunks)
            for chunks in layout.stages
        ]
        stages = range(layout.num_stages)
        self.residual_ms = [residual_ms(profile, layout, stage) for stage in stages]
        rows = [self._stage_times(stage, self.splits[stage]) for stage in stages]
        self.forward_ms, self.backward_ms = (np.array(part) for part in zip(*rows, strict=True))
        self.step_ms = float(self._steps_ms(0, [self.splits[0]])[0])

    def whole_step_ms(self) -> float:
        """Of all microbatches, with all stages as they are now."""
        times = self.forward_ms[:, :, None], self.backward_ms[:, :, None]
        return float(finished_ms(self.schedule, *times)[0])

    def improved(self, stage: int) -> bool:
        """Make exchanges in a stage while they shorten the step; whether one did."""
        found = False
        while self._exchanged(stage):
            found = True
        return found

    def _exchanged(self, stage: int) -> bool:
        most = max(1, MOST_AT_ONCE // self.events)
        candidates = list(itertools.islice(self._exchanges(stage), most))
        self.events_left -= self.events * len(candidates)
        if not candidates or self.events_left < 0:
            return False
        steps_ms = self._steps_ms(stage, candidates)
        for best in np.argsort(steps_ms, kind="stable"):
            # By more than a rounding error, or two splits could take turns for ever.
            if steps_ms[best] >= self.step_ms * (1 - 1e-9):
                return False
            if self._peak_bytes(stage, candidates[best]) <= self.budgets[stage]:
                self.splits[stage] = candidates[best]
                times = self._stage_times(stage, candidates[best])
                self.forward_ms[stage], self.backward_ms[stage] = times
                self.step_ms = float(steps_ms[best])
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

    def _steps_ms(self, stage: int, splits: Sequence[Split]) -> NDArray[np.float64]:
        """Time of the short step with each split in a stage, all else as it is."""
        forward, backward = (
            np.repeat(times[:, :, None], len(splits), axis=2)
            for times in (self.forward_ms, self.backward_ms)
        )
        for number, split in enumerate(splits):
            forward[stage, :, number], backward[stage, :, number] = self._stage_times(stage, split)
        return finished_ms(self.short, forward, backward)

    def _stage_times(self, stage: int, split: Split) -> tuple[list[float], list[float]]:
        (forward,), (backward,) = chunk_times_ms([self._units(self.times, stage, split)])
        backward[-1] += self.residual_ms[stage]
        return forward, backward

    def _peak_bytes(self, stage: int, split: Split) -> int:
        units = self._units(self.bytes, stage, split)
        chunks = self.layout.stages[stage]
        columns = [ChunkColumns(chunk, own) for chunk, own in zip(chunks, units, strict=True)]
        base = stage_base(self.profile, self.layout, stage, "high")
        loads = stage_loads(self.profile, self.schedule, stage)
        return stage_peak(base, self.schedule, stage, columns, loads).bytes

    def _units(self, of: _UnitsOf, stage: int, split: Split) -> list[tuple[Unit, ...]]:
        return [of(*pair) for pair in zip(self.layout.stages[stage], split, strict=True)]


_UnitsOf = Callable[[Chunk, tuple[LayerPolicy, ...]], tuple[Unit, ...]]


def _units_of(table: CostTable, num_layers: int) -> _UnitsOf:
    """The units of a chunk under its layers' choices, each pair worked out once."""
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
