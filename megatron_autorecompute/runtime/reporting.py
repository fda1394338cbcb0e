"""Reports the plan that runs: a table on rank 0, figures, pictures and tables for TensorBoard and
Weights & Biases.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from rich.console import Console
from rich.text import Text

from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.terminal import (
    imbalance_lines,
    measured_step_view,
    stages_view,
)
from megatron_autorecompute.runtime.decisions import Decisions
from megatron_autorecompute.runtime.job_facts import JobFacts
from megatron_autorecompute.units import GIB


def tell(plan: Plan, decisions: Decisions, steps: int) -> None:
    """Print a row per stage and feed the writers, once the plan has run a step.

    Args:
        plan: the plan that runs.
        decisions: the decisions of the job.
        steps: how many training steps are done.
    """
    job = decisions.job
    peaks = decisions.peaks() if steps else None
    job.say(report(plan, decisions, peaks))
    iteration = steps if job.iteration is None else job.iteration()
    for stage, cost in enumerate(plan.cost.stages):
        figures = {"predicted_peak_gib": cost.peak.bytes / GIB, "recompute_ms": cost.recompute_ms}
        if peaks is not None:
            figures = {"measured_peak_gib": peaks[stage] / GIB, **figures}
        for name, value in figures.items():
            _write(job, f"recompute/{name}/stage{stage}", value, iteration)
    show(plan, peaks, job.writers(), iteration)


def report(plan: Plan, decisions: Decisions, peaks: Sequence[int] | None) -> str:
    """The plan as text, a row per stage.

    Args:
        plan: the plan that runs.
        decisions: the decisions of the job.
        peaks: bytes of every stage in a step under this plan; None if they are not known.
    """
    full = decisions.problem(plan.profile).cost(decisions.leanest)
    return f"recompute auto: the plan\n{plan_text(plan, peaks, full.step_ms)}"


def _write(job: JobFacts, name: str, value: float, iteration: int) -> None:
    for writer in job.writers():
        if hasattr(writer, "add_scalar"):  # TensorBoard
            writer.add_scalar(name, value, iteration)
        else:  # Weights & Biases
            writer.log({name: value}, iteration)


WIDTH = 100
"""Columns of the text; a log has no terminal width."""


def plan_text(plan: Plan, measured_bytes: Sequence[int] | None, leanest_ms: float) -> str:
    """One row per stage, a legend, notes, and the step's time beside the alternatives.

    The peak contains the bytes that were added after the job ran short of memory.

    Args:
        plan: the plan that runs.
        measured_bytes: peak of every stage in a step under this plan; None if none was read.
        leanest_ms: predicted step of the leanest policy, full recompute if Megatron allows it.
    """
    steps = [f"predicted step {plan.cost.step_ms:,.0f} ms", f"full recompute {leanest_ms:,.0f} ms"]
    if plan.best_manual is None:
        steps.append("none of Megatron's own settings fits")
    else:
        steps.append(f"best manual {plan.best_manual.name} {plan.best_manual.step_ms:,.0f} ms")
    notes = *plan.notes, *imbalance_lines(plan.profile, plan.imbalance_percentile)
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, highlight=False)
    console.print(stages_view(plan, measured_bytes), *map(Text, notes), sep="\n")
    console.print(*measured_step_view(plan), sep="\n")
    return f"{text.getvalue().rstrip()}\nrecompute auto: {'; '.join(steps)}"


logger = logging.getLogger(__name__)


def show(plan: Plan, measured_bytes: Sequence[int] | None, writers: Any, iteration: int) -> None:
    """Give every writer the policy, the memory curve and what each choice costs, as `recompute/…`.

    What cannot be made or written is left out with a warning; it never ends the job.

    Args:
        plan: the plan that runs.
        measured_bytes: peak of every stage in a step under the plan; None if none was read.
        writers: TensorBoard's and W&B's; nothing is drawn if there are none.
        iteration: the step that the writers are told.
    """
    picture = cache(partial(_picture, plan, measured_bytes))
    for writer in writers:
        is_tensorboard = hasattr(writer, "add_scalar")
        write = _to_tensorboard if is_tensorboard else _to_wandb
        for name in ("policy", "memory", "costs"):
            try:
                part = plan if name == "costs" else picture(name)
                write(writer, f"recompute/{name}", part, iteration)
            except Exception as error:  # a picture is not worth a job
                where = "TensorBoard" if is_tensorboard else "Weights & Biases"
                logger.warning("recompute auto: %s gets no recompute/%s: %r", where, name, error)


def _picture(plan: Plan, measured_bytes: Sequence[int] | None, name: str) -> Any:
    from megatron_autorecompute.report import job_pictures  # matplotlib takes time to import

    if name == "policy":
        return job_pictures.policy_image(plan)
    return job_pictures.memory_image(plan, measured_bytes)


def _to_tensorboard(writer: Any, name: str, part: Any, iteration: int) -> None:
    from megatron_autorecompute.report import job_pictures

    if isinstance(part, Plan):
        writer.add_text(name, job_pictures.costs_markdown(part), iteration)
    else:
        writer.add_image(name, part, iteration, dataformats="HWC")


def _to_wandb(writer: Any, name: str, part: Any, iteration: int) -> None:
    from megatron_autorecompute.report import job_pictures

    module = _wandb(writer)
    if isinstance(part, Plan):
        rows = job_pictures.cost_rows(part)
        shown = module.Table(columns=list(job_pictures.COSTS), data=rows)
    else:
        shown = module.Image(part)
    writer.log({name: shown}, iteration)


def _wandb(writer: Any) -> Any:
    """The module with W&B's classes: Megatron's writer is the module itself, others have a run."""
    if hasattr(writer, "Image"):
        return writer
    return sys.modules[type(writer).__module__.partition(".")[0]]
