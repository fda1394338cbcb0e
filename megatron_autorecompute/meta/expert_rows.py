"""Stand-ins for what orders tokens by expert: HybridEP's dispatch and combine (deepseek-ai/DeepEP,
branch hybrid-ep of July 2026, csrc/hybrid_ep/executor/executor.cu, in one NVLink domain), where no
tensor of the rows exists on the sending side, and Transformer Engine's permutation (2.11,
pytorch/permutation.py), which saves int32 maps of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch

from megatron_autorecompute.meta import ops
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.job_config import PRECISIONS


def share_used(job: Job) -> float:
    """Share of the room of experts' rows that tokens take: with HybridEP by
    `moe_expert_rank_capacity_factor`."""
    room = job.resolved.moe_expert_rank_capacity_factor if job.dispatcher == "hybridep" else None
    return 1 / (room or 1.0)


def pages_of_room(job: Job) -> float | None:
    """Pages of `moe_paged_stash` for each row of the room; None without it."""
    config, room = job.resolved, job.resolved.moe_expert_rank_capacity_factor
    if not room or not config.moe_paged_stash:
        return None
    return abs(config.moe_paged_stash_buffer_size_factor_cuda) / room


def rows(job: Job, tokens: int, experts: int) -> int:
    """Rows that HybridEP makes for so many experts of a rank with so many tokens of its own, if all
    ranks' tokens are routed evenly."""
    config = job.resolved
    wide = config.use_transformer_engine_op_fuser or config.moe_use_grouped_tensor
    multiple = 256 if wide else PRECISIONS[job.precision].rows
    even = tokens * config.moe_router_topk * job.expert_tensor_parallel
    room = config.moe_expert_rank_capacity_factor
    if room is not None:
        return math.ceil(even * room / multiple) * multiple
    return experts * math.ceil(even / experts / multiple) * multiple


def _exchanged(x: torch.Tensor, length: int, group: Any) -> torch.Tensor:
    received: torch.Tensor = ops.reorder(x.contiguous(), length)
    if group.size() > 1:
        torch.distributed.all_to_all_single(received, x, group=group)
    return received


def hybrid_ep(job: Job) -> dict[str, Callable[..., Any]]:
    """The stand-ins by their names in megatron-core's transformer/moe/token_dispatcher.py."""

    def dispatch(
        x: torch.Tensor,
        routing_map: torch.Tensor,
        probs: torch.Tensor,
        group: Any,
        num_local_experts: int,
        num_permuted_tokens: Any = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Tokens [tokens, hidden] to rows [rows, hidden] ordered by expert, their probabilities,
        none for scales, each expert's rows, and the handle. `num_permuted_tokens` is given where
        every expert is padded to its capacity."""
        tokens, experts = len(x), num_local_experts
        length = num_permuted_tokens or rows(job, tokens, experts)
        # int32 for each rank and token, and a byte and int32 for each local expert of these.
        kept = x.new_empty(tokens * group.size() * (4 + 5 * experts), dtype=torch.uint8)
        handle = SimpleNamespace(
            kept=kept, group=group, tokens=tokens, experts=experts, rows=length
        )

        def run(x: torch.Tensor, probs: torch.Tensor) -> ops.Ran:
            return (_exchanged(x, length, group), probs.new_empty(length)), (), backward

        def backward(_: ops.Saved, gradient: torch.Tensor, of_probs: torch.Tensor) -> ops.Gradients:
            dprobs = of_probs.new_empty(tokens, handle.experts * group.size())
            return _exchanged(gradient, tokens, group), dprobs

        hidden, chosen = ops.kernel_with_backward(run, x, probs)
        counts = torch.full((experts,), length // experts, dtype=torch.int64, device="cpu")
        return hidden, chosen, None, counts, handle

    def combine(x: torch.Tensor, handle: Any, **_: Any) -> torch.Tensor:
        """Rows to the sums of each token's rows."""

        def run(x: torch.Tensor) -> ops.Ran:
            return _exchanged(x, handle.tokens, handle.group), (), backward

        def backward(_: ops.Saved, gradient: torch.Tensor) -> ops.Gradients:
            return [_exchanged(gradient, handle.rows, handle.group)]

        return cast(torch.Tensor, ops.kernel_with_backward(run, x))

    return {"hybrid_ep_dispatch": dispatch, "hybrid_ep_combine": combine}


def _reordered(
    x: torch.Tensor, probs: torch.Tensor | None, length: int, row_map: torch.Tensor
) -> tuple[torch.Tensor, Any]:
    """Rows of x taken, repeated or added up to `length` rows, with their probabilities. Saves: the
    map."""
    given, shape = len(x), None if probs is None else probs.shape

    def run(x: torch.Tensor, probs: torch.Tensor | None) -> ops.Ran:
        chosen = None if probs is None else probs.new_empty(length)
        return (ops.reorder(x, length), chosen), [row_map], backward

    def backward(
        _: ops.Saved, gradient: torch.Tensor, of_probs: torch.Tensor | None
    ) -> ops.Gradients:
        dprobs = None
        if shape is not None and of_probs is not None:
            dprobs = of_probs.new_empty(shape)
        return ops.reorder(gradient.contiguous(), given), dprobs

    return cast("tuple[torch.Tensor, Any]", ops.kernel_with_backward(run, x, probs))


def _permute(
    tokens: torch.Tensor, probs: torch.Tensor | None, routing_map: torch.Tensor, num_out_tokens: Any
) -> Any:
    """Tokens [tokens, hidden] to rows [rows, hidden] ordered by expert, with their probabilities
    and the map [tokens, 2 x experts + 1]. `_moe_permute_mask_map`."""
    sizes = len(tokens), 2 * routing_map.shape[1] + 1
    row_id_map = tokens.new_empty(sizes, dtype=torch.int32)
    return *_reordered(tokens, probs, int(num_out_tokens), row_id_map), row_id_map


def _unpermute(
    rows: torch.Tensor, row_id_map: torch.Tensor, *, restore_shape: Any, **_: Any
) -> torch.Tensor:
    """Rows to the sums of each token's rows, by the map of `_permute`. `_moe_unpermute_mask_map`
    without probabilities, which Megatron applies earlier."""
    return _reordered(rows, None, restore_shape[0], row_id_map)[0]


def _sort_chunks(rows: torch.Tensor, probs: torch.Tensor | None, *_: Any) -> Any:
    """Rows in another order, with their probabilities; the map is [rows]. `_moe_chunk_sort`."""
    row_map = rows.new_empty(len(rows), dtype=torch.int32)
    return _reordered(rows, probs, len(rows), row_map)


PERMUTATION: dict[str, Any] = {
    "fused_permute": lambda tokens, routing_map, *, num_out_tokens: _permute(
        tokens, None, routing_map, num_out_tokens
    )[::2],
    "fused_permute_with_probs": _permute,
    "fused_unpermute": _unpermute,
    "fused_sort_chunks_by_index": lambda rows, *_: _sort_chunks(rows, None)[0],
    "fused_sort_chunks_by_index_with_probs": _sort_chunks,
    "HAVE_TE": True,
    "is_te_min_version": lambda *_: False,  # asked before an argument for padding is passed on
}
"""The stand-ins by their names in megatron-core's transformer/moe/moe_utils.py."""
