"""Least times of every stage with every run of layers that it may have, as far as they are known.

Layouts have one chunk per stage. Times are lower bounds: at first those of a stage without a
budget, later those of the exact search of the stage, which is asked only for runs that may matter.
They are in units of the replay, in arrays of shape [stage, first layer, number of layers].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megatron_autorecompute.planner.arrays import Bools, Ints
from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.planner.layout_search.flags import one_chunk_each
from megatron_autorecompute.planner.p2p_tensors import Moment
from megatron_autorecompute.planner.peak_memory import stage_base, stage_moments
from megatron_autorecompute.planner.planner import Planner
from megatron_autorecompute.planner.stage_search.problem import (
    ChunkProblem,
    StageChoice,
    chunk_problem,
    stage_problem,
)
from megatron_autorecompute.planner.stage_search.search import StageSearch
from megatron_autorecompute.planner.stage_search.side_by_side import true_peak
from megatron_autorecompute.planner.stage_times import residual_times
from megatron_autorecompute.planner.step_search.stage_options import StageOptions
from megatron_autorecompute.planner.step_time import step_unit
from megatron_autorecompute.planner.unit_costs import PS_PER_MS, CostTable
from megatron_autorecompute.policy import FULL

NEVER = 1 << 60
"""Time of what does not fit, or is no run of that stage; sums of other times stay below."""
Place = tuple[int, int, int]
"""(stage, first layer, number of layers)"""
_Key = tuple[int, int, bool]
"""(stage, number of the run's kinds, whether this very run was measured)"""
_HEADROOM = 8.0
"""By which sums of times stay below `NEVER`."""


class StageCosts:
    """What is known of the times of stages.

    Args:
        planner: of any layout with one chunk per stage.
        budgets: bytes, of every stage.
        below_ms: of a step; runs that take longer in themselves are left out.
    """

    def __init__(self, planner: Planner, budgets: Sequence[int], below_ms: float) -> None:
        self.planner, self.budgets = planner, budgets
        self.stages, self.layers = planner.layout.num_stages, planner.layout.num_layers
        self._table = CostTable(planner.profile, planner.percentile, "high")
        times = LayerTimes(self._table, planner.layout)
        self._times = times
        self.most_layers = times.most_layers(
            below_ms * PS_PER_MS / planner.schedule.num_microbatches
        )
        self.unit = step_unit(planner.schedule, _HEADROOM * times.most_ps)
        self.is_run = self._runs()
        self._residual = self._measured()
        self._kinds = self._numbered_kinds()
        shape = self.is_run.shape
        self._own, self._forward = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._backward, self._most_forward = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._fill(times)
        self._without_budget = self._own.copy()
        self.searched: Bools = np.zeros(shape, np.bool_)
        """Runs whose exact search was asked."""
        self._chunks: dict[tuple[int, bool, bool], ChunkProblem] = {}
        self._searches: dict[_Key, StageSearch] = {}
        self._choices: dict[_Key, StageChoice | None] = {}
        self._closer: dict[tuple[_Key, int, int], int] = {}
        self._places_of: dict[_Key, tuple[int, Ints, Ints]] = {}

    # --- runs -------------------------------------------------------------------------------------

    def _runs(self) -> Bools:
        first = np.arange(self.layers + 1)[:, None]
        after = first + np.arange(self.most_layers + 1)
        is_run: Bools = np.repeat((after <= self.layers)[None], self.stages, axis=0)
        is_run[0] &= first == 0
        is_run[-1] &= after == self.layers
        return is_run

    def _measured(self) -> dict[Place, tuple[int, int]]:
        """Runs that were measured on their stage: what is added to forward and backward, ps."""
        profile, found = self.planner.profile, dict[Place, tuple[int, int]]()
        for stage in range(self.stages if len(profile.stages) == self.stages else 0):
            own = sorted(i for i in profile.stages[stage].layers if i < self.layers)
            first = own[0] if own else (self.layers if stage else 0)
            place = stage, first, len(own)
            if len(own) > self.most_layers or not self.is_run[place]:
                continue
            layout = self.layout_with(place)
            if stage_base(profile, layout, stage).measured:
                times = residual_times(CostTable(profile), layout)
                found[place] = int(times.forward[stage, 0]), int(times.backward[stage, 0])
        return found

    def _numbered_kinds(self) -> Ints:
        """Runs of layers that cost the same have the same number, `[first, number of layers]`."""
        model, kind_of = self.planner.profile.model, self.planner.profile.kind_of
        names = [(kind_of(i).name, i < model.encoder_layers) for i in range(self.layers)]
        known: dict[object, int] = {}
        numbers = np.full(self.is_run.shape[1:], -1, np.int64)
        for first in range(self.layers + 1):
            for count in range(min(self.most_layers, self.layers - first) + 1):
                run = tuple(names[first : first + count]), count and first + count == self.layers
                numbers[first, count] = known.setdefault(run, len(known))
        return numbers

    def layout_with(self, place: Place) -> Layout:
        """Some layout with this run on this stage."""
        stage, first, count = place
        sizes = [0] * self.stages
        sizes[stage] = count
        sizes[0] += first if stage else 0
        sizes[-1] += self.layers - first - count if stage < self.stages - 1 else 0
        return self.layout(sizes)

    def layout(self, sizes: Sequence[int]) -> Layout:
        """Of so many decoder layers on every stage."""
        return one_chunk_each(sizes, self.planner.layout.mtp_num_layers)

    def _key(self, place: Place) -> _Key:
        stage, first, count = place
        return stage, int(self._kinds[first, count]), place in self._residual

    def _places(self, key: _Key) -> tuple[int, Ints, Ints]:
        """Where the runs are that cost the same: stage, first layers, numbers of layers."""
        if key not in self._places_of:
            stage, number, measured = key
            was_measured = np.zeros(self._kinds.shape, np.bool_)
            for place in self._residual:
                was_measured[place[1:]] |= place[0] == stage
            alike = (self._kinds == number) & self.is_run[stage] & (was_measured == measured)
            first, count = np.nonzero(alike)
            self._places_of[key] = stage, first, count
        return self._places_of[key]

    # --- times ------------------------------------------------------------------------------------

    def _fill(self, times: LayerTimes) -> None:
        """The times without a budget."""
        first = np.arange(self.layers + 1)[:, None]
        after = np.minimum(first + np.arange(self.most_layers + 1), self.layers)
        for stage in range(self.stages):
            ends = times.ends(embedding=stage == 0, head=stage == self.stages - 1)
            low = times.before[:, after] - times.before[:, first] + ends[:, None, None]
            self._own[stage] = low[0] // self.unit - (self.unit > 1)
            self._forward[stage], self._backward[stage] = low[1:3] // self.unit
            self._most_forward[stage] = -(-low[3] // self.unit)
        for place, (forward_ps, backward_ps) in self._residual.items():
            self._own[place] += (forward_ps + backward_ps) // self.unit
            self._forward[place] += forward_ps // self.unit
            self._backward[place] += backward_ps // self.unit
            self._most_forward[place] += -(-forward_ps // self.unit)
        for least in (self._own, self._forward, self._backward):
            np.maximum(least, 0, out=least)

    @cached_property
    def _more_layers_take_longer(self) -> bool:
        """Whether a layer more at the end of a run makes it no leaner, and adds its least time.

        Choices that fit fit as well without the last layer, if a checkpoint of any number of layers
        may be one of fewer, and costs no more then.
        """
        profile, only = self.planner.profile, self.planner.only
        records = [record for kind in profile.kinds for record in kind.choices]
        checkpoints = [record for record in records if record.policy.granularity == "full"]
        alone = only is None or FULL in only.choices or not only.groups
        return alone and all(r.policy.group == 1 and r.input_kept for r in checkpoints)

    def _total(self) -> Ints:
        """At least what a forward and a backward take together."""
        found = self._own.copy()
        if self._more_layers_take_longer:
            added = self._own - self._without_budget
            for place in self._residual:
                added[place] = 0
            added = np.maximum.accumulate(added, axis=2)
            longer = np.where(added >= NEVER // 2, NEVER, self._without_budget + added)
            for place in self._residual:
                longer[place] = 0
            np.maximum(found, longer, out=found)
        found[~self.is_run] = NEVER
        return found

    def on_paths(self, weights: Ints) -> Ints:
        """At least what runs take on some paths, `[path, stage, first layer, number of layers]`.

        Args:
            weights: how often each event is on the path, `[path, direction, stage]`.
        """
        total = self._total()
        least_backward = np.maximum(self._backward, total - self._most_forward)
        found = np.empty((len(weights), *total.shape), np.int64)
        for own, path in zip(found, weights, strict=True):
            forward, backward = path[:, :, None, None]
            both = np.minimum(forward, backward)
            own[:] = both * total + (forward - both) * self._forward
            own += (backward - both) * least_backward
            for (key, *counts), value in self._closer.items():
                if counts == path[:, key[0]].tolist():
                    at = self._places(key)
                    own[at] = np.maximum(own[at], value)
            own[total >= NEVER] = NEVER
        return found

    def mean_times(self) -> tuple[int, int]:
        """Forward and backward of a stage if all were alike and fast, in units."""
        whole = self._times.before[:, -1] // (self.stages * self.unit)
        return max(1, int(whole[1])), max(1, int(whole[2]))

    # --- searches ---------------------------------------------------------------------------------

    def search(self, place: Place) -> StageChoice | None:
        """The least busy choices of a run on a stage; None where none fit its budget."""
        key = self._key(place)
        if key not in self._choices:
            self._choices[key] = self._search(place, key).fastest(self.budgets[place[0]])
            self._take_over(key)
        return self._choices[key]

    def _take_over(self, key: _Key) -> None:
        choice, at = self._choices[key], self._places(key)
        self.searched[at] = True
        if choice is None:
            self._own[at] = NEVER
            return
        residual = sum(self._residual[_place(at)]) if key[2] else 0
        least = (choice.bound_ps + residual) // self.unit - (self.unit > 1)
        self._own[at] = np.maximum(self._own[at], least)

    def _search(self, place: Place, key: _Key) -> StageSearch:
        if key not in self._searches:
            stage, profile = place[0], self.planner.profile
            layout = self.layout_with(place)
            base = stage_base(profile, layout, stage, "high")
            (chunk,) = layout.stages[stage]
            same = key[1], chunk.embedding, chunk.head
            if same not in self._chunks:
                self._chunks[same] = chunk_problem(self._table, chunk, base, self.planner.only)
            peak = true_peak(self._table, layout.stages[stage], base, self._moments[stage])
            problem = stage_problem([self._chunks[same]], self._moments[stage], base, peak)
            self._searches[key] = StageSearch(problem)
        return self._searches[key]

    @cached_property
    def _moments(self) -> list[tuple[Moment, ...]]:
        profile, schedule = self.planner.profile, self.planner.schedule
        return [stage_moments(profile, schedule, stage) for stage in range(self.stages)]

    def times(self, place: Place) -> tuple[int, int]:
        """Forward and backward of the least busy choices of a run, in units of the replay."""
        choice, key = self.search(place), self._key(place)
        assert choice is not None  # asked of runs that fit
        (chunk,) = self._searches[key].problem.chunks
        own_ps = chunk.times_ps(choice.policies[0])
        pairs = zip(own_ps, self._residual.get(place, (0, 0)), strict=True)
        forward, backward = (max(own + more, 0) // self.unit for own, more in pairs)
        return forward, backward

    def look_closer(self, place: Place, weights: tuple[int, int]) -> bool:
        """Search a run for the least time where events count so often; whether that was not known.

        The run is one that fits.
        """
        key, choice = self._key(place), self.search(place)
        known = (key, *weights)
        if known in self._closer or weights[0] == weights[1] or choice is None:
            return False
        search, residual = self._searches[key], self._residual.get(place, (0, 0))
        nothing = np.zeros((2, 1), np.int64)
        options = StageOptions(search, self.budgets[place[0]], nothing, 1, choice)
        found_ps = options.least(np.array(weights, np.int64)[:, None], exact=True).bound_ps
        found_ps += weights[0] * residual[0] + weights[1] * residual[1]
        self._closer[known] = max(0, found_ps // self.unit - sum(weights) * (self.unit > 1))
        return True


def _place(at: tuple[int, Ints, Ints]) -> Place:
    """The only one of some places."""
    return at[0], int(at[1][0]), int(at[2][0])


class LayerTimes:
    """Times of single layers without a budget, in picoseconds."""

    def __init__(self, table: CostTable, layout: Layout) -> None:
        self.table = table
        decoder = [self._limits(layer) for layer in range(layout.num_layers)]
        depths = [self._limits(layout.num_layers + depth) for depth in range(layout.mtp_num_layers)]
        self._of_depths = np.array(depths, np.int64).reshape(-1, 4).sum(axis=0)
        nothing = np.zeros((4, 1), np.int64)
        self.before: Ints = np.hstack([nothing, np.array(decoder, np.int64).T.cumsum(axis=1)])
        """Of the layers before each: least time, least forward, least backward, most forward."""

    def most_layers(self, time_ps: float) -> int:
        """Of a stage whose forward and backward take no longer than this."""
        before = self.before[0]
        counts = range(1, len(before))
        return max((n for n in counts if (before[n:] - before[:-n]).min() <= time_ps), default=0)

    def ends(self, *, embedding: bool, head: bool) -> Ints:
        """The same of what a stage has besides its decoder layers."""
        profile, found = self.table.profile, np.zeros(4, np.int64)
        records = [profile.embedding] * embedding + [profile.head] * head
        for record in records:
            forward, backward = (
                round(ms * PS_PER_MS) for ms in (record.forward_ms, record.backward_ms)
            )
            found += np.array([forward + backward, forward, backward, forward])
        found += self._of_depths * head
        if profile.final_norm is not None:  # on a stage or the next one
            found[3] += round(profile.final_norm.forward_ms * PS_PER_MS)
        return found

    @cached_property
    def most_ps(self) -> float:
        """More than any choices of the whole model take."""
        profile = self.table.profile
        records = profile.embedding, profile.head, profile.final_norm
        times = [r.forward_ms + r.backward_ms for r in records if r is not None]
        for kind in profile.kinds:
            slowest = max(r.forward_ms + r.backward_ms for r in kind.choices)
            times.append(len(kind.layers) * slowest)
        times += [abs(stage.residual_ms) for stage in profile.stages]
        return 2 * sum(times) * PS_PER_MS

    def _limits(self, layer: int) -> tuple[int, int, int, int]:
        """Least time, least forward, least backward and most forward of a layer."""
        units = [self.table.layer(layer, choice) for choice in self.table.choices(layer)]
        times = [(unit.forward_ps, unit.backward_ps) for unit in units]
        for record in self.table.profile.kind_of(layer).choices:
            if record.policy.group > 1:  # of which it is one of several
                forward, backward = (
                    int(ms * PS_PER_MS / record.policy.group)
                    for ms in (record.forward_ms, record.backward_ms)
                )
                times += [(forward, backward), (forward + 1, backward)]
        return (
            min(sum(pair) for pair in times),
            min(forward for forward, _ in times),
            min(backward for _, backward in times),
            max(forward for forward, _ in times),
        )
