"""Checks of numbers that layouts, schedules and formulas share."""

from __future__ import annotations

from megatron_autorecompute.errors import PipelineError


def check_at_least(least: int, **values: int) -> None:
    """Raise PipelineError, with the name, if one of the values is below `least`."""
    for name, value in values.items():
        if value < least:
            raise PipelineError(f"{name} is {value}; it must be at least {least}.")


def check_chunks(pp: int, vp: int) -> None:
    """Raise PipelineError for several chunks (vp) on a single stage (pp)."""
    if vp > 1 and pp == 1:
        raise PipelineError(
            f"Asked for {vp} chunks on a single stage: Megatron interleaves only between two or "
            "more stages. Use one chunk or more stages."
        )
