"""How commands print: JSON or a view, and progress on a terminal."""

from __future__ import annotations

import os
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import Progress

from megatron_autorecompute.patched import patched_environ
from megatron_autorecompute.planner.launch_lines import launch_lines
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report import terminal


def add_json(parser: ArgumentParser) -> None:
    """Add the flag `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def print_result(args: Namespace, data: str, view: RenderableType) -> None:
    """Print the data (JSON) if `--json` was given, else the view."""
    if args.json:
        print(data.rstrip("\n"))
    else:
        Console(highlight=False).print(view)


def print_plan(args: Namespace, plan: Plan) -> None:
    """Print a plan, and the text to paste into the job's launch."""
    lines = launch_lines(plan)
    print_result(args, plan.to_json(), terminal.plan_view(plan))
    if not args.json:
        for line in lines:
            print(line)  # not through rich: a wrapped line cannot be pasted


def progress_bars() -> Progress:
    """Progress bars on standard error, if it is a terminal; they disappear when done."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def quiet_upstream() -> Iterator[None]:
    """Suppress warnings of torch and megatron-core about missing CUDA, TE and Apex."""
    for_processes = {"PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore")}
    with warnings.catch_warnings(), patched_environ(for_processes):
        warnings.filterwarnings("ignore", module=r"(torch|megatron)\.")
        yield
