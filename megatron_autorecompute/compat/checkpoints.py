"""Megatron's checkpoints around a function: what they run, and the generators that they replay."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random as megatron_random

Function = Callable[..., Any]


class Wrapped(Protocol):
    """The function of one checkpoint, wrapped."""

    early_ones: list[Callable[[], None]] | None
    """What begins early is added to it; None: this one does not."""

    def __call__(self, *args: Any) -> Any:
        """Run the function."""

    def note(self, outputs: Any) -> None:
        """Note, after the first run, the checkpoint's outputs, whose graph has its node."""


_replaced: list[Function] = []
"""Megatron's function, and ours in its place."""
_wrappers: list[Callable[[Function], Wrapped]] = []
"""How functions are wrapped while any object needs it; at most one."""
_needed: set[weakref.ref[Any]] = set()
"""Objects that need the functions of checkpoints wrapped. While any is alive, they are."""


def wrap_while_alive(needing: Any, wrapped: Callable[[Function], Wrapped]) -> None:
    """Wrap the function of every checkpoint by `wrapped` from now on, until `needing`, and all
    other objects that asked for it, are freed.

    Megatron's callers look `tensor_parallel.checkpoint` up in each call. Transformer Engine's
    checkpoints (`te_checkpoint`, fp8 and fp4) are not wrapped.
    """
    if not _needed:
        original = tensor_parallel.checkpoint
        _wrappers[:] = [wrapped]
        if not hasattr(original, _DISPATCHES):  # else Megatron's sources have our patch
            tensor_parallel.checkpoint = dispatching(original)
        _replaced[:] = [original, tensor_parallel.checkpoint]
    _needed.add(weakref.ref(needing, _let_go))


def _let_go(reference: weakref.ref[Any]) -> None:
    _needed.discard(reference)
    if not _needed:
        _wrappers.clear()
        original, ours = _replaced
        if tensor_parallel.checkpoint is ours:
            tensor_parallel.checkpoint = original


_DISPATCHES = "wraps_functions_of_autorecompute"
"""Marks a function as `integrations.megatron_lm.WRAPS_FUNCTIONS` does."""


def dispatching(original: Function) -> Function:
    """Megatron's `checkpoint`, except that it wraps its function while an object needs that."""

    @functools.wraps(original)
    def checkpoint(function: Function, distribute_saved_activations: bool, *args: Any) -> Any:
        if not _wrappers:
            return original(function, distribute_saved_activations, *args)
        wrapped = _wrappers[0](function)
        outputs = original(wrapped, distribute_saved_activations, *args)
        if wrapped.early_ones is not None:
            wrapped.note(outputs)
        return outputs

    setattr(checkpoint, _DISPATCHES, True)
    return checkpoint


def run(function: Function, *args: Any) -> Any:
    """`function(*args)` inside one of Megatron's checkpoints, wrapped as all others are."""
    return tensor_parallel.checkpoint(function, False, *args)


@contextlib.contextmanager
def second_run(node: Any) -> Iterator[tuple[Any, Any]]:
    """Begin the second run, as a checkpoint's backward does before its function runs again, and
    yield the function and the inputs of the first run; node: the checkpoint's in the graph."""
    megatron_random._set_checkpointing()
    try:
        with megatron_random._fork_rng():
            megatron_random._set_all_rng_states(*node.rng_states)
            yield node.run_function, node.saved_tensors
    finally:
        megatron_random._unset_checkpointing()


def logged_losses() -> dict[str, torch.Tensor]:
    """The auxiliary losses that routers have added up for the log, by name: a value a layer. None
    on meta tensors, which have no values."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # 0.16
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        found = {name: e["values"] for name, e in get_moe_layer_wise_logging_tracker().items()}
    else:
        found = {name: e.values for name, e in get_moe_metrics_tracker().metrics.items()}
    return {name: values for name, values in found.items() if not values.is_meta}


def has_other_ranks() -> bool:
    """Whether collectives in a layer may wait for other ranks."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def generator_states() -> Any:
    """The states of all generators that a checkpoint replays."""
    return megatron_random._get_all_rng_states()


def same_states(one: Any, other: Any) -> bool:
    """Whether two results of `generator_states` are equal."""
    pairs = zip(_of_all(one), _of_all(other), strict=True)
    return all(mine is theirs or torch.equal(mine, theirs) for mine, theirs in pairs)


def _of_all(states: Any) -> Iterator[Any]:
    for each in states:  # one for each device, where there is one, and those tracked by name
        yield from each.values() if isinstance(each, Mapping) else [each]


def set_generator_states(states: Any) -> None:
    """Set what `generator_states` returned."""
    megatron_random._set_all_rng_states(*states)


def leave_interrupted(chunks: Iterable[torch.nn.Module]) -> None:
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
