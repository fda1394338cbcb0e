"""Megatron's fine-grained activation offloading of tensors on CPU, beside `without_cuda`."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload
from torch.utils._python_dispatch import _disable_current_modes

from megatron_autorecompute.compat import offload_modules
from megatron_autorecompute.patched import patched


def _is_managed(tensor: Any) -> bool:
    return not isinstance(tensor, torch.nn.Parameter)


def _uncounted(usual: Any) -> Any:
    def offload(chunk: Any, source: torch.Tensor, *args: Any, **named: Any) -> Any:
        source = source.contiguous()
        with _disable_current_modes():
            return usual(chunk, source, *args, **named)

    return offload


@contextlib.contextmanager
def offload_on_cpu() -> Iterator[None]:
    """In this block Megatron offloads tensors of any device. `without_cuda.activate()` provides
    streams, events and pinned memory; `LiveBytes` counts no host memory as the device's."""
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
