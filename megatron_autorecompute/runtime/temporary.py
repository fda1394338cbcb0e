"""What is put into a model for a step, so that a copy of it made meanwhile has none of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Replace = Callable[[Any, str, Callable[[Any], Any]], None]
"""Takes an object, the name of a method, and what makes another of the method there is."""


class Temporary:
    """A function in place of another one, in an attribute of an object.

    A deep copy and a pickle of the object have the other one there: bound to the copy, where it is
    a method of the object.
    """

    def __init__(self, function: Callable[..., Any], instead: Callable[..., Any]) -> None:
        self._function, self._instead = function, instead

    def __call__(self, *args: Any, **named: Any) -> Any:
        """As the function."""
        return self._function(*args, **named)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return _itself, (self._instead,)


def _itself(instead: Any) -> Any:
    return instead


@contextmanager
def replaced() -> Iterator[Replace]:
    """Gives a function that replaces methods of single objects until the end of the block."""
    before: list[tuple[dict[str, Any], str, Any]] = []

    def replace(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        original, own = getattr(owner, name), vars(owner)
        before.append((own, name, own.get(name)))
        own[name] = Temporary(around(original), original)

    try:
        yield replace
    finally:
        for own, name, held in reversed(before):
            del own[name]
            if held is not None:
                own[name] = held


class TemporaryHook:
    """A hook on a module. In a copy of the module stands one that leaves when it is called.

    Args:
        register: one of a module's methods that register hooks.
        call: what it is called with is what torch calls hooks with.
        options: of `register`.
    """

    def __init__(
        self, register: Callable[..., Any], call: Callable[..., None], **options: Any
    ) -> None:
        self._call = call
        self._handle = register(self, **options)

    def __call__(self, *args: Any) -> None:
        """As torch calls hooks."""
        self._call(*args)

    def remove(self) -> None:
        """Take it off the module."""
        self._handle.remove()

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return _LeavingHook, (self._handle,)


class _LeavingHook:
    """In a copy of a module; the copied handle is that of its place in the copy."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __call__(self, *_: Any) -> None:
        self._handle.remove()
