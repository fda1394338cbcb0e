"""Describes how a model is built, as facts in a profile, and builds a config from the facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_autorecompute.compat import model_layers, stage_layout, versions
from megatron_autorecompute.compat.untyped import Chunk
from megatron_autorecompute.errors import ProfileError

NAMES = (
    "transformer_config",
    "transformer_impl",
    "vocab_size",
    "position_embedding_type",
    "share_embeddings_and_output_weights",
)
"""Names of the facts that `of_model` returns; `verify` needs them to build the model again."""

_FUNCTIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "squared_relu": squared_relu,
}


def of_model(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """How a GPTModel or a HybridModel is built, as JSON values for `Model.facts` of a profile; see
    NAMES. A HybridModel has its hybrid_layer_pattern, too.

    All ranks return the same, but a rank without layers lacks transformer_impl. Empty for other
    models, which `verify` cannot build.
    """
    # Not at the top: if Megatron's sources are patched, its modules import `compat`.
    from megatron.core.models.gpt import GPTModel

    model: Any = model_layers.unwrapped(chunks[0])
    known: tuple[type, ...] = (GPTModel, *model_layers.pattern_types())
    if not issubclass(type(model), known):
        return {}
    facts: dict[str, Any] = {
        "transformer_config": of_config(model.config),
        "vocab_size": model.vocab_size,
        "position_embedding_type": model.position_embedding_type,
        "share_embeddings_and_output_weights": model.share_embeddings_and_output_weights,
    }
    pattern = stage_layout.pattern_of(model)
    if pattern is not None:
        facts["hybrid_layer_pattern"] = str(pattern)
    for layer, _ in model_layers.numbered_layers(chunks)[:1]:
        parts = (type(part).__module__ for part in layer.modules())
        fused = any(part.startswith("megatron.core.extensions") for part in parts)
        facts["transformer_impl"] = "transformer_engine" if fused else "local"
    return facts


def of_config(config: TransformerConfig) -> dict[str, Any]:
    """The fields of a config that differ from TransformerConfig's defaults, as JSON values.

    Included are numbers, texts, lists of these, dtypes and the usual activation functions. Left out
    are initialisers, callbacks and fields that other packages add, which do not change a step's
    bytes, and the recompute fields, which the plan has.
    """
    config_class = (
        MLATransformerConfig if isinstance(config, MLATransformerConfig) else TransformerConfig
    )
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    facts: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        value = getattr(config, field.name)
        default = defaults.get(field.name, dataclasses.MISSING)
        if field.name.startswith("recompute_") or value == default:
            continue
        if isinstance(value, torch.dtype):
            facts[field.name] = str(value)
        elif named := [name for name, function in _FUNCTIONS.items() if function is value]:
            facts[field.name] = named[0]
        elif _is_plain(value):
            facts[field.name] = list(value) if isinstance(value, tuple) else value
    return facts


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def rebuilt_config(facts: dict[str, Any], changed: dict[str, Any]) -> TransformerConfig:
    """The config that `of_config` described, with some fields changed.

    Raises ProfileError for fields that the installed version does not have, and if Megatron refuses
    the config.
    """
    config_class = (
        MLATransformerConfig if facts.get("multi_latent_attention") else TransformerConfig
    )
    unknown = sorted(set(facts) - {field.name for field in dataclasses.fields(config_class)})
    if unknown:
        raise ProfileError(
            f"The profile's transformer_config names {', '.join(unknown)}, which megatron-core "
            f"{versions.installed()} does not have. Verify with the version the profile was made "
            "with."
        )
    values = facts | changed
    for name, value in values.items():
        if isinstance(value, str) and value.startswith("torch."):
            values[name] = getattr(torch, value.removeprefix("torch."))
    if values.get("activation_func") in _FUNCTIONS:
        values["activation_func"] = _FUNCTIONS[values["activation_func"]]
    try:
        return config_class(**values)
    except (AssertionError, ValueError) as error:
        raise ProfileError(f"Megatron refuses the plan's config: {error}") from error
