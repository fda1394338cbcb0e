"""`megatron-autorecompute example`: prints an example's YAML; without a name, the names."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_autorecompute.cli.jobs import EXAMPLES, examples


def add_arguments(parser: ArgumentParser) -> None:
    """Add the example's name."""
    parser.add_argument("example", nargs="?", choices=examples(), metavar="NAME")


def run(args: Namespace) -> None:
    """Print the example's job description."""
    if args.example is not None:
        print((EXAMPLES / f"{args.example}.yaml").read_text(encoding="utf-8"), end="")
        return
    for name in examples():
        first = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
        print(f"{name:20} {first.removeprefix('# ')}")
