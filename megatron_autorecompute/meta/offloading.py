"""Megatron's fine-grained activation offloading without CUDA: stand-ins beside `without_cuda`."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload
from torch.utils._python_dispatch import _disable_current_modes

from megatron_autorecompute.compat import offload_modules
from megatron_autorecompute.patched import patched


def _is_managed(tensor: Any) -> bool:
    return not isinstance(tensor, torch.nn.Parameter)


def _uncounted(usual: Callable[..., Any]) -> Callable[..., Any]:
    def offload(chunk: Any, source: torch.Tensor, *args: Any, **named: Any) -> Any:
        source = source.contiguous()
        with _disable_current_modes():
            return usual(chunk, source, *args, **named)

    return offload


State = tuple[torch.Size, torch.dtype, torch.device]
"""What is left of a meta tensor that was offloaded."""


def left(source: torch.Tensor) -> State:
    """Offload a meta tensor, which has nothing to copy."""
    if not source.is_contiguous():
        torch.empty_like(source, memory_format=torch.contiguous_format)
    return source.shape, source.dtype, source.device


def back(state: State) -> torch.Tensor:
    """The tensor that was copied out, on the device again."""
    shape, dtype, device = state
    return torch.empty(shape, dtype=dtype, device=device)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """In this block Megatron offloads meta tensors, and copies take no time."""
    handler: Any = megatron_offload.ChunkOffloadHandler
    with (
        without_cuda(),
        patched(handler, "offload", lambda _, source, **__: left(source)),
        patched(handler, "reload", lambda _, state: back(state)),
        patched(handler, "finish_all_groups", offload_modules.has_no_next_group),
    ):
        yield


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """In this block Megatron offloads tensors of any device. `without_cuda.activate()` provides
    streams, events and pinned memory.

    Symptoms without it: "TE CPU offload is not available"; nothing leaves, as tensors are not on
    CUDA; a table of what was offloaded is printed in the middle of the output; `LiveBytes` counts
    host memory as the device's.
    """
    handler: Any = megatron_offload.ChunkOffloadHandler
    offload = types.SimpleNamespace(CPUOffloadEnabled=False)
    with contextlib.ExitStack() as undo:
        undo.enter_context(patched(transformer_engine, "cpu_offload", offload))
        undo.enter_context(offload_modules.without_table())
        undo.enter_context(patched(handler, "offload", _uncounted(handler.offload)))
        if hasattr(handler, "_can_manage_tensor_for_offload"):
            managed = staticmethod(_is_managed)
            undo.enter_context(patched(handler, "_can_manage_tensor_for_offload", managed))
        undo.callback(offload_modules.forget)
        yield
