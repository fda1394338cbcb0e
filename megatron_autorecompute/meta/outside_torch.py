"""Assumed bytes of device memory outside torch's allocator, by what the job runs.

CUDA's context and NCCL's buffers are no tensors, so no run on meta tensors shows them. Measured
figures are of the configurations named; a job is counted as the nearest of them. DeepEP and
HybridEP state their sizes in their sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_autorecompute.meta.devices import Device
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.units import GIB

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


@dataclass(frozen=True, slots=True)
class Outside:
    """Assumed bytes outside torch, and a few words on what they are."""

    size_bytes: int
    reason: str


def outside_torch(job: Job, device: Device) -> Outside:
    """Bytes outside torch on one of the job's ranks."""
    ranks = job.size("expert") * job.expert_tensor_parallel
    if not job.resolved.num_moe_experts or ranks == 1:
        return Outside(CONTEXT_BYTES, "CUDA's context and NCCL")
    backend = dispatcher(job)
    if backend == "deepep":
        asked = job.resolved.moe_flex_dispatcher_num_sms or job.resolved.moe_deepep_num_sms
        buffer_bytes = deepep_bytes(job.resolved.hidden_size, ranks, asked or _SMS)
        return Outside(CONTEXT_BYTES + buffer_bytes, "CUDA's context, NCCL and DeepEP's buffers")
    if backend == "hybridep":
        buffer_bytes = hybridep_bytes(job, ranks, min(ranks, device.link_domain))
        return Outside(CONTEXT_BYTES + buffer_bytes, "CUDA's context, NCCL and HybridEP's buffers")
    if backend == "alltoall":
        within = CONTEXT_BYTES + (ranks - 1) * ALL_TO_ALL_PEER_BYTES
        most = within if ranks <= min(_NODE, device.link_domain) else ALL_TO_ALL_BYTES
        return Outside(most, "CUDA's context and NCCL with the experts' all-to-all")
    return Outside(CONTEXT_BYTES, "CUDA's context and NCCL")


def dispatcher(job: Job) -> str:
    """alltoall, allgather, or the backend of the flex dispatcher."""
    name = job.resolved.moe_token_dispatcher_type
    return job.resolved.moe_flex_dispatcher_backend if name == "flex" else name


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

    Args:
        job: its tokens and experts.
        ranks: the ranks that exchange tokens.
        domain: the ranks in one NVLink domain.
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
