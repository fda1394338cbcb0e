"""`megatron-autorecompute verify`: compares a plan's peaks with Megatron's own schedule."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_autorecompute.cli.command import Command, sizes
from megatron_autorecompute.cli.output import add_json, console, progress_bars, quiet_upstream
from megatron_autorecompute.errors import OptionError
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
        from megatron_autorecompute.meta import verify  # loads torch and Megatron

        unit = unit_for(stage.peak_high_bytes for stage in plan.cost.stages)
        steps = measured is not None
        calls = args.lengths or verify.calls_of(plan)
        if calls and plan.schedule.overlap_moe_expert_parallel_comm:
            raise OptionError(
                "--lengths under overlap_moe_expert_parallel_comm: what a forward takes beside the "
                "backward of a shorter microbatch is not predicted. Leave the lengths out."
            )
        job = steps or bool(plan.measured_peak_bytes)
        lines = Lines(unit, steps=bool(calls) or steps, job=job)
        if measured is not None:
            verify.measured_peaks(plan, measured)
        with progress_bars() as bars:
            stages = plan.layout.num_stages
            task = bars.add_task("Megatron's own schedule", total=stages * (1 + steps + len(calls)))

            def done(check: StageCheck) -> None:
                bars.advance(task)
                if not args.json:
                    lines.say(check)

            checks = [*verify.verify(plan, done)]
            checks += verify.verify_calls(plan, calls, checks, done)
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


class Lines:
    """The table's rows, written one at a time, in columns of the header's widths.

    Args:
        unit: of bytes.
        steps: whether rows name their step: more than the plan's own runs.
        job: whether rows have a peak that a job measured.
    """

    def __init__(self, unit: Unit, *, steps: bool = False, job: bool = False) -> None:
        digits = 3 if unit.size == GIB else 1
        columns: list[tuple[str, Callable[[StageCheck], str]]] = [
            ("stage", lambda one: str(one.stage)),
            (f"predicted {unit.name}", lambda one: f"{one.predicted_bytes / unit.size:.{digits}f}"),
            (f"Megatron {unit.name}", lambda one: f"{one.megatron_bytes / unit.size:.{digits}f}"),
            ("  error", lambda one: f"{one.error:+.2%}"),
            (f"total {unit.name}", lambda one: unit.text(one.total_bytes)),
        ]
        if steps:
            columns.insert(0, ("          step", _step))
        if job:
            columns.append((f"  job {unit.name}", lambda one: _or_none(one.job_bytes, unit.text)))
            columns.append(("  error", lambda one: _or_none(one.job_error, "{:+.2%}".format)))
        columns.append((f"budget {unit.name}", lambda one: unit.text(one.budget_bytes)))
        self._columns = columns
        self._begun = False

    def say(self, check: StageCheck) -> None:
        """Write one stage, and the header before the first."""
        if not self._begun:
            print("  ".join(name for name, _ in self._columns))
        self._begun = True
        cells = [text(check).rjust(len(name)) for name, text in self._columns]
        print("  ".join([*cells, _remark(check)]).rstrip(), flush=True)


def _or_none(figure: float | None, text: Callable[[float], str]) -> str:
    return "" if figure is None else text(figure)


def _step(check: StageCheck) -> str:
    if check.call is not None:
        return f"call {check.call}"
    return "plan" if check.iteration is None else f"iteration {check.iteration}"


def _remark(check: StageCheck) -> str:
    """What is wrong, if anything is."""
    if check.iteration is None and not check.fits:
        return "over budget"
    if not check.bounded:
        return "above the plan"
    return "" if check.agrees else "differs"
