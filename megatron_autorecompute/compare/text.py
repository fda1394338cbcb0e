"""The text that the comparison's job trains on, its bytes as tokens; the process that starts the
ranks reads it too, without torch."""

from __future__ import annotations

from pathlib import Path

from megatron_autorecompute.compare.comparison import Shape
from megatron_autorecompute.errors import MachineError


def read_text(path: Path) -> bytes:
    """The training text.

    Raises:
        MachineError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise MachineError(f"Cannot read the text {path}: {error.strerror}.") from error


def check_length(text: bytes, shape: Shape) -> None:
    """Raises MachineError for a text that is shorter than one microbatch."""
    needed = (shape.seq_length + 1) * shape.micro_batch_size
    if len(text) < needed:
        raise MachineError(
            f"The training text has {len(text)} bytes; a microbatch of {shape.micro_batch_size} "
            f"sequences of {shape.seq_length} tokens needs {needed}. Give a longer file with "
            "--text."
        )
