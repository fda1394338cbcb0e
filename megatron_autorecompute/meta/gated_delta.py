"""Stand-ins for the kernels of Gated DeltaNet (flash-linear-attention 0.5 and 0.6), for meta
tensors: fla/ops/gated_delta_rule/chunk.py, fla/modules/convolution.py and fla/modules/l2norm.py.

They save what fla's autograd functions save, and hold what these allocate while they run.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from megatron_autorecompute.meta import ops

CHUNK = 64
"""Tokens that fla's kernels take at once."""
_FP32 = torch.float32


class _Delta(torch.autograd.Function):
    """Saves: q, k, v, g (fp32), beta, and the solved triangular matrix of every chunk, 64 elements
    for each token and head. `ChunkGatedDeltaRuleFunction` without its own l2norm."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        sums = torch.empty_like(g, dtype=_FP32)
        solved = k.new_empty(*k.shape[:3], CHUNK)
        w, u, states, new_v = _recomputed(k, v)
        out = torch.empty_like(v)
        ops.kernel([q, k, v, sums, beta, solved, w, u, states, new_v, out], _flops(k, v)[0])
        del w, u, states, new_v
        ctx.save_for_backward(q, k, v, sums, beta, solved)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, sums, beta, solved = ctx.saved_tensors
        w, u, states, new_v = _recomputed(k, v)
        dv = torch.empty_like(v)
        dstates, dv_more = torch.empty_like(states), torch.empty_like(v)
        dq, dk, dw = (torch.empty_like(q) for _ in range(3))
        moved = [q, k, v, sums, beta, solved, w, u, states, new_v, dstates, dv, dv_more, dq, dk, dw]
        ops.kernel([*moved, gradient], _flops(k, v)[1])
        return dq, dk, dv, torch.empty_like(sums), torch.empty_like(beta)


def _recomputed(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """w, u, the state before every chunk, and the values that chunks add to it."""
    batch, length, heads, k_width = k.shape
    states = k.new_empty(batch, -(-length // CHUNK), heads, k_width, v.shape[3])
    return torch.empty_like(k), torch.empty_like(v), states, torch.empty_like(v)


def _flops(k: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    """Of forward and backward: products with states, and products within chunks."""
    batch, length, heads, k_width = k.shape
    v_width, rows = v.shape[3], batch * length * heads
    return (
        rows * (6 * k_width * v_width + CHUNK * (6 * k_width + 4 * v_width)),
        rows * (16 * k_width * v_width + CHUNK * (20 * k_width + 10 * v_width)),
    )


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Stands for fla's function. q and k [batch, length, heads, k width], v [..., v width], g and
    beta [batch, length, heads]; returns the shape of v, and no state."""
    return cast(torch.Tensor, _Delta.apply(q, k, v, g, beta)), None


class _Convolution(torch.autograd.Function):
    """Saves: input and weight. `CausalConv1dFunction` with the activation inside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        ops.kernel([x, weight, y], 2 * weight.shape[-1] * x.numel())
        ctx.save_for_backward(x, weight)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        dx = torch.empty_like(x)
        ops.kernel([x, weight, gradient, dx], 6 * weight.shape[-1] * x.numel())
        return dx, torch.empty_like(weight)


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
    """Stands for fla's function. x [batch, length, channels], weight [channels, taps]."""
    return cast(torch.Tensor, _Convolution.apply(x, weight)), None


class _Unit(torch.autograd.Function):
    """Saves: output, and one fp32 for each row. `L2NormFunction`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y, statistics = ops.norm(x, x[..., :1])
        ctx.save_for_backward(y, statistics)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ops.norm_backward(gradient, *ctx.saved_tensors)


def l2norm(x: torch.Tensor, **_: Any) -> torch.Tensor:
    """Stands for fla's function; the last dimension gets length 1."""
    return cast(torch.Tensor, _Unit.apply(x))
