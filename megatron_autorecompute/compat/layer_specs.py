"""Layer specs of hybrid models, with other modules, and of GPTModels with an
`experimental_attention_variant`: Gated DeltaNet in some layers, or sparse attention (DSA).
"""

from __future__ import annotations

import contextlib
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
        spec = with_modules(modules)
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
