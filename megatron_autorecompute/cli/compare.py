"""`megatron-autorecompute compare`: runs Megatron's own strategies and ours on this machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.output import console
from megatron_autorecompute.compare.comparison import Shape
from megatron_autorecompute.compare.run import FILES, PAGE, Settings, default_shape, run
from megatron_autorecompute.options import add_flags, from_flags
from megatron_autorecompute.packages import needed


class CompareCommand(Command):
    """Runs the comparison."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add what is compared, with defaults for this machine."""
        add_flags(parser, Settings)
        with needed("compare"):
            add_flags(parser, Shape, default_shape())

    def run(self, args: Namespace) -> None:
        """Compare, and print the table and where the files are; raises as the comparison does."""
        folder = run(from_flags(Settings, args, shape=from_flags(Shape, args)), console())
        print(f"Written: {folder}/{', '.join(FILES)}")
        print(f"Our plan as a page to open in a browser: {folder}/{PAGE}")
