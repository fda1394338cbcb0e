"""Microbatches of a whole step that stay on the GPU.

Megatron-LM did so from 5e4fc931b (2026-05-21) to bf32f4415 (2026-07-06) on first tensor parallel
ranks: get_batch moved the tensors of the dictionary that RerunDataIterator keeps.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.profile import Profile, StageRecord, StaticBytes


def with_kept_microbatches(profile: Profile, job: Job) -> Profile:
    """The profile with all microbatches but the one that runs, on stages that load data."""
    ends = [
        (any(chunk.embedding for chunk in chunks), any(chunk.head for chunk in chunks))
        for chunks in job.layout().stages
    ]
    pairs = zip(profile.stages, ends, strict=True)
    return replace(profile, stages=tuple(_with_kept(job, stage, *end) for stage, end in pairs))


def _with_kept(job: Job, stage: StageRecord, embedding: bool, head: bool) -> StageRecord:
    if not embedding and not head:
        return stage
    size = kept_bytes(job, embedding=embedding or bool(job.mtp_num_layers), head=head)
    kept = StaticBytes(shared={"microbatches kept for a rerun": size})
    return replace(stage, static=StaticBytes.sum([stage.static, kept]))


def kept_bytes(job: Job, *, embedding: bool, head: bool) -> int:
    """On a stage with one end of the model or both: masks, and per token 8 bytes each of the token,
    its position and its label, and 4 of the loss mask."""
    tokens = job.micro_batch_size * job.seq_length // job.size("context")
    each = job.attention_mask_bytes + tokens * (16 * embedding + 12 * head)
    return each * (job.num_microbatches - 1)
