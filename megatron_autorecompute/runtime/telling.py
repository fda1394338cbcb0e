"""Reports the plan that runs: prints a table, and feeds TensorBoard and W&B."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.runtime.auto_text import plan_text
from megatron_autorecompute.runtime.decisions import Decisions
from megatron_autorecompute.runtime.job_facts import JobFacts
from megatron_autorecompute.runtime.showing import show
from megatron_autorecompute.units import GIB


def tell(plan: Plan, decisions: Decisions, steps: int) -> None:
    """Print a row per stage and feed the writers, once the plan has run a step.

    Args:
        plan: the plan that runs.
        decisions: of the job.
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
        decisions: of the job.
        peaks: bytes of every stage in a step under this plan; None if they are not known.
    """
    full = decisions.planner(plan.profile).evaluate(decisions.leanest)
    return f"recompute auto: the plan\n{plan_text(plan, peaks, full.step_ms)}"


def _write(job: JobFacts, name: str, value: float, iteration: int) -> None:
    for writer in job.writers():
        if hasattr(writer, "add_scalar"):  # TensorBoard
            writer.add_scalar(name, value, iteration)
        else:  # Weights & Biases
            writer.log({name: value}, iteration)
