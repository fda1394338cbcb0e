"""`megatron-autorecompute example`: prints a job description of this package."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.jobs import EXAMPLES, example, examples


class ExampleCommand(Command):
    """Prints the YAML of an example; without a name, the names."""

    name = "example"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the example's name."""
        parser.add_argument("example", nargs="?", type=example, metavar="NAME")

    def run(self, args: Namespace) -> None:
        """Print the example's job description."""
        if args.example is not None:
            print((EXAMPLES / f"{args.example}.yaml").read_text(encoding="utf-8"), end="")
            return
        for name in examples():
            first = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
            print(f"{name:20} {first.removeprefix('# ')}")
