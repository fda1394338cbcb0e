"""Counts the boundary tensors that are alive at each event of a stage and belong to no layer.

A *boundary tensor* is what one stage sends another: an output, or the gradient of an input. Most
are part of a layer's record: the received input belongs to the first layer of its chunk from the
chunk's forward on, and the gradient that a backward starts from to the chunk's last layer. The
others are counted here: tensors received before their turn, and tensors to which a variable of
Megatron's schedule is still bound after their use. `_Interleaved` keeps the variables, lists and
receive buffers of megatron-core's `forward_backward_pipelining_with_interleaving` (schedules.py)
under their names there. The schedules of megatron-core 0.16.1 and 0.19.2 are the same in this.

Without `deallocate_pipeline_outputs` an output stays alive. It belongs to its microbatch while that
is in flight, and counts here if a variable is still bound to it afterwards.

`overlap_p2p_comm_warmup_flush` is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from megatron_autorecompute.planner.cost.schedule import Direction, Schedule
from megatron_autorecompute.profile import Deferred

Sort = Literal["input", "input grad", "output", "output grad", "sent"]
"""What a combined backward sends (EP overlap) is its first layer's gradient, of which the input's
`.grad` is a copy; elsewhere the two are one tensor."""
_Place = tuple[int, int]
"""(chunk, microbatch)"""


BoundaryTensor = tuple[Sort, int, int]
"""A tensor of one forward or backward: its sort, the chunk and the microbatch."""
Alive = tuple[frozenset[BoundaryTensor], ...]
"""At each event the boundary tensors that belong to no layer."""


def bound_tensors(schedule: Schedule, stage: int, overlap_p2p: bool, deallocated: bool) -> Alive:
    """The boundary tensors alive at each event of `schedule.events(stage)` that belong to no layer.

    Args:
        schedule: the order of events.
        stage: pipeline rank.
        overlap_p2p: `overlap_p2p_comm`; without effect when there is one chunk.
        deallocated: `deallocate_pipeline_outputs`.

    Raises: PipelineError for a stage that does not exist.
    """
    if schedule.num_chunks == 1:
        return tuple(_one_chunk(schedule, stage, deallocated))
    return tuple(_Interleaved(schedule, stage, overlap_p2p, deallocated).events())


def _one_chunk(
    schedule: Schedule, stage: int, deallocated: bool
) -> Iterator[frozenset[BoundaryTensor]]:
    """1F1B, in `forward_backward_pipelining_without_interleaving`.

    Before the first backward nothing is left over. After it, these are alive in a forward: if there
    is a next stage, the last `output_tensor_grad`, and the last output if outputs are kept; if
    there is a previous stage, the last `input_tensor_grad` and the input of the microbatch just
    finished. In a later backward only the last `input_tensor_grad` is, because `output_tensor_grad`
    is then its own. All of them are of the microbatch whose backward ran last.
    """
    in_backward: list[Sort] = ["input grad"] if stage > 0 else []
    in_forward: list[Sort] = ["input", "input grad"] if stage > 0 else []
    if stage < schedule.num_stages - 1:
        in_forward.append("output grad")
        if not deallocated:
            in_forward.append("output")
    last: int | None = None
    for event in schedule.events(stage):
        sorts = in_forward if event.direction == "forward" else in_backward
        found = () if last is None else ((sort, 0, last) for sort in sorts)
        yield frozenset(found)
        last = last if event.direction == "forward" else event.microbatch


class _Interleaved:
    """What one stage holds; arguments as in `bound_tensors`."""

    def __init__(self, schedule: Schedule, stage: int, overlap: bool, deallocated: bool) -> None:
        self.schedule, self.overlap, self.deallocated = schedule, overlap, deallocated
        self.is_first, self.is_last = stage == 0, stage == schedule.num_stages - 1
        events = schedule.events(stage)
        forwards, backwards = (
            [(each.chunk, each.microbatch) for each in events if each.direction == direction]
            for direction in ("forward", "backward")
        )
        self.forwards, self.backwards = forwards, backwards
        self.warmup = schedule.warmup(stage)
        self.steady = len(forwards) - self.warmup
        self.bound: dict[object, BoundaryTensor | None] = {}
        """By the names of variables and buffers."""
        self.waiting = set[BoundaryTensor | None]()
        """In the lists `input_tensors` and `output_tensor_grads`, until used."""
        self.own = set[BoundaryTensor | None]()
        """What belongs to layers."""
        self.done = set[_Place]()
        """Backwards that have run."""

    def events(self) -> Iterator[frozenset[BoundaryTensor]]:
        """What is alive at each event."""
        if not self.is_first:
            self.waiting.add(("input", *self.forwards[0]))
        for k in range(self.warmup):
            yield self._forward(k)
            self._receive_input(k)
            self._end_of_iteration(k)
        self._receive_gradient(-1)
        for k in range(self.warmup, len(self.forwards)):
            yield self._forward(k)
            self.bound["sent output"] = self._output(k)
            if self.overlap:
                self._receive_input(k)
            yield self._backward(k - self.warmup)
            if not self.overlap:
                self._receive_input(k)
            self._end_of_iteration(k)
        early = set(self.waiting)
        for j in range(self.steady, len(self.backwards)):
            gradient = ("output grad", *self.backwards[j])
            if self.overlap and self.steady and gradient in early:
                self.bound["recv_next_wait_handle"] = gradient
            yield self._backward(j)

    def _forward(self, k: int) -> frozenset[BoundaryTensor]:
        own = self._input("input", self.forwards[k])
        self.waiting.discard(own)
        self.bound["input_tensor of the block", self.forwards[k][0]] = own
        self.own |= {own} if self.deallocated else {own, self._output(k)}
        return self._alive()

    def _backward(self, j: int) -> frozenset[BoundaryTensor]:
        place = self.backwards[j]
        gradient: BoundaryTensor = ("output grad", *place)
        self.waiting.discard(gradient)
        self.own.add(gradient)
        alive = self._alive()
        self.own -= {gradient, self._input("input", place), ("output", *place)}
        self.done.add(place)
        self.bound["input_tensor_grad"] = self._input("input grad", place)
        if self.overlap and j < self.steady:
            combined = self.schedule.overlap_moe_expert_parallel_comm
            sent = self._input("sent" if combined else "input grad", place)
            self.bound["send_prev_wait_handle"] = sent
        self._receive_gradient(j)
        return alive

    def _alive(self) -> frozenset[BoundaryTensor]:
        named = {*self.waiting, *self.bound.values()}
        held = [each for each in named if each and each not in self.own]
        # The `.grad` of an input whose backward has run is alive as long as the input.
        held += [
            ("input grad", *each[1:])
            for each in held
            if each[0] == "input" and each[1:] in self.done
        ]
        return frozenset(held)

    def _end_of_iteration(self, k: int) -> None:
        """The output's graph holds the input."""
        is_loss = self._output(k) is None
        self.bound["output_tensor"] = None if is_loss else self._input("input", self.forwards[k])
        self.bound["kept output"] = None if self.deallocated else self._output(k)
        self.bound["sent output"] = None

    def _receive_input(self, k: int) -> None:
        """What is received after forward k."""
        place = self._received(self.forwards, k, self.is_first, 1)
        tensor: BoundaryTensor | None = ("input", *place) if place else None
        self.waiting.add(tensor)
        if self.overlap and k >= self.warmup:
            self._fill("fwd_recv_buffer", k, tensor, self.is_first)
        else:
            self.bound["input_tensor"] = tensor

    def _receive_gradient(self, j: int) -> None:
        """What is received after backward j, or before the first one."""
        place = self._received(self.backwards, j, self.is_last, -1)
        tensor: BoundaryTensor | None = ("output grad", *place) if place else None
        self.waiting.add(tensor)
        if j < 0 and not self.steady:
            return  # in no variable
        if self.overlap and j < self.steady:
            self._fill("bwd_recv_buffer", j, tensor, self.is_last)
        else:
            self.bound["output_tensor_grad"] = tensor

    def _fill(self, buffer: str, number: int, tensor: BoundaryTensor | None, leads: bool) -> None:
        """Receive into one of the buffers in turn; the next one is emptied."""
        size = self.schedule.group_size - self.schedule.num_stages + 1 if leads else 1
        self.bound[buffer, number % size] = tensor
        if tensor:
            self.bound[buffer, (number + 1) % size] = None

    def _received(
        self, places: Sequence[_Place], number: int, leads: bool, step: int
    ) -> _Place | None:
        """Where the tensor is used that is received after one of these events. The first of all
        stages gets it from the last one, for the sender's next chunk."""
        if not leads:
            return places[number + 1] if number + 1 < len(places) else None
        sender = number - (self.schedule.num_stages - 1)
        chunk = places[sender][0] + step
        there = sender >= 0 and 0 <= chunk < self.schedule.num_chunks
        return (chunk, places[sender][1]) if there else None

    def _input(self, sort: Sort, place: _Place) -> BoundaryTensor | None:
        """None where the model begins."""
        return None if self.is_first and place[0] == 0 else (sort, *place)

    def _output(self, k: int) -> BoundaryTensor | None:
        """None for the loss."""
        chunk, microbatch = self.forwards[k]
        is_loss = self.is_last and chunk == self.schedule.num_chunks - 1
        return None if is_loss else ("output", chunk, microbatch)


