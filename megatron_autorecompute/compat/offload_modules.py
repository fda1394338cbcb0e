"""Megatron's fine-grained activation offloading for a single layer: its rules and its switches."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute import megatron_fields
from megatron_autorecompute.errors import ApplyError, PolicyError
from megatron_autorecompute.policy import WHOLE_LAYER, LayerPolicy, RecomputePolicy

OF_EXPERTS = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})
"""Modules whose groups lie inside what `moe` recomputes."""


def check_rules(config: TransformerConfig, choice: LayerPolicy) -> None:
    """Raise PolicyError for offload that Megatron accepts but runs wrongly or without effect."""
    if not choice.offload:
        return
    own = megatron_fields.offload_of(config)
    graphs = getattr(config, "cuda_graph_impl", None) or "none"
    rules = [
        (
            own is not None and choice.offload != (WHOLE_LAYER,),
            f"its config offloads on its own; leave that out, as a policy it is {str(own)!r}",
        ),
        (
            "core_attn" in choice.modules
            and "core_attn" in choice.offload
            and "attn_proj" not in choice.offload,
            "recompute of core_attn bypasses core_attn's offload, so that nothing would leave",
        ),
        (
            "moe" in choice.modules and bool(OF_EXPERTS & {*choice.offload}),
            "moe recompute wraps the experts in a checkpoint, which makes their activations again",
        ),
        (
            graphs not in ("none", "full_iteration") and choice.offload != (WHOLE_LAYER,),
            f"with cuda_graph_impl={graphs} copies are captured as the layers were built",
        ),
    ]
    for broken, reason in rules:
        if broken:
            raise PolicyError(f"{choice} cannot be used with this model: {reason}.")


def check_can_run(policy: RecomputePolicy) -> None:
    """Raise ApplyError if this package cannot put the policy's offload in force."""
    if any(WHOLE_LAYER in choice.offload for choice in policy.layers):
        raise ApplyError(
            "Megatron decides on cpu_offloading when it builds a model: set cpu_offloading and "
            "cpu_offloading_num_layers there, and leave the recompute policy out."
        )
    if any(choice.offload for choice in policy.layers):
        raise ApplyError("This version plans offload, and does not run it yet.")
