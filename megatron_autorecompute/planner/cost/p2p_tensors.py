"""Counts the boundary tensors that are alive at each event of a stage and belong to no layer.

A *boundary tensor* is what one stage sends another: an output, or the gradient of an input. Most
are part of a layer's record. The others are counted here: tensors received before their turn, and
tensors to which a variable of Megatron's schedule is still bound after their use
(docs/decisions/bytes.md). `overlap_p2p_comm_warmup_flush` is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from megatron_autorecompute.planner.cost import Ints
from megatron_autorecompute.planner.cost.schedule import Direction, Schedule
from megatron_autorecompute.profile import Deferred

_INPUT, _INPUT_GRAD, _OUTPUT, _OUTPUT_GRAD, _SENT = range(5)
"""Sorts of boundary tensors. What a combined backward sends (EP overlap) is its first layer's
gradient, of which the input's `.grad` is a copy; elsewhere the two are one tensor."""
_Spans = tuple[int, Ints, Ints, Ints]
"""A sort, the numbers of tensors (-1: none), and the events from and until which something refers
to each."""


@lru_cache(maxsize=32)
def _forwards(schedule: Schedule) -> tuple[Ints, Ints, Ints]:
    """The chunk and microbatch of each forward, and the number of each [chunk, microbatch]."""
    microbatch, chunk = np.array(schedule.table(), np.int64).T
    number = np.empty((schedule.num_chunks, schedule.num_microbatches), np.int64)
    number[chunk, microbatch] = np.arange(len(chunk))
    return chunk, microbatch, number


