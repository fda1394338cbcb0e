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
from megatron_autorecompute.runtime.temporary import Replace


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
        self._orders = [self._reduces, self._gathers] if groups else []

    def note(self, replace: Replace) -> None:
        """Replace, by `replace`, the methods that start collectives, to note what a step starts."""
        for group in _groups(self._chunk):
            replace(group, "start_grad_sync", functools.partial(self._noted, self._reduces, group))
            replace(group, "start_param_sync", functools.partial(self._noted, self._gathers, group))

    def gather_owed(self) -> None:
        """Gather the parameters that a forward of this chunk has not gathered yet."""
        if not getattr(self._chunk, "remove_forward_pre_hook_handles", None):
            return  # Megatron's forward does not gather now
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
        for order in self._orders:
            order.close()

    def abandon(self) -> None:
        """Leave a lost step, on every rank: the failed one has not counted its gradients."""
        self._reduces.now.clear()
        self._gathers.now.clear()
        count_again(self._chunk)

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
        self.now: dict[Any, None] = {}

    def close(self) -> None:
        """End a complete step: its order is the known one from now on."""
        if len(self.now) == len(self.known):
            self.known = list(self.now)
        self.now.clear()
