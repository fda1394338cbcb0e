"""Packages of the runtime half: where one is missing, a line that says what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_autorecompute.errors import MachineError

_EXTRA = "pip install 'megatron-autorecompute[megatron]'"
INSTALL = {
    "torch": _EXTRA,
    "megatron": _EXTRA,
    "triton": "pip install triton (torch's wheels without CUDA come without it)",
}
"""By the outermost name of what was imported."""


@contextmanager
def needed(by: str) -> Iterator[None]:
    """Around whatever imports torch or Megatron.

    Args:
        by: what asks for them.

    Raises:
        MachineError: one of them is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in INSTALL:
            raise
        raise MachineError(
            f"{by} runs Megatron's own code, and {error.name} is not installed: {INSTALL[package]}."
        ) from error
