"""Fused kernels as single operations on meta tensors, with shapes and floating-point operations and
no values. Temporaries inside a kernel and their traffic are not counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

NAMESPACE = "megatron_autorecompute"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

FLOPS: dict[str, Callable[..., int]] = {}
"""Floating-point operations by name, from the arguments; no entry if it only moves bytes."""


def _define(schema: str, meta: Callable[..., Any], flops: Callable[..., int] | None = None) -> Any:
    name = _LIBRARY.define(schema).split("::")[-1]
    _LIBRARY.impl(name, meta, "Meta")
    if flops:
        FLOPS[name] = flops
    return getattr(torch.ops.megatron_autorecompute, name)


Saved = Sequence[Any]
"""Tensors that a kernel saves for its backward."""
Gradients = Sequence[torch.Tensor | None]
"""The gradients of a kernel's inputs, in their order."""
Ran = tuple[Any, Saved, Callable[..., Gradients]]
"""A kernel's outputs, what it saves, and its backward: a function of that and of the outputs'
gradients."""


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Ran], *inputs: Any) -> Any:
        outputs, saved, ctx.run_backward = run(*inputs)
        ctx.save_for_backward(*saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *ctx.run_backward(ctx.saved_tensors, *gradients)


def kernel_with_backward(run: Callable[..., Ran], *inputs: torch.Tensor | None) -> Any:
    """The outputs of `run(*inputs)`, as one node of autograd's graph. What its backward refers to
    lives until it has run, beside what it saves."""
    return _Kernel.apply(run, *inputs)


def gathered(x: torch.Tensor, group: Any, beside: bool = False) -> torch.Tensor:
    """The parts of all ranks along the first dimension; `beside`: the next product."""
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    torch.distributed.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=beside)
    return whole


def scattered(x: torch.Tensor, group: Any, beside: bool = False) -> torch.Tensor:
    """This rank's part of the sums of all ranks; `beside`: the next product."""
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    torch.distributed.reduce_scatter_tensor(part, x.contiguous(), group=group, async_op=beside)
    return part


def _gemm_flops(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> int:
    # Every token is multiplied by one matrix, also if weight has one for each expert.
    return 2 * x.numel() * weight.shape[-2]


def _attention_flops(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any
) -> int:
    """Two matrix products; a causal mask skips half of them, a window everything outside it, of
    which the first queries have less."""
    scale, window = more[-2], more[-1]
    sequence, batch, heads, width = query.shape
    keys = key.shape[0]
    seen = min(window, keys)
    pairs = sequence * (seen - seen * seen / keys / 2 if window else keys * scale)
    return int(2 * batch * heads * pairs * (width + value.shape[3]))


gemm = _define(
    "gemm(Tensor x, Tensor weight, str precision) -> Tensor",
    lambda x, weight, precision: x.new_empty(*x.shape[:-1], weight.shape[-2]),
    _gemm_flops,
)
"""y = x weight^T; with a weight of three dimensions a grouped product of rows in order."""

gemm_data_gradient = _define(
    "gemm_data_gradient(Tensor gradient, Tensor weight, str precision) -> Tensor",
    lambda gradient, weight, precision: gradient.new_empty(*gradient.shape[:-1], weight.shape[-1]),
    lambda gradient, weight, *_: 2 * gradient.numel() * weight.shape[-1],
)
gemm_weight_gradient = _define(
    "gemm_weight_gradient(Tensor gradient, Tensor x, Tensor weight, str precision) -> ()",
    lambda gradient, x, weight, precision: None,
    lambda gradient, x, weight, *_: 2 * gradient.numel() * weight.shape[-1],
)
"""The product adds to main_grad itself (gradient_accumulation_fusion), without a temporary."""

general_gemm = _define(
    "general_gemm(Tensor a, Tensor b, ScalarType out, str layout) -> Tensor",
    lambda a, b, out, layout: a.new_empty(
        b.shape[layout[1] == "T"], a.shape[layout[0] == "N"], dtype=out
    ),
    lambda a, b, out, layout: 2 * a.numel() * b.numel() // b.shape[layout != "NT"],
)
"""TE's `general_gemm` of a and b [rows, columns] in bf16 or fp32 with a result of another type, by
layout (TN, NN or NT), without copies in it."""

quantize = _define(
    "quantize(Tensor x, float element_bytes) -> Tensor",
    lambda x, element_bytes: x.new_empty(math.ceil(x.numel() * element_bytes), dtype=torch.uint8),
)
norm = _define(
    "norm(Tensor x, Tensor weight) -> (Tensor, Tensor)",
    lambda x, weight: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)),
)
norm_backward = _define(
    "norm_backward(Tensor gradient, Tensor x, Tensor statistics) -> Tensor",
    lambda gradient, x, statistics: torch.empty_like(x),
)


