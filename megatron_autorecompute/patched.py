"""Replaces attributes, methods, hooks and environment variables inside a `with` block."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` in the block; afterwards owner is as it was before."""
    # Not getattr(): a class may inherit the attribute, and a static method must stay a descriptor.
    held = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if held is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, held)


@contextmanager
def unchanged_environ() -> Iterator[None]:
    """Restores the environment's variables after the block."""
    held = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - held.keys():
            del os.environ[name]
        os.environ.update(held)


@contextmanager
def patched_environ(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables in the block; afterwards all variables are as before."""
    with unchanged_environ():
        os.environ.update(values)
        yield


class TemporaryHook:
    """A hook on a module, by one of the module's methods that register hooks. A copy of the module
    has a hook that removes itself when called."""

    def __init__(
        self, register: Callable[..., Any], call: Callable[..., None], **options: Any
    ) -> None:
        self._call = call
        self._handle = register(self, **options)

    def __call__(self, *args: Any) -> None:
        """Call the hook, with torch's arguments."""
        self._call(*args)

    def remove(self) -> None:
        """Remove it from the module."""
        self._handle.remove()

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return _LeavingHook, (self._handle,)


class _LeavingHook:
    """The hook in a copy of a module; the copied handle removes it from the copy."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __call__(self, *_: Any) -> None:
        self._handle.remove()
