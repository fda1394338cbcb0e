"""A step that one rank cannot finish: where it may end early, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
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
"""Kinds of parallelism whose ranks meet inside layers, and `parallel_state`'s function for each."""

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
"""Flags under which Megatron keeps something from one forward to the next that an interrupted one
leaves half done; in which versions each exists does not matter here."""


def why_no_stand_in(config: TransformerConfig) -> str | None:
    """Why a rank that runs out of memory cannot finish its step with zeros; None where it may."""
    if parallel_state.model_parallel_is_initialized():
        for name, size in _GROUPS_INSIDE_LAYERS.items():
            if getattr(parallel_state, size)() > 1:
                return f"ranks of a {name} parallel group meet inside layers"
    for flag, kept in _KEPT_BETWEEN_FORWARDS.items():
        if getattr(config, flag, False):
            return f"{flag} keeps {kept}"
    if config.fp8 and config.fp8_recipe == "delayed":
        return "delayed scaling takes fp8's scales from the microbatches before"
    return None


def leave_interrupted_checkpoint() -> None:
    """Clear what a checkpoint left behind that an exception ended.

    Symptom: `is_checkpointing()` stays true. Reference: `CheckpointFunction.forward` in
    `tensor_parallel.random` sets the flag without `finally`. Remove when it does.
    """
    if hasattr(megatron_random, "_unset_checkpointing"):
        megatron_random._unset_checkpointing()


def stop_interrupted_timer(config: TransformerConfig) -> None:
    """Stop the timer of a backward that an exception ended.

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
    """The shape of what a forward returns, on a rank that shares its layers with no other.

    Args:
        model: a bare model chunk.
        tokens: of the microbatch, [b, s]; None on a stage that takes none.
        received: hidden states from the stage before, [s, b, h]; None on the first.
        another: what the forward returns for another microbatch.

    Returns:
        None where it is not known for this model.
    """
    if tokens is None:
        return received
    if len(tokens) != 2 or not hasattr(model, "post_process"):
        return None
    batch, sequence = tokens
    front = (batch, sequence) if model.post_process else (sequence, batch)
    return torch.Size((*front, *another[2:]))


def forget_lost_step(config: TransformerConfig, chunks: Sequence[Chunk]) -> None:
    """Drop what Megatron's routers have counted for `finalize_model_grads`, which is left out."""
    reset_model_temporary_tensors(config, list(chunks))


def loss_groups() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The trackers of losses that are logged, each with the groups it reduces over.

    Symptom: after a lost step ranks wait for ever where losses are logged. Reference:
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
