"""Time of a step besides its microbatches: data-parallel collectives, the optimizer, the host.

Megatron-core 0.19.2: `distributed/param_and_grad_buffer.py` (buckets, `start_grad_sync`,
`start_param_sync`), `optimizer/distrib_optimizer.py`. With `overlap_grad_reduce` gradients are
reduced bucket by bucket while the last microbatch runs backward, and the last bucket after it; with
`overlap_param_gather` the first bucket of weights is gathered before the first forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_autorecompute.meta.devices import Device, Efficiency
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.muon import Orthogonalized, muon_ms
from megatron_autorecompute.meta.roofline import Links
from megatron_autorecompute.meta.static_bytes import Parameters, expert_data_parallel

ADAM_BYTES = 42
"""Moved for each parameter of the shard: gradient, master weight and moments read, three of them
written, the weight written (30 bytes); the gradient read for its norm (4) and clipped (8)."""
BUFFER_BYTES = 12
"""Moved for each parameter's main gradient: divided (8), and set to 0 (4)."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """What the end of a step does on one pipeline stage."""

    parameters: Parameters
    """The parameters of one rank."""
    backward_ms: float
    """The backward of one microbatch, behind which gradients can be reduced."""
    forward_ms: float
    """The forward of one microbatch, behind which weights can be gathered."""


def step_end_ms(job: Job, device: Device, efficiency: Efficiency, stage: StageWork) -> float:
    """Milliseconds of a step on a stage that no microbatch takes."""
    moved_bytes = 0
    exposed_ms = 0.0
    matrices_ms = 0.0
    for count, ranks, matrices, muon in _shards(job, stage.parameters):
        sharers = len(ranks) if job.use_distributed_optimizer else 1
        if job.optimizer == "muon":
            matrices_ms += muon_ms(device, efficiency, muon, matrices, sharers)
        by_adam = count - matrices * (job.optimizer == "muon")
        moved_bytes += ADAM_BYTES * (by_adam // sharers) + BUFFER_BYTES * count
        exposed_ms += _collectives_ms(job, Links(device, efficiency), count, ranks, stage)
    moving_ms = moved_bytes / (device.bandwidth_bytes * efficiency.bandwidth) * 1e3
    return exposed_ms + moving_ms + matrices_ms + efficiency.step_ms


_Shard = tuple[int, range, int, Orthogonalized]


def _shards(job: Job, parameters: Parameters) -> tuple[_Shard, _Shard]:
    """Of dense and of expert parameters: how many, the ranks that share them, those of matrices,
    and what Muon computes over these."""
    tensor, expert = job.size("tensor"), job.size("expert") * job.expert_tensor_parallel
    dense_ranks = job.data_parallel * job.size("context")
    return (
        (
            parameters.dense,
            range(0, tensor * dense_ranks, tensor),
            parameters.dense_matrices,
            parameters.dense_muon,
        ),
        (
            parameters.expert,
            range(0, expert * expert_data_parallel(job), expert),
            parameters.expert_matrices,
            parameters.expert_muon,
        ),
    )


def _collectives_ms(job: Job, links: Links, count: int, ranks: range, stage: StageWork) -> float:
    """The collectives of one kind of parameters that no microbatch hides."""
    if len(ranks) < 2 or not count:
        return 0.0
    gradient_bytes = 4 if job.accumulate_allreduce_grads_in_fp32 else 2
    bucket = min(count, max(40_000_000, 1_000_000 * len(ranks)))  # Megatron's default

    def exposed_ms(name: str, element_bytes: int, overlaps: bool, beside_ms: float) -> float:
        whole_ms = 1e3 * links.seconds(name, element_bytes * count, ranks)
        if not overlaps:
            return whole_ms
        last_ms = 1e3 * links.seconds(name, element_bytes * bucket, ranks)
        return max(last_ms, whole_ms - beside_ms)

    if not job.use_distributed_optimizer:
        return exposed_ms("allreduce_", gradient_bytes, job.overlap_grad_reduce, stage.backward_ms)
    reduced_ms = exposed_ms(
        "_reduce_scatter_base_", gradient_bytes, job.overlap_grad_reduce, stage.backward_ms
    )
    return reduced_ms + exposed_ms(
        "_allgather_base_", 2, job.overlap_param_gather, stage.forward_ms
    )
