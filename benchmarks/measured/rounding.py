"""What torch's allocator adds to a stage's tensors.

`torch.cuda.memory_allocated` counts blocks, which may be up to 1 MiB larger than the tensors in
them (`caching_allocator`). In a job of a few GB that is 1 to 3%, of a hundred GB nothing. So the
stage's tensors are made here in Megatron's order: weights, buffers of DistributedDataParallel,
master weights, a step by Megatron's schedule on meta tensors, Adam's moments, another step.

In the jobs tried a third step adds nothing. Which hole a tensor falls into depends on all that came
before, so runs of equal flags differ by a few MiB, and so does this from each of them. Temporaries
inside kernels are not followed; other streams are DistributedDataParallel's and ring attention's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.measured.caching_allocator import Block, CachingAllocator
from benchmarks.measured.evaluation import evaluation_bytes, flushed_bytes
from benchmarks.measured.grad_buffers import laid_out
from benchmarks.measured.live_blocks import FirstUse, LiveBlocks
from megatron_autorecompute.meta import kernels, ops
from megatron_autorecompute.meta.attention import with_backend
from megatron_autorecompute.meta.devices import Device
from megatron_autorecompute.meta.fake_ranks import StepShape
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.kept_bytes import (
    counted_weights,
    shared_buffers,
)
from megatron_autorecompute.meta.meta_step import (
    kept_between_steps,
    run_step,
)
from megatron_autorecompute.meta.model import add_main_gradients, built_stage
from megatron_autorecompute.meta.static_bytes import (
    gradient_bytes,
    state_parts,
    state_ranks,
    static_bytes,
    weight_bytes,
)
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.runtime.apply import apply
from megatron_autorecompute.runtime.live_bytes import storage_bytes

BUCKET, BUCKET_OF_RANK = 40_000_000, 1_000_000
"""Elements of a bucket where gradients are reduced while backward runs, in the first chunk of the
first stage (distributed_data_parallel.py; training.py `per_chunk_bucket_sizes`)."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Bytes of blocks above those of the tensors in them, and of padding in DDP's buffers."""

    static_bytes: int
    """Between steps."""
    peak_bytes: int
    """At the fullest moment: what to add to a peak of tensors."""
    first_peak_bytes: int
    """The same of a job's first step, before Adam's moments."""
    moments_bytes: int
    """Of Adam's moments, which static bytes count."""
    evaluation_bytes: int = 0
    """Most blocks of an evaluation after these steps, all bytes counted; 0 if none was asked."""


def rounding(
    job: Job,
    device: Device,
    policy: RecomputePolicy,
    stage: int,
    *,
    evaluates: bool = False,
    expandable: bool = False,
) -> Rounding:
    """Rounding on one rank of a stage, in this process, in steps that just fill the pipeline.

    Args:
        job: the training job.
        device: the GPU; workspaces are as large as its.
        policy: one choice for every layer.
        stage: pipeline rank.
        evaluates: whether an evaluation follows.
        expandable: whether PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True.

    Raises OptionError if the job cannot be built.
    """
    job, number = with_backend(job, device), few_microbatches(job.schedule())
    with built_stage(job, number, stage) as (models, shape, step):
        first = stage == 0
        static = StaticBlocks(job, device, models, first_stage=first, expandable=expandable)
        flushed = flushed_bytes(job, device) if evaluates else None
        with apply(policy, models):
            return rounding_of(static, shape, step, flushed)


def few_microbatches(schedule: Schedule) -> int:
    """Of a step that just fills the pipeline."""
    few = 2 * schedule.group_size if schedule.num_chunks > 1 else schedule.num_stages + 1
    return min(few, schedule.num_microbatches)


def rounding_of(
    static: StaticBlocks, shape: StepShape, step: Any, flushed: int | None = None
) -> Rounding:
    """Rounding of built chunks; `step` is Megatron's forward_step_func, with `static` tensors.
    With `flushed`, as `evaluation_bytes` has it, an evaluation follows the steps."""
    allocator, models = static.allocator, static.models
    for tensor in step.static:
        allocator.allocate(storage_bytes([tensor]))
    with (
        LiveBlocks(allocator, [*static.tensors, *step.static], static.buffers) as live,
        kept_between_steps(models, live) as kept,
    ):
        run_step(models, shape, step)
        static.buffers.rest()
        without_moments = allocator.requested_bytes
        static.allocate_moments()
        first_bytes = allocator.peak_bytes
        moments_bytes = allocator.requested_bytes - without_moments
        run_step(models, shape, step)
        peak_bytes, live_peak_bytes, evaluation = allocator.peak_bytes, live.peak_bytes, 0
        if flushed is not None:
            evaluation = evaluation_bytes(models, shape, step, allocator, flushed)
    tensor_bytes = static.counted_bytes() + storage_bytes([*kept, *step.static])
    between_bytes = allocator.allocated_bytes - live.current_bytes
    all_bytes = tensor_bytes + live_peak_bytes
    return Rounding(
        between_bytes - tensor_bytes,
        peak_bytes - all_bytes,
        first_bytes - (all_bytes - moments_bytes),
        moments_bytes,
        evaluation,
    )


@dataclass(frozen=True, slots=True)
class _Weight:
    """One weight as Megatron makes it."""

    count: int
    trained: bool
    expert: bool
    of_muon: bool
    tied: bool
    element_bytes: float


