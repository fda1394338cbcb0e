"""Counts the boundary tensors that are alive at each event of a stage and belong to no layer.

A *boundary tensor* is what one stage sends another: an output, or the gradient of an input. Most
are part of a layer's record: the received input belongs to the first layer of its chunk from the
chunk's forward on, and the gradient that a backward starts from to the chunk's last layer. The
others are counted here: tensors received before their turn, and tensors to which a variable of
Megatron's schedule is still bound after their use (`bound_tensors` says which, where chunks are
interleaved). The schedules of megatron-core 0.16.1 and 0.19.2 are the same in this.

Without `deallocate_pipeline_outputs` an output stays alive. It belongs to its microbatch while that
is in flight, and counts here if a variable is still bound to it afterwards.

`overlap_p2p_comm_warmup_flush` is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.planner.arrays import Ints
from megatron_autorecompute.planner.bound_tensors import BoundTensors
from megatron_autorecompute.planner.schedule import Direction, Schedule


@lru_cache(maxsize=1024)
def extra_tensors(
    schedule: Schedule, stage: int, *, overlap_p2p: bool = True, deallocated: bool = True
) -> tuple[int, ...]:
    """Boundary tensors that belong to no layer, at each event of `schedule.events(stage)`.

    Args:
        schedule: the order of events.
        stage: pipeline rank.
        overlap_p2p: `overlap_p2p_comm`; without effect when there is one chunk.
        deallocated: `deallocate_pipeline_outputs`.

    Raises: PipelineError for a stage that does not exist.
    """
    if schedule.num_chunks == 1:
        return tuple(map(len, _one_chunk(schedule, stage, deallocated)))
    return tuple(BoundTensors(schedule, stage, overlap_p2p, deallocated).extra().tolist())


@lru_cache(maxsize=1024)
def extra_owners(
    schedule: Schedule, stage: int, *, overlap_p2p: bool = True, deallocated: bool = True
) -> tuple[tuple[int, ...], ...]:
    """The microbatch of each of these tensors, at each event; arguments as in `extra_tensors`."""
    if schedule.num_chunks == 1:
        return _one_chunk(schedule, stage, deallocated)
    return BoundTensors(schedule, stage, overlap_p2p, deallocated).owners()


@dataclass(frozen=True, slots=True)
class Moment:
    """What a stage's memory carries while one event runs, besides that event's own layers."""

    direction: Direction
    chunk: int
    in_flight: tuple[int, ...]
    """Per chunk, microbatches whose forward is done and whose backward has not begun."""
    extra: int
    """Boundary tensors that belong to no layer."""
    microbatch: int
    """The first one of which such an event is."""
    beside: int | None = None
    """With EP overlap the chunk of the event that runs at the same time, in the other direction;
    its microbatch is not in flight."""


@lru_cache(maxsize=4096)
def decisive_moments(
    schedule: Schedule, stage: int, *, overlap_p2p: bool = True, deallocated: bool = True
) -> tuple[Moment, ...]:
    """The moments that can be a stage's highest moment under some policy.

    Two sorts of moments are left out. First, moments that another moment of the same direction and
    chunk reaches in every count. Second, moments between two others: bytes are linear in the
    counts, so if every count of a moment is at most the mean of its two neighbours' counts, one of
    the neighbours needs as many bytes. This is frequent, because within a group of microbatches the
    counts move from one chunk to another in steps of one.
    """
    short = schedule.shortened()
    extra = extra_tensors(short, stage, overlap_p2p=overlap_p2p, deallocated=deallocated)
    counts = np.column_stack([short.in_flight(stage), extra])
    is_backward, chunk, _ = short.order(stage)
    beside = short.beside(stage)
    alone_in_flight(counts, beside)
    kept: list[int] = []
    # A backward beside a forward is looked at with the forward.
    chunks = schedule.num_chunks
    events = (is_backward * chunks + chunk) * (chunks + 1) + beside + 1
    for event in np.unique(events[~is_backward | (beside < 0)]).tolist():
        positions = np.flatnonzero((events == event) & (~is_backward | (beside < 0)))
        kept += _decisive(positions, counts[positions].astype(np.int16)).tolist()
    kept.sort()
    return tuple(
        Moment(
            "backward" if is_backward[at] else "forward",
            int(chunk[at]),
            tuple(counts[at, :-1].tolist()),
            int(counts[at, -1]),
            microbatch,
            int(beside[at]) if beside[at] >= 0 else None,
        )
        for at, microbatch in zip(kept, schedule.microbatches(stage, kept), strict=True)
    )


def alone_in_flight(counts: Ints, beside: Ints) -> None:
    """Take the microbatch that runs beside an event out of its counts, in place; both events of a
    pair then have the same counts.

    Args:
        counts: microbatches in flight by chunk, and boundary tensors last, `[event, column]`.
        beside: the other event's chunk; -1 for none.
    """
    paired = np.flatnonzero(beside >= 0)
    counts[paired, beside[paired]] -= 1
    first, second = paired[::2], paired[1::2]
    counts[first, -1] = counts[second, -1] = np.maximum(counts[first, -1], counts[second, -1])


def _decisive(positions: Ints, counts: NDArray[np.int16]) -> Ints:
    """Of positions with `[position, column]` counts those of neither sort, each the first alike."""
    turns = _without_passages(np.arange(len(positions)), counts)
    reached = np.ones((len(turns), len(turns)), np.bool_)  # the counts of which by which others
    for column in counts[turns].T:
        reached &= column[:, None] <= column
    by_another = np.tril(reached, -1) | (reached & ~reached.T)
    kept = _without_passages(turns[~by_another.any(axis=1)], counts)
    alike = (counts[:, None] == counts[kept]).all(axis=2)
    first: Ints = positions[alike.argmax(axis=0)]
    return first


def _without_passages(kept: Ints, counts: NDArray[np.int16]) -> Ints:
    """Those whose counts are not at most the mean of their two neighbours' counts."""
    rows = counts[kept]
    between = np.zeros(len(rows), np.bool_)
    between[1:-1] = np.all(2 * rows[1:-1] <= rows[:-2] + rows[2:], axis=1)
    return kept[~between]


def _one_chunk(schedule: Schedule, stage: int, deallocated: bool) -> tuple[tuple[int, ...], ...]:
    """1F1B, in `forward_backward_pipelining_without_interleaving`.

    Before the first backward nothing is left over. After it, these are alive in a forward: if there
    is a next stage, the last `output_tensor_grad`, and the last output if outputs are kept; if
    there is a previous stage, the last `input_tensor_grad` and the input of the microbatch just
    finished. In a later backward only the last `input_tensor_grad` is, because `output_tensor_grad`
    is then its own. All of them are of the microbatch whose backward ran last.
    """
    after, before = int(stage < schedule.num_stages - 1), int(stage > 0)
    owners: list[tuple[int, ...]] = []
    last: tuple[int, ...] = ()
    for event in schedule.events(stage):
        forward = event.direction == "forward"
        in_forward = after + 2 * before + after * (not deallocated)
        owners.append(last * (in_forward if forward else before))
        last = last if forward else (event.microbatch,)
    return tuple(owners)
