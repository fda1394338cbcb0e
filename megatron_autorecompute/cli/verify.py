"""`megatron-autorecompute verify`: compares a plan's peaks with Megatron's own schedule."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.output import (
    add_json,
    print_result,
    progress_bars,
    quiet_upstream,
)
from megatron_autorecompute.planner.plan import Plan


class VerifyCommand(Command):
    """Runs Megatron's schedule under a plan, on meta tensors."""

    name = "verify"
    help = "check a plan's peaks against Megatron's own schedule, without a device"
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
    with quiet_upstream(), progress_bars() as bars:
        from megatron_autorecompute.meta import verify  # loads torch and Megatron

        task = bars.add_task("Megatron's schedule, stage by stage", total=plan.layout.num_stages)
        checks = verify.verify(plan, lambda _: bars.advance(task))
    data = [asdict(check) | {"error": check.error, "fits": check.fits} for check in checks]
    print_result(args, json.dumps(data, indent=1), verify.table(checks))
    verify.require_verified(checks)
