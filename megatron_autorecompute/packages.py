"""Packages of the runtime half: where one is missing, a line that says what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_autorecompute.errors import MachineError

_EXTRA = "pip install 'megatron-autorecompute[megatron]'"
INSTALL = {
    "torch": _EXTRA,
    "megatron": _EXTRA,
    "megatron.bridge": "pip install 'megatron-autorecompute[megatron,bridge]'",
    "triton": "pip install triton (torch's wheels without CUDA come without it)",
}
"""By what was imported; modules inside a package are of the nearest one here around them."""


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
        install = _install(error.name or "")
        if install is None:
            raise
        raise MachineError(
            f"{by} runs Megatron's own code, and {error.name} is not installed: {install}."
        ) from error


def _install(module: str) -> str | None:
    """What installs a module; None where nobody here needs it."""
    parts = module.split(".")
    around = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((INSTALL[name] for name in around if name in INSTALL), None)
