"""The search problem of one stage: the options in each chunk, and the moments that must fit.

Constraints. For every binding moment k (direction, running chunk r, in flight n[k, c]):

    constant[k] + sum over chunks c of n[k, c] * H[c] + M[r, direction] <= budget

where H[c] is what chunk c holds and M[c, direction] the highest point of its forward or backward:
max over its units of (held of the units up to it + its transient).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.planner.cost import Bools, Ints
from megatron_autorecompute.planner.cost.layout import Chunk, Layout
from megatron_autorecompute.planner.cost.p2p_tensors import Moment, turned
from megatron_autorecompute.planner.cost.peak_memory import StageBase, stage_base, stage_moments
from megatron_autorecompute.planner.cost.policy_cost import PolicyCosts
from megatron_autorecompute.planner.cost.unit_costs import CostTable, Unit
from megatron_autorecompute.policy import NONE, LayerPolicy, RecomputePolicy

Split = tuple[tuple[LayerPolicy, ...], ...]
"""`[chunk][position]` choices of a stage."""
GROUPS = "full/N"
"""Text that stands for checkpoints around several layers, of any size."""
EARLY = "ahead"
"""Text that stands for any full choice with `+ahead`; alone, beside every recorded choice."""


@dataclass(frozen=True, slots=True)
class OnlyChoices:
    """A restriction of the choices that may be used."""

    choices: frozenset[LayerPolicy] | None
    """Choices of a single layer; None: every recorded one."""
    groups: bool
    """Whether checkpoints around several layers may be used, of any size."""
    ahead: bool
    """Whether full layers may begin their recompute before the gradient is there."""

    @classmethod
    def parse(cls, texts: Iterable[str] | None) -> OnlyChoices:
        """Read choices; `full/N` stands for all groups, `ahead` for `+ahead` of all. Raises
        PolicyError for other texts."""
        wanted = {EARLY} if texts is None else set(texts)
        if wanted == {EARLY}:
            return cls(None, True, texts is not None)
        alone = frozenset(LayerPolicy.parse(text) for text in wanted - {GROUPS, EARLY})
        for choice in alone:
            if choice.group > 1:
                raise PolicyError(f"{choice}: groups are allowed all together, as {GROUPS}.")
            if choice.ahead:
                raise PolicyError(f"{choice}: +ahead is allowed for all choices, as {EARLY}.")
        return cls(alone, GROUPS in wanted, EARLY in wanted)

    def texts(self) -> tuple[str, ...] | None:
        """What `parse` reads, sorted."""
        if self.choices is None:
            return (EARLY,) if self.ahead else None
        more = [GROUPS] * self.groups + [EARLY] * self.ahead
        return tuple(sorted([*map(str, self.choices), *more]))

    def allow(self, table: CostTable, layer: int, choice: LayerPolicy) -> bool:
        """Whether a layer may have a choice; an inert choice counts as the choice it equals."""
        if choice.ahead and not self.ahead:
            return False
        if choice.group > 1:
            return self.groups
        names = table.names(layer, choice.in_time)
        return self.choices is None or not self.choices.isdisjoint(names)


COLUMNS = FORWARD_PS, BACKWARD_PS, HELD, FORWARD, BACKWARD = range(5)
"""Of units and of plans: times, bytes held, and the highest point in a forward and a backward; of a
unit what it needs besides what is held, with the gradient of the chunk's output."""
HIGHEST = slice(FORWARD, None)


