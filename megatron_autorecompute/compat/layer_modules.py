"""Megatron's `recompute_modules` for a single layer: the attributes that turn them on."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.transformer.attention import Attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute.compat import model_layers, versions
from megatron_autorecompute.compat.untyped import Layer
from megatron_autorecompute.errors import UnsupportedVersionError

MODULE_FLAGS: dict[str, tuple[str, ...]] = {
    "core_attn": (
        "self_attention.checkpoint_core_attention",
        "cross_attention.checkpoint_core_attention",
    ),
    "layernorm": ("recompute_input_layernorm", "recompute_pre_mlp_layernorm"),
    "mlp": ("recompute_mlp",),
    "moe": ("mlp.moe_layer_recompute",),
    "shared_experts": ("mlp.shared_experts_recompute",),
    "moe_act": ("mlp.experts.activation_recompute",),
    "mla_up_proj": ("self_attention.recompute_up_proj",),
    "gdn_norm_out": ("self_attention.recompute_norm_out",),
}
"""Attributes of a layer by Megatron's `recompute_modules`. Megatron sets them once, from the config
that all layers share; every forward reads them again."""


def flags(layer: Layer, module: str) -> list[tuple[Any, str]]:
    """The (object, attribute) pairs that turn `module` on in this layer, of a depth with a stack of
    its own in all the stack's layers; empty if it is inert."""
    nested = model_layers.nested_layers(layer)
    found = (_flag(one, path) for one in nested for path in MODULE_FLAGS.get(module, ()))
    return [flag for flag in found if flag is not None]


def _flag(layer: Layer, path: str) -> tuple[Any, str] | None:
    *owners, attribute = path.split(".")
    owner: Any = layer
    for name in owners:
        owner = getattr(owner, name, None)
    if not hasattr(owner, attribute) or _is_inert(owner, attribute):
        return None
    return owner, attribute


def _is_inert(owner: Any, attribute: str) -> bool:
    """Whether Megatron's constructor leaves the flag False although the module was asked for."""
    if attribute == "recompute_input_layernorm":
        return isinstance(owner.input_layernorm, IdentityOp)
    if attribute == "recompute_pre_mlp_layernorm":
        return isinstance(owner.pre_mlp_layernorm, IdentityOp)
    if attribute == "recompute_mlp":
        return isinstance(owner.mlp, MoELayer | IdentityOp)
    if attribute == "shared_experts_recompute":
        return owner.shared_experts is None
    return False


def set_modules(layer: Layer, modules: Sequence[str]) -> None:
    """Make this layer recompute exactly `modules`, as if Megatron had built it with them."""
    for name in MODULE_FLAGS:
        for owner, attribute in flags(layer, name):
            setattr(owner, attribute, name in modules)
    if layer.config.fp8 or layer.config.fp4 or hasattr(layer.config, _QUANTISES):
        for one in model_layers.nested_layers(layer):
            _set_saved_inputs(one, modules)


_QUANTISES = "linear_layers_quantise_without_fp8"


def note_quantised(config: Any, model: Any) -> None:
    """Let a model whose linear layers quantise, though its config has no fp8, save inputs as
    Megatron's constructors do under fp8 with other scales than delayed ones, and under fp4."""
    setattr(config, _QUANTISES, True)
    for module in model.modules():
        if isinstance(module, Attention):
            module.linear_proj.save_original_input = True
        elif isinstance(module, SharedExpertMLP):
            module.linear_fc1.save_original_input = True


def _set_saved_inputs(layer: Layer, modules: Sequence[str]) -> None:
    """Repeat what Megatron's constructors also do under fp8 and fp4: TE modules whose input is
    recomputed must save it unquantised (TransformerLayer.__init__, TEGroupedMLP.__init__)."""
    from megatron.core.extensions.transformer_engine import set_save_original_input

    if "layernorm" in modules and flags(layer, "layernorm"):  # a MambaLayer has none
        if not isinstance(layer.input_layernorm, IdentityOp):
            layer.self_attention.set_for_recompute_input_layernorm()
        if not isinstance(layer.pre_mlp_layernorm, IdentityOp):
            if isinstance(layer.mlp, MoELayer):
                layer.mlp.set_for_recompute_pre_mlp_layernorm()
            else:
                set_save_original_input(layer.mlp.linear_fc1)
    if "moe_act" in modules and flags(layer, "moe_act"):
        set_save_original_input(layer.mlp.experts.linear_fc2)


def settings(layer: Layer) -> Iterator[tuple[Any, str]]:
    """Every (object, attribute) of a layer that `set_modules` may change, for undoing it."""
    for name in MODULE_FLAGS:
        yield from flags(layer, name)
    for module in layer.modules():
        if hasattr(module, "save_original_input"):
            yield module, "save_original_input"


def allowed_modules() -> tuple[str, ...]:
    """The installed Megatron's `recompute_modules`, from its validator's own message.

    Raises UnsupportedVersionError if the validator no longer lists them.
    """
    return _listed("recompute_modules", recompute_granularity="selective")


def allowed_offload_modules() -> tuple[str, ...]:
    """The installed Megatron's `offload_modules`, likewise."""
    return _listed("offload_modules", fine_grained_activation_offloading=True)


@functools.cache
def _listed(field: str, **fields: Any) -> tuple[str, ...]:
    """The values that the validator of a field allows, from its message about another one."""
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    try:
        TransformerConfig(**sizes, **fields, **{field: ["?"]})
    except (AssertionError, ValueError) as error:
        found = re.findall(r"'(\w+)'", str(error).split("Allowed", 1)[-1])
        if found:
            return tuple(sorted(found))
    raise UnsupportedVersionError(
        f"megatron-core {versions.installed()} does not say which {field} it allows; "
        f"tested are {', '.join(versions.TESTED)}."
    )
