"""`megatron-autorecompute pareto`: step time against the budget."""

from __future__ import annotations

import csv
import io
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from rich.console import Group, RenderableType
from rich.text import Text

from megatron_autorecompute.cli import streams
from megatron_autorecompute.cli.command import MOST_POINTS, Command, at_least, picture
from megatron_autorecompute.cli.output import check_output, print_result, shown_progress
from megatron_autorecompute.cli.problem import add_problem, problems, read_source
from megatron_autorecompute.planner.plan import ManualResult
from megatron_autorecompute.planner.search.curve import CurvePoint, pareto
from megatron_autorecompute.planner.search.manual import may_offload
from megatron_autorecompute.planner.search.solve import without_offload
from megatron_autorecompute.report import terminal
from megatron_autorecompute.report.data import Curve, best_points, strategies_of

STRATEGY_FIELDS = ("name", "step_ms", "peak_high_bytes")
"""The fields of one of Megatron's own settings, as the JSON output names them."""


class ParetoCommand(Command):
    """Solves for many budgets and prints the curve."""

    takes_megatron_flags = True
    reads = ("profile", "job")

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the flags of the problem, and the number of budgets."""
        add_problem(parser)
        parser.add_argument(
            "--points",
            type=at_least(1, MOST_POINTS),
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
        form = parser.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="print all as JSON, not a table")
        form.add_argument("--csv", action="store_true", help="print all as CSV, not a table")

    def run(self, args: Namespace) -> None:
        """Print the curve, and draw it if asked; raises as `check_output`."""
        if args.plot:
            check_output(args, args.plot)
        (problem,), asked = problems(args, read_source(args))
        with shown_progress() as progress:
            own = partial(progress, "Megatron's own settings")
            strategies = strategies_of(problem, None, own)
            budgets = partial(progress, "Budgets")
            points = best_points(problem, strategies, budgets, num_points=args.points)
        # None where nothing offloads, or some layers must.
        without = without_offload(problem) if may_offload(problem) else None
        apart = [] if without is None else list(pareto(without, args.points))
        if args.csv:
            print(as_csv(points, strategies), end="")
        else:
            percentile = problem.imbalance_percentile
            said = [*asked.notes, *terminal.imbalance_lines(problem.profile, percentile)]
            parts: list[RenderableType] = [terminal.curve_view(points, strategies)]
            if apart:
                parts += [Text("Without offload:"), terminal.curve_view(apart, ())]
            view = Group(*parts, *map(Text, said))
            print_result(args, as_json(points, strategies, apart), view)
        if args.plot:
            from megatron_autorecompute.report.chart import curve_chart  # loads matplotlib
            from megatron_autorecompute.report.figures import save_picture

            curve = Curve(problem.profile.model.name, points, strategies)
            about = "the best policy for every budget (line), Megatron's own settings (points)"
            save_picture(curve_chart(curve, f"{curve.title}: {about}"), args.plot)
            streams.say(f"Drawn: {args.plot}.")


def as_json(
    points: Sequence[CurvePoint],
    strategies: Sequence[ManualResult],
    without_offload: Sequence[CurvePoint] = (),
) -> str:
    """All plans, largest budget first, and all of Megatron's own settings; where layers may
    offload, also the plans without."""
    own = [{name: getattr(each, name) for name in STRATEGY_FIELDS} for each in strategies]
    data = {"points": [asdict(p) for p in points], "strategies": own}
    if without_offload:
        data["points_without_offload"] = [asdict(p) for p in without_offload]
    return json.dumps(data, indent=1)


def as_csv(points: Sequence[CurvePoint], strategies: Sequence[ManualResult]) -> str:
    """The curve and Megatron's own settings as CSV; a setting of Megatron's has no budget."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["budget_bytes", "step_ms", "peak_high_bytes", "recompute_policy"])
    rows.writerows(
        [p.budget_bytes, p.step_ms, p.peak_high_bytes, p.recompute_policy] for p in points
    )
    rows.writerows(["", s.step_ms, s.peak_high_bytes, s.name] for s in strategies)
    return text.getvalue()
