"""How commands print: JSON or a view, and progress on a terminal."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_autorecompute import json_records
from megatron_autorecompute.cli.throughput import throughput_words
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.patched import patched_environ
from megatron_autorecompute.planner.launch_lines import launch_lines
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report import terminal


def without_effect(option: str, beside: str, why: str) -> OptionError:
    """The error for an option that would be ignored because of another."""
    return OptionError(f"{option} has no effect with {beside}: {why}. Leave one of them out.")


def console(*, stderr: bool = False) -> Console:
    """The console of a command. NO_COLOR turns off bold as well (https://no-color.org).

    Brackets and colons in names are no markup.
    """
    plain: dict[str, Any] = {"color_system": None} if os.environ.get("NO_COLOR") else {}
    return Console(highlight=False, markup=False, emoji=False, stderr=stderr, **plain)


def print_result(args: Namespace, data: str, view: RenderableType) -> None:
    """Print the data (JSON) if `--json` was given, else the view."""
    if args.json:
        print(data.rstrip("\n"))
    else:
        console().print(view)


def output_file(args: Namespace) -> Path | None:
    """The file that `-o` names, checked to be writable; None without `-o`.

    Standard output is no such file: the JSON is printed there, as with `--json`.

    Raises: as `check_output`.
    """
    if args.output is None:
        return None
    if str(args.output) == "-":
        args.json = True
        return None
    check_output(args, args.output)
    return Path(args.output)


def check_output(args: Namespace, path: Path) -> None:
    """Raise ProfileError if a file cannot be written, OptionError if it is one that the command
    reads."""
    given = [getattr(args, name) for name in getattr(args.command, "READS", ())]
    lists = [each if isinstance(each, list) else [each] for each in given]
    json_records.check_writable(path, [read for each in lists for read in each if read is not None])


def print_plan(args: Namespace, plan: Plan, beside: Mapping[str, Any] | None = None) -> None:
    """Print a plan, and the text to paste into the job's launch; in JSON, `beside` too."""
    lines = launch_lines(plan)
    view = terminal.plan_view(plan, throughput_words(plan), verbose=args.verbose)
    print_result(args, plan.to_json(beside), view)
    if not args.json:
        for line in lines:
            if line.startswith(("--", "'--", "cfg.")):
                print(line)  # not through rich: a wrapped line cannot be pasted
            else:
                console().print(line)


def progress_bars() -> Progress:
    """Progress bars on standard error, if it is a terminal; they disappear when done."""
    where = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(
        *columns,
        console=where,
        transient=True,
        disable=not where.is_terminal,
        redirect_stdout=sys.stdout.isatty(),
    )


@contextmanager
def quiet_upstream() -> Iterator[None]:
    """Suppress warnings of torch and megatron-core about missing CUDA, TE and Apex, and that a
    GPTModel is deprecated."""
    for_processes = {"PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore")}
    megatron = logging.getLogger("megatron")
    level = megatron.level
    megatron.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), patched_environ(for_processes):
            warnings.filterwarnings("ignore", module=r"(torch|megatron)\.")
            yield
    finally:
        megatron.setLevel(level)
