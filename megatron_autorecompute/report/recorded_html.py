"""A recorded step in the report's page: its curve for the memory chart, and its differences."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
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


def recorded_section(step: RecordedStep | None) -> str:
    """The section of the page; empty without a recorded step."""
    if step is None:
        return ""
    parts = _table("the step's parts", "at their fullest moments", step.moments)
    layers = f"<p>{escape(step.no_layers)}</p>" if step.no_layers else ""
    if step.layers:
        what = "allocated in the forward and kept, output included and input not"
        layers = _table("layers", f"{what}; median of the microbatches", step.layers)
    return (
        f'<section id="recorded"><header><h2>Recorded beside predicted: stage {step.stage}</h2>'
        f"<p>{escape(step.source)}. {escape(step.found)}</p></header>"
        f'<div class="columns"><div>{parts}</div><div>{layers}</div></div></section>'
    )


def _table(what: str, about: str, differences: Sequence[Difference]) -> str:
    shown = [one for one in differences if abs(one.more_bytes) >= LEAST_BYTES]
    largest = sorted(shown, key=lambda one: -abs(one.more_bytes))[:MOST_ROWS]
    rest = len(differences) - len(largest)
    left_out = f"; {rest} with smaller differences, or none, are left out" if rest else ""
    rows = "".join(map(_row, largest))
    return (
        f"<h3>By {escape(what)}</h3><p>{escape(about[:1].upper() + about[1:] + left_out)}.</p>"
        '<div class="scroll"><table><thead><tr><th></th><th class="n">predicted</th>'
        '<th class="n">recorded</th><th class="n">recorded minus predicted</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _row(one: Difference) -> str:
    sign = "+" if one.more_bytes >= 0 else "&minus;"
    figures = size(one.predicted_bytes), size(one.recorded_bytes), sign + size(abs(one.more_bytes))
    cells = "".join(f'<td class="n">{figure}</td>' for figure in figures)
    return f"<tr><td>{escape(one.what)}</td>{cells}</tr>"