class _Stage:
    """The events of a stage as arrays, and its boundary tensors; arguments as `decisive_moments`.

    A forward, its backward and their tensors have one *number*: when the forward runs.
    """

    def __init__(
        self, schedule: Schedule, stage: int, overlap_p2p: bool, deallocated: bool
    ) -> None:
        self.schedule, self.overlap, self.deallocated = schedule, overlap_p2p, deallocated
        self.is_first, self.is_last = stage == 0, stage == schedule.num_stages - 1
        self.chunk, self.microbatch, self.number = _forwards(schedule)
        self.backwards = self.number[schedule.num_chunks - 1 - self.chunk, self.microbatch]
        """The numbers of backwards in their order."""
        total, self.warmup = len(self.chunk), schedule.warmup(stage)
        self.steady, self.end, order = total - self.warmup, 2 * total, np.arange(total)
        self.forward_at = np.where(order < self.warmup, order, 2 * order - self.warmup)
        """The event of each forward."""
        ran_at = np.where(order < self.steady, self.warmup + 2 * order + 1, total + order)
        self.backward_at = np.empty_like(ran_at)
        """The event of each backward, by number."""
        self.backward_at[self.backwards] = ran_at

    def alive(self) -> Ints:
        """The boundary tensors that belong to no layer, `[4, span]`: sort, number, and the events
        from and until which it is alive. Between two spans of a tensor is a gap."""
        spans = self._one_chunk() if self.schedule.num_chunks == 1 else self._interleaved()
        nothing = np.zeros((4, 0), np.int64)
        each = (np.stack(np.broadcast_arrays(*own)) for own in spans)
        found = np.concatenate([nothing, *each], axis=1)
        sort, number, since, until = found[:, found[1] >= 0]
        # What belongs to a layer is no span: an input to its backward's end, a gradient in it.
        own_since, own_until = np.zeros_like(since), np.zeros_like(since)
        inputs = sort == _INPUT if self.deallocated else (sort == _INPUT) | (sort == _OUTPUT)
        owned = inputs | (sort == _OUTPUT_GRAD)
        own_until[owned] = self.backward_at[number[owned]] + 1
        own_since[owned] = self.backward_at[number[owned]]
        own_since[inputs] = self.forward_at[number[inputs]]
        early = np.stack([sort, number, since, np.minimum(until, own_since)])
        later = np.stack([sort, number, np.maximum(since, own_until), until])
        # The `.grad` of an input whose backward has run is alive as long as the input.
        grads = later[:, sort == _INPUT]
        grads[0] = _INPUT_GRAD
        return _together(np.concatenate([early, later, grads], axis=1), self.end)

    def _one_chunk(self) -> Iterator[_Spans]:
        """1F1B, in `forward_backward_pipelining_without_interleaving`: variables refer to tensors
        of the microbatch whose backward ran last. In a backward only `input_tensor_grad` does."""
        ran_at = self.backward_at
        following = self._rebound(ran_at)
        if not self.is_first:
            yield _INPUT_GRAD, self.backwards, ran_at + 1, np.minimum(following + 1, self.end)
            yield _INPUT, self.backwards, ran_at + 1, following
        if not self.is_last:
            yield _OUTPUT_GRAD, self.backwards, ran_at + 1, following
            if not self.deallocated:
                yield _OUTPUT, self.backwards, ran_at + 1, following

    def _interleaved(self) -> Iterator[_Spans]:
        """What the variables, lists and receive buffers of
        `forward_backward_pipelining_with_interleaving` refer to, by their names there."""
        chunk, backwards, warmup, steady = self.chunk, self.backwards, self.warmup, self.steady
        numbers, last = np.arange(len(chunk)), self.schedule.num_chunks - 1
        inputs = np.where((chunk == 0) & self.is_first, -1, numbers)
        outputs = np.where((chunk == last) & self.is_last, -1, numbers)  # none is the loss
        ran, ran_at = self.forward_at + 1, self.backward_at[backwards]
        ended = ran + (numbers >= warmup)  # an iteration
        yield _INPUT, inputs, self.forward_at, self.until_next(numbers, self.forward_at)  # block
        # output_tensor, whose graph holds the input
        yield _INPUT, np.where(outputs < 0, -1, inputs), ended, self._rebound(ended)
        if not self.deallocated:
            yield _OUTPUT, outputs, ended, self._rebound(ended)
        yield _OUTPUT, outputs[warmup:], ran[warmup:], ran[warmup:] + 1
        yield _INPUT_GRAD, inputs[backwards], ran_at + 1, self._rebound(ran_at + 1)
        # input_tensors, and input_tensor or fwd_recv_buffer
        got, when = self._received(numbers, self.is_first, 1)[1:], ran if self.overlap else ended
        yield _INPUT, got, when, self.forward_at[got]
        plain = warmup if self.overlap else len(got)
        yield _INPUT, got[:plain], when[:plain], self._rebound(when[:plain])
        yield self._in_turn(_INPUT, got[plain:], when[plain:], self.is_first)
        # output_tensor_grads, and output_tensor_grad or bwd_recv_buffer
        got, when = self._received(backwards, self.is_last, -1), np.append(warmup, ran_at + 1)
        yield _OUTPUT_GRAD, got, when, self.backward_at[got]
        if not steady:
            got, when = got[1:], when[1:]  # the first is in no variable
        buffered = steady + 1 if self.overlap and steady else 0
        yield _OUTPUT_GRAD, got[buffered:], when[buffered:], self._rebound(when[buffered:])
        yield self._in_turn(_OUTPUT_GRAD, got[:buffered], when[:buffered], self.is_last)
        if buffered:
            sent = _SENT if self.schedule.overlap_moe_expert_parallel_comm else _INPUT_GRAD
            since = ran_at[:steady] + 1
            yield sent, inputs[backwards[:steady]], since, self._rebound(since)  # send_prev_…
            early = steady + np.flatnonzero(np.isin(backwards[steady:], got[:buffered]))
            yield _OUTPUT_GRAD, backwards[early], ran_at[early], self._rebound(ran_at[early])

    def _rebound(self, since: Ints) -> Ints:
        """Until when a variable is bound to what it is bound to from these events on."""
        return np.append(since[1:], self.end)[: len(since)]

    def until_next(self, numbers: Ints, events: Ints) -> Ints:
        """The event of the next one that has the same chunk, for each of `numbers` in order."""
        found = np.empty_like(events)
        for chunk in range(self.schedule.num_chunks):
            own = self.chunk[numbers] == chunk
            found[own] = self._rebound(events[own])
        return found

    def _received(self, order: Ints, leads: bool, step: int) -> Ints:
        """What is received before the first of these forwards or backwards, and after each of them;
        -1: nothing. The first of all stages gets it from the last one, for the sender's next
        chunk."""
        if not leads:
            return np.append(order, -1)
        senders = order[: len(order) - (self.schedule.num_stages - 1)]
        chunk = self.chunk[senders] + step
        there = (chunk >= 0) & (chunk < self.schedule.num_chunks)
        found = np.where(there, self.number[chunk * there, self.microbatch[senders]], -1)
        return np.append(np.full(len(order) + 1 - len(found), -1), found)

    def _in_turn(self, sort: int, got: Ints, when: Ints, leads: bool) -> _Spans:
        """Buffers that receive in turn; the next one is emptied when one is filled."""
        size = self.schedule.group_size - self.schedule.num_stages + 1 if leads else 1
        filled = np.append(got >= 0, np.zeros(size, np.bool_))[size - 1 : size - 1 + len(got)]
        later = np.append(when, np.full(size, self.end))
        return sort, got, when, np.where(filled, later[size - 1 : -1], later[size:])


