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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.planner.cost import Ints
from megatron_autorecompute.planner.cost.bound_tensors import BoundTensors
from megatron_autorecompute.planner.cost.schedule import Direction, Schedule
from megatron_autorecompute.profile import Deferred


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
    """The microbatches of each chunk whose forward is done and whose backward has not begun."""
    extra: int
    """Boundary tensors that belong to no layer."""
    microbatch: int
    """The first one of which such an event is."""
    beside: int | None = None
    """With EP overlap the chunk of the event that runs at the same time, in the other direction;
    its microbatch is not in flight."""
    idle: tuple[int, ...] = ()
    """With EP overlap: per chunk, 1 if it has run a backward and no microbatch of it is in flight
    or runs backward. Its layers' dispatchers then keep their inputs and the gradients of them."""
    idle_apart: tuple[int, ...] = ()
    """Per idle chunk, how many of its own input and the gradient of it `extra` does not count."""
    deferred: int = 0
    """Runs of the output layer whose weight gradient waits until the pipeline has drained."""
    late: int = 0
    """Of two events side by side: how many more boundary tensors there are once the last layers
    have run and outputs are sent. May be negative."""

    @property
    def in_parts(self) -> bool:
        """Whether layers run in the parts of EP overlap, beside another microbatch's or alone, so
        that `beside` has the bytes. A forward alone is as it is elsewhere."""
        return self.beside is not None or (self.direction == "backward" and bool(self.idle))


@lru_cache(maxsize=4096)
def decisive_moments(
    schedule: Schedule,
    stage: int,
    *,
    overlap_p2p: bool = True,
    deallocated: bool = True,
    deferred: Deferred | None = None,
) -> tuple[Moment, ...]:
    """The moments that can be a stage's highest moment under some policy.

    Two sorts of moments are left out. First, moments that another moment of the same direction and
    chunk reaches in every count. Second, moments between two others: bytes are linear in the
    counts, so if every count of a moment is at most the mean of its two neighbours' counts, one of
    the neighbours needs as many bytes. This is frequent, because within a group of microbatches the
    counts move from one chunk to another in steps of one.
    """
    short = schedule.shortened()
    counts = _counts(short, stage, overlap_p2p, deallocated)
    if deferred and stage == schedule.num_stages - 1:
        held = _held_of_done(short, stage, overlap_p2p, deallocated)
        _defer(counts, short, deferred, held, schedule.left_out(stage))
    is_backward, chunk, _ = short.order(stage)
    beside = short.beside(stage)
    kept: list[int] = []
    own_type = np.int16 if counts.max() < 1 << 15 else np.int64
    # A backward beside a forward is looked at with the forward.
    chunks = schedule.num_chunks
    events = (is_backward * chunks + chunk) * (chunks + 1) + beside + 1
    for event in np.unique(events[~is_backward | (beside < 0)]).tolist():
        positions = np.flatnonzero((events == event) & (~is_backward | (beside < 0)))
        kept += _decisive(positions, counts[positions].astype(own_type)).tolist()
    kept.sort()
    numbers = schedule.microbatches(stage, kept)
    return tuple(_moments(short, stage, counts, dict(zip(kept, numbers, strict=True))))


def every_moment(
    schedule: Schedule,
    stage: int,
    *,
    overlap_p2p: bool = True,
    deallocated: bool = True,
    deferred: Deferred | None = None,
) -> list[Moment]:
    """The moment of each event of a stage; arguments as in `decisive_moments`."""
    counts = _counts(schedule, stage, overlap_p2p, deallocated)
    if deferred and stage == schedule.num_stages - 1:
        held = _held_of_done(schedule, stage, overlap_p2p, deallocated)
        _defer(counts, schedule, deferred, held, np.zeros(len(counts), np.intp))
    numbers = schedule.order(stage)[2].tolist()
    return list(_moments(schedule, stage, counts, dict(enumerate(numbers))))


def _moments(
    schedule: Schedule, stage: int, counts: Ints, microbatches: dict[int, int]
) -> Iterator[Moment]:
    """microbatches: of each event that is asked for."""
    is_backward, chunk, _ = schedule.order(stage)
    beside, v = schedule.beside(stage), schedule.num_chunks
    for at, microbatch in microbatches.items():
        extra, waiting, *row = counts[at].tolist()
        yield Moment(
            "backward" if is_backward[at] else "forward",
            int(chunk[at]),
            tuple(row[:v]),
            extra,
            microbatch,
            int(beside[at]) if beside[at] >= 0 else None,
            tuple(row[v : 2 * v]),
            tuple(row[2 * v : 3 * v]),
            waiting,
            sum(row[3 * v :]),
        )


