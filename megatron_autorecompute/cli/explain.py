"""`megatron-autorecompute explain`: prints the binding moment of every stage of a plan."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from megatron_autorecompute.cli.arguments import add_json
from megatron_autorecompute.cli.output import print_result
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report import terminal

READS = ("plan",)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the plan's file."""
    parser.add_argument("plan", metavar="PLAN.json")
    add_json(parser)


def run(args: Namespace) -> None:
    """Print it; raises ProfileError for a file that is no plan."""
    plan = Plan.load(args.plan)
    evidence = json.dumps([asdict(item) for item in plan.evidence], indent=1)
    print_result(args, evidence, terminal.stages_explained(plan))
