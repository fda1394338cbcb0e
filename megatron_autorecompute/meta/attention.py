"""Attention without a device: which one Transformer Engine takes where a job leaves it the choice,
and stand-ins for those with scores, and for fused ones under context parallelism.

The choice is that of NVIDIA/TransformerEngine of August 2026, pytorch/attention/
dot_product_attention/utils.py `get_attention_backend`, and for cuDNN common/fused_attn/
fused_attn.cpp `nvte_get_fused_attn_backend`.

Stand-ins by `cp_comm_type` save, and hold while they run, what Transformer Engine 2.11 does in
bf16: pytorch/attention/dot_product_attention/context_parallel.py, by class. q, k and v have the
layout [sequence of this rank, batch, heads, width]. Every communication of a class runs, over the
fake process group; the attention of all steps is one operation of a rank's share of the whole
causal product.

Scores exist with `--attention-backend unfused` and in Megatron's local layers: products of torch
around one fused softmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

from megatron_autorecompute.meta import ops
from megatron_autorecompute.meta.devices import Device
from megatron_autorecompute.meta.job import Job


def with_backend(job: Job, device: Device) -> Job:
    """The job with `attention_backend` flash or unfused, if that is what will run.

    Before Hopper flash-attn is preferred to cuDNN's fused attention, from Hopper on it is the other
    way round. Where the job is deterministic there is no fused attention before Hopper, and on
    Blackwell only without dropout. What neither can run takes the unfused one. Multi-latent
    attention has values of another width than keys, which flash-attn 2 does not take.
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
    """Attention [sequence, batch, heads, v width] of q, k and v.

    Args:
        comm_type: p2p, all_gather, a2a or a2a+p2p.
        tensors: q, k and v.
        group: the context parallel ranks.
        window: keys that each query sees; 0 for all.
        hierarchy: ranks in an all-to-all and in a ring, of a2a+p2p alone.
    """
    inner, ring = 1, group.size()
    if comm_type == "a2a+p2p":
        inner, ring = hierarchy or (1, ring)
    function = {"a2a": _Ulysses, "all_gather": _AllGather}.get(comm_type, _Ring)
    return cast(torch.Tensor, function.apply(*tensors, _Exchange(group, window, inner, ring)))


class _Exchange(NamedTuple):
    """Context parallel ranks, the window, and the ranks of an all-to-all and of a ring."""

    group: Any
    window: int
    inner: int
    ring: int


