"""Reports the plan that runs: a table on rank 0, figures for TensorBoard and Weights & Biases."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.terminal import imbalance_lines, measured_step_view, stages_view
from megatron_autorecompute.runtime.decisions import Decisions
from megatron_autorecompute.units import GIB

WIDTH = 100
"""Columns of the text; a log has no terminal width."""


def tell(plan: Plan, decisions: Decisions, steps: int) -> None:
    """Print a row per stage and feed the writers, once the plan has run so many training steps."""
    job, figures = decisions.job, dict[str, float]()
    peaks = decisions.peaks() if steps else None
    job.say(report(plan, decisions, peaks))
    for stage, cost in enumerate(plan.cost.stages):
        if peaks is not None:
            figures[f"recompute/measured_peak_gib/stage{stage}"] = peaks[stage] / GIB
        figures[f"recompute/predicted_peak_gib/stage{stage}"] = cost.peak.bytes / GIB
        figures[f"recompute/recompute_ms/stage{stage}"] = cost.recompute_ms
    iteration = steps if job.iteration is None else job.iteration()
    for writer in job.writers():
        if not hasattr(writer, "add_scalar"):  # Weights & Biases
            writer.log(figures, iteration)
            continue
        for name, value in figures.items():
            writer.add_scalar(name, value, iteration)


def report(plan: Plan, decisions: Decisions, peaks: Sequence[int] | None) -> str:
    """The plan as text: a row per stage with its measured peak, if it is known, a legend, notes,
    and the step's time beside others'.

    The peak contains the bytes that were added after the job ran short of memory."""
    lean_ms = decisions.problem(plan.profile).cost(decisions.leanest).step_ms
    steps = [f"predicted step {plan.cost.step_ms:,.0f} ms", f"full recompute {lean_ms:,.0f} ms"]
    if plan.best_manual is None:
        steps.append("none of Megatron's own settings fits")
    else:
        steps.append(f"best manual {plan.best_manual.name} {plan.best_manual.step_ms:,.0f} ms")
    notes = *plan.notes, *imbalance_lines(plan.profile, plan.imbalance_percentile)
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, highlight=False)
    console.print("recompute auto: the plan", stages_view(plan, peaks), sep="\n")
    console.print(*map(Text, notes), *measured_step_view(plan), sep="\n")
    return f"{text.getvalue().rstrip()}\nrecompute auto: {'; '.join(steps)}"
