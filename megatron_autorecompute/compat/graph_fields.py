"""The installed Megatron's config fields for CUDA graphs, and its code for those of layers.

What is captured of a layer and what runs beside its replay is the same with the implementations
`transformer_engine` and `local`; the code here is the first one's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute.compat.untyped import Layer


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


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """In this block Megatron's modules take the paths that they take while graphs are captured."""
    start, end = (getattr(cuda_graphs, f"_set_capture_{name}") for name in ("start", "end"))
    start()
    try:
        yield
    finally:
        end()


@contextlib.contextmanager
def in_torch(layers: Sequence[Any]) -> Iterator[None]:
    """In this block calls of these layers run their forwards, graphs or not."""
    for layer in layers:
        layer._should_call_te_cudagraph = lambda *_, **__: False
    try:
        yield
    finally:
        for layer in layers:
            del layer._should_call_te_cudagraph


def capture(layer: Layer, hidden: torch.Tensor, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Run what Transformer Engine captures of a layer; returns the graph's outputs."""
    with capturing():
        outputs = layer._te_cuda_graph_capture(hidden, **kwargs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def replay(
    layer: Layer,
    graph: Callable[[torch.Tensor, torch.Tensor], Any],
    hidden: torch.Tensor,
    kwargs: dict[str, Any],
    mask_bytes: int,
) -> Any:
    """Run a layer by Megatron's own code for replays, with a function in the graph's place.

    Args:
        layer: to run.
        graph: a function of the hidden states and a mask; returns the graph's outputs.
        hidden: states.
        kwargs: keyword arguments of the layer's forward.
        mask_bytes: of the mask that Megatron makes for each replay, where a graph has one as input
            (`_get_te_cuda_graph_replay_args`, which needs Transformer Engine).
    """

    def arguments(*args: torch.Tensor, **_: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        return (args[0], torch.empty(mask_bytes, dtype=torch.bool, device=hidden.device)), {}

    layer.cuda_graphs = [graph]
    layer._get_te_cuda_graph_replay_args = arguments
    try:
        return layer._te_cuda_graph_replay(hidden, **kwargs)
    finally:
        layer.cuda_graphs = []
        del layer._get_te_cuda_graph_replay_args


def is_graphable(layer: Layer, config: TransformerConfig) -> bool:
    """Whether Megatron captures anything of a layer."""
    return bool(cuda_graphs._layer_is_graphable(layer, config))
