"""Megatron's fine-grained activation offloading without CUDA: stand-ins beside `without_cuda`."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload

from megatron_autorecompute.patched import patched


def _is_managed(tensor: Any) -> bool:
    return not isinstance(tensor, torch.nn.Parameter)


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """In this block Megatron offloads tensors of any device. `without_cuda.activate()` provides
    streams, events and pinned memory.

    Symptoms without it: "TE CPU offload is not available"; nothing leaves, as tensors are not on
    CUDA; a table of what was offloaded is printed in the middle of the output.
    """
    handler: Any = megatron_offload.ChunkOffloadHandler
    offload = types.SimpleNamespace(CPUOffloadEnabled=False)
    with contextlib.ExitStack() as undo:
        undo.enter_context(patched(transformer_engine, "cpu_offload", offload))
        undo.enter_context(
            patched(megatron_offload, "print_offload_summary_table", lambda total_bytes: None)
        )
        if hasattr(handler, "_can_manage_tensor_for_offload"):
            managed = staticmethod(_is_managed)
            undo.enter_context(patched(handler, "_can_manage_tensor_for_offload", managed))
        undo.callback(setattr, megatron_offload.PipelineOffloadManager, "OFFLOAD_MGR", None)
        yield
