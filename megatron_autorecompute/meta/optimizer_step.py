"""Bytes that the optimizer step makes above static bytes, by Megatron's DistributedOptimizer.

megatron-core 0.19.2 optimizer/distrib_optimizer.py; TE is NVIDIA/TransformerEngine 2.11.
"""

from __future__ import annotations

from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.static_bytes import Parameters, Weights, state_ranks


def optimizer_step_bytes(job: Job, weights: Weights) -> int:
    """Bytes at the fullest moment of the step: gradients in fp32, and the larger of what Adam and
    the cast to quantised weights make. Gradients of all parameters are copied first; then dense and
    expert weights are stepped by one optimizer after the other (`ChainedOptimizer`)."""
    dense, expert = _shards(job, weights.total)
    gradients = dense + expert if _copies_gradients(job) else 0
    cast = max(_shards(job, weights.quantised)) if _casts_weights(job) else 0
    return 4 * gradients + max(_unscaled_bytes(job) * max(dense, expert), 2 * cast)


def _shards(job: Job, parameters: Parameters) -> tuple[int, int]:
    """Dense and expert parameters whose state is on this rank."""
    expert = parameters.expert // state_ranks(job, expert=True)
    return parameters.dense // state_ranks(job), expert


def _copies_gradients(job: Job) -> bool:
    """bf16 main gradients are copied to fp32, unless Adam reads them as they are
    (`_copy_model_grads_to_main_grads`)."""
    return not job.accumulate_allreduce_grads_in_fp32 and not job.adam_keeps_main_params


def _unscaled_bytes(job: Job) -> int:
    """Bytes per parameter of one group: FusedAdam makes an fp32 copy of every state that is not
    fp32 (TE pytorch/optimizers/fused_adam.py `step`, `get_unscaled_state`); since 2.14 none of two
    bf16 moments (`fuse_unscale`, commit 459e7cf49). Dense weights are one group here and expert
    weights another; the few weights without weight decay are counted in these groups."""
    if not job.use_precision_aware_optimizer:
        return 0
    moments = [job.exp_avg_dtype, job.exp_avg_sq_dtype]
    fused = moments == ["bf16", "bf16"] and job.has_te(2, 14)
    states = [*([] if fused else moments), *[job.main_params_dtype] * job.adam_keeps_main_params]
    return 4 * sum(dtype != "fp32" for dtype in states)


def _casts_weights(job: Job) -> bool:
    """Master weights of all quantised weights of one optimizer are copied to bf16 before the first
    is quantised (`_copy_main_params_to_model_params`, TE pytorch/tensor/utils.py
    `cast_master_weights_to_fp8`).

    Not where Adam writes the weights itself, nor with mxfp8, whose master weights go to the
    gradient buffer (`_copy_main_params_to_param_buffer`, with reuse_grad_buf_for_mxfp8_param_ag,
    which is assumed).
    """
    quantised = job.precision not in ("bf16", "mxfp8") and not job.keeps_bf16_weights
    return quantised and job.use_distributed_optimizer and not job.adam_keeps_main_params
