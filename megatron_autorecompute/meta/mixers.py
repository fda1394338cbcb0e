"""Stand-ins for kernels of layers that mix tokens without attention, for meta tensors: they save
what mamba-ssm 2.3.2 (mamba_ssm/ops/triton) and flash-linear-attention 0.5 and 0.6 (fla/ops,
fla/modules) save, and hold while they run what their host code allocates, in its order."""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from megatron_autorecompute.meta import ops

_FP32 = torch.float32
_TAPS = 4
"""The taps of the convolution, `d_conv` of Megatron's MambaMixer."""


def split_conv1d_scan(
    zxbcdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    D: torch.Tensor,  # noqa: N803
    chunk_size: int,
    headdim: int,
    ngroups: int,
    **_: Any,
) -> torch.Tensor:
    """Stands for `mamba_split_conv1d_scan_combined`, without norm and output projection:
    convolution, scan and gate. Returns [batch, length, heads x headdim].

    Saves: the projection zxbcdt [batch, length, z x B C dt], the convolution's weights, the scan's
    output before the gate, A, D and the bias of dt.
    """
    heads, mixed = D.shape[0], weight.shape[0]  # mixed by the convolution: x, B and C
    inner = heads * headdim
    state = (mixed - inner) // ngroups // 2
    batch, length = zxbcdt.shape[:2]
    chunks, tokens = math.ceil(length / chunk_size), batch * length
    by_head = batch, heads, chunks, chunk_size
    of_scores = batch, chunks, ngroups, chunk_size, chunk_size
    of_states = batch, chunks, heads, headdim * state
    # Floating-point operations of the convolution, of C B^T within chunks, of one product of all
    # tokens with states, and of one causal product within chunks (half of all pairs).
    conv_flops = 2 * _TAPS * tokens * mixed
    scores_flops = 2 * tokens * ngroups * chunk_size * state
    states_flops, within_flops = 2 * tokens * inner * state, tokens * inner * chunk_size

    def run(zxbcdt: torch.Tensor, *rest: torch.Tensor) -> ops.Ran:
        new = zxbcdt.new_empty
        conv = new(batch, length, mixed)
        steps = [new(by_head, dtype=_FP32) for _ in range(2)]  # dt, and its sums times A
        states = new(of_states, dtype=_FP32)
        states, last = states.to(zxbcdt.dtype), new(batch, inner * state, dtype=_FP32)
        scores = new(of_scores, dtype=_FP32)
        out, before_gate = (new(batch, length, inner) for _ in range(2))
        # States of chunks, and y from states, are the two products with states.
        flops = conv_flops + scores_flops + 2 * states_flops + within_flops
        ops.kernel([zxbcdt, conv, *steps, states, scores, out, before_gate], flops)
        del conv, steps, states, last, scores
        return out, (zxbcdt, before_gate, *rest), backward

    def backward(saved: ops.Saved, gradient: torch.Tensor) -> ops.Gradients:
        zxbcdt, before_gate, *rest = saved
        new = zxbcdt.new_empty
        conv, dzxbcdt = new(batch, length, mixed), torch.empty_like(zxbcdt)
        dconv = torch.empty_like(conv)
        steps = [new(tokens, heads), *(new(by_head, dtype=_FP32) for _ in range(2))]
        scores, states = new(of_scores, dtype=_FP32), new(of_states, dtype=_FP32)
        states = torch.empty_like(states)  # passed from chunk to chunk, in the same dtype
        last, dout = new(batch, inner * state, dtype=_FP32), torch.empty_like(before_gate)
        dstates = torch.empty_like(states)
        dstates, states = dstates.to(zxbcdt.dtype), states.to(zxbcdt.dtype)
        moved = [zxbcdt, conv, dzxbcdt, dconv, *steps, scores, states, dstates, before_gate, dout]
        # Convolution, C B^T and states again; gradients of x, B, C, dt and of the states.
        flops = 3 * conv_flops + 3 * scores_flops + 5 * states_flops + 3 * within_flops
        ops.kernel([*moved, gradient], flops)
        # Gradients of dt and of its sums, of B, C and C B^T.
        of_group = batch, length, ngroups, state
        sizes = [by_head] * 3 + [of_group] * 2 + [of_scores] + [by_head] * 2
        more = [new(size, dtype=_FP32) for size in sizes]
        del conv, dconv, steps, scores, states, last, dout, dstates, moved, more
        return dzxbcdt, *(torch.empty_like(one) for one in rest)

    return cast(torch.Tensor, ops.kernel_with_backward(run, zxbcdt, weight, bias, dt_bias, a, D))


