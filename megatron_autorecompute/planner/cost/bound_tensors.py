"""The boundary tensors that variables of Megatron's pipeline schedules hold, event by event.

`_Interleaved` keeps the variables, lists and receive buffers of megatron-core's
`forward_backward_pipelining_with_interleaving` (schedules.py) under their names there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from megatron_autorecompute.planner.cost.schedule import Schedule

Sort = Literal["input", "input grad", "output", "output grad", "sent"]
"""What a combined backward sends (EP overlap) is its first layer's gradient, of which the input's
`.grad` is a copy; elsewhere the two are one tensor."""
_Place = tuple[int, int]
"""(chunk, microbatch)"""


class BoundaryTensor(NamedTuple):
    """A tensor of one forward or backward."""

    sort: Sort
    chunk: int
    microbatch: int


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
        found = () if last is None else (BoundaryTensor(sort, 0, last) for sort in sorts)
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
            self.waiting.add(BoundaryTensor("input", *self.forwards[0]))
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
            gradient = BoundaryTensor("output grad", *self.backwards[j])
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
        gradient = BoundaryTensor("output grad", *place)
        self.waiting.discard(gradient)
        self.own.add(gradient)
        alive = self._alive()
        self.own -= {gradient, self._input("input", place), BoundaryTensor("output", *place)}
        self.done.add(place)
        self.bound["input_tensor_grad"] = self._input("input grad", place)
        if self.overlap and j < self.steady:
            combined = self.schedule.overlap_moe_expert_parallel_comm
            sent = self._input("sent" if combined else "input grad", place)
            self.bound["send_prev_wait_handle"] = sent
        self._receive_gradient(j)
        return alive

    def _alive(self) -> frozenset[BoundaryTensor]:
        held = [each for each in {*self.waiting, *self.bound.values()} - self.own if each]
        # The `.grad` of an input whose backward has run is alive as long as the input.
        done = (each for each in held if each.sort == "input" and each[1:] in self.done)
        return frozenset((*held, *(BoundaryTensor("input grad", *each[1:]) for each in done)))

    def _end_of_iteration(self, k: int) -> None:
        """The output's graph holds the input."""
        is_loss = self._output(k) is None
        self.bound["output_tensor"] = None if is_loss else self._input("input", self.forwards[k])
        self.bound["kept output"] = None if self.deallocated else self._output(k)
        self.bound["sent output"] = None

    def _receive_input(self, k: int) -> None:
        """What is received after forward k."""
        place = self._received(self.forwards, k, self.is_first, 1)
        tensor = BoundaryTensor("input", *place) if place else None
        self.waiting.add(tensor)
        if self.overlap and k >= self.warmup:
            self._fill("fwd_recv_buffer", k, tensor, self.is_first)
        else:
            self.bound["input_tensor"] = tensor

    def _receive_gradient(self, j: int) -> None:
        """What is received after backward j, or before the first one."""
        place = self._received(self.backwards, j, self.is_last, -1)
        tensor = BoundaryTensor("output grad", *place) if place else None
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
        return None if self.is_first and place[0] == 0 else BoundaryTensor(sort, *place)

    def _output(self, k: int) -> BoundaryTensor | None:
        """None for the loss."""
        chunk, microbatch = self.forwards[k]
        is_loss = self.is_last and chunk == self.schedule.num_chunks - 1
        return None if is_loss else BoundaryTensor("output", chunk, microbatch)
