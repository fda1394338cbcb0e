"""Attention without a device: which one Transformer Engine takes where a job leaves it the choice,
and stand-ins for those with scores, and for fused ones under context parallelism, which do what
Transformer Engine 2.11 does in bf16 (pytorch/attention/dot_product_attention/context_parallel.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from megatron_autorecompute.meta import ops
from megatron_autorecompute.meta.devices import Device
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.patched import patched


def with_backend(job: Job, device: Device) -> Job:
    """The job with `attention_backend` flash or unfused, if that is what will run, by
    NVIDIA/TransformerEngine of August 2026 (pytorch/attention/dot_product_attention/utils.py
    `get_attention_backend`, common/fused_attn/fused_attn.cpp `nvte_get_fused_attn_backend`).

    Before Hopper flash-attn is preferred to cuDNN's fused attention. Where the job is deterministic
    there is no fused attention before Hopper, and on Blackwell only without dropout. flash-attn 2
    does not take the values of multi-latent attention.
    """
    config = job.resolved
    if job.transformer_impl == "local" or config.attention_backend != "auto":
        return job
    flash = job.flash_attn and not config.multi_latent_attention
    fused = not config.deterministic_mode or (
        device.capability >= 9 and not (device.capability >= 10 and config.attention_dropout)
    )
    if fused and (device.capability >= 9 or not flash):
        return job
    return replace(job, config={**job.config, "attention_backend": "flash" if flash else "unfused"})


CAUSAL = 0.5
"""Share of all pairs of a query and a key that a causal mask keeps."""


def attend_in_parallel(
    comm_type: str,
    tensors: Sequence[torch.Tensor],
    group: Any,
    window: int,
    hierarchy: Sequence[int] | None,
) -> torch.Tensor:
    """Attention [sequence of this rank, batch, heads, v width] of q, k and v. Every communication
    runs, over the fake process group; the attention of all steps is one operation of a rank's share
    of the whole causal product.

    Args:
        comm_type: p2p, a2a or a2a+p2p.
        tensors: q, k and v.
        group: the context parallel ranks.
        window: keys that each query sees; 0 for all.
        hierarchy: ranks in an all-to-all and in a ring, of a2a+p2p alone.
    """
    several = (comm_type == "a2a+p2p" and hierarchy) or (1, group.size())
    run = _by_heads(group, window) if comm_type == "a2a" else _in_ring(group, window, *several)
    return cast(torch.Tensor, ops.kernel_with_backward(run, *tensors))


def _by_heads(group: Any, window: int) -> Callable[..., ops.Ran]:
    """cp_comm_type a2a. Saves: q, k, v and out of all tokens and a part of the heads, and one fp32
    per head and token. The output, which the projection saves, is another tensor.
    `AttnFuncWithCPAndQKVOA2A`."""
    ranks = group.size()

    def run(*parts: torch.Tensor) -> ops.Ran:
        q, k, v = _to_heads(parts, group, ranks)
        out, statistics = ops.attention(q, k, v, CAUSAL, window)
        return _to_sequence([out], group, ranks)[0], (q, k, v, out, statistics), backward

    def backward(saved: ops.Saved, gradient: torch.Tensor) -> ops.Gradients:
        (gradient,) = _to_heads([gradient], group, ranks)
        gradients = ops.attention_backward(*saved, gradient, CAUSAL, window)
        return _to_sequence(gradients, group, ranks)

    return run


def _in_ring(group: Any, window: int, inner: int, ring: int) -> Callable[..., ops.Ran]:
    """cp_comm_type p2p, and a2a+p2p with `inner` ranks in the all-to-all. Saves: q, the last k and
    v that came around, the output, and one fp32 per head and token. Until the ring ends it holds k
    and v, output and statistics of every step, on the last rank, which is counted, of all queries.
    Every second step runs in a stream of its own. `AttnFuncWithCPAndKVP2P`."""
    more = CAUSAL * ring, window

    def run(*parts: torch.Tensor) -> ops.Ran:
        if inner > 1:
            parts = tuple(_to_heads(parts, group, inner))
        q, k, v = parts
        arrived = [torch.cat((k.reshape(-1), v.reshape(-1)))]
        steps: list[torch.Tensor] = []
        size = (*q.shape[:3], v.shape[3])
        streams = ops.MAIN_STREAM, ops.CONTEXT_PARALLEL_STREAM
        for step in range(ring):
            with patched(ops, "current_stream", streams[step % 2]):
                if step < ring - 1:
                    arrived.append(torch.empty_like(arrived[-1]))
                    torch.distributed.broadcast(arrived[-1], group=group, group_src=0)
                steps.append(q.new_empty(*size))
                steps.append(q.new_empty(*size[1::-1], size[2], dtype=torch.float32))
        out, statistics = ops.attention(q, k, v, *more)
        steps.clear()
        kv = arrived.pop()
        arrived.clear()
        if inner > 1:
            out = _to_sequence([out], group, inner)[0]
        return out, (q, kv, out, statistics), functools.partial(backward, k.shape, v.shape)

    def backward(
        k_shape: torch.Size, v_shape: torch.Size, saved: ops.Saved, gradient: torch.Tensor
    ) -> ops.Gradients:
        q, kv, out, statistics = saved
        if inner > 1:
            out, gradient = (_to_heads([part], group, inner)[0] for part in (out, gradient))
        dq = torch.empty_like(q)
        buffers = [kv.new_empty(2, *kv.shape) for _ in range(2)]  # of k and v and their gradients
        for _ in range(ring):
            torch.distributed.broadcast(buffers[0], group=group, group_src=0)
        k, v = _parted(kv, k_shape, v_shape)
        step = ops.attention_backward(q, k, v, out, statistics, gradient, *more)
        del step, k, v
        gradients = [dq, *_parted(buffers[1][1], k_shape, v_shape)]
        return gradients if inner == 1 else _to_sequence(gradients, group, inner)

    return run


def _parted(kv: torch.Tensor, k_shape: Any, v_shape: Any) -> tuple[torch.Tensor, torch.Tensor]:
    size = math.prod(k_shape)
    return kv[:size].view(k_shape), kv[size:].view(v_shape)


def _to_heads(parts: Sequence[torch.Tensor], group: Any, ranks: int) -> list[torch.Tensor]:
    """[s, b, heads, width] to [ranks * s, b, heads / ranks, width], by `ranks` ranks of the
    group."""
    return _exchanged(
        parts,
        group,
        lambda part: part.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous(),
        lambda part: part.clone().flatten(0, 1),  # in the order of the sequence
    )


def _to_sequence(parts: Sequence[torch.Tensor], group: Any, ranks: int) -> list[torch.Tensor]:
    """The reverse of `_to_heads`."""
    return _exchanged(
        parts,
        group,
        lambda part: part.clone().unflatten(0, (ranks, -1)),  # in the order of the ranks
        lambda part: part.movedim(0, 2).contiguous().flatten(2, 3),
    )


def _exchanged(
    parts: Sequence[torch.Tensor],
    group: Any,
    lay_out: Callable[[torch.Tensor], torch.Tensor],
    put_in_order: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """`flash_attn_a2a_communicate`: while one tensor is on its way, the one before it is put in
    order, and the next one is laid out for sending."""
    sent, arrived = list(parts), list(parts)
    for index in range(len(parts) + 2):
        if 0 < index <= len(parts):
            arrived[index - 1] = torch.empty_like(sent[index - 1])
            torch.distributed.all_to_all_single(arrived[index - 1], sent[index - 1], group=group)
        if index < len(parts):
            sent[index] = lay_out(sent[index])
        if index > 1:
            arrived[index - 2] = put_in_order(arrived[index - 2])
    return arrived


def softmax(scores: torch.Tensor, *_: Any, in_place: bool = True) -> torch.Tensor:
    """Scale, mask and softmax as one kernel. Saves: its output. TE
    pytorch/attention/dot_product_attention/softmax.py; Megatron fusions/fused_softmax.py.

    in_place: whether the scores' gradient takes the place of the output's (Apex; TE until 2.19)."""

    def run(scores: torch.Tensor) -> ops.Ran:
        out = ops.pointwise(scores, None)
        return out, (out,), backward

    def backward(saved: ops.Saved, gradient: torch.Tensor) -> ops.Gradients:
        return [gradient.contiguous() if in_place else ops.pointwise(gradient, *saved)]

    return cast(torch.Tensor, ops.kernel_with_backward(run, scores))


def one_tensor(*parts: torch.Tensor) -> bool:
    """Whether query, key and value are the thirds of every head of one tensor, which TE's attention
    reads as it is (`get_qkv_layout`: sbh3d). Others that are views are copied first."""
    first, width = parts[0], parts[0].shape[-1]
    return all(
        part.untyped_storage()._cdata == first.untyped_storage()._cdata
        and (part.shape, part.stride()) == (first.shape, first.stride())
        and part.storage_offset() == index * width
        for index, part in enumerate(parts)
    )


def attend_with_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    padded: bool = False,
    *,
    in_place: bool = True,
) -> torch.Tensor:
    """q, k, v [s, b, heads, width] to [s, b, heads, v width]. Keeps q, k, v, the softmax's output
    [b, heads, s, s] and, with dropout, its mask (one byte) and its output; with padding the layer's
    own mask [b, 1, s, s], too. TE pytorch/attention/dot_product_attention/backends.py
    `UnfusedDotProductAttention._forward`."""
    if not one_tensor(query, key, value):
        query, key, value = (part.contiguous() for part in (query, key, value))
    groups = query.shape[2] // key.shape[2]
    if groups > 1:
        key, value = (part.repeat_interleave(groups, dim=2) for part in (key, value))
    length, batch, heads, _ = query.shape
    queries, keys, values = (part.flatten(1, 2).transpose(0, 1) for part in (query, key, value))
    scores = queries.new_empty(batch * heads, length, keys.shape[1])
    scores = torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0.0)
    probabilities = softmax(scores, in_place=in_place)
    if padded:
        mask = queries.new_empty(batch, 1, *probabilities.shape[1:], dtype=torch.bool)
        by_sample = probabilities.view(batch, heads, *probabilities.shape[1:])
        probabilities = by_sample.masked_fill(mask, 0).view(probabilities.shape)
        del mask, by_sample
    probabilities = torch.nn.functional.dropout(probabilities, dropout)
    context = torch.bmm(probabilities, values)
    return context.view(batch, heads, length, -1).permute(2, 0, 1, 3).contiguous()
