"""Attributes and environment variables that are something else for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` within, and then what it was: absent where owner itself had none."""
    # Not getattr(): a class may inherit it, and a static method comes back as the same descriptor.
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
def patched_environ(values: Mapping[str, str]) -> Iterator[None]:
    """The process has these environment variables within, and then those it had."""
    held = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in held.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
