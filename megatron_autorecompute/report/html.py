"""The report of a plan as one HTML file that opens in a browser without network."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_autorecompute.planner.cost.step_interval import COVERS
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.chart import curve_chart
from megatron_autorecompute.report.data import ReportData
from megatron_autorecompute.report.figures import strip_svg, svg
from megatron_autorecompute.report.recorded import Difference
from megatron_autorecompute.report.terminal import best_own_setting
from megatron_autorecompute.report.timeline import StageTimeline
from megatron_autorecompute.report.words import (
    binds,
    by_room,
    came_from,
    duration,
    proof,
    size,
)

TEMPLATES = Path(__file__).parent / "templates"

_DRAWN = (
    "budget_bytes",
    "static_bytes",
    "optimizer_step_peak_bytes",
    "binding",
    "units",
    "recompute_ps",
    "chunk",
    "microbatch",
    "in_flight_bytes",
    "outside_bytes",
    "overhead_bytes",
)
"""Fields of `StageTimeline` that plan.js reads."""
_RECORDED = ("stage", "at_ms", "level_bytes")
"""Fields of `RecordedStep` that plan.js reads."""


def html(data: ReportData) -> str:
    """The whole page."""
    plan = data.plan
    tight = plan.cost.stages[by_room(plan)[0]]
    files = Environment(
        loader=FileSystemLoader(str(TEMPLATES)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    files.filters |= {"size": size, "duration": duration, "percent": "{:.1%}".format}
    return files.get_template("plan.html").render(
        data=data,
        plan=plan,
        tight=tight,
        slow=max(plan.cost.stages, key=lambda stage: stage.busy_ms),
        covers=COVERS,
        binds=binds(plan),
        came_from=came_from(plan.profile),
        setting=best_own_setting(plan),
        stages=list(zip(plan.cost.stages, plan.budget_bytes, plan.layout.stages, strict=True)),
        largest=_largest,
        strip=strip_svg(plan),
        curve=svg(curve_chart(data.curve), "curve", "Step time against memory"),
        proof=proof(plan),
        corrected=any(
            stage.residual_bytes or stage.residual_ms or stage.uncertainty_bytes
            for stage in plan.profile.stages
        ),
        packed=packed(page_data(data)),
        script=(TEMPLATES / "plan.js").read_text(encoding="utf-8"),
    )


def packed(value: Any) -> str:
    """A value as compressed JSON in text form; equal values give equal texts."""
    text = json.dumps(value, separators=(",", ":"), default=_plain)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _plain(value: Any) -> Any:
    """A record's fields; a column as differences, most of which are equal and so compress well."""
    if isinstance(value, np.ndarray):
        return [round(one, 6) or 0 for one in np.diff(value, prepend=0).tolist()]
    return {each.name: getattr(value, each.name) for each in fields(value)}


def page_data(data: ReportData) -> dict[str, Any]:
    """The data that the page's script draws."""
    plan, step = data.plan, data.recorded
    return {
        "step": data.timeline.step_ms,
        "tightest": by_room(plan)[0],
        "recorded": step and {name: getattr(step, name) for name in _RECORDED},
        "stages": [_stage_data(plan, stage) for stage in data.timeline.stages],
        "layers": plan.recompute_policy,
    }


def _stage_data(plan: Plan, stage: StageTimeline) -> dict[str, Any]:
    copies, began_ms = stage.copies, np.concatenate(([0.0], stage.end_ms[:-1]))
    return {
        **{name: getattr(stage, name) for name in _DRAWN},
        "backward": stage.backward.astype(int),
        "moment": plan.cost.stages[stage.stage].peak.moment.partition(", ")[2],
        # Sums of rounded times would drift.
        "gap_ms": (stage.start_ms - began_ms).round(6).tolist(),
        "ms": (stage.end_ms - stage.start_ms).round(6).tolist(),
        "ahead_ms": stage.ahead_ms.round(6).tolist(),
        "copies": copies
        and {
            "copied": [
                (
                    one.to_host,
                    one.begin_ps,
                    one.end_ps,
                    one.name,
                    one.microbatch,
                    one.group.record.host_bytes,
                )
                for one in sorted(copies.copied, key=lambda one: one.begin_ps)
            ],
            "waits": [ran.waits for ran in copies.ran],
            "bytes": [own.tolist() for own in stage.copy_bytes],
            "after": [copies.after(event) for event in range(len(copies.ran))],
        },
    }


MOST_ROWS = 8
"""Rows of a table; of more differences the largest are shown."""
LEAST_BYTES = 1 << 16
"""Smaller differences are left out: torch rounds every tensor."""


def _largest(differences: Sequence[Difference]) -> list[Difference]:
    shown = [one for one in differences if abs(one.more_bytes) >= LEAST_BYTES]
    return sorted(shown, key=lambda one: -abs(one.more_bytes))[:MOST_ROWS]
