"""Refuses settings that `auto` cannot work with, before any model is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.runtime.auto_options import AutoOptions

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
    """Raise OptionError for --recompute-plan-only or --recompute-allow-offload without auto.

    Args:
        options: as the user gave them.
        policy: the value of the config's field; None if there is none.
        spelled: how to write settings in the error.
    """
    if policy == "auto":
        return
    given = "no policy" if policy is None else f"{spelled('recompute_policy', policy):.60}"
    for asked, flag, why in (
        (options.recompute_plan_only, "--recompute-plan-only", "only auto makes a plan"),
        (
            options.recompute_allow_offload,
            "--recompute-allow-offload",
            "it says what auto may choose; a policy that offloads needs no leave",
        ),
    ):
        if asked:
            raise OptionError(
                f"{flag} was given with {given}: {why}. Give "
                f"{spelled('recompute_policy', 'auto')}, or leave {flag} out."
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
