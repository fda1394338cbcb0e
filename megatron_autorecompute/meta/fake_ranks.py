"""One process as the first rank of a pipeline stage; the other ranks are fake. torch's "fake"
process group delivers nothing: where Megatron's stages send shapes before every tensor
(`variable_seq_lengths`, `mtp_standalone`), this fills in what a neighbour would have sent."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch

from megatron_autorecompute.patched import patched
from megatron_autorecompute.planner.cost.schedule import Schedule


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step that are not in the model's config."""

    seq_length: int
    micro_batch_size: int
    num_microbatches: int
    vocab_size: int
    """Padded as in Megatron: a multiple of the tensor parallel size."""
    data_parallel_size: int = 1
    """Ranks per (tensor, context, pipeline) position; at least the expert parallel size over cp."""
    lengths: tuple[int, ...] = ()
    """Tokens of each microbatch, on all context parallel ranks together, if microbatches differ;
    each is one sample, and stages exchange shapes. Empty: `seq_length`."""


@contextlib.contextmanager
def fake_ranks(config: Any, stage: int, shape: StepShape) -> Iterator[None]:
    """In this block the process is the first rank of a pipeline stage; other ranks are fake."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks_per_stage = (
        config.tensor_model_parallel_size * config.context_parallel_size * shape.data_parallel_size
    )
    torch.distributed.init_process_group(
        "fake",
        store=FakeStore(),
        rank=stage * ranks_per_stage,
        world_size=config.pipeline_model_parallel_size * ranks_per_stage,
    )
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_model_parallel_size,
            pipeline_model_parallel_size=config.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        with _fake_neighbours(config, stage, shape), _works_that_hold():
            yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _works_that_hold() -> Iterator[None]:
    """A p2p operation's work has its tensors, as gloo's and NCCL's; the fake group's has not."""

    def work(_: Any, tensors: list[torch.Tensor], *__: Any) -> Any:
        return SimpleNamespace(tensors=tensors, wait=lambda *_: True)

    group = torch.distributed.ProcessGroup
    with patched(group, "send", work), patched(group, "recv", work):
        yield


@contextlib.contextmanager
def _fake_neighbours(config: Any, stage: int, shape: StepShape) -> Iterator[None]:
    """In this block the fake neighbours of a stage send the shapes of their tensors."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    depths_at = _depths_apart(config)
    if not shape.lengths and depths_at is None:
        yield
        return
    schedule = Schedule(
        config.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size or 1,
        shape.num_microbatches,
        config.microbatch_group_size_per_vp_stage,
    )
    split = config.tensor_model_parallel_size if config.sequence_parallel else 1
    split *= config.context_parallel_size
    lengths = shape.lengths or [shape.seq_length] * shape.num_microbatches

    end, last = schedule.num_stages - 1, schedule.num_chunks - 1
    apart = end + 1 if depths_at is None else depths_at

    def coming(direction: str, edge: tuple[int, int], depths: bool) -> Iterator[tuple[int, ...]]:
        """What comes in one direction, in the order in which this stage needs it: tokens,
        micro-batch, hidden. Nothing comes for one chunk of one stage (`edge`). MTP depths go to the
        stage of the loss, the decoder's output and each depth's in one tensor."""
        for event in schedule.events(stage):
            if event.direction == direction and (stage, event.chunk) != edge:
                several = 1 + (config.mtp_num_layers or 0) * (depths and event.chunk == last)
                tokens = lengths[event.microbatch] // split * several
                yield tokens, shape.micro_batch_size, config.hidden_size

    from_before = coming("forward", (0, 0), stage > apart)
    from_behind = coming("backward", (end, last), apart <= stage < end)
    original = P2PCommunicator._communicate_shapes

    @functools.wraps(original)
    def communicate_shapes(
        self: Any, to_next: Any, to_previous: Any, recv_prev: bool, recv_next: bool
    ) -> Any:
        # Megatron appends the operations in this order.
        sent = [*islice(from_before, int(recv_prev)), *islice(from_behind, int(recv_next))]

        def deliver(operations: Sequence[Any]) -> list[Any]:
            receives = [each for each in operations if each.op is torch.distributed.irecv]
            for receive, shape in zip(receives, sent, strict=True):
                receive.tensor.copy_(torch.tensor(shape))
            return []

        with (
            patched(torch.cuda, "current_device", lambda: torch.device("cpu")),
            patched(torch.distributed, "batch_isend_irecv", deliver),
        ):
            return original(self, to_next, to_previous, recv_prev, recv_next)

    with patched(P2PCommunicator, "_communicate_shapes", communicate_shapes):
        yield


def _depths_apart(config: Any) -> int | None:
    """The stage whose last chunk has the MTP depths, if the loss is on another one."""
    if not getattr(config, "mtp_standalone", False):
        return None
    layout = config.pipeline_model_parallel_layout.layout
    return next(
        stage
        for stage, chunks in enumerate(layout)
        if any(getattr(kind, "name", kind) == "mtp" for kind in chunks[-1])
    )
