"""What Megatron allows for a model, and what this machine can run of it."""

from __future__ import annotations

import copy
import functools
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute import megatron_fields
from megatron_autorecompute.compat import (
    layer_modules,
    layer_parts,
    offload_modules,
    pipeline_waits,
    versions,
)
from megatron_autorecompute.compat.layer_modules import allowed_modules, allowed_offload_modules
from megatron_autorecompute.compat.untyped import Layer
from megatron_autorecompute.errors import MachineError, PolicyError
from megatron_autorecompute.policy import OWN_MODULES, WHOLE_LAYER, LayerPolicy, RecomputePolicy
from megatron_autorecompute.work_order import RERUN_WITH

logger = logging.getLogger(__name__)


_COMPILED = {"layernorm", "moe_act", "mla_up_proj", "gdn_norm_out"}
"""Modules run through CheckpointWithoutOutput."""


def check_allowed(config: TransformerConfig, policy: RecomputePolicy) -> None:
    """Ask Megatron's own rules, on a copy of the config, about every choice in the policy.

    Megatron checks them only when `recompute_granularity` is set, which it is not under a policy.

    Raises PolicyError: an unknown module, or Megatron's own reason against a choice, with the first
    layer that has it.
    """
    check_layers(config, enumerate(policy.layers))


def check_layers(config: TransformerConfig, layers: Iterable[tuple[int, LayerPolicy]]) -> None:
    """`check_allowed` for layers with their indices."""
    versions.installed()
    first = dict[LayerPolicy, int]()
    for index, choice in layers:
        first.setdefault(choice, index)
    for choice, index in first.items():
        where = f"{choice} on layer {index}"
        check_known(choice, where)
        _check_own_rules(config, choice, where)
        reason = refusal(config, choice)
        if reason is not None and reason != refusal(config, LayerPolicy()):
            raise PolicyError(
                f"Megatron-Core {versions.installed()} refuses {where} here: {reason}"
            )


def why_not(config: TransformerConfig, choice: LayerPolicy) -> str | None:
    """Why `check_allowed` refuses a choice; None if it accepts it."""
    try:
        check_allowed(config, RecomputePolicy((choice,) * choice.group))
    except PolicyError as error:
        return " ".join(str(error).split())
    return None


def is_allowed(config: TransformerConfig, choice: LayerPolicy) -> bool:
    """Whether `check_allowed` accepts a choice."""
    return why_not(config, choice) is None


def check_known(choice: LayerPolicy, where: str) -> None:
    """Raise PolicyError for modules that the installed Megatron, or this package, does not know.

    where: the choice and its layer, for the message.
    """
    theirs = [name for name in allowed_modules() if name in layer_modules.MODULE_FLAGS]
    allowed = {*allowed_offload_modules(), WHOLE_LAYER} if choice.offload else set[str]()
    movable = sorted(allowed & {*offload_modules.SWITCHES, WHOLE_LAYER})
    for names, known, kind, purpose in (
        (choice.modules, [*theirs, *OWN_MODULES], "module", ""),
        (choice.keep, list(layer_parts.KEEPS), "part", " to keep"),
        (choice.offload, movable, "module", " to offload"),
    ):
        if unknown := [name for name in names if name not in known]:
            raise PolicyError(
                f"Unknown {kind} {', '.join(unknown)}{purpose} in {where}: there are "
                f"{', '.join(known)} (megatron-core {versions.installed()})."
            )


def _check_own_rules(config: TransformerConfig, choice: LayerPolicy, where: str) -> None:
    """Raise PolicyError for what Megatron accepts but runs wrongly, and for what we cannot add."""
    own = [module for module in choice.modules if module in OWN_MODULES]
    inside = {m: outer for outer in choice.modules for m in RERUN_WITH.get(outer, ())}
    twice = [module for module in choice.modules if module in inside]
    why_not_ahead = layer_parts.why_none(config) or pipeline_waits.why_not(config)
    keeps_in = "moe" if "moe" in choice.modules else None
    around = [*own, *[keeps_in for _ in choice.keep]]
    why_none = next(filter(None, (layer_parts.why_none(config, one) for one in around)), None)
    rules = [
        (bool(choice.ahead and why_not_ahead), why_not_ahead),
        (bool(why_none), why_none),
        (
            bool(twice and (own or twice[0] in OWN_MODULES)),
            f"{inside[twice[0]]} contains {twice[0]}, leave one of them out" if twice else "",
        ),
        (
            "layernorm" in choice.modules and getattr(config, "fused_residual_rmsnorm", False),
            "fused_residual_rmsnorm returns a residual that this recompute would discard",
        ),
        (
            "moe" in choice.modules and getattr(config, "cuda_graph_impl", None) == "local",
            "with cuda_graph_impl=local the MoE layer's recompute is fixed when graphs are made",
        ),
        (
            choice.granularity == "full" and offload_modules.own_switch(config),
            "fine_grained_activation_offloading moves tensors that full recompute makes again",
        ),
    ]
    reasons = [reason for broken, reason in rules if broken]
    reasons += offload_modules.broken_rules(config, choice)
    if reasons:
        raise PolicyError(f"{where} cannot be used with this model: {reasons[0]}.")


