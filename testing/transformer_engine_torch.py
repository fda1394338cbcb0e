"""Transformer Engine's C++ extension on CPU, in torch, so that its own Python code runs there.

TE's modules, their autograd functions, what these save and free: all of that is Python, in the
wheel `transformer-engine` itself. This module has the functions of `transformer_engine_torch` that
layers in bf16 and fp32 call, with the kernels' arithmetic in torch. `load()` imports TE with it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Iterator
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

TE = "transformer_engine"


class _Names(type):
    """An enumeration of C++ whose members are made as Python asks for them."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = cls(len(vars(cls)))
        value.name = name
        setattr(cls, name, value)
        return value


def _enumeration(name: str) -> type:
    return _Names(name, (int,), {})


_ENUMERATIONS = "NVTE_QKV_Format NVTE_QKV_Layout NVTE_Bias_Type NVTE_Mask_Type NVTE_Softmax_Type "
_ENUMERATIONS += "CommOverlapType NVTEScalingMode NVTERoutingMapFormat NVTEQBHistogramMode"
for _name in _ENUMERATIONS.split():
    globals()[_name] = _enumeration(_name)

DType = IntEnum(
    "DType",
    "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
    start=0,
)
FP8FwdTensors = IntEnum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    start=0,
)
FP8BwdTensors = IntEnum(
    "FP8BwdTensors",
    "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    start=0,
)
NVTE_Fused_Attn_Backend = IntEnum(
    "NVTE_Fused_Attn_Backend", "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8", start=-1
)


class CommOverlap:
    """Overlap of communication by userbuffers, which needs devices."""


CommOverlapP2P = CommOverlapHelper = CommOverlapBase = CommOverlap


def get_cudnn_version() -> int:
    return 91500


def get_cublasLt_version() -> int:  # noqa: N802
    return 130000


def get_num_cublas_streams() -> int:
    return 4


_TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16}
_TORCH |= {DType.kBFloat16: torch.bfloat16, DType.kInt32: torch.int32, DType.kByte: torch.uint8}


def _dtype(of: Any, like: torch.Tensor) -> torch.dtype:
    if isinstance(of, torch.dtype):
        return of
    return like.dtype if of is None else _TORCH[DType(int(of))]


