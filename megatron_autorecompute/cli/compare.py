"""`megatron-autorecompute compare`: runs Megatron's own strategies and ours on this machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_autorecompute.cli.command import Command


class CompareCommand(Command):
    """Runs the comparison, which parses its own flags (`args.flags`)."""

    name = "compare"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add nothing: the comparison has its own parser, whose defaults depend on the machine."""

    def run(self, args: Namespace) -> None:
        """Compare; ends the program with the comparison's exit code."""
        from megatron_autorecompute.compare.run import main  # loads torch and Megatron

        raise SystemExit(main(args.flags, f"megatron-autorecompute {self.name}"))