def _counts(schedule: Schedule, stage: int, overlap_p2p: bool, deallocated: bool) -> Ints:
    """Of each event: boundary tensors, no deferred run of the output layer, microbatches in flight
    by chunk, and with EP overlap the last three fields of a moment; none of them makes a moment
    need less."""
    extra = np.array(
        extra_tensors(schedule, stage, overlap_p2p=overlap_p2p, deallocated=deallocated)
    )
    in_flight, none = schedule.in_flight(stage).astype(np.int64), np.zeros_like(extra)
    if not schedule.overlap_moe_expert_parallel_comm:
        return np.column_stack([extra, none, in_flight])
    beside = schedule.beside(stage)
    done = _done_when_idle(schedule, stage, in_flight, beside)
    idle = (done >= 0).astype(np.int64)
    apart, after = 2 * idle, extra.copy()
    if schedule.num_chunks > 1:
        bound = BoundTensors(schedule, stage, overlap_p2p, deallocated)
        apart, after = bound.idle_apart(done), bound.extra_but_sent()
    late = _in_order(schedule, stage, extra, after, beside)
    return np.column_stack([extra, none, in_flight, idle, apart, late])


def _held_of_done(schedule: Schedule, stage: int, overlap_p2p: bool, deallocated: bool) -> Ints:
    """The boundary tensors that the last chunk received of microbatches whose backward has run, and
    the gradients of these: `[microbatch, from, until]`."""
    if schedule.num_chunks > 1:
        return BoundTensors(schedule, stage, overlap_p2p, deallocated).after_backward()
    owners = enumerate(_one_chunk(schedule, stage, deallocated))
    rows = [(owner, at, at + 1) for at, own in owners for owner in own]
    return np.array(rows, np.int64).reshape(-1, 3).T


def _defer(
    counts: Ints, schedule: Schedule, deferred: Deferred, held: Ints, before: NDArray[np.intp]
) -> None:
    """Count deferred runs of the output layer, in place, and no boundary tensor that is of one.

    Args:
        counts: the counts of the last stage.
        schedule: whose events they are of.
        deferred: what waits, with what a microbatch's chunk received.
        held: `_held_of_done`.
        before: how many microbatches more have run before each event.
    """
    is_backward, chunk, _ = schedule.order(schedule.num_stages - 1)
    runs = is_backward & (chunk == schedule.num_chunks - 1)
    done = np.cumsum(runs) - runs + before
    counts[:, 1] = [deferred.waiting(number) for number in done.tolist()]
    if schedule.overlap_moe_expert_parallel_comm:
        return  # `_in_order` has moved them
    for microbatch, start, stop in held.T.tolist():
        number = microbatch + int(before[start])
        counts[start:stop, 0] -= deferred.waiting(number + 1) > deferred.waiting(number)


def _done_when_idle(schedule: Schedule, stage: int, in_flight: Ints, beside: Ints) -> Ints:
    """For each event and chunk, if the chunk is idle, the forward whose backward it ran last; else
    -1. Takes a microbatch that runs beside an event out of those in flight, in place."""
    is_backward, chunk, _ = schedule.order(stage)
    paired = np.flatnonzero(beside >= 0)
    in_flight[paired, beside[paired]] -= 1
    first, second = paired[::2], paired[1::2]
    done = np.full((len(chunk), schedule.num_chunks), -1)
    for own in range(schedule.num_chunks):
        forwards = np.flatnonzero(schedule.forward_table()[1] == own)
        backwards = is_backward & (chunk == own)
        before = np.cumsum(backwards) - backwards
        last = np.where(before > 0, forwards[np.maximum(before, 1) - 1], -1)
        done[:, own] = np.where((in_flight[:, own] > 0) | backwards, -1, last)
    runs = chunk[second]
    done[first, runs] = -1
    done[second] = done[first]
    return done


def _in_order(schedule: Schedule, stage: int, extra: Ints, after: Ints, beside: Ints) -> Ints:
    """How many more tensors there are when the layers of two events side by side have run.

    What the first one sends, and what is received for later events, comes then. `extra` becomes, in
    place, that of the time before for both; the gradient that the second one starts from is its
    own. What it sends then is its own, too, and what the one before sent is gone.

    Args:
        extra: at each event.
        after: the same without gradients that are sent.
    """
    chunk = schedule.order(stage)[1]
    paired = np.flatnonzero(beside >= 0)
    first, second = paired[::2], paired[1::2]
    head = (stage == schedule.num_stages - 1) & (chunk[second] == schedule.num_chunks - 1)
    extra[first] -= ~head
    late = np.zeros_like(extra)
    most = np.maximum(after[second], np.append(after, 0)[second + 1])
    late[first] = late[second] = most - extra[first]
    extra[second] = extra[first]
    return late


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
    """The positions whose counts are not at most the mean of their two neighbours' counts."""
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
