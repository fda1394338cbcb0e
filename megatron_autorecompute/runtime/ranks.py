"""What ranks tell each other outside the training step; works without a process group, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megatron_autorecompute.errors import AutorecomputeError

Value = TypeVar("Value")


def all_gather(mine: Value) -> list[Value]:
    """What every rank holds, in rank order."""
    if not torch.distributed.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return everyone


def all_reduce_max(*mine: int) -> list[int]:
    """The largest of all ranks' numbers, place by place: cheap enough for every step."""
    if not torch.distributed.is_initialized():
        return list(mine)
    on_cuda = torch.distributed.get_backend() == "nccl"
    said = torch.tensor(mine, device="cuda" if on_cuda else "cpu")
    torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MAX)
    return [int(one) for one in said.tolist()]


def is_first_rank() -> bool:
    """Whether this is rank 0, or the only one."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def on_rank_0(work: Callable[[], Value]) -> Value:
    """Do something on rank 0 and give its result, or the error it raised on purpose, to all."""
    if not torch.distributed.is_initialized():
        return work()
    outcome: list[Any] = [None]
    if is_first_rank():
        try:
            outcome = [work()]
        except AutorecomputeError as error:
            outcome = [error]
    torch.distributed.broadcast_object_list(outcome)
    if isinstance(outcome[0], AutorecomputeError):
        raise outcome[0]
    return outcome[0]
