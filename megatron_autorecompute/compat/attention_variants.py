"""Layer specs of GPTModels with `experimental_attention_variant`: Gated DeltaNet in some layers, or
sparse attention (DSA)."""

from __future__ import annotations

from typing import Any


def _specs() -> Any:
    from megatron.core.models.gpt import experimental_attention_variant_module_specs

    return experimental_attention_variant_module_specs


def block_spec(config: Any, vp_stage: int | None) -> Any:
    """Of one chunk, as Megatron-LM's gpt_builders.py makes it."""
    return _specs().get_transformer_block_with_experimental_attention_variant_spec(
        config, vp_stage=vp_stage
    )


def layer_specs(config: Any) -> Any:
    """Of every layer of the model."""
    return _specs().get_transformer_layer_with_experimental_attention_variant_spec(config)
