"""`megatron-autorecompute trace`: writes a plan's step as Chrome trace events."""

from __future__ import annotations

import gzip
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron_autorecompute.cli.arguments import add_output
from megatron_autorecompute.cli.output import output_file
from megatron_autorecompute.json_records import write_atomically
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.trace import trace_json

READS = ("plan",)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the paths of plan and trace."""
    parser.add_argument("plan", metavar="PLAN.json")
    add_output(
        parser,
        "FILE",
        "file to write, compressed if it ends with .gz (default: PLAN.trace.json.gz "
        "beside the plan); - prints it",
    )


def run(args: Namespace) -> None:
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
