"""`megatron-autorecompute compare`: runs Megatron's own strategies and ours on this machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_autorecompute.cli.output import console
from megatron_autorecompute.compare.comparison import Shape
from megatron_autorecompute.compare.run import FILES, PAGE, Settings, compare, default_shape
from megatron_autorecompute.options import add_flags, from_flags
from megatron_autorecompute.packages import needed


def add_arguments(parser: ArgumentParser) -> None:
    """Add what is compared, with defaults for this machine."""
    add_flags(parser, Settings)
    with needed("compare"):
        add_flags(parser, Shape, default_shape())


def run(args: Namespace) -> None:
    """Compare, and print the table and where the files are; raises as the comparison does."""
    folder = compare(from_flags(Settings, args, shape=from_flags(Shape, args)), console())
    print(f"Written: {folder}/{', '.join(FILES)}")
    print(f"Our plan as a page to open in a browser: {folder}/{PAGE}")
