"""What an evaluation between two steps holds.

Megatron's `evaluate` runs the schedule forward only, without gradients, so nothing is kept. But
residual additions of a model in evaluation are a function of their own (megatron-core
fusions/fused_bias_dropout.py), which torch compiles at its first call. Inductor then times its
kernels, and flushes the L2 cache between by a tensor of its size (torch/_inductor/runtime/
benchmarking.py `InductorBenchmarker`). On a small job on Blackwell that is the peak of the run.

With deterministic algorithms torch 2.10 had one configuration of such a kernel and timed nothing.
From 2.11 on it has several: the golden values of Megatron-LM's weekly test on GB200 show it, and
the code of 2.13 (triton_heuristics.py, no `disable_pointwise_autotuning`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.fusions import fused_bias_dropout

from benchmarks.measured.caching_allocator import CachingAllocator
from megatron_autorecompute.meta.devices import Device
from megatron_autorecompute.meta.fake_ranks import StepShape
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.meta_step import run_step
from megatron_autorecompute.patched import patched


def flushed_bytes(job: Job, device: Device) -> int:
    """Bytes of the tensor by which inductor flushes the L2 cache; 0 if it times nothing, or on a
    device whose cache's size is not known."""
    if job.config.get("deterministic_mode") and not job.has_torch(2, 11):
        return 0
    return device.l2_bytes or 0


def evaluation_bytes(
    models: Sequence[torch.nn.Module],
    shape: StepShape,
    step: Any,
    allocator: CachingAllocator,
    flushed: int,
) -> int:
    """Most bytes of blocks in a job's first evaluation, as many microbatches as `shape` has.

    Args:
        models: built chunks, on meta tensors whose blocks `allocator` counts.
        shape: sizes of the step.
        step: Megatron's forward_step_func.
        allocator: of this process; its peak begins anew.
        flushed: `flushed_bytes`.
    """
    allocator.peak_bytes = allocator.allocated_bytes
    for model in models:
        model.eval()
    try:
        with torch.no_grad(), _timed_once(allocator, flushed):
            run_step(list(models), shape, step, forward_only=True)
    finally:
        for model in models:
            model.train()
    return allocator.peak_bytes


@contextlib.contextmanager
def _timed_once(allocator: CachingAllocator, flushed: int) -> Iterator[None]:
    original, left = fused_bias_dropout.bias_dropout_add_fused_inference, [flushed]

    def run(*args: Any) -> torch.Tensor:
        result: torch.Tensor = original(*args)
        if size_bytes := left.pop() if left else 0:
            allocator.free(allocator.allocate(size_bytes))
        return result

    with patched(fused_bias_dropout, "bias_dropout_add_fused_inference", run):
        yield
