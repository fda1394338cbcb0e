"""Which of its attentions Transformer Engine takes for a job, where the job leaves it the choice.

NVIDIA/TransformerEngine of August 2026, pytorch/attention/dot_product_attention/utils.py
`get_attention_backend`, and for cuDNN common/fused_attn/fused_attn.cpp
`nvte_get_fused_attn_backend`.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_autorecompute.meta.devices import Device
from megatron_autorecompute.meta.job import Job


def with_backend(job: Job, device: Device) -> Job:
    """The job with `attention_backend` flash or unfused, if that is what will run.

    Before Hopper flash-attn is preferred to cuDNN's fused attention, from Hopper on it is the other
    way round. Where the job is deterministic there is no fused attention before Hopper, and on
    Blackwell only without dropout. What neither can run takes the unfused one. Multi-latent
    attention has values of another width than keys, which flash-attn 2 does not take.
    """
    config = job.resolved
    if job.transformer_impl == "local" or config.attention_backend != "auto":
        return job
    flash = job.flash_attn and not config.multi_latent_attention
    fused = not config.deterministic_mode or (
        device.capability >= 9 and not (device.capability >= 10 and config.attention_dropout)
    )
    if fused and (device.capability >= 9 or not flash):
        return job
    return replace(job, config={**job.config, "attention_backend": "flash" if flash else "unfused"})