def _into(out: torch.Tensor | None, value: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
    if out is None:
        return value
    return out.add_(value.view_as(out)) if accumulate else out.copy_(value.view_as(out))


# ------------------------------------------------------------------------------------------- norms


def _gamma(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def rmsnorm_fwd(x, weight, eps, out, quantizer, dtype, sm_margin, zero_centered):
    """y [n, h], None, 1 / rms [n] in fp32."""
    wide = x.float()
    rsigma = torch.rsqrt(wide.square().mean(-1) + eps)
    y = wide * rsigma[:, None] * _gamma(weight, zero_centered)
    return _into(out, y.to(_dtype(dtype, x))), None, rsigma


def rmsnorm_bwd(dz, x, rsigma, weight, sm_margin, zero_centered):
    """Gradients of x and of the weight."""
    normed = x.float() * rsigma[:, None]
    scaled = dz.float() * _gamma(weight, zero_centered)
    dx = rsigma[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dz.float() * normed).sum(0).to(weight.dtype)


def layernorm_fwd(x, weight, bias, eps, out, quantizer, dtype, sm_margin, zero_centered):
    """y [n, h], mean [n] and 1 / deviation [n] in fp32."""
    wide = x.float()
    mu = wide.mean(-1)
    rsigma = torch.rsqrt(wide.var(-1, unbiased=False) + eps)
    y = (wide - mu[:, None]) * rsigma[:, None] * _gamma(weight, zero_centered) + bias.float()
    return _into(out, y.to(_dtype(dtype, x))), mu, rsigma


def layernorm_bwd(dz, x, mu, rsigma, weight, sm_margin, zero_centered):
    """Gradients of x, of the weight and of the bias."""
    normed = (x.float() - mu[:, None]) * rsigma[:, None]
    scaled = dz.float() * _gamma(weight, zero_centered)
    means = scaled.mean(-1, keepdim=True), (scaled * normed).mean(-1, keepdim=True)
    dx = rsigma[:, None] * (scaled - means[0] - normed * means[1])
    dgamma, dbeta = (dz.float() * normed).sum(0), dz.float().sum(0)
    return dx.to(x.dtype), dgamma.to(weight.dtype), dbeta.to(weight.dtype)


# ---------------------------------------------------------------------------------------- products


def _product(a, transa, b, transb):
    """op(b) op(a) of row-major matrices, as cuBLAS sees these column-major."""
    left, right = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    found = (left.t() if transb else left) @ (right.t() if transa else right)
    return found if transb else found.view(*b.shape[:-1], found.shape[-1])


def generic_gemm(
    a, transa, b, transb, out, quantizer, dtype, bias, bias_dtype, gelu, gelu_in, grad, *_, **kw
):
    """Product, gradient of the bias, input of GELU, extra output. The last arguments are the
    workspace, its size, whether to accumulate, and the split accumulator."""
    accumulate = _[2]
    assert not gelu
    assert kw["comm_overlap"] is None
    found = _product(a, transa, b, transb)
    bias_gradient = None
    if bias is not None and not grad:
        found = found + bias
    elif bias is not None:
        bias_gradient = b.reshape(-1, b.shape[-1]).sum(0).to(bias.dtype)
    return _into(out, found.to(_dtype(dtype, b)), accumulate), bias_gradient, None, None


def te_general_grouped_gemm(
    a, transa, b, transb, out, dtype, m_splits, bias, bias_dtype, single, gelu_in, grad, *_
):
    """One product for each expert, into `out`; biases or their gradients."""
    accumulate = _[2]
    outs = out[0].split(list(m_splits)) if single else out
    for one, (left, right) in enumerate(zip(a, b, strict=True)):
        found = _product(left, transa, right, transb)
        if bias[one].numel() and grad:
            bias[one].copy_(right.sum(0))
        elif bias[one].numel():
            found = found + bias[one]
        _into(outs[one], found.to(outs[one].dtype), accumulate)
    return bias


# --------------------------------------------------------------------------------------- attention


def _hidden(scores: torch.Tensor, causal: bool) -> torch.Tensor:
    if not causal:
        return torch.zeros(scores.shape[-2:], dtype=torch.bool)
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)


def _softmax(scores, hidden, scale):
    wide = (scores.float() * scale).masked_fill(hidden, -10000.0)
    return torch.softmax(wide, -1).to(scores.dtype)


def _softmax_backward(gradient, found, scale):
    wide, probabilities = gradient.float(), found.float()
    inner = (wide * probabilities).sum(-1, keepdim=True)
    return (scale * probabilities * (wide - inner)).to(gradient.dtype)


def scaled_softmax_forward(scores, scale):
    return _softmax(scores, _hidden(scores, False), scale)


def scaled_masked_softmax_forward(scores, mask, scale):
    return _softmax(scores, mask.bool(), scale)


def scaled_upper_triang_masked_softmax_forward(scores, scale):
    return _softmax(scores, _hidden(scores, True), scale)


scaled_aligned_causal_masked_softmax_forward = scaled_upper_triang_masked_softmax_forward
scaled_softmax_backward = scaled_masked_softmax_backward = _softmax_backward
scaled_upper_triang_masked_softmax_backward = _softmax_backward
scaled_aligned_causal_masked_softmax_backward = _softmax_backward


def get_fused_attn_backend(*_: Any) -> Any:
    """The backend, and why there is none."""
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


def _heads_first(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[s, b, h, d] as [b, heads, s, d] in fp32."""
    return x.permute(1, 2, 0, 3).float().repeat_interleave(heads // x.shape[2], 1)


def _probabilities(q, k, scale, dropout, causal, seed):
    heads = q.shape[2]
    scores = scale * _heads_first(q, heads) @ _heads_first(k, heads).transpose(-1, -2)
    scores = scores.masked_fill(_hidden(scores, causal), -math.inf)
    stats = torch.logsumexp(scores, -1, keepdim=True)
    kept = torch.rand(scores.shape, generator=torch.Generator().manual_seed(seed)) >= dropout
    return torch.exp(scores - stats), stats, kept / (1 - dropout) if dropout else 1.0


def fused_attn_fwd(*given: Any) -> list[torch.Tensor]:
    """cuDNN's attention of [s, b, h, d]: output, log-sum-exps, [seed, offset] of its Philox."""
    scale, dropout, mask = given[3], given[4], given[10]
    q, k, v = given[16:19]
    # It takes numbers from the generator also without dropout.
    seed = int(torch.randint(2**62, ()))
    causal = "CAUSAL" in mask.name
    found, stats, kept = _probabilities(q, k, scale, dropout, causal, seed)
    out = (found * kept) @ _heads_first(v, q.shape[2])
    state = torch.tensor([seed, 0], dtype=torch.int64)
    return [out.permute(2, 0, 1, 3).to(q.dtype).contiguous(), stats, state]


def fused_attn_bwd(*given: Any) -> list[torch.Tensor | None]:
    """Gradients of query, key and value; none of bias and softmax offset."""
    scale, dropout, mask = given[2], given[3], given[12]
    q, k, v, out, gradient = given[19:24]
    stats, state = given[25][0], given[25][-1]
    heads, groups = q.shape[2], k.shape[2]
    causal = "CAUSAL" in mask.name
    found, again, kept = _probabilities(q, k, scale, dropout, causal, int(state[0]))
    assert torch.equal(again, stats), "these are not the log-sum-exps of this query and key"
    wide = _heads_first(gradient, heads)
    inner = (wide * _heads_first(out, heads)).sum(-1, keepdim=True)
    inside = wide @ _heads_first(v, heads).transpose(-1, -2)
    d_scores = scale * found * (inside * kept - inner)
    d_v = (found * kept).transpose(-1, -2) @ wide
    d_q = d_scores @ _heads_first(k, heads)
    d_k = d_scores.transpose(-1, -2) @ _heads_first(q, heads)
    back = (
        x.view(x.shape[0], count, -1, *x.shape[2:]).sum(2).permute(2, 0, 1, 3).to(q.dtype)
        for x, count in ((d_q, heads), (d_k, groups), (d_v, groups))
    )
    return [*(x.contiguous() for x in back), None, None]


def _rotated(x: torch.Tensor, angles: torch.Tensor, sign: int) -> torch.Tensor:
    """x [s, b, heads, d]; angles [s, 1, 1, rotated d] in fp32."""
    width = angles.shape[-1]
    turned = x[..., :width].float()
    angles = angles[: x.shape[0]]
    first, second = turned.chunk(2, -1)
    half = torch.cat([-second, first], -1) * sign
    found = turned * angles.cos() + half * angles.sin()
    return torch.cat([found.to(x.dtype), x[..., width:]], -1)


def fused_rope_forward(x: torch.Tensor, angles: torch.Tensor, *_: Any) -> torch.Tensor:
    """The two halves of each head, turned."""
    return _rotated(x, angles, 1)


def fused_rope_backward(gradient: torch.Tensor, angles: torch.Tensor, *_: Any) -> torch.Tensor:
    """Turned back."""
    return _rotated(gradient, angles, -1)


# --------------------------------------------------------------------------------------- optimizer


def multi_tensor_l2norm(chunk_size, overflow, lists, per_tensor=False):
    """The norm of all tensors, and of each."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().view(1), norms


def multi_tensor_scale(chunk_size, overflow, lists, scale):
    """Each tensor of the first list times `scale`, into that of the second."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * scale)


multi_tensor_scale_tensor = multi_tensor_scale


def multi_tensor_adam(
    chunk_size, overflow, lists, lr, beta1, beta2, eps, step, mode, correct, decay
):
    """AdamW (mode 1) of gradients, parameters and both moments."""
    first, second = (1 - beta1**step, 1 - beta2**step) if correct else (1.0, 1.0)
    for gradient, parameter, mean, square in zip(*lists, strict=True):
        wide = gradient.float()
        mean.mul_(beta1).add_(wide * (1 - beta1))
        square.mul_(beta2).add_(wide * wide * (1 - beta2))
        update = (mean / first) / ((square / second).sqrt() + eps) + decay * parameter
        parameter.sub_((lr * update).to(parameter.dtype))


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """In this block TE takes CPU for a Hopper, and nothing else does."""
    hopper = SimpleNamespace(major=9, minor=0, name="CPU", multi_processor_count=1)
    seen = {
        "is_available": lambda: sys._getframe(1).f_globals["__name__"].startswith(TE),
        "get_device_properties": lambda device=None: hopper,
        "get_device_capability": lambda device=None: (hopper.major, hopper.minor),
        "device": lambda device: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
    }
    with mock.patch.multiple(torch.cuda, **seen), mock.patch.object(torch.Tensor, "is_cuda", True):
        yield


def load() -> ModuleType:
    """Import Transformer Engine, whose wheel is on the path, with this module as its extension."""
    if TE in sys.modules:
        return sys.modules[TE]
    spec = importlib.util.find_spec(TE)
    package = importlib.util.module_from_spec(spec)
    sys.modules[TE] = package
    sys.modules["transformer_engine_torch"] = sys.modules[__name__]
    # It asks for onnxscript, for exports alone.
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = mock.MagicMock()
    with mock.patch.dict(os.environ, NVTE_PROJECT_BUILDING="1"):
        common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    spec.loader.exec_module(package)
    return package


def __getattr__(name: str) -> Any:
    """What is not needed here: a function that says so when it is called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"transformer_engine_torch.{name} has no stand-in.")

    missing.__name__ = name
    return missing
