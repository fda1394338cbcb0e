"""Flags, or lines of a recipe, to paste so that a job runs a policy or a plan."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from megatron_autorecompute.block_names import Blocks
from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.megatron_fields import NO_RECOMPUTE, POLICY_FIELD, of_policy
from megatron_autorecompute.planner.cost.hybrid_pattern import pattern_of_job
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.policy import NONE, WHOLE, RecomputePolicy

JOB = {"config", "described_by", "lora_rank"}
"""Keys of `model.facts.job` that are read: the job that a profile without a device is of."""
OUR_FLAG = f"--{POLICY_FIELD.replace('_', '-')}"
LAUNCHER, DRIVER = (f"-m megatron_autorecompute.{name}" for name in ("pretrain", "bridge_pretrain"))
"""What runs a script of Megatron-LM, and a recipe, with our flag or field, which they refuse."""


def recipe_lines(
    policy: RecomputePolicy, fields: Mapping[str, Any] | None, blocks: Blocks | None = None
) -> list[str]:
    """Lines that set a policy in a Megatron Bridge recipe, in Megatron's own fields if given."""
    found = _fields(policy, fields, blocks)
    return [f"cfg.model.{name} = {value!r}" for name, value in found.items()]


def flags(
    policy: RecomputePolicy, fields: Mapping[str, Any] | None, blocks: Blocks | None = None
) -> str:
    """Flags of pretrain_gpt.py that set a policy; "" for no recompute, which needs no flag."""
    words = []
    for name, value in _fields(policy, fields, blocks).items():
        # Megatron's flags say cpu_offloading by its number of layers, and other switches alone.
        if value is not None and name != "cpu_offloading":
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += ["--" + name.replace("_", "-"), *(shlex.quote(str(each)) for each in values)]
    return " ".join(words)


def _fields(
    policy: RecomputePolicy, fields: Mapping[str, Any] | None, blocks: Blocks | None
) -> Mapping[str, Any]:
    """The given fields, or ours; Megatron's where layers leave as a whole, which it alone runs."""
    if fields is None and WHOLE in policy.layers:
        fields = of_policy(policy, [range(len(policy.layers))], linear_bias=False)
    return {**NO_RECOMPUTE, POLICY_FIELD: policy.format(blocks)} if fields is None else fields


def launch_lines(plan: Plan) -> list[str]:
    """What to paste so that a job runs the plan: for the profile's own job, if it contains one.

    Otherwise the policy is given as text, which is right for any job: whether layers are frozen,
    after which Megatron's own recompute can lose gradients, is not in a profile.

    Raises: as `job_lines`.
    """
    if lines := job_lines(plan):
        return lines
    if all(choice == NONE for choice in plan.policy.layers):
        return pretrain_lines(plan, NO_RECOMPUTE)
    recipe = f", run by {DRIVER}, the same text is cfg.model.{POLICY_FIELD}."
    if WHOLE in plan.policy.layers:
        recipe = ": " + "; ".join(recipe_lines(plan.policy, None))
    return [*pretrain_lines(plan, None), f"In a recipe of Megatron Bridge{recipe}"]


def job_lines(plan: Plan) -> list[str]:
    """What to paste for the job of a profile made without a device; empty for other profiles.

    Raises ProfileError: the profile's description of the job cannot be read.
    """
    job = plan.profile.model.facts.get("job")
    if job is None:
        return []
    if not (isinstance(job, dict) and job.keys() >= JOB and isinstance(job["config"], dict)):
        raise ProfileError(
            f"model.facts.job of the plan's profile is no job description: {job!r:.80}. Profile "
            "the job again, or take the field out."
        )
    fields = None
    pattern = pattern_of_job(plan.profile.model.facts)
    if not job["lora_rank"]:  # after frozen layers Megatron's own recompute can lose gradients
        layers = plan.layout.num_layers
        chunks = [[i for i in chunk if i < layers] for chunk in plan.layout.chunk_layers()]
        bias = bool(job["config"].get("add_bias_linear", True))
        depth = 0 if pattern is None else len(pattern.depth)
        fields = of_policy(plan.policy, chunks, linear_bias=bias, depth_layers=depth)
    if job["described_by"] == "recipe":
        return bridge_lines(plan, fields)
    return pretrain_lines(plan, fields)


def bridge_lines(plan: Plan, fields: Mapping[str, Any] | None) -> list[str]:
    """Where the plan goes in a recipe of Megatron Bridge, and the lines, as of `recipe_lines`."""
    lines = recipe_lines(plan.policy, fields, plan.profile.model.blocks)
    ours = any(line.startswith(f"cfg.model.{POLICY_FIELD} ") for line in lines)
    return [f"Put into the recipe of Megatron Bridge{f', run by {DRIVER}' * ours}:", *lines]


def pretrain_lines(plan: Plan, fields: Mapping[str, Any] | None) -> list[str]:
    """Where the plan goes in a job of Megatron-LM, and its flags, as of `flags`, and of its layout:
    one line."""
    script = "pretrain_hybrid.py" if pattern_of_job(plan.profile.model.facts) else "pretrain_gpt.py"
    words = [flags(plan.policy, fields, plan.profile.model.blocks)]
    for name, value in plan.megatron_flags.items():
        by = "=" if value.startswith("-") else " "  # a pattern may begin with it, for an MLP
        words.append(f"{shlex.quote(name)}{by}{shlex.quote(value)}")
    line = " ".join(filter(None, words))
    if not line:
        return [f"No recompute: give {script} no flags of recompute."]
    launched = f"{LAUNCHER} {script}" if line.startswith(OUR_FLAG) else script
    return [f"Add to the flags of {launched}:", line]
