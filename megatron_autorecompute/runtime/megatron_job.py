"""Sets `auto` up for any program that trains with Megatron-Core.

The integrations add what differs between programs: where settings are, and who prints and logs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_autorecompute.profile import Parallelism
from megatron_autorecompute.runtime.auto_options import AutoOptions
from megatron_autorecompute.runtime.controller import Auto, JobFacts


def tuner(
    chunks: Sequence[torch.nn.Module],
    optimizer: Any,
    options: AutoOptions,
    facts: JobFacts,
    save: str | None,
) -> Auto:
    """The job's `Auto`, whose plan goes to the folder of the job's checkpoints by default.

    Args:
        chunks: this rank's model chunks.
        optimizer: Megatron's.
        options: as the user gave them.
        facts: of the job.
        save: the folder of the job's checkpoints, made if it is missing; None if nothing is saved.
    """
    if save is not None:
        os.makedirs(save, exist_ok=True)  # the plan comes before the first checkpoint
    return Auto(chunks, optimizer, options.with_plan_in(save), facts)


def job_facts(settings: Any, micro_batch_size: int, seq_length: int, **known: Any) -> JobFacts:
    """`JobFacts` of a job with Megatron's parallel sizes.

    Args:
        settings: a TransformerConfig, or arguments with fields of the same names.
        micro_batch_size: samples per microbatch on one data-parallel rank.
        seq_length: tokens per sample.
        known: the other fields of `JobFacts`.
    """
    return JobFacts(
        parallelism=parallelism(settings, micro_batch_size, seq_length),
        num_microbatches=get_num_microbatches,
        **known,
    )


def parallelism(settings: Any, micro_batch_size: int, seq_length: int) -> Parallelism:
    """The shapes that bytes and times hold for; arguments as in `job_facts`."""
    tensor_parallel = settings.tensor_model_parallel_size
    return Parallelism(
        micro_batch_size=micro_batch_size,
        seq_length=seq_length,
        tensor_parallel=tensor_parallel,
        context_parallel=settings.context_parallel_size,
        expert_parallel=settings.expert_model_parallel_size,
        expert_tensor_parallel=settings.expert_tensor_parallel_size or tensor_parallel,
        sequence_parallel=settings.sequence_parallel,
        dtype=str(settings.params_dtype).removeprefix("torch."),
    )
