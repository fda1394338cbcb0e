"""The collectives that Megatron's DistributedDataParallel enters inside forward and backward.

With --overlap-grad-reduce the gradients of a group of buckets are reduced as soon as the last of
them is there; with --overlap-param-gather parameters are gathered when the first layer asks for
them. A rank that leaves a forward or a backward half done owes the other ranks those that it has
not entered: this module knows which and enters them, in the order in which a whole step does.
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
    """What one model chunk reduces in its backward and gathers in its forward; made at any time
    before a step.

    Args:
        chunk: a model chunk; one that overlaps nothing has nothing here.
        elsewhere: a context for every collective that is entered here.
    """

    def __init__(
        self,
        chunk: torch.nn.Module,
        elsewhere: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._chunk = chunk
        self._elsewhere = elsewhere
        groups = _groups(chunk)
        # Until a step has shown another: that of the models whose modules run as they are listed.
        self._reduces, self._gathers = _Order(groups), _Order(groups[::-1])
        self._orders = [self._reduces, self._gathers] if groups else []

    def note(self, replace: Replace) -> None:
        """Note what a step starts, while `replace` has the methods that start it replaced."""
        for group in _groups(self._chunk):
            replace(group, "start_grad_sync", functools.partial(self._noted, self._reduces, group))
            replace(group, "start_param_sync", functools.partial(self._noted, self._gathers, group))

    def gather_owed(self) -> None:
        """Gather the parameters that a forward of this chunk would have, and has not."""
        if not getattr(self._chunk, "remove_forward_pre_hook_handles", None):
            return  # Megatron's forward does not gather now
        for group in self._gathers.known:
            if not group.param_gather_dispatched or group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    def reduce_owed(self) -> None:
        """Reduce the gradients that a backward of this chunk would have, and has not."""
        for group in self._reduces.known:
            due = group.is_last_microbatch and not group.is_first_batch
            if due and group not in self._reduces.now:
                group.start_grad_sync(force_all_reduce=self._chunk.force_all_reduce)

    def finished(self) -> None:
        """All that was entered has been waited for, in a step that was whole."""
        for order in self._orders:
            order.close()

    def abandon(self) -> None:
        """Leave a lost step, on every rank: one has not counted how often its gradients come."""
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
    """Have Megatron count in the next step how often each gradient comes, and reduce at its end.

    It counts in the first step, and reduces in those that follow once the counts are equal.
    """
    for group in _groups(chunk):
        group.is_first_batch = True
        group.golden_per_param_grad_ready_counts = {}
        group.per_param_grad_ready_counts = {}


def _groups(chunk: Chunk) -> list[Any]:
    """Megatron's groups of buckets, where it reduces them while the backward runs."""
    if not getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False):
        return []
    return [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]


class _Order:
    """In which order groups of buckets start a collective within a step."""

    def __init__(self, usual: list[Any]) -> None:
        self.known = usual
        self.now: dict[Any, None] = {}

    def close(self) -> None:
        """At the end of a whole step."""
        if len(self.now) == len(self.known):
            self.known = list(self.now)
        self.now.clear()
