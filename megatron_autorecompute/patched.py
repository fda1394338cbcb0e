"""Attributes and environment variables with another value inside a `with` block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
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
def patched_environ(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables in the block, and restore the old ones afterwards."""
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


@contextmanager
def unchanged_environ() -> Iterator[None]:
    """Whatever the block does to the environment's variables, afterwards they are as before."""
    held = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - held.keys():
            del os.environ[name]
        os.environ.update(held)
