"""How near a step is to the shortest one, in the words of docs/plan.md#what-is-proven.

Everything that says it says it with these: plans as printed and drawn, notes of searches, tables.
"""

from __future__ import annotations

import math

OPTIMAL = "optimal"


def nearness(gap: float) -> str:
    """What is proven of a gap: it is `optimal`, or `within 0.124% of the optimum`, rounded up."""
    return f"within {math.ceil(1e5 * gap) / 1e3:.3f}% of the optimum" if gap else OPTIMAL