@lru_cache(maxsize=1024)
def extra_owners(
    schedule: Schedule, stage: int, *, overlap_p2p: bool = True, deallocated: bool = True
) -> tuple[tuple[int, ...], ...]:
    """The microbatch of each tensor of `bound_tensors`, at each event; the same arguments."""
    alive = bound_tensors(schedule, stage, overlap_p2p, deallocated)
    return tuple(tuple(microbatch for _, _, microbatch in each) for each in alive)


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

    @property
    def counts(self) -> tuple[int, ...]:
        """All that a moment's bytes grow with."""
        return (
            self.extra,
            self.deferred,
            self.late,
            *self.in_flight,
            *self.idle,
            *self.idle_apart,
        )


def turned(moment: Moment) -> Moment:
    """The event at the same time."""
    assert moment.beside is not None
    direction: Direction = "backward" if moment.direction == "forward" else "forward"
    return replace(moment, direction=direction, chunk=moment.beside, beside=moment.chunk)


@lru_cache(maxsize=4096)
def decisive_moments(
    schedule: Schedule,
    stage: int,
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
    short, left_out = schedule.shortened(), schedule.left_out(stage)
    moments = every_moment(short, stage, overlap_p2p, deallocated, deferred, left_out)
    found = dict[tuple[object, ...], list[tuple[int, ...]]]()
    first = dict[tuple[object, ...], int]()
    for at, moment in enumerate(moments):
        if moment.direction == "forward" or moment.beside is None:  # else it is the forward's
            event = moment.direction, moment.chunk, moment.beside
            found.setdefault(event, []).append(moment.counts)
            first.setdefault((event, moment.counts), at)
    kept = sorted(first[event, own] for event in found for own in _decisive(found[event]))
    return tuple(moments[at] for at in kept)


def every_moment(
    schedule: Schedule,
    stage: int,
    overlap_p2p: bool = True,
    deallocated: bool = True,
    deferred: Deferred | None = None,
    left_out: Sequence[int] = (),
) -> list[Moment]:
    """The moment of each event of a stage; arguments as in `decisive_moments`.

    left_out: how many microbatches more have run before each event.
    """
    alive = bound_tensors(schedule, stage, overlap_p2p, deallocated)
    events, warmup = schedule.events(stage), schedule.warmup(stage)
    overlaps = schedule.overlap_moe_expert_parallel_comm
    paired = range(warmup, len(events) - warmup) if overlaps else range(0)
    in_flight = [0] * schedule.num_chunks
    done: list[dict[int, int]] = [{} for _ in in_flight]
    """The microbatches of each chunk whose backward has run, and which of the whole step they are.
    """
    is_last, found = stage == schedule.num_stages - 1, list[Moment]()
    left_out = left_out or [0] * len(events)
    for at, (event, before) in enumerate(zip(events, left_out, strict=True)):
        own, microbatch = event.chunk, event.microbatch + before
        if event.direction == "backward":
            in_flight[own] -= 1
        if event.direction == "backward" and at in paired:
            found.append(replace(turned(found[-1]), microbatch=microbatch))
        else:
            other = events[at + 1].chunk if at in paired else None
            around = tuple(n - (chunk == other) for chunk, n in enumerate(in_flight))
            moment = Moment(event.direction, own, around, len(alive[at]), microbatch, beside=other)
            if overlaps:
                moment = _overlapped(moment, done, alive[at : at + 3], is_last)
            if deferred and is_last:
                moment = _deferring(moment, deferred, done[-1], alive[at], before)
            found.append(moment)
        if event.direction == "backward":
            done[own][event.microbatch] = microbatch
        else:
            in_flight[own] += 1
    return found


def _overlapped(
    moment: Moment, done: Sequence[dict[int, int]], alive: Alive, is_last: bool
) -> Moment:
    """The moment with EP overlap.

    Of two events side by side, what the first one sends, and what is received for later events,
    comes when the layers of both have run. The gradient that the second one starts from is its own.
    What it sends then is its own, too, and what the one before sent is gone.

    Args:
        moment: without it.
        done: the microbatches of each chunk whose backward has run.
        alive: the boundary tensors at the event and at the two after it.
        is_last: whether the stage is the last one.
    """
    backward = moment.chunk if moment.direction == "backward" else moment.beside
    idle, apart, extra, late = list[int](), list[int](), moment.extra, 0
    for chunk, ran in enumerate(done):
        idle.append(int(bool(ran) and not moment.in_flight[chunk] and chunk != backward))
        last = next(reversed(ran), 0)
        of_it = {(sort, chunk, last) for sort in ("input", "sent")}
        apart.append(idle[-1] * (2 - len(of_it & alive[0])))
    if moment.beside is not None:
        extra -= not (is_last and moment.beside == len(done) - 1)
        late = max(sum(sort != "sent" for sort, *_ in each) for each in alive[1:]) - extra
    return replace(moment, extra=extra, idle=tuple(idle), idle_apart=tuple(apart), late=late)


def _deferring(
    moment: Moment,
    deferred: Deferred,
    done: Mapping[int, int],
    alive: frozenset[BoundaryTensor],
    before: int,
) -> Moment:
    """The moment with deferred runs of the output layer, and no boundary tensor that is of one.

    Args:
        moment: of the last stage, without them.
        deferred: what waits, with what a microbatch's chunk received.
        done: the microbatches of the last chunk whose backward has run.
        alive: the boundary tensors at the event.
        before: how many microbatches more have run.
    """
    extra, last = moment.extra, len(moment.in_flight) - 1
    if not moment.idle:  # else `_overlapped` has moved them
        for sort, chunk, microbatch in alive:
            if sort in ("input", "input grad") and chunk == last and microbatch in done:
                number = done[microbatch]
                extra -= deferred.waiting(number + 1) > deferred.waiting(number)
    return replace(moment, extra=extra, deferred=deferred.waiting(len(done) + before))


def _decisive(counts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Of the counts of moments those of neither sort."""
    own = np.array(list(dict.fromkeys(_without_passages(counts))))
    reached = ~np.eye(len(own), dtype=np.bool_)  # the counts of which by which others
    for column in own.T:
        reached &= column[:, None] <= column
    return _without_passages([tuple(row) for row in own[~reached.any(axis=1)].tolist()])


def _without_passages(counts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The counts that are not at most the mean of their two neighbours."""
    own = np.array(counts)
    between = np.zeros(len(own), np.bool_)
    between[1:-1] = np.all(2 * own[1:-1] <= own[:-2] + own[2:], axis=1)
    return [row for row, is_between in zip(counts, between.tolist(), strict=True) if not is_between]
