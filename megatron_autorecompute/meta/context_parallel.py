"""Stand-ins for fused attention under context parallelism, by `cp_comm_type`.

They save, and hold while they run, what Transformer Engine 2.11 does in bf16: NVIDIA/
TransformerEngine pytorch/attention/dot_product_attention/context_parallel.py, by class. q, k and v
have the layout [sequence of this rank, batch, heads, width]. Every communication of a class runs,
over the fake process group; the attention of all steps is one operation of a rank's share of the
whole causal product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch

from megatron_autorecompute.meta import ops

CAUSAL = 0.5
"""Share of all pairs of a query and a key that a causal mask keeps."""


def attend(
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
    return cast(torch.Tensor, function.apply(*tensors, group, window, inner, ring))


class _Ulysses(torch.autograd.Function):
    """cp_comm_type a2a. Saves: q, k, v and out of all tokens and a part of the heads, and one fp32
    per head and token. The output, which the projection saves, is another tensor.
    `AttnFuncWithCPAndQKVOA2A`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: Any,
        window: int,
        *_: int,
    ) -> torch.Tensor:
        ranks = group.size()
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
        return *_to_sequence(gradients, group, ranks), None, None, None, None


class _AllGather(torch.autograd.Function):
    """cp_comm_type all_gather. Saves: q, k, v, out of both halves of the sequence apart from the
    output, and one fp32 per head and token. `AttnFuncWithCPAndKVAllGather`; since commit ee5dcec22
    (TE 2.15) the output itself is saved in place of its halves, which is not followed."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: Any,
        window: int,
        *_: int,
    ) -> torch.Tensor:
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
        return dq, dk, dv, None, None, None, None


class _Ring(torch.autograd.Function):
    """cp_comm_type p2p, and a2a+p2p with `inner` ranks in the all-to-all. Saves: q, the last k and
    v that came around, the output, and one fp32 per head and token. Until the ring ends it holds k
    and v of every step, and the output and statistics of every step: on the last rank, which is
    counted, all of them are of all queries. Every second step runs in a stream of its own. The
    corrections of outputs are compiled, without temporaries.
    `AttnFuncWithCPAndKVP2P`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        group: Any,
        window: int,
        inner: int,
        ring: int,
    ) -> torch.Tensor:
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
        ctx.more = (k.shape, v.shape, group, window, inner, ring)
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
        return *gradients, None, None, None, None


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
