"""Which layers are of one kind: a signature, and a name for the kind."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_autorecompute.compat.untyped import Layer


def signature(layer: Layer) -> str:
    """Text that is equal for layers of equal structure, shapes, attention window and trained
    parameters."""
    parts = [
        f"{name}:{type(module).__name__}:{getattr(module, 'window_size', '')}:"
        + ",".join(
            f"{p.dtype}{tuple(p.shape)}{'' if p.requires_grad else ' frozen'}"
            for p in module.parameters(recurse=False)
        )
        for name, module in layer.named_modules()
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def attends_to_context(layer: Layer) -> bool:
    """Whether the layer has cross-attention, to an encoder's output (T5's decoder)."""
    return not isinstance(getattr(layer, "cross_attention", None), IdentityOp | None)


def has_experts(layer: Layer) -> bool:
    """Whether the bytes that the layer holds depend on how tokens are routed."""
    return any(experts(layer))


def experts(layer: Layer) -> Iterator[torch.nn.Module]:
    """The modules that run a rank's experts; their first argument has a row for each token routed
    here, and for each of its experts here."""
    for module in layer.modules():
        if isinstance(module, MoELayer):
            yield module.experts


_FAMILY_OF_CLASS = {
    "MambaLayer": "mamba",
    "GatedDeltaNet": "gdn",
    "MLASelfAttention": "mla",
    "FusedMLASelfAttention": "mla",
    "AbsorbedMLASelfAttention": "dsa",
}
"""Families of a HybridModel's layers, by the class of the layer or of its attention."""


def name(layer: Layer) -> str:
    """A label: moe, decoder (after an encoder), dense; a HybridModel's layer its family
    (attention, mlp, mamba, gdn, mla, dsa); or else the name of the class."""
    if isinstance(getattr(layer, "mlp", None), MoELayer):
        return "moe"
    if attends_to_context(layer):
        return "decoder"
    if not isinstance(layer, TransformerLayer):
        return _FAMILY_OF_CLASS.get(type(layer).__name__, type(layer).__name__)
    attends, has_mlp = (
        not isinstance(part, IdentityOp) for part in (layer.self_attention, layer.mlp)
    )
    if attends and not has_mlp:
        return _FAMILY_OF_CLASS.get(type(layer.self_attention).__name__, "attention")
    return "mlp" if has_mlp and not attends else "dense"
