"""Copies to host memory and back as they run: how fast they are, and who waits for them."""

from __future__ import annotations

import contextlib
import functools
import socket
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_autorecompute.compat import offload_modules
from megatron_autorecompute.profile import HostLink
from megatron_autorecompute.runtime.host_memory import free_bytes
from megatron_autorecompute.runtime.probe import DEVICE_CLOCK, Clock
from megatron_autorecompute.runtime.ranks import all_gather

USABLE = 0.5
"""The usable share of free host memory: torch rounds what it pins up to powers of two."""
_MS_PER_GB = 1e6
"""Bytes in a millisecond at 1 GB/s."""


@dataclass(frozen=True, slots=True)
class _Timed:
    begin: Any
    end: Any
    size_bytes: int = 0


@dataclass(slots=True)
class CopyWatch:
    """Times copies in Megatron's manager, on the streams on which they run.

    Without CUDA they run in the thread that computes, which then waits for all of each.
    """

    clock: Clock = DEVICE_CLOCK
    out: list[_Timed] = field(default_factory=list)
    """Copies to host memory, one for each group that left in a step inside `watching`."""
    back: list[_Timed] = field(default_factory=list)
    """Copies back."""
    waits: list[_Timed] = field(default_factory=list)
    """How long backwards waited in the last of these steps."""
    _first: tuple[int, int] = (0, 0)
    """How many of both ran in the first step that had any; host memory is pinned in it."""
    _bytes: int = 0
    _in_bulk: bool = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Surround a step."""
        self.waits = []
        methods: dict[str, Callable[..., Any]] = {
            "offload": self._counted,
            "reload": self._reloaded,
            "bulk_offload_group": functools.partial(self._timed, self.out, "d2h_stream"),
            "bulk_reload_group": functools.partial(self._timed, self.back, "h2d_stream"),
            "on_group_commit_backward": self._waited,
        }
        with offload_modules.watched(methods):
            yield
        if not any(self._first):
            self._first = len(self.out), len(self.back)

    def waited_ms(self) -> float:
        """How long this rank's backwards waited in the last step that was watched."""
        return sum(self.clock.ms_between(one.begin, one.end) for one in self.waits)

    def link(self) -> HostLink | None:
        """What the slowest rank reached, as the median of its copies without the first step's; the
        same on every rank. None if no rank copied anything."""
        first_out, first_back = self._first
        mine = self._rate(self.out, first_out), self._rate(self.back, first_back)
        by_rank = all_gather((*mine, host_bytes()))
        to_host = [out for out, _, _ in by_rank if out is not None]
        to_device = [back for _, back, _ in by_rank if back is not None]
        if not to_host or not to_device:
            return None
        return HostLink(min(to_host), min(to_device), min(size for *_, size in by_rank))

    def _rate(self, copies: list[_Timed], first: int) -> float | None:
        """10^9 bytes per second."""
        settled = copies[first:] or copies
        timed = [(one.size_bytes, self.clock.ms_between(one.begin, one.end)) for one in settled]
        rates = [size / (ms * _MS_PER_GB) for size, ms in timed if size and ms > 0]
        return statistics.median(rates) if rates else None

    # --------------------------------------------------------------- in place of Megatron's methods

    def _counted(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def offload(chunk: Any, source: torch.Tensor, *args: Any, **named: Any) -> Any:
            self._bytes += source.numel() * source.element_size()
            return usual(chunk, source, *args, **named)

        return offload

    def _reloaded(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def reload(chunk: Any, *args: Any, **named: Any) -> torch.Tensor:
            begin = self.clock.now()
            tensor: torch.Tensor = usual(chunk, *args, **named)
            self._bytes += tensor.numel() * tensor.element_size()
            if not self._in_bulk:  # nobody had asked for it, so the backward copies by itself
                self.waits.append(_Timed(begin, self.clock.now()))
            return tensor

        return reload

    def _timed(
        self, copies: list[_Timed], stream: str, usual: Callable[..., None]
    ) -> Callable[..., None]:
        def bulk(chunk: Any, *args: Any) -> None:
            self._bytes, self._in_bulk = 0, True
            with torch.cuda.stream(getattr(chunk, stream)):
                begin = self.clock.now()
            usual(chunk, *args)
            self._in_bulk = False
            with torch.cuda.stream(getattr(chunk, stream)):
                copies.append(_Timed(begin, self.clock.now(), self._bytes))
            if not torch.cuda.is_available():
                self.waits.append(copies[-1])

        return bulk

    def _waited(self, usual: Callable[..., None]) -> Callable[..., None]:
        def on_group_commit_backward(chunk: Any, name: str) -> None:
            begin = self.clock.now()
            usual(chunk, name)
            self.waits.append(_Timed(begin, self.clock.now()))

        return on_group_commit_backward


def host_bytes() -> int:
    """Host memory for this rank's copies: its share of half of what its node or container has
    free. All ranks ask together."""
    ranks = all_gather(socket.gethostname()).count(socket.gethostname())
    return int(free_bytes() * USABLE) // ranks
