"""Bytes that torch may allocate on every device: given by the user, or found from measurements.

A profile has the measurements from which a budget is found, so a start with other options finds its
own. A budget is never taken over from a plan file.
"""

from __future__ import annotations

from megatron_autorecompute.errors import InfeasibleError
from megatron_autorecompute.profile import StageRecord
from megatron_autorecompute.runtime.auto_options import AutoOptions


def budget_bytes(
    options: AutoOptions, available_bytes: int | None, fragmentation_bytes: int
) -> int:
    """The budget of one device.

    Args:
        options: what the user asked for.
        available_bytes: device memory less what lies outside torch; None without a device.
        fragmentation_bytes: reserved beyond what was allocated, as measured.

    Raises:
        InfeasibleError: no budget is given, and there is no device to find it from.
    """
    if options.budget_bytes is not None:
        return options.budget_bytes
    if available_bytes is None:
        raise InfeasibleError(
            f"Off CUDA there is no device memory to take as the budget: give {options.BUDGET}."
        )
    reserve = options.reserve_bytes
    return available_bytes - (fragmentation_bytes if reserve is None else reserve)


def stage_budget_bytes(options: AutoOptions, stage: StageRecord) -> int:
    """The budget of a stage that was measured; raises as `budget_bytes` does."""
    return budget_bytes(options, stage.available_bytes, stage.fragmentation_bytes)


def reason(options: AutoOptions) -> str:
    """How the budget was found, for error messages."""
    if options.budget_bytes is not None:
        return f"given as {options.BUDGET}"
    if options.reserve_bytes is not None:
        return f"the device's memory less what lies outside torch and {options.RESERVE}"
    return "the device's memory less what lies outside torch and the measured fragmentation"
