"""Optional packages (torch, Megatron): if one is missing, an error says what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util

from megatron_autorecompute.errors import MachineError

_EXTRA = "pip install 'megatron-autorecompute[megatron]'"
INSTALL = {
    "torch": _EXTRA,
    "megatron": _EXTRA,
    "megatron.bridge": "pip install 'megatron-autorecompute[megatron,bridge]'",
    "triton": "pip install triton (torch's wheels without CUDA come without it)",
}
"""The command that installs each package. A module belongs to the innermost package here."""
KERNELS_OF_SYMBOLS = {
    "M": {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d", "einops": "einops"},
    "G": {"fla": "flash-linear-attention"},
    "D": {"fast_hadamard_transform": "fast-hadamard-transform"},
}
"""The modules of the kernels of each HybridModel symbol, and the packages that have them. G needs
its package even in deterministic_mode."""


def lacking_kernels(symbol: str) -> list[str]:
    """The packages that a layer of this symbol runs and that are not installed."""
    kernels = KERNELS_OF_SYMBOLS.get(symbol, {})
    return [name for module, name in kernels.items() if util.find_spec(module) is None]


@contextmanager
def needed(by: str) -> Iterator[None]:
    """Surround code that imports torch or Megatron; `by` is the subject of the error message.

    Raises: MachineError if one of them is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = _package(error.name or "")
        if package is None:
            raise
        raise MachineError(
            f"{by} runs Megatron's own code, and {package} is not installed: {INSTALL[package]}."
        ) from error


def _package(module: str) -> str | None:
    """The innermost package of INSTALL that a module belongs to; None if there is none."""
    parts = module.split(".")
    around = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((name for name in around if name in INSTALL), None)
