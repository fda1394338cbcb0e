"""A budget made smaller until what is found truly fits: where a peak is no sum over choices.

What a search counts is then the least that choices can need. What it finds is held against what it
truly needs, and where that is too much, the search is asked again with so many bytes less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

TRIES = 6
"""Searches of one budget; what they leave open is the gap of the answer."""
_GROWTH = 8
"""A part of the bytes less, by which they grow at least from one search to the next."""
_FAR = 1 << 60
_Found = TypeVar("_Found")


def shrunk(
    search: Callable[[int], _Found | None],
    over: Callable[[_Found], int],
    worse: Callable[[_Found], float],
    tries: int = TRIES,
) -> tuple[_Found | None, int]:
    """The best that truly fits, and the bytes less with which it was found; or None, and the most
    bytes less with which anything was found.

    Args:
        search: what is best with so many bytes less; None where nothing fits.
        over: bytes by which that exceeds the true budget; negative where it fits.
        worse: what is to be the least.
        tries: searches at most.
    """
    best: tuple[_Found | None, int] = (None, 0)
    low, less, high = 0, 0, _FAR
    for _ in range(tries):
        found = search(less)
        more = _FAR if found is None else over(found)
        if found is not None and more <= 0 and (best[0] is None or worse(found) < worse(best[0])):
            best = found, less
        if more <= 0 or found is None:
            high = less
        else:
            low = less
        if high <= low + 1:
            break
        less = low + max(more, low // _GROWTH) if high == _FAR else (low + high) // 2
    return best if best[0] is not None else (None, low)