class GroupNorm(torch.nn.Module):
    """Stands for Megatron's `ExtendedRMSNorm`: one RMSNorm for each group, without a gate."""

    def __init__(
        self, hidden_size: int, eps: float, group_size: int, norm_before_gate: bool, **factory: Any
    ) -> None:
        super().__init__()
        self.groups = hidden_size // group_size
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, **factory))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape as x. Saves: input, and one fp32 per token and group. `LayerNormFn` of
        layernorm_gated.py."""
        return ops.normalised(x, self.weight, groups=self.groups)


def rearrange(x: torch.Tensor, pattern: str, **_: int) -> torch.Tensor:
    """Stands for einops', with the patterns of MambaMixer's training path."""
    if pattern in ("l b d -> b l d", "b l d -> l b d"):
        return x.transpose(0, 1)
    if pattern != "d 1 w -> d w":
        raise NotImplementedError(f"einops.rearrange of {pattern!r} in Mamba's training path")
    return x.squeeze(1)


def repeat(x: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
    """Stands for einops', with the only pattern of MambaContextParallel."""
    if pattern != "l b (g n) -> l b (g r n)":
        raise NotImplementedError(f"einops.repeat of {pattern!r} under context parallelism")
    groups = x.unflatten(-1, (sizes["g"], 1, sizes["n"]))
    return groups.expand(-1, -1, -1, sizes["r"], -1).flatten(2)


CHUNK = 64
"""Tokens that fla's kernels take at once."""


def _recomputed(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """w, u, the state before every chunk, and the values that chunks add to it."""
    batch, length, heads, k_width = k.shape
    states = k.new_empty(batch, -(-length // CHUNK), heads, k_width, v.shape[3])
    return torch.empty_like(k), torch.empty_like(v), states, torch.empty_like(v)


def _flops(k: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    """The operations of forward and backward: products with states, and products within chunks."""
    batch, length, heads, k_width = k.shape
    v_width, rows = v.shape[3], batch * length * heads
    return (
        rows * (6 * k_width * v_width + CHUNK * (6 * k_width + 4 * v_width)),
        rows * (16 * k_width * v_width + CHUNK * (20 * k_width + 10 * v_width)),
    )


def chunk_gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """Stands for fla's function. q and k [batch, length, heads, k width], v [..., v width], g and
    beta [batch, length, heads]; returns the shape of v, and no state. Saves: q, k, v, g (fp32),
    beta, and the solved triangular matrix of every chunk, 64 elements for each token and head."""

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> ops.Ran:
        sums = torch.empty_like(g, dtype=_FP32)
        solved = k.new_empty(*k.shape[:3], CHUNK)
        w, u, states, new_v = _recomputed(k, v)
        out = torch.empty_like(v)
        ops.kernel([q, k, v, sums, beta, solved, w, u, states, new_v, out], _flops(k, v)[0])
        del w, u, states, new_v
        return out, (q, k, v, sums, beta, solved), backward

    def backward(saved: ops.Saved, gradient: torch.Tensor) -> ops.Gradients:
        q, k, v, sums, beta, _ = saved
        w, u, states, new_v = _recomputed(k, v)
        dv = torch.empty_like(v)
        dstates, dv_more = torch.empty_like(states), torch.empty_like(v)
        dq, dk, dw = (torch.empty_like(q) for _ in range(3))
        moved = [*saved, w, u, states, new_v, dstates, dv, dv_more, dq, dk, dw]
        ops.kernel([*moved, gradient], _flops(k, v)[1])
        return dq, dk, dv, torch.empty_like(sums), torch.empty_like(beta)

    return cast(torch.Tensor, ops.kernel_with_backward(run, q, k, v, g, beta)), None


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    """Stands for fla's function. x [batch, length, channels], weight [channels, taps]. Saves: input
    and weight. `CausalConv1dFunction` with the activation inside."""

    def run(x: torch.Tensor, weight: torch.Tensor) -> ops.Ran:
        x = x.contiguous()
        y = torch.empty_like(x)
        ops.kernel([x, weight, y], 2 * weight.shape[-1] * x.numel())
        return y, (x, weight), backward

    def backward(saved: ops.Saved, gradient: torch.Tensor) -> ops.Gradients:
        x, weight = saved
        dx = torch.empty_like(x)
        ops.kernel([x, weight, gradient, dx], 6 * weight.shape[-1] * x.numel())
        return dx, torch.empty_like(weight)

    return cast(torch.Tensor, ops.kernel_with_backward(run, x, weight)), None


def l2norm(x: torch.Tensor, **_: Any) -> torch.Tensor:
    """Stands for fla's function; the last dimension gets length 1. Saves: output, and one fp32 for
    each row. `L2NormFunction`."""

    def run(x: torch.Tensor) -> ops.Ran:
        y, statistics = ops.norm(x, x[..., :1])
        return y, (y, statistics), backward

    def backward(saved: ops.Saved, gradient: torch.Tensor) -> ops.Gradients:
        return [ops.norm_backward(gradient, *saved)]

    return cast(torch.Tensor, ops.kernel_with_backward(run, x))
