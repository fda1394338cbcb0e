"""`megatron-autorecompute pareto`: step time against the budget."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from rich.console import Group
from rich.text import Text

from megatron_autorecompute.cli import streams
from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.output import add_json, print_result, progress_bars
from megatron_autorecompute.cli.problem import add_problem, planners
from megatron_autorecompute.cli.values import MOST_POINTS, at_least, picture
from megatron_autorecompute.planner.outcomes import Outcomes
from megatron_autorecompute.planner.plan import curve_point
from megatron_autorecompute.planner.planner import Planner
from megatron_autorecompute.report import terminal
from megatron_autorecompute.report.data import Curve, best_points, strategies_of, unbeaten

_REARRANGED = (
    " What its policies recompute is rearranged over a stage's chunks for a shorter bubble, as in "
    "plans; in the table it is not."
)


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
        parser.add_argument(
            "--plot",
            type=picture,
            metavar="FILE",
            help="also draw the curve and Megatron's own settings; PNG or SVG by the name",
        )
        add_json(parser)

    def run(self, args: Namespace) -> None:
        """Print the curve, and draw it if asked; raises MachineError if the file cannot be."""
        (planner,) = planners(args)
        with progress_bars() as bars:
            task = bars.add_task("Budgets", total=1)
            found = planner.pareto(args.points, lambda share: bars.update(task, completed=share))
        points = [curve_point(point) for point in found]
        if args.plot:
            _draw(planner, args.points, args.plot)
        data = json.dumps([asdict(point) for point in points], indent=1)
        said = terminal.imbalance_lines(planner.profile, planner.percentile)
        print_result(args, data, Group(terminal.curve_view(points), *map(Text, said)))


def _draw(planner: Planner, num_points: int, path: Path) -> None:
    from megatron_autorecompute.report.figures import curve_picture  # loads matplotlib

    outcomes = Outcomes(planner)
    with progress_bars() as bars:
        task = bars.add_task("Picture", total=2)
        strategies = strategies_of(
            planner, outcomes, None, lambda share: bars.update(task, completed=share)
        )
        points = best_points(
            planner,
            outcomes,
            unbeaten(strategies),
            (),
            lambda share: bars.update(task, completed=1 + share),
            num_points,
        )
    curve_picture(Curve(planner.profile.model.name, points, strategies), path)
    streams.say(f"Drawn: {path}.{_REARRANGED * (planner.layout.num_chunks > 1)}")
