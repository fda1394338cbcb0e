"""`megatron-autorecompute plan`: the fastest policy that fits a budget."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.output import add_json, output_file, print_plan
from megatron_autorecompute.cli.problem import add_problem, planners
from megatron_autorecompute.cli.values import budgets, file, sizes
from megatron_autorecompute.cli.verify import print_verified
from megatron_autorecompute.errors import InfeasibleError
from megatron_autorecompute.planner.layout_search import search_layout
from megatron_autorecompute.planner.micro_batch_search import search_micro_batch
from megatron_autorecompute.planner.plan import Plan, make_plan
from megatron_autorecompute.planner.suggestions import explained


class PlanCommand(Command):
    """Solves, writes the plan and prints it."""

    name = "plan"
    help = "solve a profile for a budget"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the flags of the problem, the budget, further searches, and the output file."""
        add_problem(parser)
        parser.add_argument(
            "--budget-gib",
            required=True,
            type=budgets,
            metavar="GIB[,GIB...]",
            help="what torch may allocate on each device, one for all stages or one each",
        )
        parser.add_argument(
            "--search-layout", action="store_true", help="also search the layers per stage"
        )
        parser.add_argument(
            "--search-micro-batch",
            type=sizes,
            default=(),
            metavar="B,B,...",
            help="also search the micro-batch size; give one --profile for each",
        )
        parser.add_argument(
            "-o", "--output", type=file, metavar="PLAN.json", help="write the plan; - prints it"
        )
        parser.add_argument(
            "--verify", action="store_true", help="run Megatron's own schedule under the plan"
        )
        add_json(parser)

    def run(self, args: Namespace) -> None:
        """Solve; if nothing fits, raises InfeasibleError with changes that would make it fit."""
        output = output_file(args)
        plan = _solved(args)
        try:
            if output is not None:
                plan.save(output)
        finally:
            print_plan(args, plan)
        if args.verify:
            print_verified(args, plan)


def _solved(args: Namespace) -> Plan:
    found = planners(args, args.search_micro_batch)
    budget = args.budget_gib[0] if len(args.budget_gib) == 1 else args.budget_gib
    planner, notes = found[0], list[str]()
    flags: dict[str, str] = {}
    if args.search_micro_batch:
        searched, sentences = search_micro_batch(found, budget)
        planner, notes = searched.planner, list(sentences)
        flags.update(searched.megatron_flags)
    if args.search_layout:
        searched = search_layout(planner, budget)
        planner = searched.planner
        notes.append(searched.note)
        flags.update(searched.megatron_flags)
    try:
        return make_plan(planner, budget, megatron_flags=flags, notes=notes)
    except InfeasibleError as error:
        raise explained(error, planner, budget) from error
