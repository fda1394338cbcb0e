"""Optional packages (torch, Megatron): if one is missing, an error says what to install."""

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
"""What to run, by package. A module belongs to the innermost package listed here."""


@contextmanager
def needed(by: str) -> Iterator[None]:
    """Surround code that imports torch or Megatron.

    Args:
        by: subject of the error message, such as "The launcher".

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
    """The command that installs a module; None if this package does not use it."""
    parts = module.split(".")
    around = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((INSTALL[name] for name in around if name in INSTALL), None)
