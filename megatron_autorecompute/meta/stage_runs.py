"""Runs a job's plan through Megatron's own schedule on meta tensors, with stand-in kernels.

This checks that layers, stages and schedule add up to what Megatron does. It does not check the
stand-ins, which keep the same tensors here and in the profile.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_autorecompute import megatron_fields
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.meta_step import (
    StageStep,
    StepShape,
    applied,
    build_chunks,
    fake_ranks,
    in_processes,
    trace_step,
    workers,
)
from megatron_autorecompute.meta.model import (
    JobStep,
    add_main_gradients,
    build_chunk,
    megatron_config,
    meta_megatron,
    step_shape,
)
from megatron_autorecompute.policy import RecomputePolicy


def run_stages(
    job: Job,
    pipeline: Mapping[str, Any],
    num_microbatches: Sequence[int],
    policy: RecomputePolicy,
    done: Callable[[StageStep], None] = lambda _: None,
    lengths: Sequence[tuple[int, ...]] | None = None,
) -> tuple[StageStep, ...]:
    """Run every stage, of one step or several, in as many processes as `meta_step.workers` allows.

    Args:
        job: its model is run.
        pipeline: fields of Megatron's config for the pipeline, in place of the job's own.
        num_microbatches: in the step of each stage; then in the next step of each.
        policy: one choice for every layer.
        done: called with each stage's run, first stage first, step by step.
        lengths: of the microbatches of each of these, in tokens on all context parallel ranks;
            None: the job's seq_length.

    Raises OptionError if the job cannot be built, or if a layer under `full` would be one of a
    combined forward-backward.
    """
    if pipeline.get("overlap_moe_expert_parallel_comm"):
        _refuse_full(job, policy)
    piped = replace(job, config={**job.config, **pipeline})
    own = lengths or [()] * len(num_microbatches)
    run = functools.partial(_run_numbered, piped, tuple(num_microbatches), own, policy)
    numbers = range(len(num_microbatches))
    return in_processes(run, numbers, workers(len(numbers)), done)


def _refuse_full(job: Job, policy: RecomputePolicy) -> None:
    layers = [number for number, layer in enumerate(policy.layers) if layer.granularity == "full"]
    if layers:
        raise OptionError(
            f"{job.name}: layer {layers[0]} is under full, which "
            "Megatron refuses with overlap_moe_expert_parallel_comm: its combined forward-backward "
            "calls the parts of layers. Plan with --only for none and selective choices, or "
            "without the overlap."
        )


def _run_numbered(
    job: Job,
    num_microbatches: Sequence[int],
    lengths: Sequence[tuple[int, ...]],
    policy: RecomputePolicy,
    number: int,
) -> StageStep:
    stage = number % job.size("pipeline")
    return run_stage(job, num_microbatches[number], policy, stage, lengths[number])


class PlannedStep(JobStep):
    """A step that EP overlap asks for the model's plan of a microbatch, in place of its output."""

    def __call__(
        self, iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        """Run a microbatch as JobStep does; with `return_schedule_plan` nothing has run yet."""
        run = model.build_schedule_plan if return_schedule_plan else model
        return super().__call__(iterator, run)


def overlap_fields(job: Job) -> dict[str, bool]:
    """Fields of EP overlap, which the layers of a profile are built without.

    `delay_wgrad_compute` is not among them: stand-ins have no weight gradients to delay.
    """
    names = ("overlap_moe_expert_parallel_comm", "ep_overlap_early_attn_memory_release")
    return {name: True for name in names if job.config.get(name)}


def _own_setting(job: Job) -> dict[str, Any]:
    """The job's fields of recompute and offload."""
    names = (*megatron_fields.NO_RECOMPUTE, *megatron_fields.NO_OFFLOAD)
    return {name: job.config[name] for name in names if name in job.config}


def run_stage(
    job: Job,
    num_microbatches: int,
    policy: RecomputePolicy,
    stage: int,
    lengths: tuple[int, ...] = (),
) -> StageStep:
    """One stage in this process."""
    with built_stage(job, num_microbatches, stage, lengths) as (models, shape, step):
        parameters = [p for model in models for p in model.parameters()]
        add_main_gradients(parameters, dummies=job.makes_dummies)
        with applied(policy, models):
            return trace_step(models, shape, torch.device("meta"), step)


@contextlib.contextmanager
def built_stage(
    job: Job,
    num_microbatches: int,
    stage: int,
    lengths: tuple[int, ...] = (),
    *,
    own_setting: bool = False,
) -> Iterator[tuple[list[torch.nn.Module], StepShape, PlannedStep]]:
    """The chunks of one stage, the sizes of a step and what runs a microbatch of it; in this block
    the process is the stage's first rank. They are built without recompute and offload, or with
    the job's own."""
    shape = step_shape(job, num_microbatches, lengths)
    with meta_megatron(job):
        fields = {**overlap_fields(job), "variable_seq_lengths": bool(lengths)}
        config = megatron_config(job, {**fields, **(_own_setting(job) if own_setting else {})})
        with fake_ranks(config, stage, shape):
            build = functools.partial(build_chunk, job=job)
            models = build_chunks(config, shape, build, torch.device("meta"))
            yield models, shape, PlannedStep(job, None, lengths, loads_mask=True)
