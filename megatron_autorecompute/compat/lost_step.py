"""A step that one rank cannot finish: whether it may end early, and what must be cleaned up."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute.compat.untyped import Chunk

_GROUPS_INSIDE_LAYERS = {
    "tensor": "get_tensor_model_parallel_world_size",
    "context": "get_context_parallel_world_size",
    "expert": "get_expert_model_parallel_world_size",
    "expert tensor": "get_expert_tensor_parallel_world_size",
}
"""Kinds of parallelism with collectives inside layers, and `parallel_state`'s function for each."""

_KEPT_BETWEEN_FORWARDS = {
    "cpu_offloading": "what it has moved to the host",
    "defer_embedding_wgrad_compute": "the gradients that it still owes",
    "delay_wgrad_compute": "the gradients that it still owes",
    "fine_grained_activation_offloading": "what it has moved to the host",
    "log_max_attention_logit": "the largest logits, which ranks compare after the optimizer's step",
    "moe_paged_stash": "the pages in use",
    "moe_shared_expert_overlap": "how far the shared experts have come",
    "qk_clip": "the largest logits, by which weights are clipped after the optimizer's step",
}
"""Flags under which Megatron keeps data from one forward to the next, and what it keeps; an
interrupted forward would leave it incomplete. A flag need not exist in every version."""


def why_no_stand_in(config: TransformerConfig) -> str | None:
    """Why a rank that runs out of memory cannot finish its step with zeros; None if it can."""
    if parallel_state.model_parallel_is_initialized():
        for name, size in _GROUPS_INSIDE_LAYERS.items():
            if getattr(parallel_state, size)() > 1:
                return f"ranks of a {name} parallel group communicate inside layers"
    for flag, kept in _KEPT_BETWEEN_FORWARDS.items():
        if getattr(config, flag, False):
            return f"{flag} keeps {kept}"
    if config.fp8 and config.fp8_recipe == "delayed":
        return "delayed scaling takes fp8's scales from earlier microbatches"
    return None


def leave_interrupted_checkpoint(chunks: Iterable[torch.nn.Module]) -> None:
    """Clear what checkpoints leave behind when an exception ends a step before their backward.

    Symptom: `is_checkpointing()` stays true; the graph of the step is never freed. Reference:
    `CheckpointFunction.forward` in `tensor_parallel.random` sets the flag without `finally`; a
    layer's last `CheckpointWithoutOutput` is an attribute of the layer, and keeps inputs and
    outputs until its backward. Remove when neither is so.
    """
    if hasattr(megatron_random, "_unset_checkpointing"):
        megatron_random._unset_checkpointing()
    modules = (module for chunk in chunks for module in chunk.modules())
    for value in itertools.chain.from_iterable(vars(module).values() for module in modules):
        if isinstance(value, megatron_random.CheckpointWithoutOutput):
            value.run_function = value.ctx = value.outputs = None


def stop_interrupted_timer(config: TransformerConfig) -> None:
    """Stop the timer of a backward that was ended by an exception.

    Symptom: "timer has already been started" in the next step, with `timing_log_level` 2.
    Reference: `backward_step` of `pipeline_parallel.schedules`, 0.16 to 0.19, stops it without
    `finally`. Remove when it does.
    """
    if config.timers is None:
        return
    timer = config.timers("backward-compute", log_level=2)
    if getattr(timer, "_started", False):
        timer.stop()


def output_shape(
    model: Chunk,
    tokens: torch.Size | None,
    received: torch.Size | None,
    another: torch.Size,
) -> torch.Size | None:
    """The shape of a forward's output, on a rank without collectives inside its layers.

    Args:
        model: a bare model chunk.
        tokens: shape of the microbatch's tokens, [b, s]; None on a stage that gets none.
        received: shape of the hidden states from the previous stage, [s, b, h]; None on the first.
        another: shape of the output for another microbatch.

    Returns:
        None if it is not known for this model.
    """
    if tokens is None:
        return received
    if len(tokens) != 2 or not hasattr(model, "post_process"):
        return None
    batch, sequence = tokens
    front = (batch, sequence) if model.post_process else (sequence, batch)
    return torch.Size((*front, *another[2:]))


def forget_lost_step(config: TransformerConfig, chunks: Sequence[Chunk]) -> None:
    """Drop what Megatron's routers have counted for `finalize_model_grads`, which is skipped."""
    reset_model_temporary_tensors(config, list(chunks))


def loss_groups() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The trackers of losses that are logged, each with the groups it reduces over.

    Symptom: after a lost step ranks wait forever when losses are logged. Reference:
    `MTPLossLoggingHelper` and `DSAIndexerLossLoggingHelper` of 0.16 to 0.19 learn the groups in a
    forward and forget them when they log. Remove when they do not.
    """
    trackers = [MTPLossLoggingHelper.tracker]
    try:
        from megatron.core.transformer.experimental_attention_variant import dsa
    except ImportError:
        pass
    else:
        trackers.append(dsa.DSAIndexerLossLoggingHelper.tracker)
    names = ("reduce_group", "avg_group")
    return [(tracker, {name: tracker.get(name) for name in names}) for tracker in trackers]
