"""One step of a stage of any TransformerConfig on meta tensors, without the stand-ins of a job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from megatron_autorecompute.meta import without_cuda
from megatron_autorecompute.meta.fake_ranks import StepShape, fake_ranks
from megatron_autorecompute.meta.meta_step import (
    Build,
    build_chunks,
    build_gpt,
    meta_config,
)
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.runtime.apply import apply
from testing.recorded_steps import RecordedStep, recorded_step


def stage_step(
    config: Any,
    stage: int,
    shape: StepShape,
    policy: RecomputePolicy | None = None,
    build: Build = build_gpt,
) -> RecordedStep:
    """One step of the first tensor and data parallel rank of a pipeline stage, in this process.

    Args:
        config: a TransformerConfig with the real parallel sizes; only a copy is changed.
        stage: pipeline rank.
        shape: sizes of the step.
        policy: applied to the built model; without it the config's own recompute fields are used.
        build: makes a chunk.
    """
    config = meta_config(config)
    config.variable_seq_lengths = bool(shape.lengths)
    device = torch.device("meta")
    with without_cuda.activate(meta=True), fake_ranks(config, stage, shape):
        models = build_chunks(config, shape, build, device)
        with apply(policy, models) if policy else contextlib.nullcontext():
            return recorded_step(models, shape, TokenStep(shape, device))


class TokenStep:
    """forward_step_func over fresh zero tokens and labels [b, s], one causal mask [1, 1, s, s] for
    each length s.

    A mask is the same for every microbatch and step: static bytes, not activations.
    """

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.masks = {
            length: torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
            for length in set(shape.lengths or [shape.seq_length])
        }
        self.static = tuple(self.masks.values())

    def __call__(self, iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        """Run one microbatch; the iterator says which if they differ, and else is not asked."""
        lengths = self.shape.lengths
        length = lengths[next(iterator)] if lengths else self.shape.seq_length
        size = (self.shape.micro_batch_size, length)
        tokens, positions, labels = (
            torch.zeros(size, dtype=torch.long, device=self.device) for _ in range(3)
        )
        return model(tokens, positions, self.masks[length], labels=labels), _mean_loss


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return losses.float().mean(), {}
