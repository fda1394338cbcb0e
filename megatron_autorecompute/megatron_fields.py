"""Converts choices, strategies and policies to Megatron's own fields for recompute and offload, and
back.

A policy that they can express runs without this package. `compat.rules.check_allowed` checks
whether a model allows a choice; this module does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.policy import (
    OWN_MODULES,
    WHOLE_LAYER,
    LayerPolicy,
    MegatronStrategy,
    RecomputePolicy,
)
from megatron_autorecompute.profile import Profile

POLICY_FIELD = "recompute_policy"
"""The field that this package adds to TransformerConfig."""
NO_RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
}
"""All of Megatron's own recompute fields, with the values for no recompute."""
NO_OFFLOAD: dict[str, Any] = {
    "fine_grained_activation_offloading": False,
    "offload_modules": [],
    "cpu_offloading": False,
    "cpu_offloading_num_layers": 0,
}
"""Megatron's own fields that say which activations are offloaded, with the values for none."""
RUNS_FOREVER = "Megatron's own recompute of mlp never ends where linear layers have biases"


def of_strategy(strategy: MegatronStrategy) -> dict[str, Any]:
    """The fields that a strategy changes."""
    layers, fields = strategy.recompute_num_layers, dict[str, Any]()
    if strategy.method in ("block", "uniform"):
        method = {"recompute_method": strategy.method, "recompute_num_layers": layers}
        return {"recompute_granularity": "full", **method}
    if strategy.method == "cpu_offloading" and layers:
        return {"cpu_offloading": True, "cpu_offloading_num_layers": layers}
    if strategy.modules:
        fields |= {"recompute_granularity": "selective", "recompute_modules": [*strategy.modules]}
    if strategy.offload:
        fields |= {
            "fine_grained_activation_offloading": True,
            "offload_modules": list(strategy.offload),
        }
    return fields


def of_choice(choice: LayerPolicy) -> dict[str, Any]:
    """All fields, for a model whose layers all have this choice. Fields of offload are among them
    only if the choice offloads. `cpu_offloading` cannot move all layers; the fields move one."""
    modules = tuple(module for module in choice.modules if module not in OWN_MODULES)
    strategy = MegatronStrategy("selective", modules, offload=choice.offload)
    if choice.offload == (WHOLE_LAYER,):
        strategy = MegatronStrategy("cpu_offloading", (), 1)
    if choice.granularity == "full":
        strategy = MegatronStrategy("uniform", (), choice.group)
    if choice.granularity == "inner":
        strategy = MegatronStrategy("block", (), choice.inner)
    return {**NO_RECOMPUTE, **of_strategy(strategy), "recompute_modules": list(modules)}


def strategy_of(config: Any) -> MegatronStrategy | None:
    """The strategy in a config's recompute fields; None for no recompute."""
    if config.recompute_granularity == "selective":
        return MegatronStrategy("selective", tuple(config.recompute_modules or ["core_attn"]))
    if config.recompute_granularity == "full":
        return MegatronStrategy(config.recompute_method, (), config.recompute_num_layers)
    return None


def offload_of(config: Any) -> MegatronStrategy | None:
    """The strategy in a config's offload fields; None if nothing is offloaded."""
    if getattr(config, "cpu_offloading", False):
        return MegatronStrategy("cpu_offloading", (), config.cpu_offloading_num_layers)
    # A policy in force sets the first alone.
    if getattr(config, "fine_grained_activation_offloading", False) and config.offload_modules:
        return MegatronStrategy("none", offload=tuple(sorted(config.offload_modules)))
    return None


def of_policy(
    policy: RecomputePolicy,
    chunks: Sequence[Sequence[int]],
    *,
    linear_bias: bool,
    depth_layers: int = 0,
) -> dict[str, Any] | None:
    """All fields, or None if they cannot express the policy or Megatron cannot run it. `chunks` are
    the decoder layers of every pipeline chunk, in which `uniform` and `block` count; `linear_bias`
    is Megatron's add_bias_linear; `depth_layers` as `RecomputePolicy.parse` takes it."""
    strategy = _strategy_like(policy, chunks, depth_layers)
    if strategy is None or runs_forever(policy.layers[0], linear_bias):
        return None
    return {**NO_RECOMPUTE, **of_strategy(strategy)}


def _strategy_like(
    policy: RecomputePolicy, chunks: Sequence[Sequence[int]], depth_layers: int
) -> MegatronStrategy | None:
    """Megatron's strategy with the same choice for every layer as the policy, or None."""
    first = policy.layers[0]
    leading = max((_leading(policy, chunk, first) for chunk in chunks), default=0)
    moved = tuple(module for module in first.offload if module != WHOLE_LAYER)
    alike: Literal["none", "selective"] = "selective" if first.modules else "none"
    candidates = (
        MegatronStrategy(alike, first.modules, offload=moved),
        MegatronStrategy("cpu_offloading", (), leading),
        MegatronStrategy("uniform", (), first.group),
        MegatronStrategy("block", (), leading),
    )
    return next((s for s in candidates if _says(s, policy, chunks, depth_layers)), None)


def runs_forever(choice: LayerPolicy, linear_bias: bool) -> bool:
    """Whether a choice's backward never ends in Megatron's own code; it does end in ours."""
    return "mlp" in choice.modules and linear_bias


def has_linear_bias(profile: Profile) -> bool:
    """Megatron's add_bias_linear of the profile's model; False if the profile does not say."""
    config = profile.model.facts.get("transformer_config")
    # Facts are the fields that differ from their defaults, and the default is True.
    return isinstance(config, dict) and bool(config.get("add_bias_linear", True))


def _says(
    strategy: MegatronStrategy,
    policy: RecomputePolicy,
    chunks: Sequence[Sequence[int]],
    depth_layers: int,
) -> bool:
    number = strategy.recompute_num_layers
    # `uniform` of 0.16 reads beyond the end of a chunk that is no multiple of N.
    if strategy.method == "uniform" and any(len(chunk) % number for chunk in chunks):
        return False
    try:
        return strategy.policy(len(policy.layers), chunks, depth_layers) == policy
    except PolicyError:  # modules of ours, or uniform/N with multi-token prediction
        return False


def _leading(policy: RecomputePolicy, chunk: Sequence[int], choice: LayerPolicy) -> int:
    others = (at for at, index in enumerate(chunk) if policy.layers[index] != choice)
    return next(others, len(chunk))


def names_of(value: Any) -> list[str]:
    """The names in a list of parts of layers: as text with commas, as names, or as the members of
    an enumeration that Megatron's configs make of them."""
    if isinstance(value, str):
        return value.replace(",", " ").strip("[] ").split()
    return [str(getattr(each, "name", each)) for each in value or ()]
