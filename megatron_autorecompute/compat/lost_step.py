"""A step that one rank cannot finish: whether it may end early, what must be cleaned up, and which
collectives of Megatron's DistributedDataParallel it still has to enter.

With --overlap-grad-reduce the gradients of a group of buckets are reduced as soon as all of them
are ready; with --overlap-param-gather parameters are gathered when the first layer needs them. If a
rank leaves a forward or a backward half done, the other ranks wait in the collectives that it has
not entered. `BucketSyncs` enters these, in the order of a complete step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute.compat.untyped import Chunk
from megatron_autorecompute.patched import Replace

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


def why_no_stand_in(config: TransformerConfig | None, chunks: Sequence[Chunk]) -> str | None:
    """Why a rank that runs out of memory cannot finish its step with zeros; None if it can."""
    if config is None:
        return None
    if parallel_state.model_parallel_is_initialized():
        dense = parallel_state.get_tensor_and_context_parallel_group()
        expert = parallel_state.get_expert_tensor_and_model_parallel_group()
        if max(map(torch.distributed.get_world_size, (dense, expert))) > 1:
            return "tensor, context or expert parallel ranks communicate inside layers"
        several = parallel_state.get_data_parallel_world_size() > 1
        if several and "global_aux_loss" in config.moe_router_load_balancing_type:
            return "global_aux_loss adds up over data-parallel ranks inside layers"
    if any(
        hasattr(chunk, "ddp_config") and not hasattr(chunk, "bucket_groups") for chunk in chunks
    ):
        return "data-parallel ranks gather sharded parameters inside layers"
    for flag, kept in _KEPT_BETWEEN_FORWARDS.items():
        if getattr(config, flag, False):
            return f"{flag} keeps {kept}"
    if config.fp8 and config.fp8_recipe == "delayed":
        return "delayed scaling takes fp8's scales from earlier microbatches"
    return None


_CHUNK = "_autorecompute_chunk"
"""Attribute of an output tensor: the number of its chunk."""


def of_chunk(output: Any, number: int) -> Any:
    """A forward's output, marked for `replace_backward` as that of the chunk with this number."""
    first = output[0] if isinstance(output, (list, tuple)) else output
    if isinstance(first, torch.Tensor):
        setattr(first, _CHUNK, number)
    return output


def replace_backward(
    replace: Replace,
    num_chunks: int,
    config: TransformerConfig,
    instead: Callable[[int, Any, Callable[[], Any]], Any],
) -> None:
    """Replace the schedules' backward of a microbatch.

    Args:
        replace: replaces a function.
        num_chunks: of this rank.
        config: theirs. A copy of the model has its own, and its backwards stay as they are.
        instead: called with the number of the chunk, its inputs and Megatron's own backward;
            returns the gradients of the inputs.
    """

    def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward_step(input_tensor: Any, output_tensor: Any, *args: Any, **named: Any) -> Any:
            run = functools.partial(original, input_tensor, output_tensor, *args, **named)
            if (named["config"] if "config" in named else args[-1]) is not config:
                return run()
            # What has no mark was computed behind the last chunk: a loss.
            several = isinstance(output_tensor, (list, tuple))
            first = output_tensor[0] if several else output_tensor
            number = getattr(first, _CHUNK, num_chunks - 1)
            return instead(number, input_tensor, run)

        return backward_step

    replace(schedules, "backward_step", replaced)


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
    another: Any,
) -> torch.Size | None:
    """The shape of a forward's output, on a rank without collectives inside its layers.

    Args:
        model: a bare model chunk.
        tokens: shape of the microbatch's tokens, [b, s]; None on a stage that gets none.
        received: shape of the hidden states from the previous stage, [s, b, h]; None on the first.
        another: the output for another microbatch.

    Returns:
        None if it is not known for this model.
    """
    if not isinstance(another, torch.Tensor):
        return None
    if tokens is None:
        return received
    if len(tokens) != 2 or not hasattr(model, "post_process"):
        return None
    batch, sequence = tokens
    front = (batch, sequence) if model.post_process else (sequence, batch)
    return torch.Size((*front, *another.shape[2:]))


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


