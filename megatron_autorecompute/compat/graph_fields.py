"""The installed Megatron's config fields for CUDA graphs, and its code for those of layers by
`transformer_engine`; by `local` the same is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute.compat.untyped import Layer
from megatron_autorecompute.patched import patched


def graph_fields(implementation: str, modules: Sequence[str]) -> dict[str, Any]:
    """Fields of TransformerConfig for an implementation, as 0.19 names it, and parts of layers,
    without which whole layers are captured.

    Up to 0.18 `full_iteration` is a `cuda_graph_scope` of the implementation local; since 0.19 it
    is an implementation of its own, and the parts of layers are `cuda_graph_modules`.
    """
    if "cuda_graph_modules" in {field.name for field in fields(TransformerConfig)}:
        return {"cuda_graph_impl": implementation, "cuda_graph_modules": list(modules)}
    if implementation == "full_iteration":
        return {"cuda_graph_impl": "local", "cuda_graph_scope": [implementation]}
    return {"cuda_graph_impl": implementation, "cuda_graph_scope": list(modules)}


def capture(layer: Layer, hidden: torch.Tensor, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Run what Transformer Engine captures of a layer; returns the graph's outputs."""
    cuda_graphs._set_capture_start()
    try:
        outputs = layer._te_cuda_graph_capture(hidden, **kwargs)
    finally:
        cuda_graphs._set_capture_end()
    return outputs if isinstance(outputs, tuple) else (outputs,)


def replay(
    layer: Layer,
    graph: Callable[[torch.Tensor, torch.Tensor], Any],
    hidden: torch.Tensor,
    kwargs: dict[str, Any],
    mask_bytes: int,
) -> Any:
    """Run a layer by Megatron's own code for replays, with a function of the hidden states and a
    mask in the graph's place, which returns the graph's outputs.

    kwargs: keyword arguments of the layer's forward.
    mask_bytes: of the mask that Megatron makes for each replay, where a graph has one as input.
    """

    def arguments(*args: torch.Tensor, **_: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        return (args[0], torch.empty(mask_bytes, dtype=torch.bool, device=hidden.device)), {}

    name = "_get_te_cuda_graph_replay_args"
    with patched(layer, "cuda_graphs", [graph]), patched(layer, name, arguments):
        return layer._te_cuda_graph_replay(hidden, **kwargs)


def is_graphable(layer: Layer, config: TransformerConfig) -> bool:
    """Whether Megatron captures anything of a layer."""
    return bool(cuda_graphs._layer_is_graphable(layer, config))
