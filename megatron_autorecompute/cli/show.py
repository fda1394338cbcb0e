"""`megatron-autorecompute show`: a plan, stage by stage."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.output import add_json, print_plan
from megatron_autorecompute.planner.plan import Plan


class ShowCommand(Command):
    """Prints a plan in the same form as `plan`."""

    name = "show"
    help = "print a plan, stage by stage"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the plan's file."""
        parser.add_argument("plan", metavar="PLAN.json")
        add_json(parser)

    def run(self, args: Namespace) -> None:
        """Print it; raises ProfileError if the file is no plan."""
        print_plan(args, Plan.load(args.plan))
