"""What a node of autograd's graph saved."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch


class _Looking(threading.local):
    on = False


_looking = _Looking()


def is_looked_at() -> bool:
    """Whether nodes are only looked at: a hook need not make again what it dropped."""
    return _looking.on


@functools.cache
def _saved_names(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


def saved(node: Any) -> list[tuple[Any, torch.Tensor]]:
    """The handle and the tensor of all that a node saved."""
    found: list[tuple[Any, torch.Tensor]] = []
    kind: Any = type(node)
    before, _looking.on = _looking.on, True
    try:
        for name in _saved_names(kind):
            handles = getattr(node, name)
            values = getattr(node, name.removeprefix("_raw"), None)
            if name == "_raw_saved_tensors":  # of a torch.autograd.Function, or an op with a list
                values = getattr(node, "saved_tensors", values)
            if not isinstance(handles, (tuple, list)) or not values:
                handles, values = [handles], [values]
            for handle, value in zip(handles, values, strict=True):
                if isinstance(value, torch.Tensor):
                    found.append((handle, value))
    finally:
        _looking.on = before
    return found
