"""Translates a GPTModel's plan for the HybridModel of the same layers.

A layer of a GPTModel is attention and MLP (or experts); in a pattern these are two layers, such as
`*-` or `*E`. The same work is recomputed after the translation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.planner.cost.hybrid_pattern import HybridPattern, pattern_of_job
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.policy import (
    NONE,
    WHOLE_LAYER,
    LayerPolicy,
    RecomputePolicy,
)

OF_ATTENTION = frozenset({"core_attn", "mla_up_proj", "gdn_norm_out"})
"""Modules of the attention layer. All others, but norms, belong to the second one."""
NORMS = frozenset({"layernorm", "ln_out"})
"""Modules of both layers. An MLP that runs again runs its fused norm again."""
OFFLOADED_OF_ATTENTION = frozenset({"attn_norm", "qkv_linear", "core_attn", "attn_proj"})
"""Offloaded modules of the attention layer. All others belong to the second one."""


def for_hybrid(policy: RecomputePolicy, num_layers: int) -> RecomputePolicy:
    """The policy with two choices for each of the first `num_layers` layers.

    Depths of multi-token prediction, which come after them, stay one choice each: a depth of a
    HybridModel is a stack of its own with one index.
    """
    return RecomputePolicy(
        (
            *(half for choice in policy.layers[:num_layers] for half in _halves(choice)),
            *policy.layers[num_layers:],
        )
    )


def _halves(choice: LayerPolicy) -> Iterator[LayerPolicy]:
    if choice.granularity == "full":
        yield from [replace(choice, group=2 * choice.group)] * 2
        return
    modules, offload = set(choice.modules), set(choice.offload)
    norms = modules & NORMS
    both = offload & {WHOLE_LAYER}
    own_norms = norms - {"ln_out"} if "mlp" in modules else norms
    for part, moved in (
        (modules & OF_ATTENTION | norms, offload & OFFLOADED_OF_ATTENTION),
        (modules - OF_ATTENTION - NORMS | own_norms, offload - OFFLOADED_OF_ATTENTION),
    ):
        chosen = tuple(part)
        own = LayerPolicy("selective", chosen, rerun_all=choice.rerun_all) if chosen else NONE
        keep = choice.keep if "moe" in chosen else ()
        yield replace(own, keep=keep, offload=tuple(moved | both))


def pattern_of_plan(plan: Plan) -> HybridPattern:
    """The pattern of the HybridModel with the plan's layers and stages.

    Raises OptionError for a plan of a hybrid model, or of layers that no pattern has.
    """
    profile, layout = plan.profile, plan.layout
    config = profile.model.facts.get("transformer_config") or {}
    if pattern_of_job(profile.model.facts) is not None:
        raise OptionError(f"{profile.model.name} is already a hybrid model: use its own policy.")
    attention = "+" if config.get("multi_latent_attention") else "*"
    symbols = []
    for layer in range(profile.num_layers):
        name = profile.kind_of(layer).name.split("-")[0]
        if name not in ("dense", "moe", "mtp"):
            raise OptionError(f"Layer {layer} is of kind {name}, which no hybrid pattern has.")
        symbols.append(attention + ("E" if name == "moe" else "-"))
    layers = layout.num_layers
    chunks = ([i for i in chunk if i < layers] for chunk in layout.chunk_layers())
    segments = tuple("".join(symbols[i] for i in chunk) for chunk in chunks)
    depth = symbols[layers - 1] if layout.mtp_num_layers else ""  # like the last layer
    return HybridPattern(segments, depth, layout.mtp_num_layers)