def _together(spans: Ints, end: int) -> Ints:
    """Spans without empty ones; those of one tensor that meet are one."""
    sort, number, since, until = spans[:, spans[2] < spans[3]]
    if not len(sort):
        return np.zeros((4, 0), np.int64)
    first = (sort * end + number) * (end + 2)  # so that those of two tensors do not meet
    order = np.argsort(first + since)
    reach = np.maximum.accumulate((first + until)[order])
    begins = np.append(True, (first + since)[order][1:] > reach[:-1])
    begin = order[begins]
    last = np.append(np.flatnonzero(begins)[1:], len(order)) - 1
    return np.stack([sort[begin], number[begin], since[begin], reach[last] - first[begin]])


def _count(spans: Ints, events: int) -> Ints:
    """How many of some spans there are at each event."""
    more, fewer = (np.bincount(each, minlength=events + 1) for each in spans[2:])
    found: Ints = np.cumsum(more - fewer)[:events]
    return found


@lru_cache(maxsize=1024)
def extra_owners(
    schedule: Schedule, stage: int, *, overlap_p2p: bool = True, deallocated: bool = True
) -> tuple[tuple[int, ...], ...]:
    """The microbatch of each boundary tensor that belongs to no layer, at each event.

    Args:
        overlap_p2p: `overlap_p2p_comm`; without effect when there is one chunk.
        deallocated: `deallocate_pipeline_outputs`.

    Raises: PipelineError for a stage that does not exist.
    """
    own = _Stage(schedule, stage, overlap_p2p, deallocated)
    found: list[list[int]] = [[] for _ in range(own.end)]
    for _, number, since, until in own.alive().T.tolist():
        for event in found[since:until]:
            event.append(int(own.microbatch[number]))
    return tuple(map(tuple, found))


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


def turned(moment: Moment) -> Moment:
    """The event at the same time."""
    assert moment.beside is not None
    direction: Direction = "backward" if moment.direction == "forward" else "forward"
    return replace(moment, direction=direction, chunk=moment.beside, beside=moment.chunk)


class _Moments:
    """The moments of all events of a stage as arrays; arguments as `decisive_moments`, and how many
    microbatches more have run before each event."""

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        overlap_p2p: bool,
        deallocated: bool,
        deferred: Deferred | None,
        left_out: Ints | None = None,
    ) -> None:
        own = self._stage = _Stage(schedule, stage, overlap_p2p, deallocated)
        spans, v = own.alive(), schedule.num_chunks
        before = np.zeros(own.end, np.int64) if left_out is None else left_out
        self.is_backward = np.zeros(own.end, np.bool_)
        self.is_backward[own.backward_at] = True
        self.chunk, self.microbatch = np.empty((2, own.end), np.int64)
        for at in (own.forward_at, own.backward_at):
            self.chunk[at], self.microbatch[at] = own.chunk, own.microbatch
        self.microbatch += before
        is_own = self.chunk[:, None] == np.arange(v)
        self._ran = is_own & self.is_backward[:, None]
        self._ran_before = self._ran.cumsum(axis=0) - self._ran
        started = (is_own & ~self.is_backward[:, None]).cumsum(axis=0)
        self.in_flight = started - self._ran_before - is_own
        self.beside = np.full(own.end, -1)
        self.extra = _count(spans, own.end)
        self.late, self.deferred = np.zeros((2, own.end), np.int64)
        self.idle = self.apart = np.zeros((own.end, 0), np.int64)
        if schedule.overlap_moe_expert_parallel_comm:
            self._overlap(spans)
        if deferred and own.is_last:
            self._defer(spans, deferred, before)
        rows = (self.extra, self.deferred, self.late)
        self.counts = np.column_stack([*rows, self.in_flight, self.idle, self.apart])
        """All that a moment's bytes grow with, `[event, count]`."""

    def _overlap(self, spans: Ints) -> None:
        """Make them those of EP overlap.

        Of two events side by side, what the first one sends, and what is received for later events,
        comes when the layers of both have run. The gradient that the second one starts from is its
        own. What it sends then is its own, too, and what the one before sent is gone.
        """
        own, v = self._stage, self.in_flight.shape[1]
        first = own.forward_at[own.warmup :]
        second = first + 1
        self.beside[first], self.beside[second] = self.chunk[second], self.chunk[first]
        self.in_flight[first, self.chunk[second]] -= 1
        idle = (self._ran_before > 0) & (self.in_flight == 0) & ~self._ran
        idle[first, self.chunk[second]] = False
        self.idle = idle.astype(np.int64)
        # Of the microbatch whose backward a chunk ran last.
        ran_at = own.backward_at[own.backwards]
        until = np.empty_like(ran_at)
        until[own.backwards] = own.until_next(own.backwards, ran_at)
        held = spans[:, np.isin(spans[0], (_INPUT, _SENT))]
        held[2] = np.maximum(held[2], own.backward_at[held[1]] + 1)
        held[3] = np.minimum(held[3], until[held[1]] + 1)
        held = held[:, held[2] < held[3]]
        there = [_count(held[:, own.chunk[held[1]] == c], own.end) for c in range(v)]
        self.apart = self.idle * (2 - np.column_stack(there))
        after = np.append(_count(spans[:, spans[0] != _SENT], own.end), 0)
        self.extra[first] -= ~(own.is_last & (self.chunk[second] == v - 1))
        self.late[first] = np.maximum(after[second], after[second + 1]) - self.extra[first]
        for each in (self.in_flight, self.idle, self.apart, self.extra, self.late):
            each[second] = each[first]

    def _defer(self, spans: Ints, deferred: Deferred, before: Ints) -> None:
        """Count deferred runs of the output layer, and no boundary tensor that is of one."""
        done = self._ran_before[:, -1] + before
        self.deferred = np.array([deferred.waiting(number) for number in done.tolist()])
        if self.idle.size:
            return  # `_overlap` has moved them
        own = self._stage
        ran_at = own.backward_at[spans[1]]
        held = (spans[0] <= _INPUT_GRAD) & (own.chunk[spans[1]] == self.in_flight.shape[1] - 1)
        of_it = spans[:, held & (spans[2] > ran_at)]
        number = own.microbatch[of_it[1]] + before[own.backward_at[of_it[1]]]
        waits = [deferred.waiting(n + 1) > deferred.waiting(n) for n in number.tolist()]
        self.extra = self.extra - _count(of_it[:, np.array(waits, np.bool_)], own.end)

    def of(self, event: int) -> Moment:
        """The moment of one event."""
        beside = int(self.beside[event])
        return Moment(
            "backward" if self.is_backward[event] else "forward",
            int(self.chunk[event]),
            tuple(self.in_flight[event].tolist()),
            int(self.extra[event]),
            int(self.microbatch[event]),
            beside if beside >= 0 else None,
            tuple(self.idle[event].tolist()),
            tuple(self.apart[event].tolist()),
            int(self.deferred[event]),
            int(self.late[event]),
        )

    def decisive(self) -> Iterator[int]:
        """The events of which `decisive_moments` speaks, by sort of event."""
        v = self.in_flight.shape[1]
        sorts = (self.is_backward * v + self.chunk) * (v + 1) + self.beside + 1
        sorts[self.is_backward & (self.beside >= 0)] = -1  # the forward's is the same
        for sort in np.unique(sorts[sorts >= 0]):
            events = np.flatnonzero(sorts == sort)
            counts = self.counts[events]
            kept = _decisive(counts)
            alike = (counts[:, None] == kept).all(axis=2)
            yield from events[alike.argmax(axis=0)].tolist()


