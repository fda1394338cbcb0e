"""Buffers that Transformer Engine and cuBLAS keep once for all layers of a stage.

Sources: NVIDIA/TransformerEngine (TE below), its main branch of August 2026 and the commits named,
and megatron-core 0.19.2. None of these buffers is freed before the process ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_autorecompute.meta import kernels
from megatron_autorecompute.meta.devices import Device
from megatron_autorecompute.meta.job import Job

GROUPED_TYPES = (kernels.GroupedColumnLinear, kernels.GroupedRowLinear)


def shared_buffers(job: Job, device: Device, *parts: torch.nn.Module | None) -> dict[str, int]:
    """Bytes by name of all such buffers that these modules use, as `StaticBytes.shared`."""
    modules = [each for part in parts if part is not None for each in part.modules()]
    return {**dummy_weight_gradients(job, modules), **workspaces(device, modules)}


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
            found[f"dummy weight gradient {shape[0]}x{shape[1]}"] = 2 * shape[0] * shape[1]
    return found


def _weight_shape(module: Any) -> tuple[int, int] | None:
    linear = (*kernels.LINEAR_TYPES, ColumnParallelLinear, RowParallelLinear)
    if not isinstance(module, linear):
        return None
    if module.weight is None:  # an output layer that uses the embedding's weights
        return module.output_size_per_partition, module.input_size
    rows, columns = module.weight.shape[-2:]
    return (rows, columns) if module.weight.requires_grad else None


def workspaces(device: Device, modules: Iterable[torch.nn.Module]) -> dict[str, int]:
    """cuBLAS workspaces.

    TE pytorch/cpp_extensions/gemm.py `get_cublas_workspace`: 32 MiB and 1 KiB from Hopper on, 4 MiB
    before, and as much again for each of the 4 streams of grouped products
    (`get_num_cublas_streams`). torch keeps its own for each handle and stream, of which one is
    counted (aten/src/ATen/cuda/CublasHandlePool.cpp `parseChosenWorkspaceSize`: 8 times 4096 KiB,
    before Hopper 2 times 4096 KiB and 8 times 16 KiB).
    """
    used = {type(module) for module in modules}
    hopper = device.capability >= 9
    te_bytes = (32 << 20) + 1024 if hopper else 4 << 20
    torch_bytes = 32 << 20 if hopper else (8 << 20) + (128 << 10)
    found = {"cuBLAS workspace of torch": torch_bytes}
    if used & set(kernels.LINEAR_TYPES):
        found["cuBLAS workspace"] = te_bytes
    if used & set(GROUPED_TYPES):
        found["cuBLAS workspaces of grouped products"] = 4 * te_bytes
    return found
