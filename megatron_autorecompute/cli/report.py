"""`megatron-autorecompute report`: a plan as one HTML file."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import TaskID

from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.output import progress_bars
from megatron_autorecompute.json_records import write_atomically
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.data import Progress, report_data
from megatron_autorecompute.report.html import html


class ReportCommand(Command):
    """Writes the file."""

    name = "report"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the plan's file, and the page's."""
        parser.add_argument("plan", type=Path, metavar="PLAN.json")
        parser.add_argument(
            "-o", "--output", type=Path, metavar="PLAN.html", help="default: beside the plan"
        )

    def run(self, args: Namespace) -> None:
        """Write the page and print its path; raises ProfileError if the file is no plan."""
        output = args.output or args.plan.with_suffix(".html")
        with _shown_progress() as progress:
            data = report_data(Plan.load(args.plan), progress)
        write_atomically(html(data), output)
        print(f"Written: {output}. Open it in a browser; it needs no network.")


@contextmanager
def _shown_progress() -> Iterator[Progress]:
    """A progress bar for each part of the computation."""
    with progress_bars() as bars:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, share: float) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=1.0)
            bars.update(tasks[what], completed=share)

        yield progress