class ChunkUnits:
    """What may be chosen in one chunk, place by place: before its layers, the layers, and after
    them. Independent of budget and schedule. The gradient of its output has `boundary_bytes`.
    """

    def __init__(
        self, table: CostTable, chunk: Chunk, boundary_bytes: int, only: OnlyChoices
    ) -> None:
        before, after = table.pseudo_layers(chunk)
        self.layers, self.first, self.full = chunk.layers, len(before), table.full
        self.places = self.first + len(self.layers) + len(after)
        gradient = 0 if chunk.head else boundary_bytes
        allowed = [_allowed(table, layer, only) for layer in self.layers]
        self.policies = [*[()] * len(before), *allowed, *[()] * len(after)]
        """The choices of the layer at each place; none where there is no layer."""
        costs = [_outside(unit, gradient) for unit in before]
        costs += [table.units_in(chunk, *own) for own in zip(self.layers, allowed, strict=True)]
        costs += [_outside(unit, gradient) for unit in after]
        self.alone: list[Ints] = [
            _rows(own, kept if place + 1 == self.places else gradient)
            for place, (own, kept) in enumerate(costs)
        ]
        """The options of a single unit at each place, `[choice, column]`."""
        self.together: list[Ints] = [
            self._checkpoints(table, place, gradient, only.groups) for place in range(self.places)
        ]
        """The checkpoints of several layers that begin at each place, `[number - 2, column]`."""

    def _checkpoints(self, table: CostTable, place: int, gradient: int, grouped: bool) -> Ints:
        at = place - self.first
        layers = self.layers[at:] if grouped and at >= 0 else ()
        rows = _rows(table.checkpoints(layers)[:, 1:], gradient)
        if len(rows) and place + 1 + len(rows) == self.places:
            rows[-1, BACKWARD] -= gradient
        return rows

    def choice(self, place: int, number: int, size: int) -> tuple[LayerPolicy, ...]:
        """The choices of the layers in a unit; none of a unit that is no layer."""
        if size > 1:
            return (replace(self.full, group=size),) * size
        return self.policies[place][number : number + 1]

    def options(self, place: int, sizes: Ints) -> tuple[Ints, Ints, Ints]:
        """The rows of the units of a place, checkpoints of these sizes last; how many layers each
        is, and a number that tells different choices apart, -1 where there is no layer."""
        alone, names = self.alone[place], self._names[place]
        return (
            np.concatenate([alone, self.together[place][sizes - 2]]),
            np.concatenate([np.ones(len(alone), np.int64), sizes]),
            np.concatenate([names, -sizes]),
        )

    @cached_property
    def every(self) -> list[tuple[Ints, Ints, Ints]]:
        """The `options` of each place, with checkpoints of all sizes."""
        return [
            self.options(place, np.arange(2, len(more) + 2))
            for place, more in enumerate(self.together)
        ]

    @cached_property
    def _names(self) -> list[Ints]:
        known: dict[LayerPolicy, int] = {}
        own = ([known.setdefault(p, len(known)) for p in choices] for choices in self.policies)
        return [np.array(names or [-1], np.int64) for names in own]

    def plan(self, policies: Sequence[LayerPolicy]) -> Ints:
        """The figures of a plan."""
        rows, place = list[Ints](), 0
        while place < self.places:
            choices = self.policies[place]
            choice = policies[place - self.first] if choices else NONE
            if choice.group > 1:
                rows.append(self.together[place][choice.group - 2])
            else:
                rows.append(self.alone[place][choices.index(choice) if choices else 0])
            place += choice.group
        found = np.zeros(len(COLUMNS), np.int64)
        for row in reversed(rows):
            found[HIGHEST] = row[HELD] + np.maximum(found[HIGHEST], row[HIGHEST])
            found[:FORWARD] += row[:FORWARD]
        return found

    @cached_property
    def forward_is_below_backward_by(self) -> int:
        """Least (highest point in backward - in forward) of all units; negative if above."""
        every = (rows for rows in (*self.alone, *self.together) if len(rows))
        return min((int((rows[:, BACKWARD] - rows[:, FORWARD]).min()) for rows in every), default=0)


def _outside(unit: Unit, gradient: int) -> tuple[Ints, Ints]:
    """The options of a unit that is no layer, as `CostTable.units_in` has them."""
    kept = min(gradient, unit.kept_gradient_bytes)
    return np.array([unit.costs], np.int64).T, np.array([kept], np.int64)


def _rows(costs: Ints, gradient: Ints | int) -> Ints:
    """A cost table's rows, `[choice, column]`, with an output's gradient in the backward."""
    held, forward, backward, forward_ps, backward_ps, _ = costs
    return np.stack([forward_ps, backward_ps, held, forward, backward + gradient], 1)