def normed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """x after RMSNorm or, with a bias, LayerNorm, and what is saved of it beside x: one fp32 per
    row (`rsigma`; of LayerNorm `mu`, too)."""
    y, statistics = norm(x, weight)
    return (y, statistics) if bias is None else (y, statistics, torch.empty_like(statistics))


def normalised(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, groups: int = 1
) -> torch.Tensor:
    """`normed` as a kernel. Saves: input, copied if it is a view of parts of one, and statistics.
    TE pytorch/ops/basic/rmsnorm.py and layer_norm.py, `op_forward`."""

    def run(x: torch.Tensor, *_: Any) -> Ran:
        x = x.contiguous()
        y, *statistics = normed(x if groups == 1 else x.unflatten(-1, (groups, -1)), weight, bias)
        return y if groups == 1 else y.flatten(-2), (x, *statistics), backward

    def backward(saved: Saved, gradient: torch.Tensor) -> Gradients:
        return norm_backward(gradient, *saved[:2]), None, None

    return cast(torch.Tensor, kernel_with_backward(run, x, weight, bias))


attention = _define(
    "attention(Tensor q, Tensor k, Tensor v, float share, int window) -> (Tensor, Tensor)",
    lambda q, k, v, share, window: (
        q.new_empty(*q.shape[:3], v.shape[3]),
        q.new_empty(q.shape[1], q.shape[2], q.shape[0], dtype=torch.float32),
    ),
    _attention_flops,
)
attention_backward = _define(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor out, Tensor statistics, "
    "Tensor gradient, float share, int window) -> (Tensor, Tensor, Tensor)",
    lambda q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
    # The scores once more, and four products: 5 of the forward's 2 (Dao 2023).
    lambda q, k, v, *rest: _attention_flops(q, k, v, *rest) * 5 // 2,
)
rotate = _define("rotate(Tensor x) -> Tensor", torch.empty_like)
gated = _define(
    "gated(Tensor x, Tensor? weights) -> Tensor",
    lambda x, weights: x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
)
pointwise = _define(
    "pointwise(Tensor x, Tensor? weights) -> Tensor", lambda x, weights: torch.empty_like(x)
)
activation_backward = _define(
    "activation_backward(Tensor gradient, Tensor x, Tensor? weights) -> (Tensor, Tensor)",
    lambda gradient, x, weights: (
        torch.empty_like(x),
        x.new_empty(0) if weights is None else torch.empty_like(weights),
    ),
)
mla_rotate = _define(
    "mla_rotate(Tensor kv, Tensor k_position, int k_width, int v_width) -> (Tensor, Tensor)",
    lambda kv, k_position, k_width, v_width: (
        kv.new_empty(*kv.shape[:-1], k_width + k_position.shape[-1]),
        kv.new_empty(*kv.shape[:-1], v_width),
    ),
)
mla_rotate_backward = _define(
    "mla_rotate_backward(Tensor dk, Tensor dv, Tensor kv, Tensor k_position) -> (Tensor, Tensor)",
    lambda dk, dv, kv, k_position: (torch.empty_like(kv), torch.empty_like(k_position)),
)
reorder = _define(
    "reorder(Tensor x, int rows) -> Tensor", lambda x, rows: x.new_empty(rows, *x.shape[1:])
)
"""Rows of x taken, repeated or added up."""
cross_entropy = _define(
    "cross_entropy(Tensor logits) -> Tensor",
    lambda logits: logits.new_empty(logits.shape[:-1], dtype=torch.float32),
)
kernel = _define(
    "kernel(Tensor[] moved, int flops) -> ()",
    lambda moved, flops: None,
    lambda moved, flops: flops,
)
"""A kernel that reads or writes these tensors once, in the caller's count of operations."""

_LIBRARY.define("generator_states() -> ()")
_LIBRARY.impl("generator_states", lambda: None, "CompositeExplicitAutograd")
generator_states = torch.ops.megatron_autorecompute.generator_states
"""A checkpoint reads or sets the states of all random generators: the host alone is busy."""
_LIBRARY.define("host_operations(int count) -> ()")
_LIBRARY.impl("host_operations", lambda count: None, "CompositeExplicitAutograd")
host_operations = torch.ops.megatron_autorecompute.host_operations
"""So many operations of torch that start no kernel."""
concatenated = _define(
    "concatenated(Tensor largest, int rows) -> Tensor",
    lambda largest, rows: largest.new_empty(rows, *largest.shape[1:]),
)
"""torch's `cat` of views of one tensor, of which the largest counts as read."""
OF_HOST = ("generator_states", "host_operations")
"""These start no kernel."""
OF_TORCH = (*OF_HOST, "concatenated")
"""These are no modules in Python."""

MAIN_STREAM, DDP_STREAM, CONTEXT_PARALLEL_STREAM = range(3)
"""The streams of a device. torch's allocator has blocks of its own for each."""
current_stream = MAIN_STREAM
"""The stream in which tensors are made; other code patches it."""
