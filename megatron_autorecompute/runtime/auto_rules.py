"""Refuses settings that `auto` cannot work with, or without it have no effect, before any model is
built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.profile import IMBALANCE_PERCENTILE
from megatron_autorecompute.runtime.auto_options import AutoOptions
from megatron_autorecompute.runtime.host_memory import machine_bytes
from megatron_autorecompute.units import gib

Spelled = Callable[[str, Any], str]
"""How a program writes a setting, from the name of its field and its value."""


def as_flag(name: str, value: Any) -> str:
    """As on Megatron's command line: `--cuda-graph-impl local`, or `--bf16` for True."""
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def as_field(name: str, value: Any) -> str:
    """As in a Megatron Bridge config: `model.cuda_graph_impl=local`."""
    return f"model.{name}={value}"


def refuse_without_auto(options: AutoOptions, policy: Any, spelled: Spelled = as_flag) -> None:
    """Raise OptionError for options that only auto uses, without auto.

    Args:
        options: as the user gave them.
        policy: the value of the config's field; None if there is none.
        spelled: how to write settings in the error.
    """
    used = ["recompute_run_on_cpu", *["recompute_choices"] * (policy is not None)]
    unused = [
        as_flag(field.name, getattr(options, field.name))
        for field in fields(options)
        if field.name not in used and getattr(options, field.name) != field.default
    ]
    if unused and policy != "auto":
        given = "no policy" if policy is None else f"{spelled('recompute_policy', policy):.60}"
        raise OptionError(
            f"{', '.join(unused)}: given with {given}, and only auto uses that. Give "
            f"{spelled('recompute_policy', 'auto')}, or leave {' and '.join(unused)} out."
        )


def refuse_percentile(options: AutoOptions, config: Any) -> None:
    """Raise OptionError for a percentile of uneven routing in a model that routes nothing."""
    percentile = options.recompute_imbalance_percentile
    if percentile != IMBALANCE_PERCENTILE and not config.num_moe_experts:
        flag = as_flag("recompute_imbalance_percentile", f"{percentile:g}")
        raise OptionError(
            f"{flag}: it is for layers with experts, and this model has none. Leave it out."
        )


def refuse_beyond_device(options: AutoOptions) -> None:
    """Raise OptionError for a budget above the memory of a device; without CUDA, the machine's."""
    import torch

    if torch.cuda.is_available():
        whose, memory_bytes = "a device", torch.cuda.get_device_properties(0).total_memory
    else:
        whose, memory_bytes = "this machine", machine_bytes()
    if options.budget_bytes is not None and options.budget_bytes > memory_bytes:
        raise OptionError(
            f"{options.BUDGET} {options.recompute_memory_budget_gib:g}: {whose} has "
            f"{gib(memory_bytes)} GiB. Give what torch may allocate of that."
        )


def refuse_unmeasurable(config: Any, spelled: Spelled = as_flag) -> None:
    """Raise OptionError for a config whose steps `auto` cannot measure.

    Args:
        config: a TransformerConfig.
        spelled: how to write settings in the error.
    """
    auto, plan = spelled("recompute_policy", "auto"), spelled("recompute_policy", "@PLAN")
    if config.cuda_graph_impl != "none":
        raise OptionError(
            f"{auto} was given with {spelled('cuda_graph_impl', config.cuda_graph_impl)}: auto "
            "measures by varying the choices, and a CUDA graph keeps those it was captured with. "
            f"Run auto for a few steps with {spelled('cuda_graph_impl', 'none')} and a plan path, "
            f"then give {plan}."
        )
    if config.overlap_moe_expert_parallel_comm:
        raise OptionError(
            f"{auto} was given with {spelled('overlap_moe_expert_parallel_comm', True)}: there "
            "Megatron alternates between parts of layers of two microbatches, but auto measures "
            "whole layers. Give a policy as text, such as "
            f"{spelled('recompute_policy', 'selective[layernorm]')}, or {plan} with a plan made "
            "without a device (megatron-autorecompute estimate, then plan)."
        )
