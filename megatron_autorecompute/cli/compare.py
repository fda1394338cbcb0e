"""`megatron-autorecompute compare`: runs Megatron's own strategies and ours on this machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.output import console


class CompareCommand(Command):
    """Runs the comparison, which parses its own flags (`args.flags`)."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add nothing: the comparison has its own parser, whose defaults depend on the machine."""

    def run(self, args: Namespace) -> None:
        """Compare, and print the table and where the files are; raises as the comparison does."""
        # Loads matplotlib, and its ranks torch and Megatron.
        from megatron_autorecompute.compare.run import FILES, PAGE, compare

        folder = compare(args.flags, console(), "megatron-autorecompute compare")
        print(f"Written: {folder}/{', '.join(FILES)}")
        print(f"Our plan as a page to open in a browser: {folder}/{PAGE}")
