"""A policy in Megatron's own recompute settings, where they can say it.

What they can say runs without this package. Whether a choice is allowed for a model is not asked
here but in `compat.rules.check_allowed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.policy import FULL, LayerPolicy, MegatronStrategy, RecomputePolicy
from megatron_autorecompute.profile import Profile

FIELD = "recompute_policy"
NO_RECOMPUTE_FIELDS: dict[str, Any] = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
}
"""Megatron's own recompute fields, with the values that ask for nothing."""
RUNS_FOREVER = "Megatron's own recompute of mlp never ends where linear layers have biases"


def megatron_fields(
    policy: RecomputePolicy, chunks: Sequence[Sequence[int]], *, linear_bias: bool
) -> dict[str, Any] | None:
    """The same in Megatron's own fields, or None where they cannot say it or run it.

    Args:
        policy: one choice for every layer.
        chunks: decoder layers of every pipeline chunk, which `uniform` and `block` count in.
        linear_bias: Megatron's add_bias_linear.
    """
    first = policy.layers[0]
    if first.granularity == "selective":
        return _selective(policy, linear_bias)
    if policy.format() == f"none*{len(policy.layers)}":
        return dict(NO_RECOMPUTE_FIELDS)
    leading = max((_leading_full(policy, chunk) for chunk in chunks), default=0)
    methods: tuple[tuple[Literal["block", "uniform"], int], ...]
    methods = ("uniform", first.group), ("block", leading)
    for method, number in methods:
        if _is_strategy(policy, chunks, method, number):
            return {
                "recompute_granularity": "full",
                "recompute_method": method,
                "recompute_num_layers": number,
                "recompute_modules": None,
            }
    return None


def _selective(policy: RecomputePolicy, linear_bias: bool) -> dict[str, Any] | None:
    first = policy.layers[0]
    if len(set(policy.layers)) > 1 or runs_forever(first, linear_bias):
        return None
    modules = list(first.modules)
    return {
        **NO_RECOMPUTE_FIELDS,
        "recompute_granularity": "selective",
        "recompute_modules": modules,
    }


def runs_forever(choice: LayerPolicy, linear_bias: bool) -> bool:
    """Whether Megatron's own code never returns from a choice's backward, where ours does."""
    return "mlp" in choice.modules and linear_bias


def has_linear_bias(profile: Profile) -> bool:
    """Megatron's add_bias_linear of the profile's model, where the profile says what that is."""
    config = profile.model.facts.get("transformer_config")
    # Facts are the fields that differ from their defaults, and the default is True.
    return isinstance(config, dict) and bool(config.get("add_bias_linear", True))


def _is_strategy(
    policy: RecomputePolicy,
    chunks: Sequence[Sequence[int]],
    method: Literal["block", "uniform"],
    number: int,
) -> bool:
    # `uniform` of 0.16 reads beyond the end of a chunk that is no multiple of N.
    if number < 1 or (method == "uniform" and any(len(chunk) % number for chunk in chunks)):
        return False
    try:
        strategy = MegatronStrategy(method, (), number).policy(len(policy.layers), chunks)
    except PolicyError:  # uniform/N with multi-token prediction
        return False
    return strategy == policy


def _leading_full(policy: RecomputePolicy, chunk: Sequence[int]) -> int:
    others = (at for at, index in enumerate(chunk) if policy.layers[index] != FULL)
    return next(others, len(chunk))
