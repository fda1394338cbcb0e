"""The installed Megatron's config fields for CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig


def graph_fields(implementation: str, modules: Sequence[str]) -> dict[str, Any]:
    """Fields of TransformerConfig.

    Up to 0.18 `full_iteration` is a `cuda_graph_scope` of the implementation local; since 0.19 it
    is an implementation of its own, and the parts of layers are `cuda_graph_modules`. Remove when
    0.18 is no longer supported.

    Args:
        implementation: as 0.19 names it.
        modules: parts of layers; empty: whole layers.
    """
    if "cuda_graph_modules" in {field.name for field in fields(TransformerConfig)}:
        return {"cuda_graph_impl": implementation, "cuda_graph_modules": list(modules)}
    if implementation == "full_iteration":
        return {"cuda_graph_impl": "local", "cuda_graph_scope": [implementation]}
    return {"cuda_graph_impl": implementation, "cuda_graph_scope": list(modules)}
