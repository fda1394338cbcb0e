"""`megatron-autorecompute verify`: compares a plan's peaks with Megatron's own schedule."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_autorecompute.cli.arguments import add_json, sizes
from megatron_autorecompute.cli.output import console, progress_bars, quiet_upstream
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.units import GIB, Unit, unit_for

if TYPE_CHECKING:
    from megatron_autorecompute.meta.verify import StageCheck

READS = ("plan", "measured")
DESCRIPTION = (
    "Ends with exit code 10 if a stage exceeds its budget, or its prediction is over 0.5% off."
)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the plan's file, and that of a job."""
    parser.add_argument("plan", metavar="PLAN.json")
    add_runs(parser)
    add_json(parser)


def run(args: Namespace) -> None:
    """Verify; raises VerificationError if Megatron's own schedule disagrees."""
    checks = verified(args, Plan.load(args.plan))
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


def verified(args: Namespace, plan: Plan) -> tuple[StageCheck, ...]:
    """Run Megatron's schedule under a plan, and under the policy of the step that a job measured.

    Without --json a table is printed, each line as soon as its stage is done.
    """
    measured = _measured(args, plan)
    with quiet_upstream():
        from megatron_autorecompute.meta import verify  # loads torch and Megatron

        calls = args.lengths or verify.calls_of(plan)
        steps = 1 + len(calls) + (measured is not None)
        unit = unit_for(stage.peak_high_bytes for stage in plan.cost.stages)
        job = measured is not None or bool(plan.measured_peak_bytes)
        with progress_bars() as bars:
            total = steps * plan.layout.num_stages
            task = bars.add_task("Megatron's own schedule", total=total)

            def done(check: StageCheck) -> None:
                bars.advance(task)
                if not args.json:
                    print_row(check, unit, steps=steps > 1, job=job)

            return verify.verify(plan, calls, measured, done)


def conclude(args: Namespace, checks: Sequence[StageCheck]) -> None:
    """Print the verdict, unless JSON was asked for.

    Raises: VerificationError if a stage exceeds its budget or differs from the prediction.
    """
    from megatron_autorecompute.meta import verify  # loads torch and Megatron

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


def print_row(check: StageCheck, unit: Unit, *, steps: bool = False, job: bool = False) -> None:
    """Print one stage in columns of the header's widths, and the header before the first; with
    `steps` rows name their step, with `job` they have a peak that a job measured."""
    digits = 3 if unit.size == GIB else 1
    columns = [
        ("          step", check.step) if steps else (),
        ("stage", str(check.stage)),
        (f"predicted {unit.name}", f"{check.predicted_bytes / unit.size:.{digits}f}"),
        (f"Megatron {unit.name}", f"{check.megatron_bytes / unit.size:.{digits}f}"),
        ("  error", f"{check.error:+.2%}"),
        (f"total {unit.name}", unit.text(check.total_bytes)),
        (f"  job {unit.name}", _or_none(check.job_bytes, unit.text)) if job else (),
        ("  error", _or_none(check.job_error, "{:+.2%}".format)) if job else (),
        (f"budget {unit.name}", _or_none(check.budget_bytes, unit.text)),
    ]
    shown = [column for column in columns if column]
    if (check.step, check.stage) == ("plan", 0):
        print("  ".join(name for name, _ in shown))
    cells = [text.rjust(len(name)) for name, text in shown]
    print("  ".join([*cells, _remark(check)]).rstrip(), flush=True)


def _or_none(figure: float | None, text: Callable[[float], str]) -> str:
    return "" if figure is None else text(figure)


def _remark(check: StageCheck) -> str:
    """What is wrong, if anything is."""
    if not check.fits:
        return "over budget"
    if not check.bounded:
        return "above the plan"
    return "" if check.agrees else "differs"
