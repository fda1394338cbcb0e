"""Choices that also offload, beside those that a layer has, and where there can be none."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute import megatron_fields
from megatron_autorecompute.compat import offload_modules, rules
from megatron_autorecompute.compat.untyped import Layer
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.runtime.model_shard import MAX_CHOICES, Choices, choices

ATTENTION = ("core_attn", "attn_proj")
EXPERTS = ("expert_fc1", "moe_act")
MEASURED_SETS = (ATTENTION, EXPERTS, (*ATTENTION, *EXPERTS), tuple(offload_modules.SWITCHES))
"""What `auto` measures, as far as a layer has it: attention, experts, both, all."""


def with_offload(plain: Choices, layer: Layer, sets: Sequence[Sequence[str]]) -> Choices:
    """A layer's choices, and each without full that also offloads one of the sets of modules, as
    far as the layer has them and Megatron allows it."""
    own = [tuple(m for m in modules if offload_modules.switch(layer, m)) for modules in sets]
    found = [
        replace(choice, offload=modules)
        for modules in dict.fromkeys(filter(None, own))
        for choice in plain
        if choice.granularity in ("none", "selective")
    ]
    return (*plain, *(choice for choice in found if rules.is_allowed(layer.config, choice)))


def without_parts(found: Choices) -> Choices:
    """The choices without those that need checkpoints of ours: if any layer offloads, all
    checkpoints are Megatron's own."""
    return tuple(each for each in found if not (each.own or each.rerun_all))


def measured(layer: Layer) -> Choices:
    """What `auto` measures where it may offload: besides a layer's choices at most as many again,
    first those that recompute least."""
    plain = without_parts(choices(layer))
    small = (choice for choice in plain if choice.granularity in ("none", "selective"))
    offloading = (with_offload((choice,), layer, MEASURED_SETS)[1:] for choice in small)
    return (*plain, *itertools.islice(itertools.chain.from_iterable(offloading), MAX_CHOICES))


def refuse(config: TransformerConfig, *, blocks: int, varies: bool) -> None:
    """Raise an error if `auto` cannot offload in this job, though it was allowed to.

    Args:
        config: the model's TransformerConfig.
        blocks: stacks of layers in the model; with an encoder or a tower there are two.
        varies: whether calls differ in lengths and numbers of microbatches.

    Raises:
        OptionError: the config offloads on its own, or offload cannot run in this job.
        MachineError: Transformer Engine is missing, or not told to use its first offload.
    """
    own = megatron_fields.offload_of(config)
    instead = "Leave --recompute-allow-offload out."
    if own is not None:
        raise OptionError(
            f"--recompute-allow-offload was given, and the config offloads on its own ({own}). "
            "Leave one of them out."
        )
    if varies:
        raise OptionError(
            "recompute_allow_offload was given to a loop whose calls differ: Megatron's offload "
            "learns the microbatches of one call, and pins host memory for every shape. In a loop "
            "whose calls are all alike say so: attach(..., allow_offload=FixedCalls(...)). "
            "Otherwise leave it out."
        )
    if blocks > 1:
        raise OptionError(
            "--recompute-allow-offload was given with a model of two stacks of layers, and "
            f"Megatron's offload knows one. {instead}"
        )
    offload_modules.check_machine()


def without_offload(profile: Profile) -> Profile:
    """The profile without what was recorded of offload."""
    kinds = (
        replace(
            kind,
            choices=tuple(record for record in kind.choices if not record.policy.offload),
            inert={name: same for name, same in kind.inert.items() if "+offload[" not in name},
        )
        for kind in profile.kinds
    )
    return replace(profile, kinds=tuple(kinds), host_link=None)
