"""`megatron-autorecompute verify`: compares a plan's peaks with Megatron's own schedule."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from megatron_autorecompute.cli.command import Command
from megatron_autorecompute.cli.output import add_json, console, progress_bars, quiet_upstream
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.rows import Column, Rows
from megatron_autorecompute.units import GIB, Unit, unit_for

if TYPE_CHECKING:
    from megatron_autorecompute.meta.verify import StageCheck


class VerifyCommand(Command):
    """Runs Megatron's schedule under a plan, on meta tensors."""

    name = "verify"
    description = "Ends with 10 where a stage exceeds its budget or differs by more than 0.5%%."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the plan's file."""
        parser.add_argument("plan", metavar="PLAN.json")
        add_json(parser)

    def run(self, args: Namespace) -> None:
        """Verify; raises VerificationError if Megatron's own schedule disagrees."""
        print_verified(args, Plan.load(args.plan))


def print_verified(args: Namespace, plan: Plan) -> None:
    """Run Megatron's schedule under a plan; print the bytes of every stage, and a verdict.

    Lines of a pipe or file are written as soon as their stage is done. Raises VerificationError if
    a stage exceeds its budget or differs from the prediction.
    """
    with quiet_upstream():
        from megatron_autorecompute.meta import verify  # loads torch and Megatron

        unit = unit_for(stage.peak_high_bytes for stage in plan.cost.stages)
        lines = Lines(unit) if not args.json and not sys.stdout.isatty() else None
        with progress_bars() as bars:
            task = bars.add_task("Megatron's own schedule", total=plan.layout.num_stages)

            def done(check: StageCheck) -> None:
                bars.advance(task)
                if lines is not None:
                    lines.say(check)

            checks = verify.verify(plan, done)
        if args.json:
            data = [asdict(each) | {"error": each.error, "fits": each.fits} for each in checks]
            print(json.dumps(data, indent=1))
        elif lines is None:
            console().print(table(checks, unit))
        verify.require_verified(checks)
        if not args.json:
            piped = lines is not None
            console().print(verify.verdict(checks), soft_wrap=piped)


def table(checks: Sequence[StageCheck], unit: Unit) -> Rows:
    """One row per stage."""
    columns = [Column(name) for name in _names(unit)]
    return Rows([*columns, Column("", left=True)], [_cells(check, unit) for check in checks])


class Lines:
    """The table's rows for a pipe: written one at a time, in columns of the header's widths."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._names = _names(unit)
        self._begun = False

    def say(self, check: StageCheck) -> None:
        """Write one stage, and the header before the first."""
        if not self._begun:
            print("  ".join(self._names))
        self._begun = True
        *texts, remark = _cells(check, self._unit)
        row = [text.rjust(len(name)) for text, name in zip(texts, self._names, strict=True)]
        print("  ".join([*row, remark]).rstrip(), flush=True)


def _names(unit: Unit) -> tuple[str, ...]:
    """The columns but the last; none is narrower than its figures."""
    return (
        "stage",
        f"predicted {unit.name}",
        f"Megatron {unit.name}",
        "  error",
        f"total {unit.name}",
        f"budget {unit.name}",
    )


def _cells(check: StageCheck, unit: Unit) -> tuple[str, ...]:
    """One stage; the last text says what is wrong, if anything is."""
    digits = 3 if unit.size == GIB else 1
    return (
        str(check.stage),
        f"{check.predicted_bytes / unit.size:.{digits}f}",
        f"{check.megatron_bytes / unit.size:.{digits}f}",
        f"{check.error:+.2%}",
        unit.text(check.static_bytes + check.megatron_bytes),
        unit.text(check.budget_bytes),
        "" if check.fits and check.agrees else "differs" if check.fits else "over budget",
    )
