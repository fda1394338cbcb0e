"""Layer specs of hybrid models, with other modules, and of GPTModels with an
`experimental_attention_variant`: Gated DeltaNet in some layers, or sparse attention (DSA).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_autorecompute.patched import patched


def with_modules(modules: Mapping[str, Any]) -> Any:
    """`hybrid_stack_spec` of `hybrid_layer_specs.py`, whose code runs here once more.

    It names Transformer Engine's modules at import, and without Transformer Engine gets mocks.

    Args:
        modules: by Transformer Engine's name in `megatron.core.extensions.transformer_engine`.
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
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add as bda
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm as Norm
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    def part(module: Any, submodules: Any, **params: Any) -> Any:
        return ModuleSpec(module=module, submodules=submodules, params=params)

    def layer(module: Any = TransformerLayer, **submodules: Any) -> Any:
        return part(module, TransformerLayerSubmodules(**submodules))

    normed = functools.partial(layer, input_layernorm=Norm, self_attn_bda=bda)
    mamba = functools.partial(MambaLayerSubmodules, norm=Norm, mamba_bda=bda)

    column, row = ColumnParallelLinear, RowParallelLinear
    attention = part(
        SelfAttention,
        SelfAttentionSubmodules(
            linear_qkv=column, core_attention=DotProductAttention, linear_proj=row
        ),
        attn_mask_type=AttnMaskType.causal,
    )
    gdn = part(GatedDeltaNet, GatedDeltaNetSubmodules(in_proj=column, out_norm=Norm, out_proj=row))
    mixer = part(MambaMixer, MambaMixerSubmodules(in_proj=column, out_proj=row))
    mlp = functools.partial(
        MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)
    )
    moe = get_moe_module_spec_for_backend(
        backend=LocalSpecProvider(), num_experts=8, moe_grouped_gemm=False
    )
    return part(
        HybridStack,
        HybridStackSubmodules(
            mamba_layer=part(MambaLayer, mamba(mixer=mixer)),
            attention_layer=normed(self_attention=attention),
            gdn_layer=normed(self_attention=gdn),
            mlp_layer=layer(MLPLayer, pre_mlp_layernorm=Norm, mlp=mlp, mlp_bda=bda),
            moe_layer=layer(MoETransformerLayer, pre_mlp_layernorm=Norm, mlp=moe, mlp_bda=bda),
            mtp_block_spec=_depth_spec(column, Norm),
        ),
    )


def _depth_spec(column: type, norm: type) -> Any:
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec

    depth = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, eh_proj=column, mtp_model_layer=None, layer_norm=norm
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[depth]),
    )


def torch_norm() -> contextlib.AbstractContextManager[None]:
    """Makes HybridStack end with torch's norm as long as the block runs: the real one takes
    Transformer Engine's norm under any spec."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return patched(hybrid_block, "TENorm", WrappedTorchNorm)


def places_of_packed_tokens() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """The function by which Gated DeltaNet finds a rank's packed tokens: the module below
    megatron.core that calls it, its name, and itself.

    Upstream: 0.19's gdn.py imports it from common.py; main's common.py calls it.
    """
    name = "_build_thd_cp_a2a_perm"
    for module in ("ssm.gated_delta_net.gdn", "ssm.gated_delta_net.common"):
        function = getattr(importlib.import_module("megatron.core." + module), name, None)
        if function is not None:
            yield module, name, function


def _specs() -> Any:
    from megatron.core.models.gpt import experimental_attention_variant_module_specs

    return experimental_attention_variant_module_specs


def block_spec(config: Any, vp_stage: int | None) -> Any:
    """The specs of one chunk, as Megatron-LM's gpt_builders.py makes them."""
    return _specs().get_transformer_block_with_experimental_attention_variant_spec(
        config, vp_stage=vp_stage
    )


def layer_specs(config: Any) -> Any:
    """The spec of every layer of the model."""
    return _specs().get_transformer_layer_with_experimental_attention_variant_spec(config)
