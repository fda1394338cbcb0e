"""`megatron-autorecompute report`: writes a plan as one HTML file."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from megatron_autorecompute.cli.arguments import add_output, at_least
from megatron_autorecompute.cli.output import console, output_file
from megatron_autorecompute.cli.throughput import throughput_words
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.json_records import write_atomically
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.data import report_data
from megatron_autorecompute.report.recorded import recorded_step

READS = ("plan", "snapshot")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the paths of plan and page."""
    parser.add_argument("plan", metavar="PLAN.json")
    add_output(parser, "PLAN.html", "file to write (default: beside the plan); - prints it")
    parser.add_argument(
        "--snapshot",
        type=Path,
        metavar="RANK0.pickle",
        help="also draw the memory history that torch.cuda.memory._dump_snapshot wrote",
    )
    parser.add_argument(
        "--stage",
        type=at_least(0),
        help="pipeline stage of the snapshot (default: the only one)",
    )


def run(args: Namespace) -> None:
    """Write the page and print its path.

    Raises:
        ProfileError: the file is no plan, the snapshot is none, or the page cannot be written.
        OptionError: the page would replace the plan or the snapshot; the snapshot's stage is
            not known, or is given without a snapshot.
    """
    if args.stage is not None and args.snapshot is None:
        raise OptionError("--stage is the stage of a snapshot: give --snapshot FILE with it.")
    if args.output is None:
        args.output = Path(os.path.splitext(args.plan)[0] + ".html")
    from megatron_autorecompute.report.html import html  # loads matplotlib

    output, plan = output_file(args), Plan.load(args.plan)
    recorded = recorded_step(plan, args.snapshot, args.stage) if args.snapshot else None
    with console(stderr=True).status("Other choices, and other budgets"):
        data = report_data(plan)
    page = html(replace(data, recorded=recorded, speed=throughput_words(plan)))
    if output is None:
        print(page)
        return
    write_atomically(page, output)
    print(f"Written: {output}. Open it in a browser; it needs no network.")
