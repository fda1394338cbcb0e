"""The search problem of one stage: the options in each chunk, and the moments that must fit.

Constraints. For every binding moment k (direction, running chunk r, in flight n[k, c]):

    constant[k] + sum over chunks c of n[k, c] * H[c] + M[r, direction] <= budget

where H[c] is what chunk c holds and M[c, direction] the highest point of its forward or backward:
max over its units of (held of the units up to it + its transient).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.planner.cost.arrays import Bools, Ints
from megatron_autorecompute.planner.cost.layout import Chunk, Layout
from megatron_autorecompute.planner.cost.p2p_tensors import Moment
from megatron_autorecompute.planner.cost.peak_memory import StageBase, turned
from megatron_autorecompute.planner.cost.unit_costs import Checkpoints, CostTable, Unit
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy

Split = tuple[tuple[LayerPolicy, ...], ...]
"""`[chunk][position]` choices of a stage."""
GROUPS = "full/N"
"""Text that stands for checkpoints around several layers, of any size."""
EARLY = "ahead"
"""Text that stands for any full choice with `+ahead`; alone, beside every recorded choice."""


@dataclass(frozen=True, slots=True)
class OnlyChoices:
    """A restriction of the choices that may be used."""

    choices: frozenset[LayerPolicy]
    """Choices of a single layer."""
    groups: bool
    """Whether checkpoints around several layers may be used, of any size."""
    ahead: bool = False
    """Whether full layers may begin their recompute before the gradient is there."""

    @classmethod
    def parse(cls, texts: Iterable[str]) -> OnlyChoices:
        """Read choices; `full/N` stands for all groups, `ahead` for `+ahead` of all. Raises
        PolicyError for other texts."""
        wanted = set(texts)
        alone = frozenset(LayerPolicy.parse(text) for text in wanted - {GROUPS, EARLY})
        for choice in alone:
            if choice.group > 1:
                raise PolicyError(f"{choice}: groups are allowed all together, as {GROUPS}.")
            if choice.ahead:
                raise PolicyError(f"{choice}: +ahead is allowed for all choices, as {EARLY}.")
        return cls(alone, GROUPS in wanted, EARLY in wanted)

    @property
    def every(self) -> bool:
        """Whether every recorded choice is allowed."""
        return self.ahead and not self.choices and not self.groups

    def texts(self) -> tuple[str, ...]:
        """What `parse` reads, sorted."""
        more = [GROUPS] * self.groups + [EARLY] * self.ahead
        return tuple(sorted([*map(str, self.choices), *more]))

    def and_also(self, choice: LayerPolicy) -> OnlyChoices:
        """These choices, and one more choice of a single layer."""
        return self if self.every else replace(self, choices=self.choices | {choice})

    def allow(self, table: CostTable, layer: int, choice: LayerPolicy) -> bool:
        """Whether a layer may have a choice; an inert choice counts as the choice it equals."""
        if choice.ahead and not self.ahead:
            return False
        if choice.group > 1 or self.every:
            return self.groups or self.every
        choice = choice.in_time
        return not self.choices.isdisjoint(table.names(layer, choice))


@dataclass(frozen=True, slots=True)
class Singles:
    """Costs of the choices of a single layer; arrays of shape [choice]."""

    policies: tuple[LayerPolicy, ...]
    held: Ints
    forward: Ints
    backward: Ints
    forward_ps: Ints
    backward_ps: Ints
    kept_gradient: Ints
    """Of backward as the chunk's last unit, as `Unit.kept_gradient_bytes`."""


@dataclass(frozen=True)
class ChunkProblem:
    """What may be chosen in one chunk. Independent of budget and schedule."""

    layers: tuple[int, ...]
    before: tuple[Unit, ...]
    after: tuple[Unit, ...]
    singles: tuple[Singles, ...]
    """Per position in the chunk."""
    groups: tuple[Checkpoints, ...]
    """Per position: one checkpoint around the g layers from there on, with index g - 1."""
    full: LayerPolicy
    """What layers have in a group, without its number of layers."""
    output_gradient_bytes: int
    """In the backward of every unit but a layer or checkpoint that is the chunk's last; a head has
    0."""

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """Per position, what tells layers of different cost apart."""
        return tuple(
            tuple(
                tuple(column.tolist())
                for column in (s.held, s.forward, s.backward, s.forward_ps, s.backward_ps)
            )
            for s in self.singles
        )

    def times_ps(self, policies: Sequence[LayerPolicy]) -> tuple[int, int]:
        """Forward and backward of one microbatch, each counted once."""
        forward = sum(unit.forward_ps for unit in (*self.before, *self.after))
        backward = sum(unit.backward_ps for unit in (*self.before, *self.after))
        position = 0
        while position < len(policies):
            policy = policies[position]
            costs: Singles | Checkpoints = self.singles[position]
            index = policy.group - 1
            if policy.group > 1:
                costs = self.groups[position]
            else:
                index = self.singles[position].policies.index(policy)
            forward += int(costs.forward_ps[index])
            backward += int(costs.backward_ps[index])
            position += policy.group
        return forward, backward

    @cached_property
    def forward_is_below_backward_by(self) -> int:
        """Least (backward transient - forward transient) over all units; negative if above."""
        pairs = [
            (u.forward_transient_bytes, u.backward_transient_bytes)
            for u in (*self.before, *self.after)
        ]
        gaps = [b - f for f, b in pairs]
        gaps += [int((s.backward - s.forward).min()) for s in self.singles]
        gaps += [
            int((g.backward_transient_bytes - g.forward_transient_bytes)[1:].min())
            for g in self.groups
            if len(g.held_bytes) > 1
        ]
        return min(gaps)


