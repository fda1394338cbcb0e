"""The report of a plan as one HTML file that opens in a browser without network."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from megatron_autorecompute.planner.cost.copies import StageCopies
from megatron_autorecompute.planner.cost.step_interval import COVERS
from megatron_autorecompute.planner.cost.unit_costs import OUTSIDE, PS_PER_MS, Unit
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.chart import curve_chart
from megatron_autorecompute.report.data import ReportData
from megatron_autorecompute.report.figures import svg
from megatron_autorecompute.report.recorded import Difference, RecordedStep
from megatron_autorecompute.report.strip import strip_svg
from megatron_autorecompute.report.terminal import best_own_setting
from megatron_autorecompute.report.timeline import StageTimeline
from megatron_autorecompute.report.words import (
    TEMPLATES,
    binds,
    came_from,
    proof,
    template,
)

_PARTS = (  # as plan.js draws them
    ("static", "static_bytes"),
    ("overhead", "overhead_bytes"),
    ("outside", "embedding_head_bytes"),
    ("in-flight", "in_flight_bytes"),
    ("running", "running_bytes"),
    ("transient", "transient_bytes"),
    ("copies", "copy_bytes"),
    ("overhead", "graph_bytes"),
)


def html(data: ReportData) -> str:
    """The whole page."""
    plan = data.plan
    tight = plan.cost.stages[tightest_stage(plan)]
    return template("plan.html").render(
        data=data,
        plan=plan,
        tight=tight,
        slow=max(plan.cost.stages, key=lambda stage: stage.busy_ms),
        covers=COVERS,
        binds=binds(plan),
        came_from=came_from(plan.profile),
        setting=best_own_setting(plan),
        stages=list(zip(plan.cost.stages, plan.budget_bytes, plan.layout.stages, strict=True)),
        memory_parts=_PARTS,
        share=lambda part, whole: f"{100 * part / whole:.2f}%",
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
    text = json.dumps(value, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def page_data(data: ReportData) -> dict[str, Any]:
    """The data that the page's script draws."""
    plan = data.plan
    tightest = tightest_stage(plan)
    return {
        "step": data.timeline.step_ms,
        "tightest": tightest,
        "recorded": recorded_data(data.recorded),
        "stages": [_stage_data(plan, stage) for stage in data.timeline.stages],
        "layers": [
            {
                "choice": plan.recompute_policy[layer],
                "stage": plan.layout.stage_of(layer),
                "others": list(map(asdict, others)),
            }
            for layer, others in enumerate(data.others)
        ],
    }


def _stage_data(plan: Plan, stage: StageTimeline) -> dict[str, Any]:
    """A stage's columns as differences between events; most are equal, so they compress well."""
    cost = plan.cost.stages[stage.stage]
    gap_ms = stage.start_ms - np.concatenate(([0.0], stage.end_ms[:-1]))
    return {
        "budget": stage.budget_bytes,
        "static": stage.static_bytes,
        "optimizer": stage.optimizer_step_peak_bytes,
        "binding": None if stage.binding is None else [stage.binding.event, stage.binding.unit],
        "moment": cost.peak.moment.partition(", ")[2],
        "chunks": [
            {"ms": (forward, backward - ahead), "ahead": ahead}
            | {"units": [_unit_data(plan, *pair) for pair in zip(units, again, strict=True)]}
            for forward, backward, ahead, units, again in zip(
                cost.forward_ms,
                cost.backward_ms,
                cost.ahead_ms or (0.0,) * len(stage.units),
                stage.units,
                stage.recompute_ps,
                strict=True,
            )
        ],
        "code": (stage.chunk * 2 + stage.backward).tolist(),
        "microbatch": stage.microbatch.tolist(),
        "gap": [round(gap, 6) or 0 for gap in gap_ms.tolist()],
        "inFlight": np.diff(stage.in_flight_bytes, prepend=0).tolist(),
        "outside": np.diff(stage.outside_bytes, prepend=0).tolist(),
        "overhead": np.diff(stage.overhead_bytes, prepend=0).tolist(),
        "copies": None if stage.copies is None else _copies_data(stage, stage.copies),
    }


def _copies_data(stage: StageTimeline, copies: StageCopies) -> dict[str, Any]:
    """Copies in the order in which each direction makes them, and their names once each."""
    names = list(dict.fromkeys(copy.name for copy in copies.copied))
    number = {name: at for at, name in enumerate(names)}
    return {
        "names": names,
        "ways": [
            [
                (
                    round(copy.begin_ps / PS_PER_MS, 6),
                    round(copy.end_ps / PS_PER_MS, 6),
                    number[copy.name],
                    copy.microbatch,
                    copy.group.record.host_bytes,
                )
                for copy in sorted(copies.copied, key=lambda copy: copy.begin_ps)
                if copy.to_host == to_host
            ]
            for to_host in (True, False)
        ],
        "waits": [
            [[at / PS_PER_MS, wait / PS_PER_MS] for at, wait in ran.waits] for ran in copies.ran
        ],
        "bytes": [own.tolist() for own in stage.copy_bytes],
        "after": [copies.after(event) for event in range(len(copies.ran))],
    }


def _unit_data(plan: Plan, unit: Unit, recompute_ps: int) -> dict[str, Any]:
    backward_ps = unit.backward_ps - unit.ahead_ps
    return {
        "name": unit.name,
        "choice": plan.recompute_policy[unit.layers[0]] if unit.layers else "",
        "outside": unit.name in OUTSIDE,
        "held": unit.held_bytes,
        "transient": [unit.forward_transient_bytes, unit.backward_transient_bytes],
        "ms": [unit.forward_ps / PS_PER_MS, backward_ps / PS_PER_MS],
        "recompute": recompute_ps / PS_PER_MS,
    }


def tightest_stage(plan: Plan) -> int:
    """The stage with the least room under its budget."""
    room = [
        budget - cost.peak_high_bytes
        for budget, cost in zip(plan.budget_bytes, plan.cost.stages, strict=True)
    ]
    return room.index(min(room))


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


def _largest(differences: Sequence[Difference]) -> list[Difference]:
    shown = [one for one in differences if abs(one.more_bytes) >= LEAST_BYTES]
    return sorted(shown, key=lambda one: -abs(one.more_bytes))[:MOST_ROWS]
