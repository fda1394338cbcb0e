"""This rank's pipeline stage, and the process groups it waits for."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from megatron_autorecompute.compat import layer_parts
from megatron_autorecompute.compat.untyped import Block


def pipeline_size() -> int:
    """Number of pipeline stages, 1 where parallel state is not set up."""
    if not parallel_state.model_parallel_is_initialized():
        return 1
    return int(parallel_state.get_pipeline_model_parallel_world_size())


def pipeline_rank() -> int:
    """This rank's pipeline stage, 0 where parallel state is not set up."""
    if not parallel_state.model_parallel_is_initialized():
        return 0
    return int(parallel_state.get_pipeline_model_parallel_rank())


def stage_groups() -> list[Any]:
    """The group of the ranks that share a pipeline stage (TP x CP x DP); none for a single rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return []
    if not parallel_state.model_parallel_is_initialized():
        return [torch.distributed.group.WORLD]
    return [parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)]


def over_stages(mine: Any) -> list[Any]:
    """A value of every stage's rank in this rank's pipeline, first stage first."""
    group = parallel_state.get_pipeline_model_parallel_group()
    said: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(said, mine, group=group)
    return said


def groups_inside(block: Block) -> list[Any]:
    """The groups of ranks that wait for each other in every forward of this block's layers."""
    if not parallel_state.model_parallel_is_initialized():
        return []
    groups = [parallel_state.get_tensor_and_context_parallel_group()]
    if layer_parts.has_experts(block):
        groups.append(parallel_state.get_expert_tensor_and_model_parallel_group())
    return [group for group in groups if torch.distributed.get_world_size(group) > 1]


def global_buffers() -> list[torch.Tensor]:
    """Megatron's buffers that all layers share and that stay once allocated (unfused attention)."""
    if not parallel_state.model_parallel_is_initialized():
        return []
    return list(parallel_state.get_global_memory_buffer().buffer.values())


def expert_ranks() -> tuple[int, ...]:
    """Ranks that exchange tokens for their experts with this one, itself included; it alone if
    nothing is set up."""
    if not torch.distributed.is_initialized():
        return (0,)
    if not parallel_state.model_parallel_is_initialized():
        return (torch.distributed.get_rank(),)
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    return tuple(torch.distributed.get_process_group_ranks(group))
