"""`megatron-autorecompute show`: a plan, stage by stage, or a profile, choice by choice."""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentParser, Namespace

from megatron_autorecompute import json_records
from megatron_autorecompute.cli import streams
from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.for_hybrid import for_hybrid, pattern_of_plan
from megatron_autorecompute.cli.output import (
    add_json,
    add_verbose,
    check_output,
    print_plan,
    print_result,
    refuse_ignored,
    without_effect,
)
from megatron_autorecompute.cli.profile_view import profile_view
from megatron_autorecompute.cli.values import file
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.report.strip import strip_svg


class ShowCommand(Command):
    """Prints a plan in the same form as `plan`, a profile in the same form as `estimate`."""

    name = "show"
    reads = ("plan",)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the plan's or profile's file."""
        parser.add_argument("plan", metavar="FILE.json", help="a plan or a profile")
        parser.add_argument(
            "--svg",
            type=file,
            metavar="FILE",
            help="also draw the policy for a document; - prints the picture alone",
        )
        parser.add_argument(
            "--for-hybrid",
            action="store_true",
            help="print a GPT's plan for a HybridModel of the same layers: pattern and policy",
        )
        add_json(parser)
        add_verbose(parser)

    def run(self, args: Namespace) -> None:
        """Print it.

        Raises ProfileError if the file is neither plan nor profile or the picture cannot be
        written, OptionError for a picture that would replace it, and for a picture or a translation
        of a profile.
        """
        refuse_ignored(args)
        if args.svg and not streams.is_standard_output(args.svg):
            check_output(args, args.svg)
        text = json_records.read(args.plan, Plan.__name__)
        if json_records.has_fields(text, "kinds", "parallelism"):
            if args.svg:
                raise without_effect("--svg", args.plan, "it is a profile and has no policy")
            if args.for_hybrid:
                raise without_effect("--for-hybrid", args.plan, "it is a profile and has no policy")
            profile = Profile.from_json(text, str(args.plan))
            print_result(args, profile.to_json(), profile_view(profile, args.verbose))
            return
        plan = Plan.from_json(text, str(args.plan))
        if args.for_hybrid:
            _print_for_hybrid(args, plan)
            return
        if args.svg and streams.is_standard_output(args.svg):
            if args.json:
                raise without_effect("--json", f"--svg {args.svg}", "the picture is printed alone")
            streams.write(strip_svg(plan))
            return
        if args.svg:
            json_records.write_atomically(strip_svg(plan), args.svg)
            streams.say(f"Drawn: {args.svg}")
        print_plan(args, plan)


def _print_for_hybrid(args: Namespace, plan: Plan) -> None:
    pattern = pattern_of_plan(plan)
    policy = for_hybrid(plan.policy, plan.layout.num_layers)
    found = {"hybrid_layer_pattern": str(pattern), "recompute_policy": policy.format()}
    if args.json:
        streams.write(json.dumps(found) + "\n")
        return
    streams.write(
        "".join(f"--{name.replace('_', '-')} {shlex.quote(v)}\n" for name, v in found.items())
    )
