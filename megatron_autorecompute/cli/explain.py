"""`megatron-autorecompute explain`: why a plan made its choices."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.output import add_json, print_result
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.planner.search.neighbours import neighbours
from megatron_autorecompute.report import terminal


class ExplainCommand(Command):
    """Prints the binding moment of every stage, or the cost of one layer's other choices."""

    name = "explain"
    reads = ("plan",)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the plan's file and the layer."""
        parser.add_argument("plan", metavar="PLAN.json")
        parser.add_argument(
            "--layer",
            type=int,
            metavar="I",
            help="print what other choices of layer I (from 0) cost",
        )
        add_json(parser)

    def run(self, args: Namespace) -> None:
        """Print it; raises ProfileError for a file that is no plan, PolicyError for a bad layer."""
        plan = Plan.load(args.plan)
        if args.layer is None:
            _explain_stages(args, plan)
        else:
            _explain_layer(args, plan)


def _explain_stages(args: Namespace, plan: Plan) -> None:
    evidence = json.dumps([asdict(item) for item in plan.evidence], indent=1)
    print_result(args, evidence, terminal.stages_explained(plan))


def _explain_layer(args: Namespace, plan: Plan) -> None:
    found = neighbours(plan.problem(), plan.policy, args.layer)
    stage = next(
        number
        for number, chunks in enumerate(plan.layout.stages)
        if any(args.layer in chunk.layers for chunk in chunks)
    )
    data = {
        "layer": args.layer,
        "stage": stage,
        "choice": plan.recompute_policy[args.layer],
        "binding": plan.evidence[stage].binding,
        "others": terminal.neighbour_rows(plan, stage, found),
    }
    view = terminal.neighbours_view(plan, args.layer, stage, found)
    print_result(args, json.dumps(data, indent=1), view)
