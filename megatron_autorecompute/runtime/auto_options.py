"""Options of `--recompute-policy auto`: one dataclass, from which the flags are made, and what is
refused before any model is built.

`integrations.megatron_lm` adds the flags to Megatron's parser; any other program can fill the
dataclass itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, ClassVar

from megatron_autorecompute.block_names import as_megatrons
from megatron_autorecompute.errors import InfeasibleError, OptionError
from megatron_autorecompute.options import option
from megatron_autorecompute.profile import IMBALANCE_PERCENTILE
from megatron_autorecompute.runtime.host_memory import machine_bytes
from megatron_autorecompute.units import GIB, gib

AHEAD_CHOICES, ALL_CHOICES, MEGATRONS_CHOICES = "ahead", "all", "megatron"
"""Values of `recompute_choices`."""
PLAN_FILE = "recompute-plan.json"
"""Name of the plan in the folder of `--save`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoOptions:
    """recompute policy auto (megatron-autorecompute).

    Raises OptionError for an impossible value.
    """

    BUDGET: ClassVar[str] = "--recompute-memory-budget-gib"
    """What the user calls it, for messages; so are the next three."""
    RESERVE: ClassVar[str] = "--recompute-memory-reserve-gib"
    PATH: ClassVar[str] = "--recompute-plan-path"
    CHOICES: ClassVar[str] = "--recompute-choices"

    recompute_memory_budget_gib: float | None = option(
        None,
        "GiB that torch may allocate on every device. Without it: the device's memory less what "
        "lies outside torch and less the reserve",
    )
    recompute_memory_reserve_gib: float | None = option(
        None,
        "GiB kept free for fragmentation when no budget is given. Without it: what the allocator "
        "reserved beyond what it allocated in the measuring steps",
    )
    recompute_imbalance_percentile: float = option(
        IMBALANCE_PERCENTILE,
        "plan mixture-of-experts layers for this percentile of the microbatches measured on the "
        "fullest rank, in percent; 100 is the maximum",
    )
    recompute_measure_steps: int = option(
        12,
        "measure during at most this many training steps, and at least two; they train like "
        "any other",
    )
    recompute_plan_path: str | None = option(
        None,
        "file the plan is written to, and read from at a restart. Without it: "
        "recompute-plan.json in the folder of --save, or no file",
    )
    recompute_plan_only: bool = option(
        False, "measure, print the plan, and exit without training on"
    )
    recompute_choices: str = option(
        AHEAD_CHOICES,
        "ahead, all or megatron. With all, no recompute begins while a stage waits for a gradient. "
        "With megatron, every policy runs Megatron's own checkpoints, which also rerun what no "
        "backward reads, and auto measures and plans only these",
    )
    recompute_allow_offload: bool = option(
        False, "also measure and plan Megatron's fine-grained activation offloading"
    )
    recompute_run_on_cpu: bool = option(
        False,
        "run Megatron without CUDA, on CPU with gloo: for trying out. Works through "
        "python -m megatron_autorecompute.pretrain only, and refuses where CUDA is available",
    )

    def __post_init__(self) -> None:
        budget, reserve = self.recompute_memory_budget_gib, self.recompute_memory_reserve_gib
        _check_gib(self.BUDGET, budget, " above 0, such as 72", zero=False)
        _check_gib(self.RESERVE, reserve, ", 0 or more, such as 2", zero=True)
        if None not in (budget, reserve):
            raise OptionError(
                f"{self.RESERVE} was given together with {self.BUDGET}: the reserve only applies "
                "if auto finds the budget itself. Leave one of them out."
            )
        path = self.recompute_plan_path
        if path is not None and (not isinstance(path, str | os.PathLike) or not str(path)):
            raise OptionError(f"{self.PATH} {path!r}: give the path of a file, or leave it out.")
        if not 0 < self.recompute_imbalance_percentile <= 100:
            raise OptionError(
                f"--recompute-imbalance-percentile {self.recompute_imbalance_percentile:g}: a "
                "percentile is above 0 and at most 100, such as 99."
            )
        if self.recompute_choices not in (AHEAD_CHOICES, ALL_CHOICES, MEGATRONS_CHOICES):
            raise OptionError(
                f"{self.CHOICES} {self.recompute_choices!r}: give {AHEAD_CHOICES}, {ALL_CHOICES} "
                f"or {MEGATRONS_CHOICES}."
            )
        if self.recompute_measure_steps < 1:
            raise OptionError(
                f"--recompute-measure-steps {self.recompute_measure_steps}: give 1 or more. To "
                "measure nothing give a policy, or a plan as @FILE."
            )

    def field_of(self, policy: Any) -> Any:
        """The value of the config's field by which a policy, or auto, runs under these options."""
        own = self.recompute_choices == MEGATRONS_CHOICES and policy not in (None, "auto")
        return as_megatrons(policy) if own else policy

    def with_plan_in(self, folder: str | None) -> AutoOptions:
        """The options with the plan in `folder`, the job's checkpoints, if no path was given."""
        if self.recompute_plan_path is not None or folder is None:
            return self
        return replace(self, recompute_plan_path=os.path.join(folder, PLAN_FILE))

    @property
    def budget_bytes(self) -> int | None:
        """`recompute_memory_budget_gib` in bytes."""
        budget_gib = self.recompute_memory_budget_gib
        return None if budget_gib is None else int(budget_gib * GIB)