class BucketSyncs:
    """The gradients that one chunk reduces in backward, and the parameters it gathers in forward.

    chunk: a model chunk; without overlap it has no such collectives.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        groups = _groups(chunk)
        # Until a step shows another order: that of a model whose modules run as registered.
        self._reduces, self._gathers = _Order(groups), _Order(groups[::-1])
        self._ready: dict[Any, None] = {}
        """Groups in the order in which the last of their gradients arrived in this step."""

    def note(self, replace: Replace) -> None:
        """Replace, by `replace`, the methods that start collectives, to note what a step starts."""
        for group in _groups(self._chunk):
            replace(group, "start_grad_sync", functools.partial(self._noted, self._reduces, group))
            replace(group, "start_param_sync", functools.partial(self._noted, self._gathers, group))
            replace(group, "register_grad_ready", functools.partial(self._arriving, group))

    @property
    def lacks_order(self) -> bool:
        """Whether forwards gather parameters, and none has shown yet in which order."""
        return self._gathers_now() and not self._gathers.is_seen

    def gather_owed(self) -> None:
        """Gather the parameters that a forward of this chunk has not gathered yet."""
        if not self._gathers_now():
            return
        for group in self._gathers.known:
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    def reduce_owed(self) -> None:
        """Reduce the gradients that a backward of this chunk has not reduced yet."""
        for group in self._reduces.known:
            due = group.is_last_microbatch and not group.is_first_batch
            if due and group not in self._reduces.now:
                group.start_grad_sync(force_all_reduce=self._chunk.force_all_reduce)

    def finished(self) -> None:
        """End a complete step, in which all entered collectives have been waited for."""
        # In a first step Megatron reduces at the end, in another order than in the steps to come:
        # as gradients arrive.
        if len(self._ready) == len(self._reduces.known):
            self._reduces.now = dict(self._ready)
        self._ready.clear()
        self._reduces.close()
        self._gathers.close()

    def abandon(self, finalizes: bool) -> None:
        """Leave a lost step, on every rank: the failed one has not counted its gradients.

        finalizes: whether the reductions that all ranks have entered must be waited for.
        """
        if finalizes and hasattr(self._chunk, "finish_grad_sync"):
            self._chunk.finish_grad_sync(force_all_reduce=self._chunk.force_all_reduce)
        if hasattr(self._chunk, "zero_grad_buffer"):
            self._chunk.zero_grad_buffer()
        for begun in (self._reduces.now, self._gathers.now, self._ready):
            begun.clear()
        count_again(self._chunk)

    def _gathers_now(self) -> bool:
        """Whether Megatron's forward gathers parameters now."""
        return bool(getattr(self._chunk, "remove_forward_pre_hook_handles", None))

    def _arriving(self, group: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def register(*args: Any, **kwargs: Any) -> Any:
            if group.is_last_microbatch:
                self._ready.pop(group, None)
                self._ready[group] = None
            return original(*args, **kwargs)

        return register

    def _noted(self, order: _Order, group: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **kwargs: Any) -> Any:
            started = original(*args, **kwargs)
            order.now[group] = None
            return started

        return start


def count_again(chunk: torch.nn.Module) -> None:
    """Make Megatron count again, in the next step, how often each gradient arrives.

    Megatron counts in the first step and reduces at its end. In later steps it reduces as soon as
    the counts are reached.
    """
    for group in _groups(chunk):
        group.is_first_batch = True
        group.golden_per_param_grad_ready_counts = {}
        group.per_param_grad_ready_counts = {}


def _groups(chunk: Chunk) -> list[Any]:
    """Megatron's groups of buckets, if it reduces them while the backward runs."""
    if not getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False):
        return []
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


class _Order:
    """The order in which groups of buckets start a collective within a step."""

    def __init__(self, usual: list[Any]) -> None:
        self.known = usual
        self.is_seen = False
        """Whether a complete step has shown `known`."""
        self.now: dict[Any, None] = {}

    def close(self) -> None:
        """End a complete step: its order is the known one from now on."""
        if self.now and len(self.now) == len(self.known):
            self.known, self.is_seen = list(self.now), True
        self.now.clear()
