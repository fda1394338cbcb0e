"""The command line: reads files, runs the planner or the meta part, and prints results."""

from megatron_autorecompute.cli.program import main

__all__ = ["main"]
