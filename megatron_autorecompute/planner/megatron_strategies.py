"""A policy in Megatron's own recompute settings where they can say it, and what to paste.

What is said in them needs no plugin to load. It knows neither torch nor Megatron: whether a choice
is allowed for a model is asked elsewhere (`compat.rules.check_allowed`).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.policy import FULL, LayerPolicy, MegatronStrategy, RecomputePolicy
from megatron_autorecompute.profile import Profile

if TYPE_CHECKING:  # else Bridge's integration would load the solver
    from megatron_autorecompute.planner.plan import Plan

FIELD = "recompute_policy"
NATIVE: dict[str, Any] = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
}
"""Megatron's own recompute fields, with the values that ask for nothing."""
RUNS_FOREVER = "Megatron's own recompute of mlp never ends where linear layers have biases"
JOB = {"config", "described_by", "lora_rank"}
"""What is read of the job that a profile without a device was made for."""


def native_fields(
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
        return dict(NATIVE)
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
    return {**NATIVE, "recompute_granularity": "selective", "recompute_modules": modules}


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


def recipe_lines(policy: RecomputePolicy, native: Mapping[str, Any] | None) -> list[str]:
    """Lines that set a policy in a Megatron Bridge recipe, in Megatron's own fields if given."""
    fields = native if native is not None else {**NATIVE, FIELD: policy.format()}
    return [f"cfg.model.{name} = {value!r}" for name, value in fields.items()]


def flags(policy: RecomputePolicy, native: Mapping[str, Any] | None) -> str:
    """Flags of pretrain_gpt.py that set a policy; "" where no recompute is no flag."""
    if native is None:
        return f"--recompute-policy {shlex.quote(policy.format())}"
    words = []
    for name, value in native.items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            words += ["--" + name.replace("_", "-"), *map(str, values)]
    return " ".join(words)


def launch_lines(plan: Plan) -> list[str]:
    """What to paste where the job of a profile without a device came from; none for others."""
    job = plan.profile.model.facts.get("job")
    if job is None:
        return []
    if not (isinstance(job, dict) and job.keys() >= JOB and isinstance(job["config"], dict)):
        raise ProfileError(
            f"model.facts.job of the plan's profile is no job description: {job!r:.80}. Profile "
            "the job again, or take the field out; then nothing is printed to be pasted."
        )
    native = None
    if not job["lora_rank"]:  # behind frozen layers Megatron's own can leave gradients out
        layers = plan.layout.num_layers
        chunks = [[i for i in chunk if i < layers] for chunk in plan.layout.chunk_layers()]
        bias = bool(job["config"].get("add_bias_linear", True))
        native = native_fields(plan.policy, chunks, linear_bias=bias)
    if job["described_by"] == "recipe":
        return ["Put into the recipe:", *recipe_lines(plan.policy, native)]
    words = [flags(plan.policy, native)]
    words += [f"{name} {shlex.quote(value)}" for name, value in plan.megatron_flags.items()]
    line = " ".join(filter(None, words))
    if not line:
        return ["No recompute: give pretrain_gpt.py no flags of recompute."]
    return ["Add to the flags of pretrain_gpt.py:", line]
