"""Builds HybridModels from Megatron's own layer spec; on meta tensors with stand-ins in it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_autorecompute.compat import layer_specs, model_layers
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta import kernels
from megatron_autorecompute.meta.meta_step import StepShape


def check_supported(name: str) -> None:
    """Raise OptionError if the installed megatron-core has no HybridModel; `name` is the job's."""
    if not model_layers.pattern_types():
        raise OptionError(
            f"{name}: hybrid_layer_pattern describes a HybridModel, which megatron-core has from "
            "0.18 on. Install a newer one, or leave the pattern out for a GPTModel."
        )


def build_hybrid(
    config: Any,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    shape: StepShape,
    *,
    pattern: str,
    spec: Any = None,
    position_embedding_type: str = "none",
    rotary_percent: float = 1.0,
    share_embeddings_and_output_weights: bool = False,
) -> torch.nn.Module:
    """A chunk of a HybridModel; without `spec` it has stand-ins: call it inside `stand_ins`."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel(
        config,
        spec or _spec(),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.seq_length,
        hybrid_layer_pattern=pattern,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type=position_embedding_type,
        rotary_percent=rotary_percent,
        share_embeddings_and_output_weights=share_embeddings_and_output_weights,
        vp_stage=vp_stage,
    )


def build_local(config: Any, *where: Any, pattern: str, **ends: Any) -> torch.nn.Module:
    """`build_hybrid` of Megatron's local layers."""
    with layer_specs.torch_norm():
        return build_hybrid(config, *where, pattern=pattern, spec=layer_specs.local_spec(), **ends)


@functools.cache
def _spec() -> Any:
    """Megatron's hybrid_stack_spec, of stand-ins."""
    return layer_specs.with_modules(kernels.LAYERS)
