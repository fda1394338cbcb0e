"""A recorded step in the report's page: its curve for the memory chart, and its differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_autorecompute.report.recorded import Difference, RecordedStep
from megatron_autorecompute.report.words import size

MOST_ROWS = 8
"""Rows of a table; of more differences the largest are shown."""
LEAST_BYTES = 1 << 16
"""Smaller differences are left out: torch rounds every tensor."""


def recorded_data(step: RecordedStep | None) -> dict[str, Any] | None:
    """What the page's script draws: the points as differences, which compress well."""
    if step is None:
        return None
    return {
        "stage": step.stage,
        "at": [round(gap, 6) or 0 for gap in np.diff(step.at_ms, prepend=0.0).tolist()],
        "bytes": np.diff(step.level_bytes, prepend=0).tolist(),
    }


@dataclass(frozen=True, slots=True)
class RecordedTable:
    """A table of the largest differences."""

    what: str
    """What has a row each."""
    about: str
    """A sentence on the figures."""
    rows: tuple[tuple[str, ...], ...]
    """Name, planned bytes, recorded bytes, their difference; as texts."""


def recorded_tables(step: RecordedStep | None) -> list[RecordedTable]:
    """The tables of the page; none without a recorded step."""
    if step is None:
        return []
    tables = [_table("the step's parts", "At their fullest moments", step.moments)]
    if step.layers:
        what = "Allocated in the forward and kept, output included and input not"
        tables.append(_table("layers", f"{what}; median of the microbatches", step.layers))
    return tables


def _table(what: str, about: str, differences: Sequence[Difference]) -> RecordedTable:
    shown = [one for one in differences if abs(one.more_bytes) >= LEAST_BYTES]
    largest = sorted(shown, key=lambda one: -abs(one.more_bytes))[:MOST_ROWS]
    rest = len(differences) - len(largest)
    left_out = f"; {rest} with smaller differences, or none, are left out" if rest else ""
    return RecordedTable(what, about + left_out, tuple(map(_row, largest)))


def _row(one: Difference) -> tuple[str, ...]:
    sign = "+" if one.more_bytes >= 0 else "\N{MINUS SIGN}"
    more = sign + size(abs(one.more_bytes))
    return one.what, size(one.predicted_bytes), size(one.recorded_bytes), more
