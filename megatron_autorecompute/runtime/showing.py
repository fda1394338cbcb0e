"""Pictures and tables of the plan that runs, for TensorBoard and Weights & Biases."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from megatron_autorecompute.planner.plan import Plan

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
    parts = {name: cache(partial(make, plan, measured_bytes)) for name, make in _PARTS.items()}
    for writer in writers:
        is_tensorboard = hasattr(writer, "add_scalar")
        write = _to_tensorboard if is_tensorboard else _to_wandb
        for name, part in parts.items():
            try:
                write(writer, f"recompute/{name}", part(), iteration)
            except Exception as error:  # a picture is not worth a job
                where = "TensorBoard" if is_tensorboard else "Weights & Biases"
                logger.warning("recompute auto: %s gets no recompute/%s: %r", where, name, error)


def _policy(plan: Plan, measured_bytes: Sequence[int] | None) -> Any:
    from megatron_autorecompute.report import job_pictures  # matplotlib takes time to import

    return job_pictures.policy_image(plan)


def _memory(plan: Plan, measured_bytes: Sequence[int] | None) -> Any:
    from megatron_autorecompute.report import job_pictures

    return job_pictures.memory_image(plan, measured_bytes)


def _costs(plan: Plan, measured_bytes: Sequence[int] | None) -> Plan:
    return plan


_PARTS: dict[str, Callable[[Plan, Sequence[int] | None], Any]] = {
    "policy": _policy,
    "memory": _memory,
    "costs": _costs,
}


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
