"""How commands print: JSON or a view, and progress on a terminal."""

from __future__ import annotations

import os
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import Progress

from megatron_autorecompute import json_records
from megatron_autorecompute.cli import streams
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
        # Names in a file are no markup, and move no cursor.
        Console(highlight=False, markup=False, emoji=False).print(streams.Printable(view))


def output_file(args: Namespace) -> Path | None:
    """The file that `-o` names, which can be written; None for none.

    Standard output is no such file: the JSON is printed there, as with `--json`.

    Raises: ProfileError if the file cannot be written.
    """
    if args.output is None:
        return None
    if streams.is_standard_output(args.output):
        args.json = True
        return None
    json_records.check_writable(args.output)
    return Path(args.output)


def print_plan(args: Namespace, plan: Plan) -> None:
    """Print a plan, and the text to paste into the job's launch."""
    lines = launch_lines(plan)
    print_result(args, plan.to_json(), terminal.plan_view(plan))
    if not args.json:
        for line in lines:
            print(streams.printable(line))  # not through rich: a wrapped line cannot be pasted


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
