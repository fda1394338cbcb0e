"""`megatron-autorecompute pareto`: step time against the budget."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from rich.console import Group
from rich.text import Text

from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.output import add_json, print_result, progress_bars
from megatron_autorecompute.cli.problem import add_problem, planners
from megatron_autorecompute.cli.values import MOST_POINTS, at_least
from megatron_autorecompute.planner.plan import curve_point
from megatron_autorecompute.report import terminal


class ParetoCommand(Command):
    """Solves for many budgets and prints the curve."""

    name = "pareto"
    help = "time of the step against the budget"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the flags of the problem, and the number of budgets."""
        add_problem(parser)
        parser.add_argument(
            "--points",
            type=at_least(1, MOST_POINTS),
            default=64,
            metavar="N",
            help="budgets (default: 64)",
        )
        add_json(parser)

    def run(self, args: Namespace) -> None:
        """Print the curve."""
        (planner,) = planners(args)
        with progress_bars() as bars:
            task = bars.add_task("Budgets", total=1)
            found = planner.pareto(args.points, lambda share: bars.update(task, completed=share))
        points = [curve_point(point) for point in found]
        data = json.dumps([asdict(point) for point in points], indent=1)
        said = terminal.imbalance_lines(planner.profile, planner.percentile)
        print_result(args, data, Group(terminal.curve_view(points), *map(Text, said)))
