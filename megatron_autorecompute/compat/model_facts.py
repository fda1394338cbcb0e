"""What a model is built from, as facts that a profile carries, and the config built from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_autorecompute.compat import model_layers, versions
from megatron_autorecompute.compat.untyped import Chunk
from megatron_autorecompute.errors import ProfileError

NAMES = (
    "transformer_config",
    "transformer_impl",
    "vocab_size",
    "position_embedding_type",
    "share_embeddings_and_output_weights",
)
"""What `of_model` returns and `verify` needs to build a model again."""

_FUNCTIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "squared_relu": squared_relu,
}


def of_model(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """What a GPTModel is built from, JSON-able, for `Model.facts` of a profile; see NAMES.

    The same from every rank but one without layers, which lacks transformer_impl. Empty for other
    models: how to build them is not known here.
    """
    # Not above: it is built of modules that import `compat` where Megatron's sources are patched.
    from megatron.core.models.gpt import GPTModel

    model = model_layers.unwrapped(chunks[0])
    if not isinstance(model, GPTModel):
        return {}
    facts = {
        "transformer_config": of_config(model.config),
        "vocab_size": model.vocab_size,
        "position_embedding_type": model.position_embedding_type,
        "share_embeddings_and_output_weights": model.share_embeddings_and_output_weights,
    }
    for layer, _ in model_layers.numbered_layers(chunks)[:1]:
        attention = type(getattr(layer.self_attention, "core_attention", None)).__module__
        fused = attention.startswith("megatron.core.extensions")
        facts["transformer_impl"] = "transformer_engine" if fused else "local"
    return facts


def of_config(config: TransformerConfig) -> dict[str, Any]:
    """The fields of a config that differ from TransformerConfig's defaults, JSON-able.

    Numbers, texts, lists of these, dtypes and the usual activation functions; initialisers and a
    running job's callbacks have no part in what a step holds, nor have fields that other packages
    add, and recompute fields are the plan's.
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

    Raises ProfileError for fields the installed version does not have, and for what Megatron
    refuses.
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
