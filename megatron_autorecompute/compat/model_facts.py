"""Describes how a model is built, as facts in a profile, builds a config from the facts, and makes
layer specs of hybrid models."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
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
from megatron_autorecompute.patched import patched

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
    """How a GPTModel or a HybridModel is built, as JSON values for `Model.facts` of a profile
    (NAMES, and a HybridModel's hybrid_layer_pattern). All ranks return the same, but a rank without
    layers lacks transformer_impl. Empty for other models, which `verify` cannot build."""
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
    """The fields of a config that differ from TransformerConfig's defaults, as JSON values:
    numbers, texts, lists of these, dtypes and the usual activation functions, without recompute
    fields."""
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


def hybrid_spec(modules: Mapping[str, Any]) -> Any:
    """`hybrid_stack_spec` of `hybrid_layer_specs.py`, whose code runs here once more: it names
    Transformer Engine's modules at import, and without Transformer Engine gets mocks.

    modules: by their names in `megatron.core.extensions.transformer_engine`.
    """
    engine = importlib.import_module("megatron.core.extensions.transformer_engine")
    found: Any = importlib.util.find_spec("megatron.core.models.hybrid.hybrid_layer_specs")
    module = importlib.util.module_from_spec(found)
    with contextlib.ExitStack() as undo:
        for name, stand_in in modules.items():
            undo.enter_context(patched(engine, name, stand_in))
        found.loader.exec_module(module)
    return module.hybrid_stack_spec


def local_spec() -> Any:
    """The layers of `hybrid_stack_spec`, but MLA and DSA, of Megatron's local modules, as
    `get_gpt_layer_local_spec` has them: every norm is a module of its own. Build with `torch_norm`
    where Transformer Engine is missing."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm as Norm

    modules = {
        "TELinear": ColumnParallelLinear,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TELayerNormColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
        "TEDotProductAttention": DotProductAttention,
        "TENorm": Norm,
    }
    moe = moe_module_specs.get_moe_module_spec_for_backend(
        backend=LocalSpecProvider(), num_experts=8, moe_grouped_gemm=False
    )
    with patched(moe_module_specs, "get_moe_module_spec", lambda **_: moe):
        spec = hybrid_spec(modules)
    layers = spec.submodules
    layers.mamba_layer.submodules.norm = Norm
    for layer in (layers.attention_layer, layers.gdn_layer):
        layer.submodules.input_layernorm = Norm
    layers.mlp_layer.submodules.pre_mlp_layernorm = Norm
    return spec


def torch_norm() -> contextlib.AbstractContextManager[None]:
    """Makes HybridStack end with torch's norm as long as the block runs: the real one takes
    Transformer Engine's norm under any spec."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return patched(hybrid_block, "TENorm", WrappedTorchNorm)
