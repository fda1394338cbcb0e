"""Lists the boundary tensors that variables of Megatron's interleaved schedule hold at each event.

The variables are those of `forward_backward_pipelining_with_interleaving` in megatron-core's
`schedules.py`. Nothing is replayed event by event: the order of events fixes the lifetime of every
tensor in a variable, a receive buffer or a list, and one computation gives all lifetimes.

A time is the number of an event; what happens between two events happens at the second one.
"""

from __future__ import annotations

import numpy as np

from megatron_autorecompute.planner.cost import Ints
from megatron_autorecompute.planner.cost.schedule import Schedule

_INPUT, _INPUT_GRADIENT, _OUTPUT, _GRADIENT, _SENT = range(5)
"""Tensors of one forward or backward. With T forwards, tensor k of a sort is number sort * T + k;
the gradient that a backward receives has the number of the backward, all others of the forward.
What a combined backward sends (EP overlap) is its first layer's gradient, of which the input's
`.grad` is a copy; elsewhere the two are one tensor."""
_NO_TENSOR = -1


class BoundTensors:
    """What one stage's variables hold in an interleaved schedule.

    Args:
        schedule: the order of events; of several chunks.
        stage: pipeline rank.
        overlap: `overlap_p2p_comm`.
        deallocated: `deallocate_pipeline_outputs`.
    """

    def __init__(self, schedule: Schedule, stage: int, overlap: bool, deallocated: bool) -> None:
        self.schedule, self.overlap, self.deallocated = schedule, overlap, deallocated
        self.is_first, self.is_last = stage == 0, stage == schedule.num_stages - 1
        is_backward, _, _ = schedule.order(stage)
        self.forward_at = np.flatnonzero(~is_backward)
        self.backward_at = np.flatnonzero(is_backward)
        self.total, self.warmup = len(self.forward_at), schedule.warmup(stage)
        self.steady = self.total - self.warmup
        self.chunk = schedule.forward_table()[1]
        shape = schedule.num_chunks, schedule.num_microbatches
        self.forwards = np.argsort(self.chunk, kind="stable").reshape(shape)
        """`[chunk, microbatch]`, as the next one."""
        self.backwards = np.argsort(-self.chunk, kind="stable").reshape(shape)
        self._held: list[Ints] = []
        """(tensor, from, until) of everything that holds one."""

    def extra(self) -> Ints:
        """Tensors alive at each event that belong to no microbatch in flight and no own layer."""
        return _distinct(self._all_held(), 2 * self.total)

    def extra_but_sent(self) -> Ints:
        """The boundary tensors of `extra` without gradients that combined backwards send."""
        held = self._all_held()
        return _distinct(held[:, held[0] // self.total != _SENT], 2 * self.total)

    def idle_apart(self, done: Ints) -> Ints:
        """Of an idle chunk's input and the gradient of it, which its first layer keeps, those that
        are not among `extra`: 0 to 2.

        Args:
            done: `[event, chunk]` the forward whose backward ran last in a chunk that is idle then;
                a negative number if none is.
        """
        apart = np.where(done < 0, 0, 2)
        for tensor, start, stop in _disjoint(self._all_held(), len(done)).T.tolist():
            sort, forward = divmod(tensor, self.total)
            if sort in (_INPUT, _SENT):
                chunk = self.chunk[forward]
                apart[start:stop, chunk] -= done[start:stop, chunk] == forward
        return apart

    def owners(self) -> tuple[tuple[int, ...], ...]:
        """The microbatch of each of these tensors, at each event."""
        microbatch = self.schedule.forward_table()[0]
        found: list[list[int]] = [[] for _ in range(2 * self.total)]
        for tensor, start, stop in _disjoint(self._all_held(), 2 * self.total).T.tolist():
            for event in range(start, stop):
                found[event].append(int(microbatch[tensor % self.total]))
        return tuple(map(tuple, found))

    def after_backward(self) -> Ints:
        """Inputs of the last chunk and gradients of these that are held once its backward has run:
        `[microbatch, from, until]`."""
        tensor, start, stop = _disjoint(self._all_held(), 2 * self.total)
        sort, forward = np.divmod(tensor, self.total)
        there = np.isin(sort, (_INPUT, _INPUT_GRADIENT))
        there &= (self.chunk[forward] == self.schedule.num_chunks - 1) & (
            start > self._own_events()[1][forward]
        )
        microbatch = self.schedule.forward_table()[0][forward]
        return np.stack([microbatch, start, stop])[:, there]

    def _all_held(self) -> Ints:
        self._held.clear()
        self._inputs()
        self._outputs()
        self._gradients()
        if self.overlap and self.steady:
            self._works()
        held = np.concatenate(self._held, axis=1)
        held = held[:, (held[0] != _NO_TENSOR) & (held[1] < held[2])]
        first, last = (own[held[0]] for own in self._own_events())
        before = np.stack([held[0], held[1], np.minimum(held[2], first)])
        after = np.stack([held[0], np.maximum(held[1], last + 1), held[2]])
        # The `.grad` of an input whose backward has run is alive as long as the input.
        grads = after[:, after[0] < self.total] + [[_INPUT_GRADIENT * self.total], [0], [0]]
        return np.concatenate([before, after, grads], axis=1)

    def _inputs(self) -> None:
        received = self._inputs_received()
        after = self.forward_at + 1 if self.overlap else self._end_of_iteration()
        self._list(after, received, self.forward_at)
        if not self.is_first:
            self._list(np.zeros(1, np.int64), np.zeros(1, np.int64), self.forward_at)
        if self.overlap:
            warm_up, steady = slice(self.warmup), slice(self.warmup, None)
            self._variable(after[warm_up], received[warm_up])
            self._buffers(after[steady], received[steady], self.warmup, self.is_first)
        else:
            self._variable(after, received)
        for chunk in self.forwards:  # every block's `input_tensor`
            self._variable(self.forward_at[chunk], self._inputs_of(chunk))
        gradients = self._forward_of_backward()
        there = self._inputs_of(gradients) != _NO_TENSOR
        gradients = np.where(there, gradients + _INPUT_GRADIENT * self.total, _NO_TENSOR)
        self._variable(self.backward_at + 1, gradients)  # `input_tensor_grad`

    def _outputs(self) -> None:
        forward = np.arange(self.total)
        loss = self.is_last & (self.chunk == self.schedule.num_chunks - 1)
        output = np.where(loss, _NO_TENSOR, forward + _OUTPUT * self.total)
        end = self._end_of_iteration()
        # An output's graph holds the input. What is sent is bound until the backward beside it.
        self._variable(end, np.where(loss, _NO_TENSOR, self._inputs_of(forward)))
        sent = slice(self.warmup, None)
        self._hold(output[sent], self.forward_at[sent] + 1, end[sent])
        if not self.deallocated:
            self._variable(end, output)

    def _gradients(self) -> None:
        first = np.full(1, _NO_TENSOR if self.is_last else 0)
        received, after = self._gradients_received(), self.backward_at + 1
        at = self.forward_at[[self.warmup - 1]] + 1
        received, after = np.append(first, received), np.append(at, after)
        self._list(after, received, self.backward_at)
        tensors = np.where(received < 0, _NO_TENSOR, received + _GRADIENT * self.total)
        if not self.steady:  # the first one is in no variable
            self._variable(after[1:], tensors[1:])
        elif self.overlap:
            last = self.steady + 1
            self._buffers(after[:last], tensors[:last], -1, self.is_last)
            self._variable(after[last:], tensors[last:])
        else:
            self._variable(after, tensors)

    def _works(self) -> None:
        """What the works of p2p operations hold, as long as variables hold the works."""
        # `recv_next_wait_handle`: gradients received in the steady state and used after it.
        received = np.append(0, self._gradients_received()[: self.steady])
        received = received[received >= self.steady]
        self._variable(self.backward_at[received], received + _GRADIENT * self.total)
        # `send_prev_wait_handle`: the gradient that the last backward of the steady state sends.
        # Before, an input's `.grad` is bound longer, unless it is another tensor than what is sent.
        combined = self.schedule.overlap_moe_expert_parallel_comm
        first, sort = (0, _SENT) if combined else (self.steady - 1, _INPUT_GRADIENT)
        sent = self._inputs_of(self._forward_of_backward()[first : self.steady])
        sent = np.where(sent == _NO_TENSOR, _NO_TENSOR, sent + sort * self.total)
        self._variable(self.backward_at[first : self.steady] + 1, sent)

    def _end_of_iteration(self) -> Ints:
        """The time after each forward; in the steady state, after the backward beside it."""
        end = self.forward_at + 1
        end[self.warmup :] = self.backward_at[: self.steady] + 1
        return end

    def _inputs_of(self, forward: Ints) -> Ints:
        """The inputs of forwards that receive one."""
        if not self.is_first:
            return forward
        return np.where(self.chunk[forward] == 0, _NO_TENSOR, forward)

    def _forward_of_backward(self) -> Ints:
        found = np.empty(self.total, np.int64)
        found[self.backwards.ravel()] = self.forwards.ravel()
        return found

    def _inputs_received(self) -> Ints:
        """The forward whose input is received, after each forward."""
        if not self.is_first:
            return np.append(np.arange(1, self.total), _NO_TENSOR)
        return self._of_last_sender(self.forwards)

    def _gradients_received(self) -> Ints:
        """The backward whose gradient is received, after each backward."""
        if not self.is_last:
            return np.append(np.arange(1, self.total), _NO_TENSOR)
        return self._of_last_sender(self.backwards[::-1])

    def _of_last_sender(self, order: Ints) -> Ints:
        """`recv_tensor_from_previous_stage` where a tensor is for the sender's next chunk.

        `order` is `[chunk, microbatch]` in the order in which a microbatch passes the chunks.
        """
        following = np.full(self.total, _NO_TENSOR)
        following[order[:-1]] = order[1:]
        late = self.schedule.num_stages - 1
        return np.append(np.full(late, _NO_TENSOR), following[: self.total - late])

    def _own_events(self) -> tuple[Ints, Ints]:
        """For each tensor the events from first to last at which it belongs to layers."""
        never = np.full(self.total, 2 * self.total)
        done = np.empty(self.total, np.int64)
        done[self.forwards.ravel()] = self.backward_at[self.backwards.ravel()]
        outputs = (never, never) if self.deallocated else (self.forward_at, done)
        none = never, never
        pairs = (self.forward_at, done), none, outputs, (self.backward_at,) * 2, none
        first, last = (np.concatenate(own) for own in zip(*pairs, strict=True))
        return first, last

    def _hold(self, tensor: Ints, start: Ints, stop: Ints) -> None:
        self._held.append(np.stack([tensor, start, stop]))

    def _list(self, start: Ints, event: Ints, at: Ints) -> None:
        """What waits in a list for its forward or its backward."""
        there = event != _NO_TENSOR
        start, event = start[there], event[there]
        sort = _INPUT if at is self.forward_at else _GRADIENT
        self._hold(event + sort * self.total, start, at[event])

    def _variable(self, start: Ints, tensor: Ints) -> None:
        """What is bound to a variable, in order, each until the next one is."""
        self._hold(tensor, start, np.append(start[1:], 2 * self.total)[: len(start)])

    def _buffers(self, start: Ints, tensor: Ints, first: int, leads: bool) -> None:
        """What is received in turn into the receive buffers; after it the next one is emptied."""
        size = self.schedule.group_size - self.schedule.num_stages + 1 if leads else 1
        number = np.arange(first, first + len(start))
        emptied = np.where(tensor == _NO_TENSOR, -1, (number + 1) % size)
        buffer = np.column_stack([number % size, emptied]).ravel()
        tensor = np.column_stack([tensor, np.full(len(start), _NO_TENSOR)]).ravel()
        start = np.repeat(start, 2)
        for one in range(size):
            self._variable(start[buffer == one], tensor[buffer == one])


def _distinct(held: Ints, events: int) -> Ints:
    """How many different tensors are held at each event."""
    _, start, stop = _disjoint(held, events)
    begun = np.bincount(start, minlength=events + 1)
    ended = np.bincount(stop, minlength=events + 1)
    return np.asarray((begun - ended).cumsum()[:events], np.int64)


def _disjoint(held: Ints, events: int) -> Ints:
    """The lifetimes without overlaps: never two of the same tensor at the same time."""
    tensor, start, stop = held[:, held[1] < held[2]]
    order = np.lexsort((start, tensor))
    tensor, start, stop = tensor[order], start[order], stop[order]
    far = tensor * (events + 1)  # farther than any time of the tensor before
    reached = np.maximum.accumulate(far + stop) - far
    start = np.maximum(start, np.append(0, np.where(np.diff(tensor), 0, reached[:-1])))
    fresh = start < stop
    return np.stack([tensor[fresh], start[fresh], stop[fresh]])
