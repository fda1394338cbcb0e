"""Bytes that live through the step, and those that the optimizer step makes above them, by
Megatron's own rules (`DistributedOptimizer`, `_ParamAndGradBuffer`, OptimizerConfig), from numbers
of parameters. Padding of buffers is left out. TE is NVIDIA/TransformerEngine 2.11.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron_autorecompute.meta.devices import Device
from megatron_autorecompute.meta.job import ELEMENT_BYTES, Job
from megatron_autorecompute.meta.job_config import PRECISIONS
from megatron_autorecompute.profile import StaticBytes
from megatron_autorecompute.units import GIB

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from 3.11 on


class _Summed:
    """Dataclasses that are added field by field."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        mine: Any = self
        names = (each.name for each in fields(mine))
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True, slots=True)
class Trained(_Summed):
    """Trained parameters that the same ranks share, on one rank."""

    count: int = 0
    in_matrices: int = 0
    """Those that Muon trains: two-dimensional, but not of embedding and output layer (megatron-core
    optimizer/emerging_optimizers.py `_is_nonlinear_or_embedding`)."""
    matrices: int = 0
    """The matrices of these."""
    iteration_flops: int = 0
    """Floating-point operations of one of Muon's iterations over all of them."""


@dataclass(frozen=True, slots=True)
class Parameters(_Summed):
    """Numbers of one rank's parameters, by how they are sharded and trained."""

    dense: Trained = Trained()
    """Sharded over data and context parallel ranks."""
    expert: Trained = Trained()
    """Sharded over the ranks that hold the same experts."""
    frozen: int = 0
    """Parameters without gradient and optimizer state."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense.count + self.expert.count + self.frozen


@dataclass(frozen=True, slots=True)
class Weights(_Summed):
    """Parameters of one part of the model on one rank."""

    quantised: Parameters = Parameters()
    """Weights of layers that multiply in the job's precision."""
    others: Parameters = Parameters()
    """Norms, biases, embedding, router, output layer."""

    @property
    def total(self) -> Parameters:
        """The sum of both parts."""
        return self.quantised + self.others


def static_bytes(job: Job, device: Device, weights: Weights) -> StaticBytes:
    """Static bytes of parameters on one rank."""
    total = weights.total
    ranks, expert_ranks = state_ranks(job), state_ranks(job, expert=True)
    state = _adam_or_muon(job, total.dense, ranks) + _adam_or_muon(job, total.expert, expert_ranks)
    quantised_bytes = weight_bytes(job, device) * weights.quantised.total
    return StaticBytes(
        parameter_bytes=round(quantised_bytes) + 2 * weights.others.total,
        gradient_bytes=gradient_bytes(job) * (total.dense.count + total.expert.count),
        optimizer_state_bytes=state,
    )