def _allowed(table: CostTable, layer: int, only: OnlyChoices) -> tuple[LayerPolicy, ...]:
    policies = tuple(p for p in table.choices(layer) if only.allow(table, layer, p))
    if not policies:
        raise ProfileError(
            f"None of the allowed choices {list(only.texts() or ())} has a record for "
            f"layer {layer}, which has {', '.join(map(str, table.choices(layer)))}. Allow one of "
            "these."
        )
    return policies


@dataclass(frozen=True)
class StageProblem:
    """One stage: its chunks and its binding moments; arrays have the first dimension [moment]."""

    chunks: tuple[ChunkUnits, ...]
    counts: Ints
    """`[moment, chunk]` microbatches in flight."""
    running: Ints
    """Chunk that runs."""
    is_forward: Bools
    constant: Ints
    """Bytes alive under every choice."""
    floor_bytes: int
    """Peak outside forwards and backwards: static bytes and the optimizer step."""
    paired: Bools
    """Whether an event is one of two side by side, here without the other, or in part a CUDA graph:
    what it truly needs may be more, by no sum over chunks."""

    def apart(self, added_bytes: int) -> StageProblem:
        """This problem with some bytes added to these events."""
        return replace(self, constant=self.constant + self.paired * added_bytes)


def stage_problem(costs: PolicyCosts, stage: int, only: OnlyChoices) -> StageProblem:
    """The problem of one stage, without the moments that others imply."""
    profile = costs.profile
    base = stage_base(profile, costs.layout, stage, "high")
    moments = stage_moments(profile, costs.schedule, stage)
    own = costs.layout.stages[stage]
    chunks = [ChunkUnits(costs.high, chunk, base.boundary_bytes, only) for chunk in own]
    pairs = [moment for moment in moments if moment.beside is not None]
    graphs = profile.graphs_of_layers and not any(m.in_parts for m in moments)
    moments = (*moments, *map(turned, pairs))
    kept = [moment for moment in moments if not _implied(moment, moments, chunks, base)]
    return StageProblem(
        tuple(chunks),
        np.array([moment.in_flight for moment in kept], np.int64).reshape(len(kept), len(chunks)),
        np.array([moment.chunk for moment in kept], np.int64),
        np.array([moment.direction == "forward" for moment in kept], np.bool_),
        np.array([base.constant_bytes(m.direction, m.extra, m.deferred) for m in kept], np.int64),
        base.static.total_bytes + base.optimizer_step_peak_bytes,
        np.array([graphs or moment.in_parts for moment in kept], np.bool_),
    )


def _implied(
    moment: Moment, moments: Sequence[Moment], chunks: Sequence[ChunkUnits], base: StageBase
) -> bool:
    """Whether a forward never needs more than some backward of the same chunk."""
    if moment.direction == "backward":
        return False
    constant = base.constant_bytes("forward", moment.extra, moment.deferred)
    below = chunks[moment.chunk].forward_is_below_backward_by
    return any(
        other.direction == "backward"
        and other.chunk == moment.chunk
        and constant <= base.constant_bytes("backward", other.extra, other.deferred) + below
        and all(n >= k for n, k in zip(other.in_flight, moment.in_flight, strict=True))
        for other in moments
    )


def put_together(layout: Layout, splits: Sequence[Split]) -> RecomputePolicy:
    """The policy of all layers from every stage's split."""
    choices = {
        layer: choice
        for chunks, split in zip(layout.stages, splits, strict=True)
        for chunk, policies in zip(chunks, split, strict=True)
        for layer, choice in zip(chunk.layers, policies, strict=True)
    }
    return RecomputePolicy(tuple(choices[layer] for layer in range(len(choices))))


