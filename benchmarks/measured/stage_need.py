"""What one stage needs as it is built, by Megatron's own schedule on meta tensors: no plan, no
records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.measured.rounding import StaticBlocks, few_microbatches, rounding_of
from megatron_autorecompute import megatron_fields
from megatron_autorecompute.meta.attention import with_backend
from megatron_autorecompute.meta.devices import Device
from megatron_autorecompute.meta.fake_ranks import StepShape
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.kept_bytes import counted_weights, shared_buffers
from megatron_autorecompute.meta.model import built_stage
from megatron_autorecompute.meta.static_bytes import optimizer_step_bytes, static_bytes
from testing.recorded_steps import recorded_step


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one stage."""

    static_bytes: int
    """Parameters, gradients, optimizer state, buffers."""
    activation_bytes: int
    """Most that is alive beside them."""
    activation_moment: str
    """When that is: `backward of layer 11`."""
    optimizer_step_bytes: int
    """Copies that the optimizer step makes."""
    rounding_bytes: int
    """What the allocator's blocks add at the fullest moment (`rounding`)."""
    first_step_bytes: int
    """Peak of a job's first step, before Adam's moments; with offload Megatron's warm-up, in which
    all groups leave."""

    @property
    def peak_bytes(self) -> int:
        """Of the step."""
        most_bytes = max(self.activation_bytes, self.optimizer_step_bytes)
        return self.static_bytes + most_bytes + self.rounding_bytes

    @property
    def moment(self) -> str:
        """When the peak is."""
        late = self.optimizer_step_bytes > self.activation_bytes
        return "optimizer step" if late else self.activation_moment


def own_need(job: Job, device: Device, stage: int, *, expandable: bool = False) -> Need:
    """What a stage needs under the job's own recompute and fine-grained offload, in this process.

    Every offload that Megatron runs, beside EP overlap, too. A tensor that leaves is free at once,
    as in `torch.cuda.memory_allocated`, which does not wait for copies under way.

    Args:
        job: the training job.
        device: the GPU; workspaces are as large as its.
        stage: pipeline rank.
        expandable: whether PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True.

    Raises OptionError if the job cannot be built.
    """
    job = with_backend(job, device)
    number = few_microbatches(job.schedule())
    names = (*megatron_fields.NO_RECOMPUTE, *megatron_fields.NO_OFFLOAD)
    own = {name: job.config[name] for name in names if name in job.config}
    with built_stage(job, number, stage, changed=own) as (models, shape, step):
        static = StaticBlocks(job, device, models, first_stage=stage == 0, expandable=expandable)
        return need_of(job, device, static, shape, step)


def need_of(job: Job, device: Device, blocks: StaticBlocks, shape: StepShape, step: Any) -> Need:
    """What built chunks need; `step` is Megatron's forward_step_func, with `static` tensors."""
    chunks = blocks.models
    rounding = rounding_of(blocks, shape, step)
    ran = recorded_step(chunks, shape, step)
    weights = counted_weights(torch.nn.ModuleList(chunks))
    shared = shared_buffers(job, device, *chunks)
    static = static_bytes(job, device, weights).total_bytes + sum(shared.values())
    static += ran.buffer_bytes
    return Need(
        static_bytes=static,
        activation_bytes=ran.peak_bytes,
        activation_moment=str(ran.peak_span.where),
        optimizer_step_bytes=optimizer_step_bytes(job, weights),
        rounding_bytes=rounding.peak_bytes,
        first_step_bytes=static
        + ran.peak_bytes
        - rounding.moments_bytes
        + rounding.first_peak_bytes,
    )
