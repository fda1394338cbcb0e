"""The command line: reads files, runs the planner or the meta part, and prints results."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    try:
        # Loading it takes most of a second, in which an interrupt is no error either.
        from megatron_autorecompute.cli.program import main as program
    except KeyboardInterrupt:
        print("megatron-autorecompute: interrupted", file=sys.stderr)
        return 130
    return program(arguments)