def _adam_or_muon(job: Job, trained: Trained, ranks: int) -> int:
    """Bytes of the optimizer's state. Muon trains matrices with an fp32 master weight and
    momentum (emerging_optimizers' OrthogonalizedOptimizer has `momentum_buffer` alone).

    With the distributed optimizer whole matrices are divided over the ranks (megatron-core
    optimizer/layer_wise_optimizer.py), evenly in this count, and the rest byte by byte, or without
    the layout in whole tensors too."""
    adam = sum(state_parts(job))
    if job.optimizer == "adam":
        return -(-adam * trained.count // ranks)
    rest = adam * (trained.count - trained.in_matrices)
    return -(-8 * trained.in_matrices // ranks) + (
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
    return (1 if once else 2) * PRECISIONS[job.precision].copy_bytes + 2 * job.keeps_bf16_weights


def state_parts(job: Job) -> tuple[int, int, int]:
    """Bytes of master weight and both moments for each parameter."""
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


def optimizer_step_bytes(job: Job, weights: Weights) -> int:
    """Bytes at the fullest moment of the step: gradients in fp32, and the larger of what Adam and
    the cast to quantised weights make. Gradients of all parameters are copied first; then dense and
    expert weights are stepped by one optimizer after the other (`ChainedOptimizer`)."""
    dense, expert = _shards(job, weights.total)
    # bf16 main gradients are copied to fp32, unless Adam reads them as they are
    # (`_copy_model_grads_to_main_grads`).
    copies = not job.accumulate_allreduce_grads_in_fp32 and not job.adam_keeps_main_params
    gradients = dense + expert if copies else 0
    cast = max(_shards(job, weights.quantised)) if _casts_weights(job) else 0
    return 4 * gradients + max(_unscaled_bytes(job) * max(dense, expert), 2 * cast)


def _shards(job: Job, parameters: Parameters) -> tuple[int, int]:
    """Dense and expert parameters whose state is on this rank."""
    expert = parameters.expert.count // state_ranks(job, expert=True)
    return parameters.dense.count // state_ranks(job), expert


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


CONTEXT_BYTES = round(2 * GIB)
"""CUDA's context and NCCL's rings: assumed."""
ALL_TO_ALL_PEER_BYTES = round((4.34e9 - 1.06e9) / 7)
"""Bytes for each other rank of an all-to-all within one NVLink domain: 4.34 GB outside torch after
the first all-to-all of 8 H100s, 1.06 GB before (NVIDIA/nccl issue 1685)."""
ALL_TO_ALL_BYTES = 6_403 << 20
"""Bytes of a whole job whose experts' all-to-all crosses nodes: device memory used less the most
that torch reserved, 68,973 - 62,570 MB on 64 H100s with EP 16 and PP 4 (NVIDIA/Megatron-LM pull
request 6429; 6,411 MB with EP overlap)."""
_NODE = 8
"""LEGACY_NUM_MAX_NVL_PEERS of DeepEP."""
_SMS = 20
"""DeepEP's default of SMs, and Megatron's for it; two for each channel."""
_RECEIVED = {96: 480, 128: 560, 144: 720, 160: 720}
"""Tokens of an NVLink chunk by ranks, deep_ep/buffers/legacy.py `get_dispatch_config`: 256 up to 8
ranks, 288 up to 64."""
_BETWEEN_NODES = {16: 140, 96: 132, 128: 132, 144: 132, 160: 132}
"""Tokens of a chunk between nodes by ranks: 128, up to a multiple of what is sent at once."""


def outside_torch(job: Job, device: Device) -> tuple[int, str]:
    """Assumed bytes outside torch on one of the job's ranks, and a few words on what they are."""
    ranks = job.size("expert") * job.expert_tensor_parallel
    if not job.resolved.num_moe_experts or ranks == 1:
        return CONTEXT_BYTES, "CUDA's context and NCCL"
    backend = job.dispatcher
    if backend == "deepep":
        asked = job.resolved.moe_flex_dispatcher_num_sms or job.resolved.moe_deepep_num_sms
        buffer_bytes = deepep_bytes(job.resolved.hidden_size, ranks, asked or _SMS)
        return CONTEXT_BYTES + buffer_bytes, "CUDA's context, NCCL and DeepEP's buffers"
    if backend == "hybridep":
        buffer_bytes = hybridep_bytes(job, ranks, min(ranks, device.link_domain))
        return CONTEXT_BYTES + buffer_bytes, "CUDA's context, NCCL and HybridEP's buffers"
    if backend == "alltoall":
        within = CONTEXT_BYTES + (ranks - 1) * ALL_TO_ALL_PEER_BYTES
        most = within if ranks <= min(_NODE, device.link_domain) else ALL_TO_ALL_BYTES
        return most, "CUDA's context and NCCL with the experts' all-to-all"
    return CONTEXT_BYTES, "CUDA's context and NCCL"


def deepep_bytes(hidden_size: int, ranks: int, sms: int = _SMS) -> int:
    """DeepEP's buffer for bf16 tokens, the larger of dispatch and combine: csrc/legacy/config.hpp
    `get_nvl_buffer_size_hint` and `get_rdma_buffer_size_hint` (deepseek-ai/DeepEP, August 2026)."""
    nodes, local = max(ranks // _NODE, 1), min(ranks, _NODE)
    channels = sms // 2
    of_token = 2 * hidden_size + 8 + 128 * (8 + 4 + 4)  # where it came from; top-k and scales
    received = _RECEIVED.get(ranks, 256 if ranks <= _NODE else 288)
    nvlink = channels * local * (4 * (2 * nodes + 3) + received * of_token)
    nvlink = -(-nvlink // 128) * 128
    if ranks <= _NODE:
        return nvlink
    arriving = _BETWEEN_NODES.get(ranks, 128)
    between = channels * nodes * 2 * (4 * (2 * _NODE + 2) + arriving * (of_token + 16))
    return nvlink + -(-between // 128) * 128


def hybridep_bytes(job: Job, ranks: int, domain: int) -> int:
    """HybridEP's buffers for bf16 tokens, those of dispatch and combine shared: deepseek-ai/DeepEP
    branch hybrid-ep, csrc/hybrid_ep/buffer/intranode.cu `allocate_dispatch_buffers`, and between
    NVLink domains internode_doca.cu.

    domain: of the ranks that exchange tokens, those in one NVLink domain.
    """
    hidden, experts = job.resolved.hidden_size, job.resolved.num_moe_experts
    of_sequence = job.size("context") * (
        job.size("tensor") if job.resolved.sequence_parallel else 1
    )
    tokens = job.micro_batch_size * job.seq_length // of_sequence
    of_domain = experts // job.size("expert") * domain
    scales = 4 * (hidden // 128)
    # Room for all tokens of all ranks.
    found = ranks * tokens * (2 * hidden + 4 * of_domain + scales)
    others = ranks // domain - 1
    if others:
        own = tokens * (2 * hidden + 4 * experts + scales)
        one = tokens * others * (2 * hidden + 4 * of_domain)
        found += own + 3 * one + tokens * others * scales
    return found
