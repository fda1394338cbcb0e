"""`megatron-autorecompute compare`: runs Megatron's own strategies and ours on this machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_autorecompute.cli.command import Command


class CompareCommand(Command):
    """Measures Megatron's own strategies against ours on this machine; `flags` are all its own."""

    name = "compare"
    help = "run Megatron's own strategies and ours on this machine, and print the table"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add nothing: what is on the machine decides defaults, so the comparison has a parser."""

    def run(self, args: Namespace) -> None:
        """Compare; ends the program with the comparison's exit code."""
        from megatron_autorecompute.compare.run import main  # loads torch and Megatron

        raise SystemExit(main(args.flags, f"megatron-autorecompute {self.name}"))