@lru_cache(maxsize=4096)
def decisive_moments(
    schedule: Schedule,
    stage: int,
    overlap_p2p: bool = True,
    deallocated: bool = True,
    deferred: Deferred | None = None,
) -> tuple[Moment, ...]:
    """The moments that can be a stage's highest moment under some policy; arguments and errors
    as in `extra_owners`, with what the last stage keeps of output layers.

    Two sorts of moments are left out. First, moments that another moment of the same direction and
    chunk reaches in every count. Second, moments between two others: bytes are linear in the
    counts, so if every count of a moment is at most the mean of its two neighbours' counts, one of
    the neighbours needs as many bytes. This is frequent, because within a group of microbatches the
    counts move from one chunk to another in steps of one.
    """
    short, left_out = schedule.shortened(), np.array(schedule.left_out(stage))
    found = _Moments(short, stage, overlap_p2p, deallocated, deferred, left_out)
    return tuple(map(found.of, sorted(found.decisive())))


def every_moment(
    schedule: Schedule,
    stage: int,
    overlap_p2p: bool = True,
    deallocated: bool = True,
    deferred: Deferred | None = None,
) -> list[Moment]:
    """The moment of each event of a stage; arguments as in `decisive_moments`."""
    found = _Moments(schedule, stage, overlap_p2p, deallocated, deferred)
    return list(map(found.of, range(len(found.chunk))))


def _decisive(counts: Ints) -> Ints:
    """Of the counts of moments those of neither sort."""
    own = np.array(list(dict.fromkeys(map(tuple, _without_passages(counts).tolist()))))
    reached = ~np.eye(len(own), dtype=np.bool_)  # the counts of which by which others
    for column in own.T:
        reached &= column[:, None] <= column
    return _without_passages(own[~reached.any(axis=1)])


def _without_passages(counts: Ints) -> Ints:
    """The counts that are not at most the mean of their two neighbours."""
    between = np.zeros(len(counts), np.bool_)
    between[1:-1] = np.all(2 * counts[1:-1] <= counts[:-2] + counts[2:], axis=1)
    return counts[~between]