class StaticBlocks:
    """A stage's weights, gradients and optimizer state, allocated in Megatron's order: weights, by
    megatron/training/training.py `get_model` the buffers of DistributedDataParallel in a stream of
    their own, which with the distributed optimizer replace the weights, and fp32 master weights
    (optimizer/optimizer.py, distrib_optimizer.py `_build_model_and_main_param_groups`).

    models: chunks on meta tensors. tensors: theirs, and main gradients. rank: of those that share
    the optimizer state, from the end where negative. expandable: as `rounding` has it.
    """

    def __init__(
        self,
        job: Job,
        device: Device,
        models: Sequence[torch.nn.Module],
        *,
        first_stage: bool,
        rank: int = -1,
        expandable: bool = False,
    ) -> None:
        self.models = list(models)
        self.allocator = CachingAllocator(expandable=expandable)
        self._job, self._device, self._rank = job, device, rank
        every = [p for model in models for p in model.parameters()]
        gradients = add_main_gradients(every, dummies=job.makes_dummies)
        self.tensors = [*every, *gradients, *(b for model in models for b in model.buffers())]
        chunks = [list(self._weights(model)) for model in models]
        blocks = [[self._allocate(w.element_bytes * w.count) for w in chunk] for chunk in chunks]
        self._shards: list[tuple[_Weight, int]] = []
        for number, (chunk, own) in enumerate(zip(chunks, blocks, strict=True)):
            self._add_buffers(chunk, own, bucketed=first_stage and number == 0)
        self._add_master_weights()
        self.buffers = FirstUse(self.allocator, shared_buffers(job, device, *models))

    def allocate_moments(self) -> None:
        """What Adam's first step makes; Muon has one moment."""
        main, *moments = state_parts(self._job)
        if self._job.adam_keeps_main_params:
            moments.append(main)
        for weight, shard in self._shards:
            for element_bytes in (4,) if weight.of_muon else moments:
                self._allocate(element_bytes * shard)

    def counted_bytes(self) -> int:
        """The same as `static_bytes` has it."""
        weights = counted_weights(torch.nn.ModuleList(self.models))
        shared = shared_buffers(self._job, self._device, *self.models)
        return static_bytes(self._job, self._device, weights).total_bytes + sum(shared.values())

    def _allocate(self, size_bytes: float, stream: int = ops.MAIN_STREAM) -> Block | None:
        return self.allocator.allocate(round(size_bytes), stream) if size_bytes >= 1 else None

    def _free(self, block: Block | None) -> None:
        if block is not None:
            self.allocator.free(block)

    def _weights(self, model: torch.nn.Module) -> Iterator[_Weight]:
        quantised = weight_bytes(self._job, self._device)
        for module in model.modules():
            grouped = isinstance(module, kernels.GroupedLinear)
            for name, parameter in module.named_parameters(recurse=False):
                linear = name == "weight" and isinstance(module, kernels.LinearModule)
                # Experts of stand-ins are one tensor, in Transformer Engine one each.
                each = parameter[0] if grouped else parameter
                outside = getattr(parameter, "is_embedding_or_output_parameter", False)
                found = _Weight(
                    each.numel(),
                    parameter.requires_grad,
                    not getattr(parameter, "allreduce", True),
                    self._job.optimizer == "muon" and each.dim() == 2 and not outside,
                    getattr(parameter, "shared_embedding", False),
                    quantised if linear else 2,
                )
                yield from [found] * (len(parameter) if grouped else 1)

    def _add_buffers(
        self, chunk: Sequence[_Weight], blocks: Sequence[Block | None], *, bucketed: bool
    ) -> None:
        job = self._job
        for expert in (False, True):
            own = [i for i, w in enumerate(chunk) if w.trained and w.expert is expert]
            weights, counts = [chunk[i] for i in own], [chunk[i].count for i in own]
            if not job.use_distributed_optimizer:
                self._allocate(gradient_bytes(job) * sum(counts), ops.DDP_STREAM)
                self._shards += zip(weights, counts, strict=True)
                continue
            ranks = state_ranks(job, expert=expert)
            bucket_size = max(BUCKET, BUCKET_OF_RANK * ranks) if bucketed else None
            tied = [weight.tied for weight in weights]
            buffer = laid_out(counts, ranks, bucket_size, tied, rank=self._rank)
            if job.precision == "bf16":
                self._allocate(2 * buffer.numel, ops.DDP_STREAM)
            self._allocate(gradient_bytes(job) * buffer.numel, ops.DDP_STREAM)
            if job.precision == "bf16":
                for index in own:
                    self._free(blocks[index])
            shards = buffer.shards
            if job.optimizer == "muon":  # as `static_bytes` divides them
                whole = not job.use_layer_wise_param_layout
                shards = tuple(
                    w.count if whole and not w.of_muon else -(-w.count // ranks) for w in weights
                )
            self._shards += zip(weights, shards, strict=True)

    def _add_master_weights(self) -> None:
        main, *_ = state_parts(self._job)
        for _, shard in self._shards if not self._job.adam_keeps_main_params else ():
            clone = self._allocate(2 * shard)
            self._allocate(main * shard)
            self._free(clone)