class _Ulysses(torch.autograd.Function):
    """cp_comm_type a2a. Saves: q, k, v and out of all tokens and a part of the heads, and one fp32
    per head and token. The output, which the projection saves, is another tensor.
    `AttnFuncWithCPAndQKVOA2A`."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: _Exchange
    ) -> torch.Tensor:
        group, window, ranks = how.group, how.window, how.group.size()
        q, k, v = _to_heads([q, k, v], group, ranks)
        out, statistics = ops.attention(q, k, v, CAUSAL, window)
        ctx.save_for_backward(q, k, v, out, statistics)
        ctx.more = (group, ranks, window)
        return _to_sequence([out], group, ranks)[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, ranks, window = ctx.more
        (gradient,) = _to_heads([gradient], group, ranks)
        gradients = ops.attention_backward(*ctx.saved_tensors, gradient, CAUSAL, window)
        return *_to_sequence(gradients, group, ranks), None


class _AllGather(torch.autograd.Function):
    """cp_comm_type all_gather. Saves: q, k, v, out of both halves of the sequence apart from the
    output, and one fp32 per head and token. `AttnFuncWithCPAndKVAllGather`; since commit ee5dcec22
    (TE 2.15) the output itself is saved in place of its halves, which is not followed."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: _Exchange
    ) -> torch.Tensor:
        group, window, *_ = how
        whole_k, whole_v = (_gathered_in_order(part, group) for part in (k, v))
        half = q.new_empty(q.shape[0] // 2, *q.shape[1:])  # q of one of two steps
        out, statistics = ops.attention(q, k, v, CAUSAL * group.size(), window)
        halves = torch.empty_like(out)
        ctx.save_for_backward(q, k, v, halves, statistics)
        ctx.more = (group, window)
        del half, whole_k, whole_v
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, window = ctx.more
        q, k, v, out, statistics = ctx.saved_tensors
        ranks = group.size()
        sums = [part.new_empty(ranks * part.shape[0], *part.shape[1:]) for part in (k, v)]
        wholes = [_gathered_in_order(part, group) for part in (k, v)]
        # Of the step whose queries see all keys, on the last rank.
        steps = [torch.empty_like(part) for part in wholes]
        dq, dk, dv = ops.attention_backward(
            q, k, v, out, statistics, gradient, CAUSAL * ranks, window
        )
        del steps, wholes, dk, dv
        dk, dv = (_scattered_in_order(part, group) for part in sums)
        return dq, dk, dv, None


class _Ring(torch.autograd.Function):
    """cp_comm_type p2p, and a2a+p2p with `inner` ranks in the all-to-all. Saves: q, the last k and
    v that came around, the output, and one fp32 per head and token. Until the ring ends it holds k
    and v of every step, and the output and statistics of every step: on the last rank, which is
    counted, all of them are of all queries. Every second step runs in a stream of its own. The
    corrections of outputs are compiled, without temporaries.
    `AttnFuncWithCPAndKVP2P`."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: _Exchange
    ) -> torch.Tensor:
        group, window, inner, ring = how
        if inner > 1:
            q, k, v = _to_heads([q, k, v], group, inner)
        arrived = [torch.cat((k.reshape(-1), v.reshape(-1)))]
        steps: list[torch.Tensor] = []
        size = (*q.shape[:3], v.shape[3])
        for step in range(ring):
            with ops.stream((ops.MAIN_STREAM, ops.CONTEXT_PARALLEL_STREAM)[step % 2]):
                if step < ring - 1:
                    arrived.append(torch.empty_like(arrived[-1]))
                    torch.distributed.broadcast(arrived[-1], group=group, group_src=0)
                steps.append(q.new_empty(*size))
                steps.append(q.new_empty(*size[1::-1], size[2], dtype=torch.float32))
        out, statistics = ops.attention(q, k, v, CAUSAL * ring, window)
        steps.clear()
        kv = arrived.pop()
        arrived.clear()
        if inner > 1:
            out = _to_sequence([out], group, inner)[0]
        ctx.save_for_backward(q, kv, out, statistics)
        ctx.more = (k.shape, v.shape, *how)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        k_shape, v_shape, group, window, inner, ring = ctx.more
        q, kv, out, statistics = ctx.saved_tensors
        if inner > 1:
            out, gradient = (_to_heads([part], group, inner)[0] for part in (out, gradient))
        dq = torch.empty_like(q)
        buffers = [kv.new_empty(2, *kv.shape) for _ in range(2)]  # of k and v and their gradients
        for _ in range(ring):
            torch.distributed.broadcast(buffers[0], group=group, group_src=0)
        k, v = _parted(kv, k_shape, v_shape)
        step = ops.attention_backward(q, k, v, out, statistics, gradient, CAUSAL * ring, window)
        del step, k, v
        dk, dv = _parted(buffers[1][1], k_shape, v_shape)
        gradients = [dq, dk, dv]
        if inner > 1:
            gradients = _to_sequence(gradients, group, inner)
        return *gradients, None


def _parted(kv: torch.Tensor, k_shape: Any, v_shape: Any) -> tuple[torch.Tensor, torch.Tensor]:
    size = math.prod(k_shape)
    return kv[:size].view(k_shape), kv[size:].view(v_shape)


def _to_heads(parts: Sequence[torch.Tensor], group: Any, ranks: int) -> list[torch.Tensor]:
    """[s, b, heads, width] to [ranks * s, b, heads / ranks, width], by `ranks` ranks of the group.

    `flash_attn_a2a_communicate` before attention: while one tensor is on its way, the one before it
    is put in order, and the next one is laid out for sending.
    """
    sent, arrived = list(parts), list(parts)
    for index in range(len(parts) + 2):
        if 0 < index <= len(parts):
            arrived[index - 1] = _exchanged(sent[index - 1], group)
        if index > 1:
            found = arrived[index - 2].clone()  # in the order of the sequence
            arrived[index - 2] = found.view(-1, *found.shape[2:])
        if index < len(parts):
            part = sent[index]
            split = part.view(*part.shape[:2], ranks, part.shape[2] // ranks, part.shape[3])
            sent[index] = split.movedim(2, 0).contiguous()
    return arrived


def _to_sequence(parts: Sequence[torch.Tensor], group: Any, ranks: int) -> list[torch.Tensor]:
    """The reverse of `_to_heads`; `flash_attn_a2a_communicate` after attention."""
    sent, arrived = list(parts), list(parts)
    for index in range(len(parts) + 2):
        if 0 < index <= len(parts):
            arrived[index - 1] = _exchanged(sent[index - 1], group)
        if index < len(parts):
            part = sent[index].clone()  # in the order of the ranks
            sent[index] = part.view(ranks, part.shape[0] // ranks, *part.shape[1:])
        if index > 1:
            found = arrived[index - 2].movedim(0, 2).contiguous()
            arrived[index - 2] = found.view(*found.shape[:2], -1, found.shape[4])
    return arrived


def _exchanged(part: torch.Tensor, group: Any) -> torch.Tensor:
    arrived = torch.empty_like(part)
    torch.distributed.all_to_all_single(arrived, part, group=group)
    return arrived


def _gathered_in_order(part: torch.Tensor, group: Any) -> torch.Tensor:
    """The tensor of all ranks along the sequence, in the sequence's order."""
    whole = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    torch.distributed.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole.clone()


def _scattered_in_order(whole: torch.Tensor, group: Any) -> torch.Tensor:
    """Sums of all ranks; this rank's part of the sequence."""
    ordered = whole.clone()
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    torch.distributed.reduce_scatter_tensor(part, ordered, group=group)
    return part


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
    """_Softmax with a gradient of its own: Transformer Engine since 2.19."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        return (ops.pointwise(gradient, out),)


SOFTMAX = SimpleNamespace(apply=_Softmax.apply)
"""The replacement of Megatron's fused softmaxes, which are called with more arguments."""


def attend_with_scores(
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
