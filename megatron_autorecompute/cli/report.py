"""`megatron-autorecompute report`: a plan as one HTML file."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.progress import TaskID

from megatron_autorecompute.cli import streams
from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.output import add_output, output_file, progress_bars
from megatron_autorecompute.cli.throughput import throughput_words
from megatron_autorecompute.cli.values import at_least
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.json_records import write_atomically
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.data import Progress, report_data
from megatron_autorecompute.report.html import html
from megatron_autorecompute.report.recorded import recorded_step


class ReportCommand(Command):
    """Writes a plan as one HTML file."""

    name = "report"
    reads = ("plan", "snapshot")

    def add_arguments(self, parser: ArgumentParser) -> None:
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
            help="pipeline stage of the snapshot (default: by the rank in the file's name)",
        )

    def run(self, args: Namespace) -> None:
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
        output, plan = output_file(args), Plan.load(args.plan)
        recorded = recorded_step(plan, args.snapshot, args.stage) if args.snapshot else None
        with _shown_progress() as progress:
            data = replace(report_data(plan, progress), recorded=recorded)
        page = html(replace(data, speed=throughput_words(plan)))
        if output is None:
            streams.write(page)
            return
        write_atomically(page, output)
        print(streams.printable(f"Written: {output}. Open it in a browser; it needs no network."))


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
