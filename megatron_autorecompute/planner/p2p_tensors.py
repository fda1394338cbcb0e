"""Counts the boundary tensors that are alive at each event of a stage and belong to no layer.

A *boundary tensor* is what one stage sends another: an output, or the gradient of an input. Most
are part of a layer's record: the received input belongs to the first layer of its chunk from the
chunk's forward on, and the gradient that a backward starts from to the chunk's last layer. This
module replays the schedule to count the others: tensors received before their turn, and tensors to
which a variable of Megatron's schedule is still bound after their use. The variables below are
those of megatron-core's `schedules.py`, the same in 0.16.1 and 0.19.2.

Without `deallocate_pipeline_outputs` an output stays alive. It belongs to its microbatch while that
is in flight, and counts here if a variable is still bound to it afterwards.

`overlap_p2p_comm_warmup_flush` is not replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from megatron_autorecompute.planner.arrays import Ints
from megatron_autorecompute.planner.schedule import Direction, Schedule

Tensor = int | None
"""A tensor's number; None if Megatron's variable is None."""


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
        return _one_chunk(schedule, stage, deallocated)
    return tuple(_Interleaved(schedule, stage, overlap_p2p, deallocated).extra)


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
    same: dict[tuple[bool, int, int], dict[tuple[int, ...], int]] = {}
    columns = is_backward.tolist(), chunk.tolist(), beside.tolist(), map(tuple, counts.tolist())
    for at, (*event, row) in enumerate(zip(*columns, strict=True)):
        if event[0] and event[2] >= 0:
            continue  # with its forward
        same.setdefault((event[0], event[1], event[2]), {}).setdefault(row, at)
    kept: list[int] = []
    for rows in same.values():
        kept += _without_passages(_maximal(list(rows.values()), counts), counts)
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


def _maximal(positions: Sequence[int], counts: Ints) -> Ints:
    """The positions, in order, whose counts no other position reaches in every column."""
    # By descending total: a later position cannot exceed an earlier one in every column.
    rest = np.array(sorted(positions, key=lambda at: -counts[at].sum()))
    kept = []
    while len(rest):
        kept.append(rest[0])
        rest = rest[~np.all(counts[rest] <= counts[rest[0]], axis=1)]
    return np.sort(kept)


def _without_passages(positions: Ints, counts: Ints) -> list[int]:
    """The positions whose counts are not at most the mean of their two neighbours' counts."""
    rows = counts[positions]
    between = np.zeros(len(rows), np.bool_)
    between[1:-1] = np.all(2 * rows[1:-1] <= rows[:-2] + rows[2:], axis=1)
    return [int(at) for at in positions[~between]]


def _one_chunk(schedule: Schedule, stage: int, deallocated: bool) -> tuple[int, ...]:
    """1F1B, in `forward_backward_pipelining_without_interleaving`.

    Before the first backward nothing is left over. After it, these are alive in a forward: if there
    is a next stage, the last `output_tensor_grad`, and the last output if outputs are kept; if
    there is a previous stage, the last `input_tensor_grad` and the input of the microbatch just
    finished. In a later backward only the last `input_tensor_grad` is, because `output_tensor_grad`
    is then its own.
    """
    after, before = int(stage < schedule.num_stages - 1), int(stage > 0)
    counts, begun = [], False
    for event in schedule.events(stage):
        forward = event.direction == "forward"
        in_forward = after + 2 * before + after * (not deallocated)
        counts.append((in_forward if forward else before) if begun else 0)
        begun = begun or not forward
    return tuple(counts)


