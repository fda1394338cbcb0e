"""Stand-ins for Transformer Engine's permutation of tokens by expert (`moe_permute_fusion`).

They save what NVIDIA/TransformerEngine 2.11 pytorch/permutation.py does: int32 maps of rows, by
pytorch/triton/permutation.py `make_row_id_map` and `make_chunk_sort_map`. Megatron's permutation
without it runs as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_autorecompute.meta import ops


class _Permute(torch.autograd.Function):
    """Tokens [tokens, hidden] to rows [rows, hidden] ordered by expert. Saves: a map
    [tokens, 2 x experts + 1]. `_moe_permute_mask_map`."""

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, probs: torch.Tensor | None, experts: int, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        row_id_map = tokens.new_empty(len(tokens), 2 * experts + 1, dtype=torch.int32)
        ctx.save_for_backward(row_id_map)
        ctx.mark_non_differentiable(row_id_map)
        ctx.shape = None if probs is None else probs.shape
        ctx.tokens = len(tokens)
        chosen = None if probs is None else probs.new_empty(rows)
        return ops.reorder(tokens, rows), chosen, row_id_map

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, of_probs: torch.Tensor | None, _: Any
    ) -> tuple[torch.Tensor | None, ...]:
        dprobs = None
        if ctx.shape is not None and of_probs is not None:
            dprobs = of_probs.new_empty(ctx.shape)
        return ops.reorder(gradient.contiguous(), ctx.tokens), dprobs, None, None


class _Unpermute(torch.autograd.Function):
    """Rows to the sums of each token's rows. Saves: the map, which `_Permute` saves too.
    `_moe_unpermute_mask_map` without probabilities, which Megatron applies earlier."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, row_id_map: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        ctx.save_for_backward(row_id_map)
        ctx.rows = len(rows)
        return ops.reorder(rows, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ops.reorder(gradient, ctx.rows), None, None


class _SortChunks(torch.autograd.Function):
    """Rows in another order. Saves: a map [rows]. `_moe_chunk_sort`."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.save_for_backward(rows.new_empty(len(rows), dtype=torch.int32))
        ctx.with_probs = probs is not None
        return ops.reorder(rows, len(rows)), None if probs is None else torch.empty_like(probs)

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, of_probs: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        dprobs = torch.empty_like(of_probs) if ctx.with_probs and of_probs is not None else None
        return ops.reorder(gradient, len(gradient)), dprobs


def _permute(
    tokens: torch.Tensor, routing_map: torch.Tensor, *, num_out_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, _, row_id_map = _Permute.apply(tokens, None, routing_map.shape[1], int(num_out_tokens))
    return rows, row_id_map


def _permute_with_probs(
    tokens: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, *, num_out_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Permute.apply(
        tokens, probs, routing_map.shape[1], int(num_out_tokens)
    )
    return found


def _unpermute(
    rows: torch.Tensor, row_id_map: torch.Tensor, *, restore_shape: torch.Size, **_: Any
) -> torch.Tensor:
    tokens: torch.Tensor = _Unpermute.apply(rows, row_id_map, restore_shape[0])
    return tokens


def _sort(rows: torch.Tensor, sizes: Any, order: Any) -> torch.Tensor:
    found: torch.Tensor = _SortChunks.apply(rows, None)[0]
    return found


def _sort_with_probs(
    rows: torch.Tensor, probs: torch.Tensor, sizes: Any, order: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = _SortChunks.apply(rows, probs)
    return found


REPLACEMENTS: dict[str, Any] = {
    "fused_permute": _permute,
    "fused_permute_with_probs": _permute_with_probs,
    "fused_unpermute": _unpermute,
    "fused_sort_chunks_by_index": _sort,
    "fused_sort_chunks_by_index_with_probs": _sort_with_probs,
    "HAVE_TE": True,
    "is_te_min_version": lambda *_: False,  # asked before an argument for padding is passed on
}
"""The stand-ins by their names in megatron-core's transformer/moe/moe_utils.py."""
