"""How far off predictions are: errors as shares of what was measured, several at once."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Of at least one error. Absolute, but for `worst` and `signed_mean`."""

    rows: int
    median: float
    mean: float
    percentile_90: float
    worst: float
    """With its sign."""
    signed_mean: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Spread:
        """Of predicted / measured - 1."""
        signed = list(errors)
        sizes = sorted(map(abs, signed))
        return cls(
            rows=len(signed),
            median=statistics.median(sizes),
            mean=statistics.fmean(sizes),
            percentile_90=sizes[min(len(sizes) - 1, round(0.9 * (len(sizes) - 1)))],
            worst=max(signed, key=abs),
            signed_mean=statistics.fmean(signed),
        )