def runs(policies: Sequence[object]) -> int:
    """Runs of equal choices in a row."""
    return sum(1 for _ in groupby(policies))


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The best choices of a stage, and the proof."""

    policies: tuple[tuple[LayerPolicy, ...], ...]
    """`[chunk][position]`."""
    time_ps: int
    """Forward plus backward of one microbatch through all chunks."""
    peak_bytes: int
    bound_ps: int
    """Lower bound: no choices that fit are faster than this."""

    @property
    def gap(self) -> float:
        """(time - bound) / time; 0 is proven optimal."""
        return (self.time_ps - self.bound_ps) / self.time_ps if self.time_ps else 0.0


FAR = 1 << 60
"""Bytes that no sum reaches."""


def leanest(problem: StageProblem) -> StageChoice:
    """The choices with the lowest peak, at any time; of these, every chunk's hold the least they
    can. Exact, without tables.

    A chunk affects other chunks only by what it holds, and less is better. Within a chunk, less
    held by the first layers is better for all later ones. So iteration finds the least that every
    chunk can hold under a peak: begin as if chunks held nothing, let each hold the least with which
    its own moments fit beside the others, and repeat until nothing rises. If the iteration ends,
    these choices fit; if a chunk finds none, nothing fits. Bisection then finds the lowest such
    peak. Every other time it asks for less than the lowest one so far, which mostly ends it.
    """
    found = _fitting(problem, FAR, np.zeros(len(problem.chunks), np.int64))
    assert found is not None  # without a limit everything fits
    best, figures = found
    low, high, less = problem.floor_bytes, _peak_bytes(problem, figures), True
    while low < high:
        peak, less = high - 1 if less else (low + high) // 2, not less
        found = _fitting(problem, peak, figures[:, HELD])
        if found is None:
            low = peak + 1
        else:
            best, figures = found
            high = _peak_bytes(problem, figures)
    time_ps = int(figures[:, :HELD].sum())
    return StageChoice(best, time_ps, high, time_ps)


def _fitting(problem: StageProblem, peak: int, held: Ints) -> tuple[Split, Ints] | None:
    """Choices with such a peak and their figures, `[chunk, column]`; None where there are none.
    Chunks hold no less than they do under a higher peak."""
    while True:
        split, figures = list[tuple[LayerPolicy, ...]](), list[Ints]()
        for c, chunk in enumerate(problem.chunks):
            room = peak - problem.constant - problem.counts @ held
            own, forward = problem.running == c, problem.is_forward
            limits = [room[own & each].min(initial=FAR) for each in (forward, ~forward)]
            choices = _least(chunk, np.array(limits))
            if choices is None:
                return None
            split.append(choices)
            figures.append(chunk.plan(choices))
        rising = np.maximum(held, [own[HELD] for own in figures])
        if np.array_equal(rising, held):
            return tuple(split), np.stack(figures)
        held = rising


def _peak_bytes(problem: StageProblem, figures: Ints) -> int:
    own = figures[problem.running, np.where(problem.is_forward, FORWARD, BACKWARD)]
    needed = problem.constant + problem.counts @ figures[:, HELD] + own
    return int(max(needed.max(initial=0), problem.floor_bytes))


def _least(units: ChunkUnits, limits: Ints) -> tuple[LayerPolicy, ...] | None:
    """The choices of a chunk that hold the least of those below both limits; None where there are
    none.

    From the first unit to the last it keeps the choices with the least held before each place.
    """
    places = units.places
    held, came = np.full(places + 1, FAR), np.zeros((places + 1, 2), np.int64)
    held[0] = 0
    for place, (rows, sizes, _) in enumerate(units.every):
        if held[place] >= FAR:
            continue
        total = held[place] + rows[:, HELD]
        over = (total[:, None] + rows[:, HIGHEST] - limits).max(axis=1)
        which = np.flatnonzero((over <= 0) & (total < held[place + sizes]))
        which = which[np.argsort(-total[which], kind="stable")]  # the least is written last
        held[place + sizes[which]] = total[which]
        came[place + sizes[which], 0], came[place + sizes[which], 1] = place, which
    if held[-1] >= FAR:
        return None
    choices, place = list[tuple[LayerPolicy, ...]](), places
    while place:  # back along what led to the end
        before, at = came[place].tolist()
        choices.append(units.choice(before, at, place - before))
        place = before
    return tuple(choice for own in reversed(choices) for choice in own)
