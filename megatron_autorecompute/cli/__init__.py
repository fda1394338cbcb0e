"""The command line: reads files, asks the planner, shows what it says."""

from megatron_autorecompute.cli.commands import main

__all__ = ["main"]