@dataclass
class _Interleaved:
    """The variables that hold tensors in `forward_backward_pipelining_with_interleaving`."""

    schedule: Schedule
    stage: int
    overlap: bool
    deallocated: bool
    extra: list[int] = field(default_factory=list)
    """Counted so far, one per event."""
    bound: dict[object, Tensor] = field(default_factory=dict)
    """By name: local variables, receive buffers, and every block's `input_tensor`."""
    gradient_of: dict[Tensor, Tensor] = field(default_factory=dict)
    """The `.grad` of an input whose backward has run: alive as long as the input."""
    in_flight: set[Tensor] = field(default_factory=set)
    """Inputs and kept outputs of microbatches between the start of forward and end of backward."""
    last: int = 0

    def __post_init__(self) -> None:
        v = self.schedule.num_chunks
        _, chunk, _ = self.schedule.forward_table()
        self.chunk = chunk.tolist()
        self.backward_chunk = [v - 1 - number for number in self.chunk]
        self.inputs: list[list[Tensor]] = [[] for _ in range(v)]
        self.grads: list[list[Tensor]] = [[] for _ in range(v)]
        self.outputs: list[list[Tensor]] = [[] for _ in range(v)]
        self.is_first, self.is_last = self.stage == 0, self.stage == self.schedule.num_stages - 1
        self._run()

    def _run(self) -> None:
        total, warmup = len(self.chunk), self.schedule.warmup(self.stage)
        self.inputs[0].append(self._received(not self.is_first))
        for k in range(warmup):
            self._warm_up(k, steady_follows=k == warmup - 1 < total - 1)
        for k in range(total - warmup):
            self._steady(k + warmup, k, is_last=k == total - warmup - 1)
        if warmup == total:
            self.grads[-1].append(self._received(not self.is_last))
        for k in range(total - warmup, total):
            self._cool_down(k, is_last=k == total - 1)

    def _warm_up(self, k: int, steady_follows: bool) -> None:
        self._bind_output(self._forward(k))
        self._receive_input(k, "input_tensor", stop=k == len(self.chunk) - 1)
        if steady_follows:
            name = ("bwd_recv_buffer", self._buffer_size(self.is_last) - 1)
            self.bound[name if self.overlap else "output_tensor_grad"] = self._received(
                not self.is_last
            )
            self.grads[-1].append(self.last if not self.is_last else None)

    def _steady(self, forward_k: int, backward_k: int, is_last: bool) -> None:
        output = self._forward(forward_k)
        if self.overlap:
            slot = forward_k % self._buffer_size(self.is_first)
            self._receive_input(forward_k, ("fwd_recv_buffer", slot), stop=is_last)
            self._clear("fwd_recv_buffer", forward_k, self.is_first)
        self.bound["forward_output_tensor"] = output[0]  # until sent, whatever is freed then
        self.bound["its graph"] = output[1]
        gradient = self._backward(backward_k)
        self.bound["forward_output_tensor"] = self.bound["its graph"] = None
        self._bind_output(output)
        if self.overlap:
            slot = backward_k % self._buffer_size(self.is_last)
            self._receive_gradient(backward_k, ("bwd_recv_buffer", slot))
            self._clear("bwd_recv_buffer", backward_k, self.is_last)
        else:
            self._receive_input(forward_k, "input_tensor", stop=is_last)
            self._receive_gradient(backward_k, "output_tensor_grad")
        self.bound["input_tensor_grad"] = gradient

    def _cool_down(self, k: int, is_last: bool) -> None:
        self.bound["input_tensor_grad"] = self._backward(k)
        self._receive_gradient(k, "output_tensor_grad", stop=is_last)

    def _bind_output(self, output: tuple[Tensor, Tensor]) -> None:
        """Bind `output_tensor`: the tensor, if it is kept, and the input that its graph holds."""
        self.bound["output_tensor"] = None if self.deallocated else output[0]
        self.bound["output_tensor's graph"] = output[1]

    def _forward(self, k: int) -> tuple[Tensor, Tensor]:
        chunk = self.chunk[k]
        inputs, outputs = self.inputs[chunk], self.outputs[chunk]
        if chunk == 0 and self.is_first and len(inputs) == len(outputs):
            inputs.append(None)
        own = inputs[len(outputs)]
        self.bound["block", chunk] = own
        self.in_flight.add(own)
        self._count(None)
        loss = chunk == len(self.inputs) - 1 and self.is_last
        output = self._received(not loss)
        outputs.append(None if self.deallocated else output)
        self.in_flight.add(outputs[-1])
        return output, None if loss else own

    def _backward(self, k: int) -> Tensor:
        chunk = self.backward_chunk[k]
        if chunk == len(self.inputs) - 1 and self.is_last:
            self.grads[chunk].append(None)
        own, output = self.inputs[chunk].pop(0), self.outputs[chunk].pop(0)
        self._count(self.grads[chunk].pop(0))
        self.in_flight -= {own, output}
        if own is not None:
            self.gradient_of[own] = self._received(True)
        return self.gradient_of.get(own)

    def _count(self, gradient: Tensor) -> None:
        """Count what is alive, without microbatches in flight and the event's own layers."""
        alive = set(self.bound.values())
        for inputs, outputs, gradients in zip(self.inputs, self.outputs, self.grads, strict=True):
            alive.update(inputs[len(outputs) :], gradients)
        # Not `alive -= self.in_flight`, which goes through the larger of the two.
        alive = {tensor for tensor in alive if tensor not in self.in_flight}
        alive.update([self.gradient_of[tensor] for tensor in alive if tensor in self.gradient_of])
        self.extra.append(len(alive - {None, gradient}))

    def _received(self, there: bool) -> Tensor:
        self.last += there
        return self.last if there else None

    def _receive_input(self, k: int, name: object, stop: bool) -> None:
        there, chunk = self._expected(k, self.is_first, self.chunk, 1)
        self.bound[name] = self._received(there and not stop)
        if there and not stop:
            self.inputs[chunk].append(self.bound[name])

    def _receive_gradient(self, k: int, name: object, stop: bool = False) -> None:
        there, chunk = self._expected(k, self.is_last, self.backward_chunk, -1)
        self.bound[name] = self._received(there and not stop)
        if there and not stop:
            self.grads[chunk].append(self.bound[name])

    def _expected(self, k: int, leads: bool, chunks: list[int], step: int) -> tuple[bool, int]:
        """`recv_tensor_from_previous_stage`: whether a tensor is received, and for which chunk."""
        p, end = self.schedule.num_stages, chunks[-1]
        if not leads:
            return True, chunks[(k + 1) % len(chunks)]
        if k < p - 1:
            return False, 0
        chunk = chunks[k - (p - 1)]
        return chunk != end, chunk + step

    def _buffer_size(self, leads: bool) -> int:
        return self.schedule.group_size - self.schedule.num_stages + 1 if leads else 1

    def _clear(self, buffer: str, k: int, leads: bool) -> None:
        size = self._buffer_size(leads)
        if self.bound[buffer, k % size] is not None:
            self.bound[buffer, (k + 1) % size] = None
