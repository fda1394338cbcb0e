"""`megatron-autorecompute show`: a plan, stage by stage."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_autorecompute.cli import streams
from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.output import add_json, print_plan
from megatron_autorecompute.cli.values import file
from megatron_autorecompute.json_records import write_atomically
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.strip import strip_svg


class ShowCommand(Command):
    """Prints a plan in the same form as `plan`."""

    name = "show"
    help = "print a plan, stage by stage"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the plan's file."""
        parser.add_argument("plan", metavar="PLAN.json")
        parser.add_argument(
            "--svg",
            type=file,
            metavar="FILE",
            help="also draw the policy, for a document; - prints it alone",
        )
        add_json(parser)

    def run(self, args: Namespace) -> None:
        """Print it; raises ProfileError if the file is no plan or the picture cannot be written."""
        plan = Plan.load(args.plan)
        if args.svg and streams.is_standard_output(args.svg):
            streams.write(strip_svg(plan))
            return
        if args.svg:
            write_atomically(strip_svg(plan), args.svg)
            streams.say(f"Drawn: {args.svg}")
        print_plan(args, plan)