def refusal(config: TransformerConfig, choice: LayerPolicy) -> str | None:
    """Megatron's reason against running the whole model with `choice`, or None."""
    trial = copy.copy(config)
    trial.recompute_policy = None
    if not trial.offload_modules:  # a policy in force sets this alone, which Megatron refuses
        trial.fine_grained_activation_offloading = False
    for name, value in megatron_fields.of_choice(choice).items():
        setattr(trial, name, value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's own config has already warned
            # Megatron Bridge's configs keep their rules in finalize(); __post_init__ is empty.
            getattr(trial, "finalize", functools.partial(_own_post_init(trial), trial))()
    except (AssertionError, ValueError) as error:
        return str(error) or type(error).__name__
    return None


def _own_post_init(config: TransformerConfig) -> Callable[[TransformerConfig], None]:
    """`__post_init__` of Megatron's own class. A subclass's own has run already; it may take an
    InitVar, which no longer exists, and may not be meant to run twice."""
    kinds = type(config).__mro__
    own: Any = next(kind for kind in kinds if kind.__module__.startswith("megatron."))
    post_init: Callable[[TransformerConfig], None] = own.__post_init__
    return post_init


def check_compiler(policy: RecomputePolicy) -> None:
    """Refuse modules that would fail in the first step because TE or a compiler is missing.

    Symptoms, for modules whose output is discarded and recomputed: without Transformer Engine a
    NameError, because `CheckpointWithoutOutput` takes `fp8=False` for fp8; since 0.17 a C++
    extension is compiled at run time. Reference: `tensor_parallel.random`,
    `CheckpointWithoutOutput.__init__` and `_get_share_storage`. Remove when the first is fixed and
    the extension is shipped compiled.

    Raises MachineError: Transformer Engine, g++ (or $CXX) or ninja is missing.
    """
    used = sorted({m for layer in policy.layers for m in layer.modules} & _COMPILED)
    if used and not hasattr(megatron_random, "FP8GlobalStateManager"):
        raise MachineError(
            f"Recomputing {', '.join(used)} with megatron-core {versions.installed()} needs "
            "Transformer Engine under every precision, and it is not installed. Install it (the "
            "extra `te`), or choose a policy without these modules."
        )
    share_storage = getattr(megatron_random, "_get_share_storage", None)
    if getattr(share_storage, "__module__", None) != megatron_random.__name__:
        return  # an older version, or the stand-in of `without_cuda`
    tools = [os.environ.get("CXX", "g++"), "ninja"]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if used and missing:
        raise MachineError(
            f"Recomputing {', '.join(used)} with megatron-core {versions.installed()} compiles a "
            f"small C++ extension at run time, and {' and '.join(missing)} cannot be found. "
            "Install it, or choose a policy without these modules."
        )


def runnable_modules(layer: Layer) -> list[str]:
    """The modules this layer has, Megatron allows here, and this machine can run."""
    return [
        name
        for name in layer_modules.MODULE_FLAGS
        if layer_modules.flags(layer, name)
        and is_allowed(layer.config, LayerPolicy("selective", (name,)))
        and _can_be_compiled(name)
    ]


def usable_modules(layer: Layer) -> list[str]:
    """Those of `runnable_modules` that keep results bit-identical.

    `layernorm` on torch's RMSNorm is left out: its recompute adds gradients in another order
    (differences of 1e-8 to 1e-7). A policy may still name it.
    """
    return [
        name
        for name in runnable_modules(layer)
        if not (name == "layernorm" and _recomputes_rms_norm(layer))
    ] + [
        name
        for name in layer_parts.worth_recomputing(layer)
        if is_allowed(layer.config, LayerPolicy("selective", (name,)))
    ]


def _recomputes_rms_norm(layer: Layer) -> bool:
    names = {"recompute_input_layernorm": "input_layernorm"}
    return any(
        isinstance(getattr(owner, names.get(flag, "pre_mlp_layernorm")), torch.nn.RMSNorm)
        for owner, flag in layer_modules.flags(layer, "layernorm")
    )


def _can_be_compiled(module: str) -> bool:
    try:
        check_compiler(RecomputePolicy((LayerPolicy("selective", (module,)),)))
    except MachineError as error:
        logger.warning("recompute of %s is left out: %s", module, error)
        return False
    return True


def own_recompute(config: TransformerConfig) -> str | None:
    """Megatron's own recompute settings as policy text, or None if there are none."""
    if getattr(config, "moe_layer_recompute", False):
        return "selective[moe]"
    strategy = megatron_fields.strategy_of(config)
    return None if strategy is None else str(strategy)
