"""A plan of a job through Megatron's own schedule on meta tensors, with the stand-in kernels.

What it checks is the composition: that layers, stages and schedule add up to what Megatron does.
Stand-ins in the run keep what they keep in the profile, so it says nothing about them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_autorecompute.errors import MachineError
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.meta_step import (
    StageStep,
    applied,
    build_chunks,
    fake_ranks,
    in_processes,
    trace_step,
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
    num_microbatches: int,
    policy: RecomputePolicy,
    done: Callable[[StageStep], None] = lambda _: None,
) -> tuple[StageStep, ...]:
    """Run every stage, one process at a time.

    Args:
        job: whose model.
        pipeline: fields of Megatron's config that say its pipeline, over the job's own.
        num_microbatches: of a step.
        policy: one choice for every layer.
        done: called with each stage's run.

    Raises MachineError for overlap_moe_expert_parallel_comm, OptionError as building the job does.
    """
    if pipeline.get("overlap_moe_expert_parallel_comm"):
        raise MachineError(
            f"{job.name}: a plan with overlap_moe_expert_parallel_comm cannot be verified without "
            "a device, because Megatron's combined forward-backward needs CUDA streams. Verify a "
            "plan made without it, which is in flight one microbatch less."
        )
    piped = replace(job, config={**job.config, **pipeline})
    run = functools.partial(run_stage, piped, num_microbatches, policy)
    return in_processes(run, range(piped.size("pipeline")), done=done)


def run_stage(job: Job, num_microbatches: int, policy: RecomputePolicy, stage: int) -> StageStep:
    """One stage in this process."""
    shape, device = step_shape(job, num_microbatches), torch.device("meta")
    with meta_megatron(job):
        config = megatron_config(job, {})
        with fake_ranks(config, stage, shape):
            build = functools.partial(build_chunk, job=job)
            models = build_chunks(config, shape, build, device)
            add_main_gradients(p for model in models for p in model.parameters())
            with applied(policy, models):
                return trace_step(models, shape, device, JobStep(job))
