"""The command line: reads files, asks the planner, shows what it says."""

from megatron_autorecompute.cli.program import main

__all__ = ["main"]
