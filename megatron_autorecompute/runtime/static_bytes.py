"""Bytes that a rank keeps through the whole step, counted from tensors, not from the allocator.

Only tensors on the training device count, the device of the first parameter. Works for any device
and all of Megatron's optimizers, through attribute names that 0.16 to 0.19 share. A storage counts
once, however many views it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_autorecompute.compat import model_layers, parallel
from megatron_autorecompute.profile import StaticBytes
from megatron_autorecompute.runtime.live_bytes import storage_bytes


def tensors(chunks: Sequence[torch.nn.Module], optimizer: Any) -> list[torch.Tensor]:
    """Parameters, gradient buffers, optimizer state and shared buffers of this rank."""
    return _on_device(
        chunks,
        _parameters(chunks)
        + _gradients(chunks)
        + _optimizer_state(optimizer)
        + parallel.global_buffers(),
    )


def static_bytes(chunks: Sequence[torch.nn.Module], optimizer: Any) -> StaticBytes:
    """Bytes of these tensors by type; complete after the optimizer's first step."""
    parameters = _on_device(chunks, _parameters(chunks))
    gradients = _on_device(chunks, _gradients(chunks))
    state = _on_device(chunks, _optimizer_state(optimizer))
    parameter_bytes = storage_bytes(parameters)
    gradient_bytes = storage_bytes(parameters + gradients) - parameter_bytes
    # In fp32 the optimizer works on the parameters themselves.
    everything = storage_bytes(parameters + gradients + state)
    return StaticBytes(
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_state_bytes=everything - parameter_bytes - gradient_bytes,
        buffer_bytes=storage_bytes(_on_device(chunks, parallel.global_buffers())),
    )


def _on_device(
    chunks: Sequence[torch.nn.Module], found: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors on the training device: an optimizer may keep its state in host memory."""
    devices = [parameter.device for chunk in chunks for parameter in chunk.parameters()]
    return [tensor for tensor in found if tensor.device in devices[:1]]


def _parameters(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for chunk in chunks:
        found += chunk.parameters()
        found += model_layers.unwrapped(chunk).buffers()
    return found


def _gradients(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """DistributedDataParallel's contiguous buffers, or plain `.grad` without it."""
    found = [p.grad for chunk in chunks for p in chunk.parameters() if p.grad is not None]
    for chunk in chunks:
        names = ("buffers", "expert_parallel_buffers")
        lists = [getattr(chunk, name, ()) for name in names]
        # Module.buffers of torch is a method; only DDP's attribute is a list.
        buffers = [buffer for part in lists if isinstance(part, list) for buffer in part]
        found += [buffer.grad_data for buffer in buffers]
        found += [b.param_data for b in buffers if getattr(b, "param_data", None) is not None]
    return found


def _optimizer_state(optimizer: Any) -> list[torch.Tensor]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [part.optimizer for part in parts if getattr(part, "optimizer", None) is not None]
    state = [value for part in inner for entry in part.state.values() for value in entry.values()]
    masters = [p for part in inner for group in part.param_groups for p in group["params"]]
    return [value for value in state + masters if isinstance(value, torch.Tensor)]
