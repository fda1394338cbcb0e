"""Megatron's checkpoints around a function: what they run, and the generators that they replay."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random as megatron_random

Function = Callable[..., Any]
_original: Function = tensor_parallel.checkpoint
_needed: set[weakref.ref[Any]] = set()
"""Objects that need the functions of checkpoints wrapped. While any is alive, they are."""


def wrap_while_alive(needing: Any, wrapped: Callable[[Function], Function]) -> None:
    """Wrap the function of every checkpoint by `wrapped` from now on, until `needing`, and all
    other objects that asked for it, are freed.

    Megatron's callers look `tensor_parallel.checkpoint` up in each call. Transformer Engine's
    checkpoints (`te_checkpoint`, fp8 and fp4) are not wrapped.
    """
    if not _needed:
        tensor_parallel.checkpoint = _wrapping(wrapped)
    _needed.add(weakref.ref(needing, _let_go))


def _let_go(reference: weakref.ref[Any]) -> None:
    _needed.discard(reference)
    if not _needed:
        tensor_parallel.checkpoint = _original


def _wrapping(wrapped: Callable[[Function], Function]) -> Function:
    @functools.wraps(_original)
    def checkpoint(function: Function, distribute_saved_activations: bool, *args: Any) -> Any:
        return _original(wrapped(function), distribute_saved_activations, *args)

    return checkpoint


def run(function: Function, *args: Any) -> Any:
    """`function(*args)` inside one of Megatron's checkpoints, wrapped as all others are."""
    return tensor_parallel.checkpoint(function, False, *args)


def generator_states() -> Any:
    """The states of all generators that a checkpoint replays."""
    return megatron_random._get_all_rng_states()


def set_generator_states(states: Any) -> None:
    """Set what `generator_states` returned."""
    megatron_random._set_all_rng_states(*states)
