"""What layouts, schedules and formulas ask of their numbers."""

from __future__ import annotations

from megatron_autorecompute.errors import PipelineError


def check_at_least(least: int, **values: int) -> None:
    """Refuse values below the least, by name; raises PipelineError."""
    for name, value in values.items():
        if value < least:
            raise PipelineError(f"{name} is {value}; it must be at least {least}.")


def check_chunks(pp: int, vp: int) -> None:
    """Refuse several chunks on a single stage; raises PipelineError."""
    if vp > 1 and pp == 1:
        raise PipelineError(
            f"Asked for {vp} chunks on a single stage: Megatron interleaves only between two or "
            "more stages. Use one chunk or more stages."
        )
