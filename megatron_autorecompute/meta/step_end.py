"""Time of a step besides its microbatches: data-parallel collectives, the optimizer, the host.

As in megatron-core 0.19.2 (`param_and_grad_buffer.py`, `distrib_optimizer.py`), and for Muon as in
NVIDIA-NeMo/Emerging-Optimizers (`muon_utils.py`, `orthogonalized_optimizer.py`).
"""

from __future__ import annotations

from megatron_autorecompute.meta.devices import Device, Efficiency
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.roofline import Links
from megatron_autorecompute.meta.static_bytes import (
    Parameters,
    Trained,
    expert_data_parallel,
    gradient_bytes,
)

ADAM_BYTES = 42
"""Moved for each parameter of the shard: gradient, master weight and moments read, three of them
written, the weight written (30 bytes); the gradient read for its norm (4) and clipped (8)."""
BUFFER_BYTES = 12
"""Moved for each parameter's main gradient: divided (8), and set to 0 (4)."""

MUON_ITERATIONS = 5
"""Megatron's default of `muon_num_ns_steps`."""
MUON_KERNELS = 10 + 3 * MUON_ITERATIONS
"""For each matrix: weight decay, momentum, its norm, the clamp and the division, to bf16 and back,
two scales, the update; of every iteration X X^T and two `addmm`."""
MUON_VIEWS = 5 + MUON_ITERATIONS
"""Transposes and the expanded norm, which the host makes too."""
MUON_CALLS = 4 + MUON_ITERATIONS
"""Functions in Python around these kernels: `orthogonalize`, `scaled_orthogonalize_fn`,
`newton_schulz_tp`, `newton_schulz`, and `newton_schulz_step` for every iteration."""
MUON_BYTES = 90
"""Moved for each of its parameters by these kernels but the iterations': weight decay (8), momentum
(12), normalised (12), to bf16 and back (12), scaled twice (16), added to the master weight (12); by
Megatron the gradient's norm and its clipping (12), the weight written (6)."""


def step_end_ms(
    job: Job,
    device: Device,
    efficiency: Efficiency,
    parameters: Parameters,
    forward_ms: float,
    backward_ms: float,
) -> float:
    """Milliseconds of a step on a stage that no microbatch takes.

    parameters: of one rank; forward_ms, backward_ms: of one microbatch, behind which weights can be
    gathered and gradients reduced.
    """
    links = Links(device, efficiency)
    moved_bytes = 0
    exposed_ms = matrices_ms = 0.0
    sends: list[tuple[str, int, float]] = [
        ("_reduce_scatter_base_", gradient_bytes(job), backward_ms * job.overlap_grad_reduce),
        ("_allgather_base_", 2, forward_ms * job.overlap_param_gather),
    ]
    if not job.use_distributed_optimizer:
        sends = [("allreduce_", *sends[0][1:])]
    for trained, ranks in _shared(job, parameters):
        sharers = len(ranks) if job.use_distributed_optimizer else 1
        by_adam = trained.count
        if job.optimizer == "muon":
            by_adam -= trained.in_matrices
            matrices_ms += muon_ms(device, efficiency, trained, sharers)
        moved_bytes += ADAM_BYTES * (by_adam // sharers) + BUFFER_BYTES * trained.count
        if len(ranks) > 1 and trained.count:
            for name, element_bytes, beside_ms in sends:
                exposed_ms += _exposed_ms(
                    links, name, element_bytes, trained.count, ranks, beside_ms
                )
    moving_ms = moved_bytes / (device.bandwidth_bytes * efficiency.bandwidth) * 1e3
    return exposed_ms + moving_ms + matrices_ms + efficiency.step_ms


def _shared(job: Job, parameters: Parameters) -> tuple[tuple[Trained, range], ...]:
    """Dense and expert parameters, and the ranks that share them."""
    tensor, expert = job.size("tensor"), job.size("expert") * job.expert_tensor_parallel
    dense_ranks = job.data_parallel * job.size("context")
    return (
        (parameters.dense, range(0, tensor * dense_ranks, tensor)),
        (parameters.expert, range(0, expert * expert_data_parallel(job), expert)),
    )


def iteration_flops(rows: int, columns: int) -> int:
    """A = X X^T along the shorter side, B = bA + cAA, X = aX + BX."""
    short, long = sorted((rows, columns))
    return 4 * short**2 * long + 2 * short**3


def muon_ms(device: Device, efficiency: Efficiency, trained: Trained, ranks: int) -> float:
    """Milliseconds of the fullest of so many ranks, which have whole matrices (megatron-core
    optimizer/layer_wise_optimizer.py): of kernels, whose products reach what large ones do, or of
    the host that starts them, if that takes longer."""
    used = min(ranks, trained.matrices) or 1
    matrices = -(-trained.matrices // used)
    host_us = (MUON_KERNELS + MUON_VIEWS) * efficiency.host_us + MUON_CALLS * efficiency.module_us
    moved_bytes = MUON_BYTES * trained.in_matrices / used
    seconds = moved_bytes / (device.bandwidth_bytes * efficiency.bandwidth)
    flops = MUON_ITERATIONS * (trained.iteration_flops / used)
    seconds += flops / (device.rate("bf16") * efficiency.gemm)
    seconds += matrices * MUON_KERNELS * efficiency.kernel_us * 1e-6
    return max(1e3 * seconds, 1e-3 * matrices * host_us)


def _exposed_ms(
    links: Links, name: str, element_bytes: int, count: int, ranks: range, beside_ms: float
) -> float:
    """A collective of so many parameters beside a microbatch: at least its last bucket remains."""
    whole_ms = 1e3 * links.seconds(name, element_bytes * count, ranks)
    if not beside_ms:
        return whole_ms
    bucket = min(count, max(40_000_000, 1_000_000 * len(ranks)))  # Megatron's default
    last_ms = 1e3 * links.seconds(name, element_bytes * bucket, ranks)
    return max(last_ms, whole_ms - beside_ms)