def chunk_problem(
    table: CostTable,
    chunk: Chunk,
    base: StageBase,
    only: OnlyChoices | None = None,
) -> ChunkProblem:
    """Collect the options of a chunk; `only` restricts them, None allows every recorded choice."""
    before, after = table.pseudo_layers(chunk)
    layers = chunk.layers
    grouped = only is None or only.groups or only.every
    groups = [table.checkpoints(layers[i:] if grouped else ()) for i in range(len(layers))]
    return ChunkProblem(
        layers,
        tuple(before),
        tuple(after),
        tuple(_singles(table, chunk, layer, only) for layer in layers),
        tuple(groups),
        table.full,
        0 if chunk.head else base.boundary_bytes,
    )


def _singles(table: CostTable, chunk: Chunk, layer: int, only: OnlyChoices | None) -> Singles:
    policies = tuple(p for p in table.choices(layer) if only is None or only.allow(table, layer, p))
    if not policies:
        raise ProfileError(
            f"None of the allowed choices {list(only.texts() if only else ())} has a record for "
            f"layer {layer}, which has {', '.join(map(str, table.choices(layer)))}. Allow one of "
            "these."
        )
    costs, kept = table.units_in(chunk, layer, policies)
    held, forward, backward, forward_ps, backward_ps, _ = costs
    return Singles(policies, held, forward, backward, forward_ps, backward_ps, kept)


@dataclass(frozen=True)
class StageProblem:
    """One stage: its chunks and its binding moments; arrays have the first dimension [moment]."""

    chunks: tuple[ChunkProblem, ...]
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
    see `side_by_side`."""
    true_peak: Callable[[Split], int] | None = None
    """Peak of choices; None where the moments say it, because no event is such a one."""

    def apart(self, added_bytes: int) -> StageProblem:
        """With some bytes added to these events, and no true peak."""
        return replace(self, constant=self.constant + self.paired * added_bytes, true_peak=None)


def stage_problem(
    chunks: Sequence[ChunkProblem],
    moments: Sequence[Moment],
    base: StageBase,
    true_peak: Callable[[Split], int] | None = None,
) -> StageProblem:
    """Combine chunks and moments, without the moments that others imply."""
    pairs = [moment for moment in moments if moment.beside is not None]
    graphs = true_peak is not None and not any(m.in_parts for m in moments)
    moments = [*moments, *map(turned, pairs)]
    kept = [moment for moment in moments if not _implied(moment, moments, chunks, base)]
    return StageProblem(
        tuple(chunks),
        np.array([moment.in_flight for moment in kept], np.int64).reshape(len(kept), len(chunks)),
        np.array([moment.chunk for moment in kept], np.int64),
        np.array([moment.direction == "forward" for moment in kept], np.bool_),
        np.array([base.constant_bytes(m.direction, m.extra, m.deferred) for m in kept], np.int64),
        base.static.total_bytes + base.optimizer_step_peak_bytes,
        np.array([graphs or moment.in_parts for moment in kept], np.bool_),
        true_peak,
    )


def _implied(
    moment: Moment, moments: Sequence[Moment], chunks: Sequence[ChunkProblem], base: StageBase
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
    return sum(1 for i, one in enumerate(policies) if i == 0 or one != policies[i - 1])


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The best choices of a stage, and the proof."""

    policies: tuple[tuple[LayerPolicy, ...], ...]
    """`[chunk][position]`."""
    time_ps: int
    """Forward plus backward of one microbatch through all chunks."""
    peak_bytes: int
    runs: int
    """Runs of equal choices, counted per chunk."""
    bound_ps: int
    """Lower bound: no choices that fit are faster than this."""

    @property
    def gap(self) -> float:
        """(time - bound) / time; 0 is proven optimal."""
        return (self.time_ps - self.bound_ps) / self.time_ps if self.time_ps else 0.0