def _check_gib(flag: str, gib: Any, such_as: str, *, zero: bool) -> None:
    if gib is None:
        return
    # Tests the allowed range, because NaN compares false with everything.
    if not (isinstance(gib, Real) and 0 <= float(gib) < float("inf") and (gib or zero)):
        raise OptionError(f"{flag} {gib!r}: give a number of GiB{such_as}.")


# A profile has the measurements from which a budget is found, so a start with other options finds
# its own. A budget is never taken over from a plan file.


def budget_bytes(
    options: AutoOptions, available_bytes: int | None, fragmentation_bytes: int
) -> int:
    """The budget of one device.

    Args:
        options: what the user asked for.
        available_bytes: device memory less what lies outside torch; None without a device.
        fragmentation_bytes: reserved beyond what was allocated, as measured.

    Raises InfeasibleError: no budget is given, and there is no device to find it from.
    """
    if options.budget_bytes is not None:
        return options.budget_bytes
    if available_bytes is None:
        raise InfeasibleError(
            f"Off CUDA there is no device memory to take as the budget: give {options.BUDGET}."
        )
    reserve_gib = options.recompute_memory_reserve_gib
    reserve = fragmentation_bytes if reserve_gib is None else int(reserve_gib * GIB)
    return available_bytes - reserve


def budget_reason(options: AutoOptions) -> str:
    """How the budget was found, for error messages."""
    if options.budget_bytes is not None:
        return f"given as {options.BUDGET}"
    if options.recompute_memory_reserve_gib is not None:
        return f"the device's memory less what lies outside torch and {options.RESERVE}"
    return "the device's memory less what lies outside torch and the measured fragmentation"


def refuse_without_auto(options: AutoOptions, policy: Any) -> None:
    """Raise OptionError for options that only auto uses, if another policy or none is given."""
    used = ["recompute_run_on_cpu", *["recompute_choices"] * (policy is not None)]
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    unused = [
        f"--{field.name.replace('_', '-')}" + f" {values[field.name]}" * (field.type != "bool")
        for field in fields(options)
        if field.name not in used and values[field.name] != field.default
    ]
    if unused and policy != "auto":
        given = "no policy" if policy is None else f"recompute_policy={policy!s:.60}"
        raise OptionError(
            f"{', '.join(unused)}: given with {given}, and only auto uses that. Give the policy "
            f"auto, or leave {' and '.join(unused)} out."
        )


def refuse_percentile(options: AutoOptions, config: Any) -> None:
    """Raise OptionError for a percentile of uneven routing in a model that routes nothing."""
    percentile = options.recompute_imbalance_percentile
    if percentile != IMBALANCE_PERCENTILE and not config.num_moe_experts:
        raise OptionError(
            f"--recompute-imbalance-percentile {percentile:g}: it is for layers with experts, and "
            "this model has none. Leave it out."
        )


def refuse_for_auto(options: AutoOptions, config: Any) -> None:
    """Raise OptionError for a config whose steps auto cannot measure, or a budget above what the
    device has."""
    _refuse_beyond_device(options)
    if config.cuda_graph_impl != "none":
        raise OptionError(
            f"recompute_policy=auto was given with cuda_graph_impl={config.cuda_graph_impl}: auto "
            "measures by varying the choices, and a CUDA graph keeps those it was captured with. "
            "Run auto for a few steps with cuda_graph_impl=none and a plan path, then give "
            "recompute_policy=@PLAN."
        )
    if config.overlap_moe_expert_parallel_comm:
        raise OptionError(
            "recompute_policy=auto was given with overlap_moe_expert_parallel_comm: there "
            "Megatron alternates between parts of layers of two microbatches, but auto measures "
            "whole layers. Give a policy as text, such as selective[layernorm], or @PLAN with a "
            "plan made without a device (megatron-autorecompute estimate, then plan)."
        )


def _refuse_beyond_device(options: AutoOptions) -> None:
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
