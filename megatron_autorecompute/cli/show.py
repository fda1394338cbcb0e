"""`megatron-autorecompute show`: a plan, stage by stage, or a profile, choice by choice."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_autorecompute import json_records
from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.output import (
    add_json,
    add_verbose,
    print_plan,
    print_result,
    refuse_ignored,
)
from megatron_autorecompute.cli.profile_view import profile_view
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import Profile


class ShowCommand(Command):
    """Prints a plan in the same form as `plan`, a profile in the same form as `estimate`."""

    name = "show"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the file."""
        parser.add_argument("plan", metavar="FILE.json", help="a plan or a profile")
        add_json(parser)
        add_verbose(parser)

    def run(self, args: Namespace) -> None:
        """Print it; raises ProfileError if the file is neither plan nor profile."""
        refuse_ignored(args)
        text = json_records.read(args.plan, Plan.__name__)
        if json_records.has_fields(text, "kinds", "parallelism"):
            profile = Profile.from_json(text, str(args.plan))
            print_result(args, profile.to_json(), profile_view(profile, args.verbose))
        else:
            print_plan(args, Plan.from_json(text, str(args.plan)))
