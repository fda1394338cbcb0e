"""The collectives that Megatron's DistributedDataParallel enters inside forward and backward.

With --overlap-grad-reduce the gradients of a group of buckets are reduced as soon as all of them
are ready; with --overlap-param-gather parameters are gathered when the first layer needs them. If a
rank leaves a forward or a backward half done, the other ranks wait in the collectives that it has
not entered. This module enters these, in the order of a complete step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_autorecompute.compat.untyped import Chunk
from megatron_autorecompute.patched import Replace


class BucketSyncs:
    """The gradients that one chunk reduces in backward, and the parameters it gathers in forward.

    Args:
        chunk: a model chunk; without overlap it has no such collectives.
        elsewhere: a context around every collective that is entered here.
    """

    def __init__(
        self,
        chunk: torch.nn.Module,
        elsewhere: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._chunk = chunk
        self._elsewhere = elsewhere
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

    def abandon(self) -> None:
        """Leave a lost step, on every rank: the failed one has not counted its gradients."""
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
            with self._elsewhere():
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
