"""Fills in the shapes that neighbouring stages would send before every tensor.

Stages send shapes if microbatches differ in length, or if MTP depths are on another stage than
the loss.
Megatron's own code of `variable_seq_lengths` and `mtp_standalone` runs, with real small tensors on
CPU. The fake process group delivers nothing, so this module fills in what a neighbour would have
sent: neighbours run the same schedule, and send the shapes of their microbatches in its order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from megatron_autorecompute.patched import patched
from megatron_autorecompute.planner.cost.schedule import Schedule

Shape = tuple[int, int, int]
"""The shape of a tensor between stages: tokens, micro-batch, hidden."""


@dataclass(frozen=True, slots=True)
class Wide:
    """Outputs of MTP depths, sent to the stage of the loss: the decoder's output and each depth's
    in one tensor."""

    first_stage: int | None
    """The first stage whose last chunk has such outputs; None: none has."""
    factor: int
    """Times as many tokens."""

    def of(self, shape: Shape, stage: int, *, last_chunk: bool) -> Shape:
        """The shape of an output of a stage's chunk."""
        if self.first_stage is None or stage < self.first_stage or not last_chunk:
            return shape
        return shape[0] * self.factor, *shape[1:]


def received(
    schedule: Schedule, stage: int
) -> tuple[list[tuple[int, bool]], list[tuple[int, bool]]]:
    """The microbatches whose outputs a stage gets from the stage before it, and those whose
    gradients it gets from the stage behind it, in the order in which they come; of each, whether it
    is of the last chunk of its stage."""
    last = schedule.num_stages - 1
    before, behind = (stage - 1) % (last + 1), (stage + 1) % (last + 1)
    kept_forward = {schedule.num_chunks - 1} if before == last else set()
    kept_backward = {0} if behind == 0 else set()
    outputs = [
        (event.microbatch, event.chunk == schedule.num_chunks - 1)
        for event in schedule.events(before)
        if event.direction == "forward" and event.chunk not in kept_forward
    ]
    gradients = [
        (event.microbatch, behind > 0 and event.chunk == schedule.num_chunks - 1)
        for event in schedule.events(behind)
        if event.direction == "backward" and event.chunk not in kept_backward
    ]
    return outputs, gradients


@contextlib.contextmanager
def shapes_exchanged(
    schedule: Schedule, stage: int, shapes: Sequence[Shape], wide: Wide
) -> Iterator[None]:
    """In this block the fake neighbours of a stage send the shapes of their tensors.

    Args:
        schedule: the schedule of the step.
        stage: pipeline rank of this process.
        shapes: the shape of each microbatch's tensor between stages.
        wide: which of them are larger.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    outputs, gradients = received(schedule, stage)
    from_before = iter([wide.of(shapes[n], stage - 1, last_chunk=last) for n, last in outputs])
    from_behind = iter([wide.of(shapes[n], stage, last_chunk=last) for n, last in gradients])
    original = P2PCommunicator._communicate_shapes

    @functools.wraps(original)
    def communicate_shapes(
        self: Any, to_next: Any, to_previous: Any, recv_prev: bool, recv_next: bool
    ) -> Any:
        # Megatron appends the operations in this order.
        coming = [*islice(from_before, int(recv_prev)), *islice(from_behind, int(recv_next))]

        def deliver(operations: Sequence[Any]) -> list[Any]:
            receives = [each for each in operations if each.op is torch.distributed.irecv]
            for receive, shape in zip(receives, coming, strict=True):
                receive.tensor.copy_(torch.tensor(shape))
            return []

        with (
            patched(torch.cuda, "current_device", lambda: torch.device("cpu")),
            patched(torch.distributed, "batch_isend_irecv", deliver),
        ):
            return original(self, to_next, to_previous, recv_prev, recv_next)

    with patched(P2PCommunicator, "_communicate_shapes", communicate_shapes):
        yield
