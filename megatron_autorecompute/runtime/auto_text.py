"""The text that `--recompute-policy auto` prints on rank 0 once its plan runs."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.terminal import (
    imbalance_lines,
    legend,
    measured_step_view,
    strip,
)
from megatron_autorecompute.units import gib

WIDTH = 100
"""Columns of the text; a log has no terminal width."""


def plan_text(plan: Plan, measured_bytes: Sequence[int] | None, leanest_ms: float) -> str:
    """One row per stage, a legend, notes, and the step's time beside the alternatives.

    "predicted" contains the bytes that were added after the job ran short of memory.

    Args:
        plan: the plan that runs.
        measured_bytes: peak of every stage in a step under this plan; None if none was read.
        leanest_ms: predicted step of the leanest policy, full recompute if Megatron allows it.
    """
    text = io.StringIO()
    Console(file=text, width=WIDTH).print(_stages(plan, measured_bytes))
    steps = [f"predicted step {plan.cost.step_ms:,.0f} ms", f"full recompute {leanest_ms:,.0f} ms"]
    if plan.best_manual is None:
        steps.append("none of Megatron's own settings fits")
    else:
        steps.append(f"best manual {plan.best_manual.name} {plan.best_manual.step_ms:,.0f} ms")
    lines = [f"{text.getvalue()}{_legend(plan)}", *plan.notes]
    lines += imbalance_lines(plan.profile, plan.imbalance_percentile)
    lines += _measured_step(plan)
    return "\n".join([*lines, f"recompute auto: {'; '.join(steps)}"])


def _measured_step(plan: Plan) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=WIDTH, highlight=False).print(*measured_step_view(plan), sep="\n")
    return text.getvalue().rstrip().splitlines()


def _stages(plan: Plan, measured_bytes: Sequence[int] | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("stage", justify="right")
    table.add_column("policy", overflow="fold")
    for name in ("predicted GiB", "measured", "budget"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage, chunks in enumerate(plan.layout.stages):
        table.add_row(
            str(stage),
            Text(strip(plan.policy, chunks)),
            gib(plan.cost.stages[stage].peak.bytes),
            "-" if measured_bytes is None else gib(measured_bytes[stage]),
            gib(plan.budget_bytes[stage]),
        )
    return table


def _legend(plan: Plan) -> str:
    single = {s: choice for choice, s in legend(plan.policy).items() if choice.group == 1}
    meanings = [f"{symbol} {choice}" for symbol, choice in sorted(single.items())]
    if any(choice.group > 1 for choice in plan.policy.layers):
        meanings.append("(FF) one checkpoint around these")
    return "   ".join([*meanings, "E embedding", "L head and loss", "| next chunk"])
