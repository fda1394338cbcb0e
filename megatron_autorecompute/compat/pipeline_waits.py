"""Where Megatron's pipeline schedules wait for a gradient, and for which microbatch's.

`P2PCommunicator` posts what a stage sends and receives, and then waits; with `overlap_p2p_comm` the
schedule waits itself, just before the backward. What is to begin early begins in between. The same
in megatron-core 0.16 to 0.19.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

Begin = Callable[[], None]
Function = Callable[..., Any]


def why_not(config: Any) -> str | None:
    """The reason that no recompute of such a model can begin ahead; None if it can."""
    reasons = {
        "variable_seq_lengths": "stages exchange lengths, and so wait, before they post a receive",
        "mtp_standalone": "stages exchange shapes, and so wait, before they post a receive",
        "use_ring_exchange_p2p": "a ring exchange posts and waits in one call",
        "distribute_saved_activations": "the ranks of a stage hold a part of each input",
    }
    return next((why for name, why in reasons.items() if getattr(config, name, False)), None)


def early() -> list[Begin] | None:
    """What may begin early of the microbatch whose forward runs now, to be added to; None outside
    of a schedule's forward."""
    return _watches[-1].running if _watches else None


def watch_while_alive(needing: Any) -> None:
    """Let what `early` has been given begin where the schedule waits, until `needing`, and all
    other objects that asked for it, are freed."""
    if not _needed:
        _watches.append(_Watch())
    _needed.add(weakref.ref(needing, _let_go))


_watches: list[_Watch] = []
_needed: set[weakref.ref[Any]] = set()


def _let_go(reference: weakref.ref[Any]) -> None:
    _needed.discard(reference)
    if not _needed and _watches:
        _watches.pop().stop()


@dataclass
class _Step:
    """The forwards and backwards of one step on this rank, as far as it has come."""

    losses: Any = None
    """The list that the schedule collects losses in: another one in each step."""
    chunks: list[Any] = field(default_factory=list)
    """The chunks in the order of their first forwards, which is Megatron's."""
    forwards: list[int] = field(default_factory=list)
    """The chunk of each."""
    backwards: int = 0
    lost: bool = False
    """Whether something failed in it: nothing of it begins early any more."""
    waiting: collections.defaultdict[int, collections.deque[list[Begin]]] = field(
        default_factory=lambda: collections.defaultdict(collections.deque)
    )
    """What may begin early, of each microbatch whose backward has not begun, by chunk."""

    def chunk(self, model: Any) -> int:
        for number, known in enumerate(self.chunks):
            if known is model:
                return number
        self.chunks.append(model)
        return len(self.chunks) - 1

    def chunk_of_backward(self, number: int) -> int | None:
        """The chunk of the n-th backward: that of the n-th forward's microbatch, counted from the
        end (`get_schedule_table`). None: that forward is still to come."""
        if number >= len(self.forwards):
            return None
        return len(self.chunks) - 1 - self.forwards[number]

    def next_backward(self, is_last_stage: bool) -> list[Begin]:
        """What may begin early of the microbatch whose backward is next. The backward of the last
        chunk of all waits for no stage."""
        chunk = self.chunk_of_backward(self.backwards)
        if chunk is None or (is_last_stage and chunk == len(self.chunks) - 1):
            return []
        queue = self.waiting[chunk]
        return queue[0] if queue else []


class _Watch:
    """Functions of Megatron's, replaced until `stop`. A failure in one of them ends the step. They
    are the schedules' `forward_step` and `backward_step`, and the functions of the communication
    that post requests and wait for them.
    """

    def __init__(self) -> None:
        self.running: list[Begin] | None = None
        self._step = _Step()
        self._posting: tuple[bool, bool] | None = None
        """Whether the running call of `_communicate` is on the last stage, and whether it waits."""
        self._over = False
        self._replaced: list[tuple[Any, str, Function, Function]] = []
        self._replace(schedules, "forward_step", self._forward_step)
        self._replace(schedules, "backward_step", self._backward_step)
        self._replace(P2PCommunicator, "_communicate", self._communicate)
        for name in ("_p2p_ops", "_batched_p2p_ops"):
            self._replace(p2p_communication, name, self._post)

    def stop(self) -> None:
        self._over, self._step = True, _Step()  # what they begin is nothing from now on
        for owner, name, original, ours in self._replaced:
            if getattr(owner, name) is ours:
                setattr(owner, name, original)

    def _replace(self, owner: Any, name: str, run: Function) -> None:
        original = getattr(owner, name)

        def ours(*args: Any, **kwargs: Any) -> Any:
            if self._over:  # somebody else's function still calls this one
                return original(*args, **kwargs)
            try:
                return run(original, *args, **kwargs)
            except BaseException:
                self._step = _Step(self._step.losses, lost=True)
                raise

        self._replaced.append((owner, name, original, ours))
        setattr(owner, name, ours)

    def _forward_step(
        self,
        original: Function,
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        input_tensor: Any,
        forward_data_store: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given = forward_step_func, data_iterator, model, num_microbatches, input_tensor
        if not torch.is_grad_enabled():
            return original(*given, forward_data_store, *args, **kwargs)
        if self._step.losses is not forward_data_store:
            self._step = _Step(forward_data_store)
        step = self._step
        if step.lost:
            return original(*given, forward_data_store, *args, **kwargs)
        self.running = []
        chunk = step.chunk(model)
        try:
            found = original(*given, forward_data_store, *args, **kwargs)
            step.forwards.append(chunk)
            step.waiting[chunk].append(self.running)
        finally:
            self.running = None
        return found

    def _backward_step(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        chunk = step.chunk_of_backward(step.backwards)
        if chunk is not None:
            step.waiting[chunk].popleft().clear()
            step.backwards += 1
            if not any(step.waiting.values()):
                self._step = _Step()
        return original(*args, **kwargs)

    def _communicate(
        self, original: Function, communicator: Any, *, wait_on_reqs: bool = True, **kwargs: Any
    ) -> Any:
        group = communicator.pp_group
        self._posting = group.rank() == group.size() - 1, wait_on_reqs
        try:
            return original(communicator, wait_on_reqs=wait_on_reqs, **kwargs)
        finally:
            self._posting = None

    def _post(self, original: Function, **kwargs: Any) -> Any:
        found = original(**kwargs)
        if self._posting is None or kwargs["tensor_recv_next"] is None:
            return found
        is_last_stage, waits = self._posting

        def begin() -> None:
            early = self._step.next_backward(is_last_stage)
            while early:
                early.pop()()  # the last layer's first, as backward needs them

        if isinstance(found, list):
            return [_Request(each, begin) for each in found]
        # Those that are not waited for at once, the schedule waits for one by one.
        own = found if waits else ["recv_next"]
        return {name: _Request(r, begin) if name in own else r for name, r in found.items()}


class _Request:
    """A posted request; before the wait for it something else begins."""

    def __init__(self, request: Any, begin: Begin) -> None:
        self._request, self._begin = request, begin

    def wait(self, *args: Any) -> Any:
        self._begin()
        return self._request.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
