"""`megatron-autorecompute verify`: compares a plan's peaks with Megatron's own schedule."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.output import (
    add_json,
    progress_bars,
    quiet_upstream,
)
from megatron_autorecompute.planner.plan import Plan


class VerifyCommand(Command):
    """Runs Megatron's schedule under a plan, on meta tensors."""

    name = "verify"
    description = "Ends with 10 where a stage exceeds its budget or differs by more than 0.5%%."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the plan's file."""
        parser.add_argument("plan", metavar="PLAN.json")
        add_json(parser)

    def run(self, args: Namespace) -> None:
        """Verify; raises VerificationError if Megatron's own schedule disagrees."""
        print_verified(args, Plan.load(args.plan))


def print_verified(args: Namespace, plan: Plan) -> None:
    """Run Megatron's schedule under a plan and print the bytes it needs, stage by stage.

    Raises VerificationError if a stage exceeds its budget or differs from the prediction.
    """
    with quiet_upstream():
        from megatron_autorecompute.meta import verify  # loads torch and Megatron

        unit, piped = verify.unit_of(plan), not args.json and not sys.stdout.isatty()
        lines: list[str] = []

        def say(text: str) -> None:
            lines.append(text)
            if piped:  # a log shows every stage as soon as it is done
                print(text, flush=True)

        with progress_bars() as bars:
            task = bars.add_task("Megatron's own schedule", total=plan.layout.num_stages)

            def done(check: verify.StageCheck) -> None:
                if not lines:
                    say(verify.header(unit))
                say(verify.line(check, unit))
                bars.advance(task)

            checks = verify.verify(plan, done)
        if args.json:
            data = [asdict(each) | {"error": each.error, "fits": each.fits} for each in checks]
            print(json.dumps(data, indent=1))
        elif not piped:
            print("\n".join(lines))
        verify.require_verified(checks)
        if not args.json:
            print(verify.verdict(checks))
