"""Bytes that live through the step, by Megatron's own rules, from numbers of parameters.

Rules: `DistributedOptimizer` and `_ParamAndGradBuffer` of megatron-core (the table in Megatron-LM's
docs/source/api-guide/dist_optimizer.md: bf16 weights with fp32 gradients take 6 + 12/d bytes), and
OptimizerConfig's precision-aware dtypes. Padding of buffers to multiples of the ranks is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_autorecompute.meta.job import ELEMENT_BYTES, Job
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

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.dense + other.dense, self.expert + other.expert, self.frozen + other.frozen
        )

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.expert + self.frozen


def static_bytes(job: Job, parameters: Parameters, *, quantised: bool = False) -> StaticBytes:
    """Static bytes of parameters on one rank.

    quantised: whether they are weights of layers that multiply in the job's precision.
    """
    trained = parameters.dense + parameters.expert
    gradient = _gradient_bytes(job)
    shards = (
        (parameters.dense, job.data_parallel * job.size("context")),
        (parameters.expert, expert_data_parallel(job)),
    )
    state = _state_bytes(job)
    divided = job.use_distributed_optimizer
    return StaticBytes(
        parameter_bytes=round(_weight_bytes(job, quantised) * parameters.total),
        gradient_bytes=gradient * trained,
        optimizer_state_bytes=sum(
            -(-state * count // (ranks if divided else 1)) for count, ranks in shards
        ),
    )


def expert_data_parallel(job: Job) -> int:
    """Ranks that hold the same experts."""
    ranks = job.size("pipeline") * job.size("expert") * job.expert_tensor_parallel
    return max(1, job.num_gpus // ranks)


def optimizer_step_bytes(job: Job, parameters: Parameters) -> int:
    """Bytes of fp32 copies that the optimizer step makes of one rank's shard, above static bytes.

    bf16 main gradients are copied all at once (DistributedOptimizer
    `_copy_model_grads_to_main_grads`). The precision-aware optimizer reads gradients as they are,
    but Transformer Engine's FusedAdam makes an fp32 copy of every state that is not fp32, for one
    parameter group at a time (pytorch/optimizers/fused_adam.py `step`, `get_unscaled_state`, as
    read in 2025). Dense weights are one group here and expert weights another; the few weights
    without weight decay are counted in these groups.
    """
    divided = job.use_distributed_optimizer
    dense = parameters.dense // (job.data_parallel * job.size("context") if divided else 1)
    expert = parameters.expert // (expert_data_parallel(job) if divided else 1)
    if job.use_precision_aware_optimizer:
        dtypes = (job.main_params_dtype, job.exp_avg_dtype, job.exp_avg_sq_dtype)
        return 4 * sum(dtype != "fp32" for dtype in dtypes) * max(dense, expert)
    return 0 if job.accumulate_allreduce_grads_in_fp32 else 4 * (dense + expert)


def _weight_bytes(job: Job, quantised: bool) -> float:
    """Bytes per weight. bf16: 2. Quantised: TE keeps each weight for forward and for backward
    (rowwise and columnwise), and also in bf16 if the parameters themselves are not quantised."""
    if not quantised or job.precision == "bf16":
        return 2.0
    once = 0.5 + 1 / 16 if job.precision == "nvfp4" else 1.0
    copies = 1 if job.disable_parameter_transpose_cache else 2
    keeps_bf16 = job.precision == "nvfp4" or not job.fp8_param_gather
    return copies * once + 2 * keeps_bf16


def _gradient_bytes(job: Job) -> int:
    return 4 if job.accumulate_allreduce_grads_in_fp32 else 2


def _state_bytes(job: Job) -> int:
    if not job.use_precision_aware_optimizer:
        return 12
    main = ELEMENT_BYTES[job.main_params_dtype]
    if job.main_params_dtype == "fp32" and job.store_param_remainders:
        main = 2
    return main + ELEMENT_BYTES[job.exp_avg_dtype] + ELEMENT_BYTES[job.exp_avg_sq_dtype]
