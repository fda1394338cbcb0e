"""Searches with smaller budgets until the answer truly fits, where a peak is no sum over choices.

The search counts the least bytes that choices can need. The answer is compared with what it truly
needs. If that exceeds the budget, the search runs again with the budget lowered by the excess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

TRIES = 6
"""Searches of one problem; what they leave open is the gap of the answer."""
_GROWTH = 8
"""A part of the bytes less, by which they grow at least from one search to the next."""
_FAR = 1 << 60
_Found = TypeVar("_Found")
Less = tuple[int, ...]
"""Bytes less than each budget."""


@dataclass(slots=True)
class _Budget:
    """What is known of the bytes less with which one budget is met."""

    low: int = 0
    less: int = 0
    high: int = _FAR

    def learn(self, over: int | None) -> None:
        """How many bytes too many were needed, None where nothing was found; `less` is what to try
        next."""
        if over is None or over <= 0:
            self.high = self.less
        else:
            self.low = self.less
            self.high = self.high if self.high > self.low else _FAR  # as other budgets got smaller
        if self.high == _FAR:
            self.less = self.low + max(over or 0, self.low // _GROWTH)
        else:
            self.less = (self.low + self.high) // 2

    @property
    def is_known(self) -> bool:
        """Whether one byte less would be too few."""
        return self.high <= self.low + 1


def shrunk(
    search: Callable[[Less], _Found | None],
    over: Callable[[_Found], Sequence[int]],
    worse: Callable[[_Found], float],
    number: int = 1,
    tries: int = TRIES,
) -> tuple[_Found | None, Less]:
    """The best that truly fits, and the bytes less with which it was found; or None, and the most
    bytes less with which anything was found.

    Args:
        search: what is best with so many bytes less; None where nothing fits.
        over: bytes by which that exceeds each true budget; negative where it fits.
        worse: what is to be the least.
        number: the number of budgets.
        tries: searches at most.
    """
    budgets = [_Budget() for _ in range(number)]
    best: tuple[_Found | None, Less] = None, (0,) * number
    for _ in range(tries):
        less = tuple(budget.less for budget in budgets)
        found = search(less)
        more: list[int | None] = [None] * number
        if found is not None:
            more = [*over(found)]
            better = best[0] is None or worse(found) < worse(best[0])
            best = (found, less) if better and max(over(found)) <= 0 else best
        for budget, own in zip(budgets, more, strict=True):
            budget.learn(own)
        if all(budget.is_known for budget in budgets):
            break
    return best if best[0] is not None else (None, tuple(budget.low for budget in budgets))
