"""`megatron-autorecompute pareto`: step time against the budget."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from rich.console import Group
from rich.text import Text

from megatron_autorecompute.cli.arguments import add_json, at_least, picture
from megatron_autorecompute.cli.output import check_output, console, print_result
from megatron_autorecompute.cli.problem import add_problem, problems, read_source
from megatron_autorecompute.planner.search.curve import pareto
from megatron_autorecompute.report import terminal
from megatron_autorecompute.report.data import Curve, needs_of_unbeaten, strategies_of

TAKES_MEGATRON_FLAGS = True
READS = ("profile", "job")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of the problem, and the number of budgets."""
    add_problem(parser)
    parser.add_argument(
        "--points",
        type=at_least(1, 4096),
        default=64,
        metavar="N",
        help="number of budgets at even distances (default: 64)",
    )
    parser.add_argument(
        "--plot",
        type=picture,
        metavar="FILE",
        help="also draw the curve and Megatron's own settings; the name says PNG or SVG",
    )
    add_json(parser)


def run(args: Namespace) -> None:
    """Print the curve, and draw it if asked; raises as `check_output`."""
    if args.plot:
        check_output(args, args.plot)
    (problem,), asked = problems(args, read_source(args))
    with console(stderr=True).status("Megatron's own settings, and budgets"):
        strategies = strategies_of(problem)
        points = pareto(problem, args.points, needs_of_unbeaten(strategies))
    percentile = problem.imbalance_percentile
    said = [*asked.notes, *terminal.imbalance_lines(problem.profile, percentile)]
    view = Group(terminal.curve_view(points, strategies), *map(Text, said))
    own = [{k: v for k, v in asdict(each).items() if k != "fits"} for each in strategies]
    data = {"points": list(map(asdict, points)), "strategies": own}
    print_result(args, json.dumps(data, indent=1), view)
    if args.plot:
        from megatron_autorecompute.report.chart import curve_chart  # loads matplotlib
        from megatron_autorecompute.report.figures import save_picture

        curve = Curve(problem.profile.model.name, points, strategies)
        about = "the best policy for every budget (line), Megatron's own settings (points)"
        save_picture(curve_chart(curve, f"{curve.title}: {about}"), args.plot)
        print(f"Drawn: {args.plot}.", file=sys.stderr)
