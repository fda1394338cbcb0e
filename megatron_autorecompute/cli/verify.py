"""`megatron-autorecompute verify`: compares a plan's peaks with Megatron's own schedule."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_autorecompute.cli.command import Command, sizes
from megatron_autorecompute.cli.output import add_json, console, progress_bars, quiet_upstream
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.rows import Column, Rows
from megatron_autorecompute.units import GIB, Unit, unit_for

if TYPE_CHECKING:
    from megatron_autorecompute.meta.verify import StageCheck


class VerifyCommand(Command):
    """Runs Megatron's schedule under a plan, on meta tensors."""

    reads = ("plan", "measured")
    description = (
        "Ends with exit code 10 if a stage exceeds its budget, or its prediction is over 0.5% off."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the plan's file, and that of a job."""
        parser.add_argument("plan", metavar="PLAN.json")
        add_runs(parser)
        add_json(parser)

    def run(self, args: Namespace) -> None:
        """Verify; raises VerificationError if Megatron's own schedule disagrees."""
        plan = Plan.load(args.plan)
        checks = verified(args, plan)
        if args.json:
            print(json.dumps(as_data(checks), indent=1))
        conclude(args, checks)


def add_runs(parser: ArgumentParser) -> None:
    """Add the flags that say what runs beside the plan's own step."""
    parser.add_argument(
        "--measured",
        metavar="JOB.json",
        help="a plan file that a job wrote: also print the peaks that the job measured "
        "(default: the plan itself, if a job measured it)",
    )
    parser.add_argument(
        "--lengths",
        type=sizes,
        action="append",
        default=[],
        metavar="TOKENS,TOKENS,...",
        help="also run a call whose microbatches have these tokens on a rank, in this order; "
        "repeatable (default: for a plan of several lengths, three calls that it expects)",
    )


def verified(args: Namespace, plan: Plan) -> list[StageCheck]:
    """Run Megatron's schedule under a plan, and under the policy of a step that a job measured."""
    measured = _measured(args, plan)
    with quiet_upstream():
        from megatron_autorecompute.meta import verify, verify_calls  # loads torch and Megatron

        steps = measured is not None
        calls = args.lengths or verify_calls.calls_of(plan)
        verify_calls.fullest_parts(plan, calls)  # refused before anything runs
        if measured is not None:
            verify.measured_peaks(plan, measured)
        with progress_bars() as bars:
            stages = plan.layout.num_stages
            task = bars.add_task("Megatron's own schedule", total=stages * (1 + steps + len(calls)))

            def done(_: StageCheck) -> None:
                bars.advance(task)

            checks = [*verify.verify(plan, done)]
            checks += verify_calls.verify_calls(plan, calls, checks, done)
            if measured is not None:
                checks += verify.verify_measured(plan, measured, done)
    return checks


def conclude(args: Namespace, checks: Sequence[StageCheck]) -> None:
    """Print the table and the verdict, unless JSON was asked for.

    Raises: VerificationError if a stage exceeds its budget or differs from the prediction.
    """
    from megatron_autorecompute.meta import verify  # loads torch and Megatron

    if not args.json:
        console().print(table(checks))
    verify.require_verified(checks)
    if not args.json:
        console().print(verify.verdict(checks), soft_wrap=not sys.stdout.isatty())


def as_data(checks: Sequence[StageCheck]) -> list[dict[str, Any]]:
    """The checks as JSON."""
    return [
        asdict(each) | {"error": each.error, "job_error": each.job_error, "fits": each.fits}
        for each in checks
    ]


def _measured(args: Namespace, plan: Plan) -> Plan | None:
    """The plan file with the job's own step: the one named, else the plan where it has peaks."""
    if args.measured is not None:
        return Plan.load(args.measured)
    step = plan.profile.measured_step
    known = step is not None and all(r.max_memory_allocated_bytes is not None for r in step.ranks)
    return plan if known else None


def table(checks: Sequence[StageCheck]) -> Rows:
    """A row for each stage of each step that ran. The last word says what is wrong, if anything."""
    unit = unit_for(check.total_bytes for check in checks)
    steps = any(check.iteration is not None or check.call is not None for check in checks)
    job = any(check.job_bytes is not None for check in checks)
    columns = (
        *([Column("step")] if steps else []),
        Column("stage"),
        Column(f"predicted {unit.name}"),
        Column(f"Megatron {unit.name}"),
        Column("  error"),
        Column(f"total {unit.name}"),
        *([Column(f"job {unit.name}"), Column("  error")] if job else []),
        Column(f"budget {unit.name}"),
    )
    rows = [_cells(check, unit, steps=steps, job=job) for check in checks]
    if any(remark for *_, remark in rows):
        return Rows((*columns, Column("", left=True)), rows)
    return Rows(columns, [row[:-1] for row in rows])


def _cells(check: StageCheck, unit: Unit, *, steps: bool, job: bool) -> tuple[str, ...]:
    digits = 3 if unit.size == GIB else 1
    step = "plan" if check.iteration is None else f"iteration {check.iteration}"
    step = step if check.call is None else f"call {check.call}"
    ran = "" if check.job_bytes is None else unit.text(check.job_bytes)
    remarks = {
        "over budget": check.iteration is None and not check.fits,
        "above the plan": not check.bounded,
        "differs": not check.agrees,
    }
    return (
        *((step,) if steps else ()),
        str(check.stage),
        f"{check.predicted_bytes / unit.size:.{digits}f}",
        f"{check.megatron_bytes / unit.size:.{digits}f}",
        f"{check.error:+.2%}",
        unit.text(check.total_bytes),
        *((ran, "" if check.job_error is None else f"{check.job_error:+.2%}") if job else ()),
        unit.text(check.budget_bytes),
        next((remark for remark, holds in remarks.items() if holds), ""),
    )
