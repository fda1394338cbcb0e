"""Describes how a model is built, as facts in a profile, and builds a config from the facts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import activations
from megatron.core.fusions import fused_bias_geglu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_autorecompute.compat import model_layers, stage_layout, versions
from megatron_autorecompute.compat.untyped import Chunk
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.options import nearest

NAMES = (
    "transformer_config",
    "transformer_impl",
    "vocab_size",
    "position_embedding_type",
    "share_embeddings_and_output_weights",
)
"""Names of the facts that `of_model` returns; `verify` needs them to build the model again."""

_ACTIVATIONS = {
    name: getattr(torch.nn.functional, name, None) or getattr(activations, name)
    for name in ("gelu", "silu", "relu", "squared_relu", "fast_gelu")
}
# Megatron has two of this name, and compares with the one that its flag sets.
_ACTIVATIONS["quick_gelu"] = fused_bias_geglu.quick_gelu


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
    config_class = config_type(isinstance(config, MLATransformerConfig))
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    facts: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        value = getattr(config, field.name)
        default = defaults.get(field.name, dataclasses.MISSING)
        if field.name.startswith("recompute_") or value == default:
            continue
        if isinstance(value, torch.dtype):
            facts[field.name] = str(value)
        elif named := [name for name, function in _ACTIVATIONS.items() if function is value]:
            facts[field.name] = named[0]
        elif _is_plain(value):
            facts[field.name] = list(value) if isinstance(value, tuple) else value
    return facts


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def config_type(latent: bool) -> Any:
    """The class of a config, with multi-latent attention or without."""
    return MLATransformerConfig if latent else TransformerConfig


def config_of(facts: dict[str, Any], source: str) -> TransformerConfig:
    """The config with these fields, as `of_config` or a job describes them.

    Raises OptionError, which begins with `source`, for fields that the installed version does not
    have, and if Megatron refuses the config.
    """
    kind = config_type(bool(facts.get("multi_latent_attention")))
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := sorted(set(facts) - set(known)):
        raise OptionError(
            f"{source}: config names {', '.join(unknown)}, which {kind.__name__} of megatron-core "
            f"{versions.installed()} does not have. The nearest to {unknown[0]} is "
            f"{nearest(unknown[0], known)}. Correct the names, leave them out, or take the version "
            "that has them."
        )
    values = dict(facts)
    for name, value in facts.items():
        if isinstance(value, str) and value.startswith("torch."):
            values[name] = getattr(torch, value.removeprefix("torch."))
    for name, named in (("activation_func", _ACTIVATIONS), ("attention_backend", AttnBackend)):
        if isinstance(values.get(name), str):
            values[name] = named[values[name]]
    try:
        config: TransformerConfig = kind(**values)
    except (AssertionError, ValueError, TypeError) as error:
        raise OptionError(f"{source}: Megatron refuses this config: {error}") from error
    return config
