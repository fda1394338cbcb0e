"""The Autodist document's own table, to stand beside ours, marked as published.

GPT-3 760M widened to 48 layers, two GPUs, global batch 1024, micro-batch 8, limit 16 GB: seconds a
step, GB, seconds of search.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """One row of the document."""

    name: str
    step_s: float
    peak_gb: float
    search_s: float | None = None

    @property
    def over(self) -> bool:
        """Whether the document calls it out of memory."""
        return self.peak_gb > LIMIT_GB


LIMIT_GB = 16.0
ROWS = (
    Published("Megatron selective", 137.10, 17.22),
    Published("Megatron full", 171.78, 7.09),
    Published("Megatron manual: first 31 full", 154.22, 15.85),
    Published("Alpa", 149.53, 16.15, 129.96),
    Published("Autodist continuous", 145.90, 15.67, 2069.80),
    Published("Autodist single", 146.65, 15.99, 130.31),
)
BUDGET_FRACTION = (LIMIT_GB - ROWS[1].peak_gb) / (ROWS[0].peak_gb - ROWS[1].peak_gb)
"""Where the limit stands between full and selective: 0.88 of the way."""
SAVED = 1 - ROWS[4].step_s / ROWS[2].step_s
"""Of the best manual setting's step time, by the document's best: its +5.4%."""
