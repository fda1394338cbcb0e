"""`megatron-autorecompute show`: prints a plan as `plan` does, a profile as `estimate` does."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from megatron_autorecompute import json_records
from megatron_autorecompute.cli.arguments import add_json, add_verbose, file
from megatron_autorecompute.cli.output import check_output, print_plan, print_result, without_effect
from megatron_autorecompute.cli.profile_view import profile_view
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import Profile

READS = ("plan",)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the plan's or profile's file."""
    parser.add_argument("plan", metavar="FILE.json", help="a plan or a profile")
    parser.add_argument(
        "--svg",
        type=file,
        metavar="FILE",
        help="also draw the policy for a document; - prints the picture alone",
    )
    add_json(parser)
    add_verbose(parser)


def run(args: Namespace) -> None:
    """Print it.

    Raises ProfileError if the file is neither plan nor profile or the picture cannot be
    written, OptionError for a picture that would replace it, and for a picture of a profile.
    """
    alone = str(args.svg) == "-"
    if alone and args.json:
        raise without_effect("--json", "--svg -", "the picture is printed alone")
    if args.svg and not alone:
        check_output(args, args.svg)
    text = json_records.read(args.plan, Plan.__name__)
    if json_records.has_fields(text, "kinds", "parallelism"):
        if args.svg:
            raise without_effect("--svg", args.plan, "it is a profile and has no policy")
        profile = Profile.from_json(text, str(args.plan))
        print_result(args, profile.to_json(), profile_view(profile, args.verbose))
        return
    plan = Plan.from_json(text, str(args.plan))
    if args.svg:
        from megatron_autorecompute.report.figures import strip_svg  # loads matplotlib

        picture = strip_svg(plan)
        if alone:
            print(picture)
            return
        json_records.write_atomically(picture, args.svg)
        print(f"Drawn: {args.svg}", file=sys.stderr)
    print_plan(args, plan)
