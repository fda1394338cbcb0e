"""Units of bytes for options and printing; the code itself counts whole bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal

MIB = 1 << 20
GIB = 1 << 30
MOST_GIB = 1 << 20
"""More than any device has, and far below the limit of the planner's integers."""


def gib(size_bytes: float) -> str:
    """Bytes as GiB with two decimals, or with more decimals for small figures."""
    value = size_bytes / GIB
    return f"{value:.3g}" if 0 < abs(value) < 0.1 else f"{value:.2f}"


def gib_needed(size_bytes: int) -> str:
    """Bytes as `gib` writes them, rounded up, so that a budget of so many GiB is enough."""
    if size_bytes < GIB // 10:
        return f"{Context(prec=3, rounding=ROUND_CEILING).divide(Decimal(size_bytes), GIB):f}"
    return gib(math.ceil(size_bytes * 100 / GIB) / 100 * GIB)


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit in which the byte figures of one table are printed."""

    name: str
    """The unit's name in the table's header: GiB or MiB."""
    size: int
    """Bytes of one unit."""

    def text(self, size_bytes: float) -> str:
        """Bytes as a number of this unit: two decimals of GiB, one of MiB."""
        return gib(size_bytes) if self.size == GIB else f"{size_bytes / self.size:.1f}"

    def change(self, size_bytes: float) -> str:
        """A difference in bytes with its sign: three decimals of GiB, one of MiB."""
        return f"{size_bytes / self.size:+.{3 if self.size == GIB else 1}f}"


def unit_for(sizes: Iterable[float]) -> Unit:
    """GiB, or MiB where none of the sizes (bytes) is a whole GiB, as in models for trying out."""
    return Unit("GiB", GIB) if max(map(abs, sizes), default=GIB) >= GIB else Unit("MiB", MIB)
