"""Buffers that Transformer Engine and cuBLAS keep once for all layers of a stage.

Sources: NVIDIA/TransformerEngine (TE below), its main branch of August 2026 and the commits named,
and megatron-core 0.19.2. None of these buffers is freed before the process ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from megatron_autorecompute.meta import kernels
from megatron_autorecompute.meta.devices import Device
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.static_bytes import COPY_BYTES
from megatron_autorecompute.profile import Deferred

OF_TORCH = "cuBLAS workspaces of torch"
OF_LINEAR = "cuBLAS workspace"
OF_GROUPED = "cuBLAS workspaces of grouped products"
GROUPED_STREAMS = 4
"""TE's `get_num_cublas_streams`, each with a workspace."""
GROUPED_TYPES = (kernels.GroupedColumnLinear, kernels.GroupedRowLinear)


def shared_buffers(job: Job, device: Device, *parts: torch.nn.Module | None) -> dict[str, int]:
    """Bytes by name of all such buffers that these modules use, as `StaticBytes.shared`."""
    modules = [each for part in parts if part is not None for each in part.modules()]
    return {**dummy_weight_gradients(job, modules), **workspaces(job, device, modules)}


def deferred_output_layer(job: Job) -> Deferred | None:
    """What `defer_embedding_wgrad_compute` keeps of microbatches on the head's stage: the gradients
    of their logits, and the output layer's inputs, until the pipeline drains (megatron-core
    tensor_parallel/layers.py, `grad_output_buffer` and `embedding_activation_buffer`; schedules.py
    `finish_embedding_wgrad_compute`, before gradients are reduced). These inputs have their graph,
    which ends at what the stage received: so it stays too, with its gradient.
    """
    if not job.resolved.defer_embedding_wgrad_compute:
        return None
    tokens = job.micro_batch_size * job.seq_length // job.size("context")
    tensor, hidden = job.size("tensor"), job.resolved.hidden_size
    input_size = tokens * hidden // (tensor if job.resolved.sequence_parallel else 1)
    each = 2 * (tokens * job.padded_vocab_size // tensor + 3 * input_size)
    limit = job.resolved.wgrad_deferral_limit
    return Deferred(each, 1 + job.mtp_num_layers, limit or None)


def quantised_output_layer(job: Job) -> dict[str, int]:
    """What `fp8_output_proj` adds: copies in MXFP8 of the output layer's bf16 weights, in both
    layouts, that Transformer Engine caches (megatron-core extensions/transformer_engine.py
    `TELMHeadColumnParallelLinear`, which is built outside fp8_model_init). Its input, which is
    kept in bf16 in these figures, takes half."""
    if not job.resolved.fp8_output_proj or job.precision != "mxfp8":
        return {}
    elements = job.padded_vocab_size // job.size("tensor") * job.resolved.hidden_size
    return {"quantised copies of the output layer": round(2 * COPY_BYTES["mxfp8"] * elements)}


def graph_inputs(job: Job) -> dict[str, int]:
    """What a CUDA graph of the iteration reads, on stages whose ranks load data."""
    size = job.graph_input_bytes
    return {"samples of a CUDA graph": size} if size else {}


def dummy_weight_gradients(job: Job, modules: Iterable[torch.nn.Module]) -> dict[str, int]:
    """One tensor per shape [out, in] of trained weights, 2 bytes per element under every precision.

    With gradient accumulation fusion the product adds to main_grad, and backward returns a tensor
    of the weight's shape that nobody reads, for DistributedDataParallel's hooks to run. TE
    pytorch/module/base.py `get_dummy_wgrad` caches it; linear.py, layernorm_linear.py and
    grouped_linear.py (one for all experts) call it, and so does megatron-core's
    tensor_parallel/layers.py (output layer) if TE can be imported. Norms, embeddings and the router
    have none. `Job.keeps_dummies` says which versions do. TE's LayerNormMLP, which Megatron's layer
    specs do not build, makes a new tensor each time.
    """
    found: dict[str, int] = {}
    for module in modules:
        shape = _weight_shape(module)
        grouped = isinstance(module, GROUPED_TYPES)
        if shape is not None and job.keeps_dummies("grouped" if grouped else "linear"):
            found[dummy_name(shape)] = 2 * shape[0] * shape[1]
    return found


def dummy_name(shape: Sequence[int]) -> str:
    """The name of the dummy of weights [out, in]."""
    return f"dummy weight gradient {shape[0]}x{shape[1]}"


def _weight_shape(module: Any) -> tuple[int, int] | None:
    linear = (*kernels.LINEAR_TYPES, ColumnParallelLinear, RowParallelLinear)
    if not isinstance(module, linear):
        return None
    if module.weight is None:  # an output layer that uses the embedding's weights
        return module.output_size_per_partition, module.input_size
    rows, columns = module.weight.shape[-2:]
    return (rows, columns) if module.weight.requires_grad else None


def workspaces(job: Job, device: Device, modules: Iterable[torch.nn.Module]) -> dict[str, int]:
    """cuBLAS workspaces.

    TE pytorch/cpp_extensions/gemm.py `get_cublas_workspace`: 32 MiB and 1 KiB from Hopper on, 4 MiB
    before, and as much again for each of the 4 streams of grouped products
    (`get_num_cublas_streams`), and for each of 3 streams with userbuffers (`tp_comm_overlap`,
    `_NUM_MAX_UB_STREAMS`).

    torch keeps its own for each handle and stream, and each thread has a handle: forward's and
    autograd's. aten/src/ATen/cuda/CublasHandlePool.cpp `parseChosenWorkspaceSize`: 8 times 4096 KiB
    on Hopper, and since 2.12 (pytorch pull request 175344) on Blackwell; else 2 times 4096 KiB and
    8 times 16 KiB. CUBLAS_WORKSPACE_CONFIG says another size; `--deterministic-mode` asks for one
    (Megatron training/arguments.py). Only what torch itself multiplies needs it: the output layer,
    attention with scores, local layers, gates of shared experts, and routers that are not of TE
    (`Job.routers_of_te`).
    """
    modules = list(modules)
    routers = any(isinstance(module, TopKRouter) for module in modules)
    used = {type(module) for module in modules}
    te_bytes = (32 << 20) + 1024 if device.capability >= 9 else 4 << 20
    found = {}
    if (routers and not job.routers_of_te) or any(map(_is_of_torch, modules)):
        found[OF_TORCH] = 2 * _workspace_of_torch(job, device)
    if used & set(kernels.LINEAR_TYPES) or (routers and job.routers_of_te):
        found[OF_LINEAR] = te_bytes
        if job.resolved.tp_comm_overlap:
            found["cuBLAS workspaces of userbuffers"] = 3 * te_bytes
    if used & set(GROUPED_TYPES):
        found[OF_GROUPED] = GROUPED_STREAMS * te_bytes
    return found


def _workspace_of_torch(job: Job, device: Device) -> int:
    large = 9 <= device.capability < 10
    if job.has_torch(2, 12):
        large |= 10 <= device.capability < 11 or 12 <= device.capability < 13
    given = ":4096:8" if large or job.resolved.deterministic_mode else ":4096:2:16:8"
    numbers = list(map(int, (job.cublas_workspace_config or given).split(":")[1:]))
    return sum(kib * count << 10 for kib, count in zip(numbers[::2], numbers[1::2], strict=True))


def _is_of_torch(module: torch.nn.Module) -> bool:
    """Whether it calls torch's own products."""
    if isinstance(module, kernels.Attention):
        return module.dropout is not None
    if isinstance(module, SharedExpertMLP):
        return bool(module.use_shared_expert_gate)
    return isinstance(module, (ColumnParallelLinear, RowParallelLinear))
