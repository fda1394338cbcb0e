"""Which stream of a device a stand-in's tensors would be made in.

torch's allocator has blocks of its own for each stream (`caching_allocator`); nothing else here
asks for streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

MAIN, OF_DDP, OF_CONTEXT_PARALLEL = range(3)

_current = [MAIN]


@contextlib.contextmanager
def stream(number: int) -> Iterator[None]:
    """In this block tensors are made in this stream, as in `torch.cuda.stream`."""
    before, _current[0] = _current[0], number
    try:
        yield
    finally:
        _current[0] = before


def current() -> int:
    """The stream of the innermost block."""
    return _current[0]
