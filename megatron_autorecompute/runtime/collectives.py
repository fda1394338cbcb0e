"""Detects the collectives that this process enters, at torch's process groups in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.distributed import ProcessGroup

from megatron_autorecompute.patched import patched

_ENTER = ("all", "reduce", "broadcast", "barrier", "gather", "scatter", "send", "recv")
"""Parts of the names of a process group's methods that enter a collective. Collectives entered from
C++ are not seen: functional collectives, and those of other libraries' transports."""


class Meetings:
    """Collectives of several ranks that are entered while `inside` is set.

    with meetings.watched():
        meetings.inside = True
        layer(hidden_states)
        meetings.inside = False
    meetings.found  # ["allreduce of 4 ranks"]
    """

    def __init__(self) -> None:
        self.inside = False
        self.found: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch every call of a process group's methods in the block."""
        entering = [name for name in vars(ProcessGroup) if any(part in name for part in _ENTER)]
        with ExitStack() as undo:
            for name in entering:
                noted = self._noted(name, getattr(ProcessGroup, name))
                undo.enter_context(patched(ProcessGroup, name, noted))
            yield

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Do not count collectives in the block, although `inside` is set."""
        was, self.inside = self.inside, False
        try:
            yield
        finally:
            self.inside = was

    def _noted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if self.inside and group.size() > 1:
                entered = f"{name.strip('_')} of {group.size()} ranks"
                if entered not in self.found:
                    self.found.append(entered)
            return original(group, *args, **kwargs)

        return method
