"""Builds HybridModels from Megatron's own layer spec; on meta tensors with stand-ins in it."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron_autorecompute.compat import layer_specs, model_layers
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta import kernels, mixers
from megatron_autorecompute.meta.meta_step import StepShape
from megatron_autorecompute.patched import patched

_TE_NAMES: dict[str, Any] = {
    "TEColumnParallelLinear": kernels.ColumnLinear,
    "TEDotProductAttention": kernels.Attention,
    "TELayerNormColumnParallelLinear": kernels.NormColumnLinear,
    "TELinear": kernels.Linear,
    "TENorm": kernels.Norm,
    "TERowParallelLinear": kernels.RowLinear,
}


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
    return layer_specs.with_modules(_TE_NAMES, kernels.StandIns)


def _hadamard(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """fast_hadamard_transform's `HadamardTransformFn`, which saves nothing as a rotation does."""
    return kernels.rotate(x)


def _on_meta(permutation: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    """Megatron's places of packed tokens, from ends of samples that are on CPU."""
    return tuple(places.to("meta") for places in permutation(*args))


def _replacements() -> Iterator[tuple[str, dict[str, Any]]]:
    yield (
        "models.hybrid.hybrid_block",
        {
            "TENorm": kernels.Norm,
            "TELayerNormColumnParallelLinear": kernels.NormColumnLinear,
        },
    )
    yield (
        "ssm.mamba_mixer",
        {
            "HAVE_MAMBA_SSM": True,
            "HAVE_EINOPS": True,
            "MAMBA_HAS_STATE_DTYPE": False,
            "_check_mamba_sequence_packing_support": lambda **_: (True, None),
            "RMSNormGated": mixers.GroupNorm,
            "ExtendedRMSNorm": mixers.GroupNorm,
            "mamba_split_conv1d_scan_combined": mixers.split_conv1d_scan,
            "rearrange": mixers.rearrange,
        },
    )
    yield (
        "ssm.mamba_context_parallel",
        {
            "HAVE_EINOPS": True,
            "repeat": mixers.repeat,
            "is_te_min_version": lambda *_: True,
            "tex": mixers.PackedIndices,
        },
    )
    yield (
        "ssm.gated_delta_net.common",
        {
            "HAVE_FLA": True,
            "l2norm": mixers.l2norm,
            "chunk_gated_delta_rule": mixers.chunk_gated_delta_rule,
        },
    )
    yield (
        "ssm.gated_delta_net.gdn",
        {
            "causal_conv1d": mixers.causal_conv1d,
            "chunk_gated_delta_rule": mixers.chunk_gated_delta_rule,
        },
    )
    for module, name, function in layer_specs.places_of_packed_tokens():
        yield module, {name: functools.partial(_on_meta, function)}
    yield (
        "transformer.experimental_attention_variant.absorbed_mla",
        {name: _TE_NAMES[name] for name in ("TELinear", "TEColumnParallelLinear")},
    )
    yield "transformer.experimental_attention_variant.dsa", {"hadamard_transform": _hadamard}
    yield "transformer.moe.moe_layer", {"HAVE_TE": True, "TELinear": kernels.Linear}


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """In this block a HybridModel's kernels, and latent MoE's linear layers, are stand-ins."""
    with contextlib.ExitStack() as undo:
        for name, names in _replacements() if model_layers.pattern_types() else ():
            owner = importlib.import_module("megatron.core." + name)
            for attribute, stand_in in names.items():
                undo.enter_context(patched(owner, attribute, stand_in))
        yield
