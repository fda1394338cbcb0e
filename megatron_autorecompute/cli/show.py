"""The commands that read a plan: `show`, `explain`, `report` and `trace`."""

from __future__ import annotations

import gzip
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, replace
from pathlib import Path

from megatron_autorecompute import json_records
from megatron_autorecompute.cli.command import Command, at_least, file
from megatron_autorecompute.cli.output import (
    add_json,
    add_output,
    add_verbose,
    check_output,
    console,
    output_file,
    print_plan,
    print_result,
    without_effect,
)
from megatron_autorecompute.cli.profile_view import profile_view
from megatron_autorecompute.cli.throughput import throughput_words
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.json_records import write_atomically
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.report import terminal
from megatron_autorecompute.report.data import report_data
from megatron_autorecompute.report.recorded import recorded_step
from megatron_autorecompute.report.trace import trace_json


class ShowCommand(Command):
    """Prints a plan in the same form as `plan`, a profile in the same form as `estimate`."""

    reads = ("plan",)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the plan's or profile's file."""
        parser.add_argument("plan", metavar="FILE.json", help="a plan or a profile")
        parser.add_argument(
            "--svg",
            type=file,
            metavar="FILE",
            help="also draw the policy for a document; - prints the picture alone",
        )
        add_json(parser)
        add_verbose(parser)

    def run(self, args: Namespace) -> None:
        """Print it.

        Raises ProfileError if the file is neither plan nor profile or the picture cannot be
        written, OptionError for a picture that would replace it, and for a picture of a profile.
        """
        alone = str(args.svg) == "-"
        if alone and args.json:
            raise without_effect("--json", "--svg -", "the picture is printed alone")
        if args.svg and not alone:
            check_output(args, args.svg)
        text = json_records.read(args.plan, Plan.__name__)
        if json_records.has_fields(text, "kinds", "parallelism"):
            if args.svg:
                raise without_effect("--svg", args.plan, "it is a profile and has no policy")
            profile = Profile.from_json(text, str(args.plan))
            print_result(args, profile.to_json(), profile_view(profile, args.verbose))
            return
        plan = Plan.from_json(text, str(args.plan))
        if args.svg:
            from megatron_autorecompute.report.figures import strip_svg  # loads matplotlib

            picture = strip_svg(plan)
            if alone:
                print(picture)
                return
            write_atomically(picture, args.svg)
            print(f"Drawn: {args.svg}", file=sys.stderr)
        print_plan(args, plan)


class ExplainCommand(Command):
    """Prints the binding moment of every stage."""

    reads = ("plan",)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the plan's file."""
        parser.add_argument("plan", metavar="PLAN.json")
        add_json(parser)

    def run(self, args: Namespace) -> None:
        """Print it; raises ProfileError for a file that is no plan."""
        plan = Plan.load(args.plan)
        evidence = json.dumps([asdict(item) for item in plan.evidence], indent=1)
        print_result(args, evidence, terminal.stages_explained(plan))


class ReportCommand(Command):
    """Writes a plan as one HTML file."""

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
            help="pipeline stage of the snapshot (default: the only one)",
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


class TraceCommand(Command):
    """Writes a plan's step as Chrome trace events."""

    reads = ("plan",)

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the paths of plan and trace."""
        parser.add_argument("plan", metavar="PLAN.json")
        add_output(
            parser,
            "FILE",
            "file to write, compressed if it ends with .gz (default: PLAN.trace.json.gz "
            "beside the plan); - prints it",
        )

    def run(self, args: Namespace) -> None:
        """Write the trace and print its path; raises ProfileError if the file is no plan."""
        if args.output is None:
            args.output = Path(os.path.splitext(args.plan)[0] + ".trace.json.gz")
        output, plan = output_file(args), Plan.load(args.plan)
        text = trace_json(plan)
        if output is None:
            print(text)
            return
        compressed = output.suffix == ".gz"
        write_atomically(gzip.compress(text.encode(), mtime=0) if compressed else text, output)
        print(f"Written: {output}. Open it in https://ui.perfetto.dev or chrome://tracing.")
