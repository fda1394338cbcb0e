"""Boundary tensors counted in Megatron's own schedule, in units of one of them.

See docs/decisions/bytes.md.
"""

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_autorecompute.meta.fake_ranks import StepShape
from testing.meta_stages import stage_step
from testing.recorded_steps import RecordedStep, StepSpan, Where


def events(step: RecordedStep) -> list[StepSpan]:
    """The forwards and backwards in order, with one span for all layers of each."""
    merged: list[StepSpan] = []
    for span in step.spans:
        where = Where(*span.where[:3])
        if merged and merged[-1].where == where and where.phase != "between":
            before = merged.pop()
            peak_bytes = max(before.peak_bytes, span.peak_bytes)
            span = StepSpan(where, before.start_bytes, peak_bytes)
        merged.append(StepSpan(where, span.start_bytes, span.peak_bytes))
    return [span for span in merged if span.where.phase != "between"]


@dataclass(frozen=True, slots=True)
class BoundaryTensors:
    """Number of pipeline tensors that are alive when an event begins and belong to no layer.

    The input of a chunk belongs to its first layer, and a gradient that a layer's backward is about
    to use to that layer.
    """

    phase: Literal["forward", "backward"]
    chunk: int
    extra: int
    """Alive during the whole event: earlier gradients, tensors received early or kept late."""


def boundary_tensors(config: Any, stage: int, num_microbatches: int) -> list[BoundaryTensors]:
    """Count them at every event, on chunks that keep exactly their input.

    Only the schedule's fields of the config matter (pipeline sizes, microbatch group, p2p overlap,
    deallocate_pipeline_outputs), so a tiny model is run: about a millisecond per event.
    """
    small = copy.copy(config)
    small.num_layers = config.pipeline_model_parallel_size
    small.hidden_size = 2048  # so large that tokens and losses are negligible
    small.sequence_parallel = False
    small.tensor_model_parallel_size = small.context_parallel_size = 1
    small.expert_model_parallel_size = small.expert_tensor_parallel_size = 1
    small.num_moe_experts = small.mtp_num_layers = None
    unit_bytes = 8 * small.hidden_size * small.params_dtype.itemsize
    shape = StepShape(
        seq_length=8, micro_batch_size=1, num_microbatches=num_microbatches, vocab_size=1
    )
    traced = stage_step(small, stage, shape, build=InputKeeper)
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    first_of_all, last_of_all = stage == 0, stage == config.pipeline_model_parallel_size - 1
    in_flight = 0
    counts = []
    for event in events(traced):
        forward, chunk = event.where.phase == "forward", event.where.chunk
        no_input = forward and first_of_all and chunk == 0
        gradient = int(not forward and not (last_of_all and chunk == num_chunks - 1))
        own = int(forward and not no_input) + gradient
        extra = round(event.start_bytes / unit_bytes) - in_flight - own
        counts.append(BoundaryTensors(event.where.phase, chunk, extra))
        in_flight += 1 if forward else -1
    return counts


class InputKeeper(torch.nn.Module):
    """A chunk whose backward needs only its input: output = input * weight."""

    def __init__(
        self,
        config: Any,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
        shape: StepShape,
    ) -> None:
        from megatron.core.enums import ModelType

        super().__init__()
        self.config, self.vp_stage = config, vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process = pre_process
        self.size = (shape.seq_length, shape.micro_batch_size, config.hidden_size)
        self.weight = torch.nn.Parameter(torch.ones(()))

    def set_input_tensor(self, tensors: list[torch.Tensor]) -> None:
        """Called by Megatron's forward_step with what the previous stage sent."""
        self.input_tensor = tensors[0]

    def forward(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # input_tensor stays set until the next forward, as TransformerBlock's does: one tensor more
        # per chunk, alive after its backward.
        source = self.weight.new_zeros(self.size) if self.pre_process else self.input_tensor
        return source * self.weight
