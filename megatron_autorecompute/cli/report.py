"""`megatron-autorecompute report`: a plan as one HTML file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress as Bar

from megatron_autorecompute.json_records import write_atomically
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.data import Progress, report_data
from megatron_autorecompute.report.html import html

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def add_report(verbs: Verbs) -> None:
    """The verb and its flags."""
    verb = verbs.add_parser("report", help="look at a plan: one HTML file that opens offline")
    verb.add_argument("plan", type=Path, metavar="PLAN.json")
    verb.add_argument(
        "-o", "--output", type=Path, metavar="PLAN.html", help="default: beside the plan"
    )
    verb.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> None:
    output = args.output or args.plan.with_suffix(".html")
    with shown_progress() as progress:
        data = report_data(Plan.load(args.plan), progress)
    write_atomically(html(data), output)
    print(f"Written: {output}. Open it in a browser; it needs no network.")


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """A bar for each thing that is computed, on standard error while it is a terminal."""
    console = Console(file=sys.stderr)
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks = {}

        def progress(what: str, share: float) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=1.0)
            bar.update(tasks[what], completed=share)

        yield progress
