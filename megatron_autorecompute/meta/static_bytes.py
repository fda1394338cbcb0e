"""Bytes that live through the step, by Megatron's own rules, from numbers of parameters.

Rules: `DistributedOptimizer` and `_ParamAndGradBuffer` of megatron-core (the table in Megatron-LM's
docs/source/api-guide/dist_optimizer.md: bf16 weights with fp32 gradients take 6 + 12/d bytes), and
OptimizerConfig's precision-aware dtypes. Padding of buffers to multiples of the ranks is left out.
TE is NVIDIA/TransformerEngine 2.11.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_autorecompute.meta.devices import Device
from megatron_autorecompute.meta.job import ELEMENT_BYTES, Job
from megatron_autorecompute.meta.muon import NO_MATRICES, Orthogonalized
from megatron_autorecompute.profile import StaticBytes


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of one rank's parameters, by how they are sharded and trained."""

    dense: int = 0
    """Sharded over data and context parallel ranks."""
    expert: int = 0
    """Sharded over the ranks that hold the same experts."""
    frozen: int = 0
    """Without gradient and optimizer state."""
    dense_matrices: int = 0
    """Those of `dense` that Muon trains: two-dimensional, but not embedding and output layer
    (megatron-core optimizer/emerging_optimizers.py `_is_nonlinear_or_embedding`)."""
    expert_matrices: int = 0
    """Those of `expert`."""
    dense_muon: Orthogonalized = NO_MATRICES
    """What Muon computes over `dense_matrices`."""
    expert_muon: Orthogonalized = NO_MATRICES
    """The same over `expert_matrices`."""

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.dense + other.dense,
            self.expert + other.expert,
            self.frozen + other.frozen,
            self.dense_matrices + other.dense_matrices,
            self.expert_matrices + other.expert_matrices,
            self.dense_muon + other.dense_muon,
            self.expert_muon + other.expert_muon,
        )

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.expert + self.frozen


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of one part of the model on one rank."""

    quantised: Parameters = Parameters()
    """Weights of layers that multiply in the job's precision."""
    others: Parameters = Parameters()
    """Norms, biases, embedding, router, output layer."""

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.quantised + other.quantised, self.others + other.others)

    @property
    def total(self) -> Parameters:
        """Both."""
        return self.quantised + self.others


def static_bytes(job: Job, device: Device, weights: Weights) -> StaticBytes:
    """Static bytes of parameters on one rank."""
    total = weights.total
    ranks, expert_ranks = state_ranks(job), state_ranks(job, expert=True)
    state = _adam_or_muon(job, total.dense, total.dense_matrices, ranks)
    state += _adam_or_muon(job, total.expert, total.expert_matrices, expert_ranks)
    quantised_bytes = weight_bytes(job, device) * weights.quantised.total
    return StaticBytes(
        parameter_bytes=round(quantised_bytes) + 2 * weights.others.total,
        gradient_bytes=gradient_bytes(job) * (total.dense + total.expert),
        optimizer_state_bytes=state,
    )


def _adam_or_muon(job: Job, count: int, matrices: int, ranks: int) -> int:
    """State of `count` parameters, `matrices` of which Muon trains with an fp32 master weight and
    momentum (emerging_optimizers' OrthogonalizedOptimizer has `momentum_buffer` alone).

    With the distributed optimizer whole matrices are divided over the ranks (megatron-core
    optimizer/layer_wise_optimizer.py), evenly in this count, and the rest byte by byte, or without
    the layout in whole tensors too."""
    adam = state_bytes(job)
    if job.optimizer == "adam":
        return -(-adam * count // ranks)
    rest = adam * (count - matrices)
    return -(-8 * matrices // ranks) + (
        -(-rest // ranks) if job.use_layer_wise_param_layout else rest
    )


def state_ranks(job: Job, *, expert: bool = False) -> int:
    """Ranks over which the optimizer's state of dense weights, or of experts', is divided.

    With several instances of the distributed optimizer, those of one instance (megatron-core
    `ProcessGroupCollection.intra_dp_cp` and `intra_expt_dp`).
    """
    if not job.use_distributed_optimizer:
        return 1
    ranks = expert_data_parallel(job) if expert else job.data_parallel * job.size("context")
    return max(1, ranks // job.num_distributed_optimizer_instances)


def expert_data_parallel(job: Job) -> int:
    """Ranks that hold the same experts."""
    ranks = job.size("pipeline") * job.size("expert") * job.expert_tensor_parallel
    return max(1, job.num_gpus // ranks)


COPY_BYTES = {"fp8": 1, "fp8_block": 1 + 4 / 128**2, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Bytes for each element of a quantised weight in one layout. TE pytorch/tensor: Float8Tensor,
Float8BlockwiseQTensor (an fp32 scale for 128 x 128 elements), MXFP8Tensor (a byte for 32),
NVFP4Tensor (a byte for 16)."""


def weight_bytes(job: Job, device: Device) -> float:
    """Bytes for each weight of a layer that multiplies in the job's precision.

    Forward and backward read a layout each; fp8 with one scale per tensor has a transpose only
    where `Device.needs_fp8_transposes`. Weights that are quantised themselves have all layouts
    however `disable_parameter_transpose_cache` is set: TE pytorch/module/base.py
    `get_weight_workspace` adds the layout that is missing and drops none.
    """
    if job.precision == "bf16" or job.copies_weights:
        return 2.0
    once = job.precision == "fp8" and not device.needs_fp8_transposes
    return (1 if once else 2) * COPY_BYTES[job.precision] + 2 * job.keeps_bf16_weights


def state_bytes(job: Job) -> int:
    """Bytes of optimizer state for each parameter: master weight and both moments."""
    return sum(state_parts(job))


def state_parts(job: Job) -> tuple[int, int, int]:
    """The same of each of the three."""
    if not job.use_precision_aware_optimizer:
        return 4, 4, 4
    moments = ELEMENT_BYTES[job.exp_avg_dtype], ELEMENT_BYTES[job.exp_avg_sq_dtype]
    if not job.adam_keeps_main_params:
        return 4, *moments
    main = ELEMENT_BYTES[job.main_params_dtype]
    if job.main_params_dtype == "fp32" and job.store_param_remainders:
        main = 2
    return main, *moments


def gradient_bytes(job: Job) -> int:
    """Bytes of each parameter's main gradient."""
    return 4 if job.accumulate_allreduce_grads_in_fp32 else 2
