"""Attention whose scores exist: `--attention-backend unfused`, and Megatron's local layers.

Both run products of torch around one fused softmax, of which the kernels are stand-ins here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megatron_autorecompute.meta import ops


class _Softmax(torch.autograd.Function):
    """Scale, mask and softmax as one kernel. Saves: its output. TE
    pytorch/attention/dot_product_attention/softmax.py `scaled_masked_softmax_fwd`; Megatron
    fusions/fused_softmax.py `ScaledUpperTriangMaskedSoftmax`. The scores' gradient takes the place
    of the output's (Apex; TE pytorch/csrc/extensions/softmax.cpp until 2.19, commit 0c8cf2c03)."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, *_: Any) -> torch.Tensor:
        ctx.inputs = len(_)
        out = ops.pointwise(scores, None)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors  # what is offloaded stays in its group until it is read
        return (gradient.contiguous(), *(None,) * ctx.inputs)


class _SoftmaxApart(_Softmax):
    """The same with a gradient of its own: Transformer Engine since 2.19."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        return (ops.pointwise(gradient, out),)


SOFTMAX = SimpleNamespace(apply=_Softmax.apply)
"""In place of Megatron's fused softmaxes, which are called with more arguments."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    padded: bool = False,
    *,
    in_place: bool = True,
) -> torch.Tensor:
    """q, k, v [s, b, heads, width] to [s, b, heads, v width].

    Keeps q, k, v, the softmax's output [b, heads, s, s] and, with dropout, its mask (one byte) and
    its output. Transformer Engine pytorch/attention/dot_product_attention/backends.py
    `UnfusedDotProductAttention._forward`; q, k and v that do not lie side by side in one tensor are
    copied before (`get_qkv_layout`). With padding the layer's own mask [b, 1, s, s] too, by which
    what the softmax gave to padding is overwritten. Masks that nothing keeps are left out.
    `in_place`: whether the softmax's backward overwrites the gradient that it gets.
    """
    if not _side_by_side(query, key, value):
        query, key, value = (part.contiguous() for part in (query, key, value))
    groups = query.shape[2] // key.shape[2]
    if groups > 1:
        key, value = (part.repeat_interleave(groups, dim=2) for part in (key, value))
    length, batch, heads, _ = query.shape
    queries, keys, values = (part.flatten(1, 2).transpose(0, 1) for part in (query, key, value))
    scores = queries.new_empty(batch * heads, length, keys.shape[1])
    scores = torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0.0)
    probabilities = (_Softmax if in_place else _SoftmaxApart).apply(scores)
    if padded:
        mask = queries.new_empty(batch, 1, *probabilities.shape[1:], dtype=torch.bool)
        by_sample = probabilities.view(batch, heads, *probabilities.shape[1:])
        probabilities = by_sample.masked_fill(mask, 0).view(probabilities.shape)
        del mask, by_sample
    probabilities = torch.nn.functional.dropout(probabilities, dropout)
    context = torch.bmm(probabilities, values)
    return context.view(batch, heads, length, -1).permute(2, 0, 1, 3).contiguous()


def _side_by_side(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether all are views of one tensor of equal shapes, as of a projection without rotation."""
    storages = {part.untyped_storage()._cdata for part in (query, key, value)}
    return len(storages) == 1 and query.shape == key.shape == value.shape
