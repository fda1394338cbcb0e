"""`megatron-autorecompute verify`: compares a plan's peaks with Megatron's own schedule."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from megatron_autorecompute.cli.command import Command, sizes
from megatron_autorecompute.cli.output import add_json, console, progress_bars, quiet_upstream
from megatron_autorecompute.planner.plan import Plan
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
    """Run Megatron's schedule under a plan, and under the policy of the step that a job measured.

    Without --json a table is printed, each line as soon as its stage is done.
    """
    measured = _measured(args, plan)
    with quiet_upstream():
        from megatron_autorecompute.meta import verify, verify_calls  # loads torch and Megatron

        unit = unit_for(stage.peak_high_bytes for stage in plan.cost.stages)
        steps = measured is not None
        calls = args.lengths or verify_calls.calls_of(plan)
        verify_calls.fullest_parts(plan, calls)  # refused before anything runs
        beside = Beside(bool(calls) or steps, steps or bool(plan.measured_peak_bytes))
        lines = None if args.json else Lines(unit, beside)
        if measured is not None:
            verify.measured_peaks(plan, measured)
        with progress_bars() as bars:
            stages = plan.layout.num_stages
            task = bars.add_task("Megatron's own schedule", total=stages * (1 + steps + len(calls)))

            def done(check: StageCheck) -> None:
                bars.advance(task)
                if lines is not None:
                    lines.say(check)

            checks = [*verify.verify(plan, done)]
            checks += verify_calls.verify_calls(plan, calls, checks, done)
            if measured is not None:
                checks += verify.verify_measured(plan, measured, done)
    return checks


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


@dataclass(frozen=True, slots=True)
class Beside:
    """The further columns of the table."""

    steps: bool = False
    """Whether rows name their step: more than the plan's own runs."""
    job: bool = False
    """Whether rows have a peak that a job measured."""


class Lines:
    """The table's rows, written one at a time, in columns of the header's widths."""

    def __init__(self, unit: Unit, beside: Beside = Beside()) -> None:
        self._unit = unit
        self._beside = beside
        self._names = _names(unit, beside)
        self._begun = False

    def say(self, check: StageCheck) -> None:
        """Write one stage, and the header before the first."""
        if not self._begun:
            print("  ".join(self._names))
        self._begun = True
        *texts, remark = _cells(check, self._unit, self._beside)
        row = [text.rjust(len(name)) for text, name in zip(texts, self._names, strict=True)]
        print("  ".join([*row, remark]).rstrip(), flush=True)


def _names(unit: Unit, beside: Beside) -> tuple[str, ...]:
    """Names of all columns but the last, each as wide as its figures."""
    return (
        *(("          step",) if beside.steps else ()),
        "stage",
        f"predicted {unit.name}",
        f"Megatron {unit.name}",
        "  error",
        f"total {unit.name}",
        *((f"  job {unit.name}", "  error") if beside.job else ()),
        f"budget {unit.name}",
    )


def _cells(check: StageCheck, unit: Unit, beside: Beside) -> tuple[str, ...]:
    """The cells of a stage's row. The last cell says what is wrong, if anything is."""
    digits = 3 if unit.size == GIB else 1
    step = "plan" if check.iteration is None else f"iteration {check.iteration}"
    step = step if check.call is None else f"call {check.call}"
    ran = ("", "") if check.job_bytes is None else (unit.text(check.job_bytes), _percent(check))
    remarks = {
        "over budget": check.iteration is None and not check.fits,
        "above the plan": not check.bounded,
        "differs": not check.agrees,
    }
    return (
        *((step,) if beside.steps else ()),
        str(check.stage),
        f"{check.predicted_bytes / unit.size:.{digits}f}",
        f"{check.megatron_bytes / unit.size:.{digits}f}",
        f"{check.error:+.2%}",
        unit.text(check.total_bytes),
        *(ran if beside.job else ()),
        unit.text(check.budget_bytes),
        next((remark for remark, holds in remarks.items() if holds), ""),
    )


def _percent(check: StageCheck) -> str:
    return "" if check.job_error is None else f"{check.job_error:+.2%}"
