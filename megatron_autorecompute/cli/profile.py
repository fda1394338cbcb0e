"""`megatron-autorecompute profile --no-device`, the former name of `estimate`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_autorecompute.cli.estimate import EstimateCommand
from megatron_autorecompute.options import say_renamed


class ProfileCommand(EstimateCommand):
    """Does what `estimate` does, and prints the new name."""

    name = "profile"
    description = "The former name of estimate."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add --no-device, which this name requires, and the flags of `estimate`."""
        parser.add_argument(
            "--no-device", action="store_true", required=True, help="as estimate, without a device"
        )
        super().add_arguments(parser)

    def run(self, args: Namespace) -> None:
        """Print the new name, and run `estimate`."""
        say_renamed("profile --no-device", "estimate")
        super().run(args)
