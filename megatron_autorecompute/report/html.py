"""The report of a plan as one HTML file that opens in a browser without network."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from megatron_autorecompute.planner.cost.peak_memory import Breakdown
from megatron_autorecompute.planner.cost.policy_cost import StageCost
from megatron_autorecompute.planner.cost.step_interval import COVERS
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.copies import Copy, StepCopies
from megatron_autorecompute.report.curve import curve_svg
from megatron_autorecompute.report.data import ReportData
from megatron_autorecompute.report.strip import STYLE, strip_svg
from megatron_autorecompute.report.terminal import best_own_setting
from megatron_autorecompute.report.timeline import StageTimeline, UnitCost
from megatron_autorecompute.report.words import binds, came_from, duration, percent, proof, size

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
    parts = {
        "title": escape(plan.profile.model.name),
        "shape": escape(_shape(plan)),
        "answer": _answer(plan),
        "speed": f"<p>{escape(data.speed)}</p>" * bool(data.speed),
        "cards": _cards(data),
        "stages_note": _stages_note(plan),
        "stages": _stages(data),
        "step_note": _step_note(data),
        "policy_note": "Point at a cell to see what its other choices would cost.",
        "strip": strip_svg(plan, interactive=True),
        "curve_note": _curve_note(data),
        "curve": curve_svg(data.curve),
        "evidence": _evidence(data),
        "pastes": "".join(
            _paste(i, paste.where, paste.text) for i, paste in enumerate(data.pastes)
        ),
        "data": packed(page_data(data)),
    }
    page = _template("plan.html")
    page = page.replace("/*strip*/", STYLE).replace("/*script*/", _template("plan.js"))
    for name, text in parts.items():
        page = page.replace("{{" + name + "}}", text)
    return page


def _template(name: str) -> str:
    return (files(__package__) / "templates" / name).read_text(encoding="utf-8")


def packed(value: Any) -> str:
    """A value as compressed JSON in text form; equal values give equal texts."""
    text = json.dumps(value, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def page_data(data: ReportData) -> dict[str, Any]:
    """The data that the page's script draws."""
    plan = data.plan
    tightest = tightest_stage(plan)
    stage_of = data.stage_of
    return {
        "step": data.timeline.step_ms,
        "tightest": tightest,
        "stages": [_stage_data(plan, stage) for stage in data.timeline.stages],
        "layers": [
            {
                "choice": plan.recompute_policy[layer],
                "stage": stage_of[layer],
                "others": [
                    {
                        "choice": str(other.choice),
                        "step": other.step_ms,
                        "busy": other.stage_busy_ms,
                        "bytes": other.peak_bytes,
                        "fits": other.fits,
                    }
                    for other in effects
                ],
            }
            for layer, effects in enumerate(data.effects)
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
            | {"units": [_unit_data(plan, unit) for unit in units]}
            for forward, backward, ahead, units in zip(
                cost.forward_ms,
                cost.backward_ms,
                cost.ahead_ms or (0.0,) * len(stage.units),
                stage.units,
                strict=True,
            )
        ],
        "code": (stage.chunk * 2 + stage.backward).tolist(),
        "microbatch": stage.microbatch.tolist(),
        "gap": [round(gap, 6) or 0 for gap in gap_ms.tolist()],
        "inFlight": np.diff(stage.in_flight_bytes, prepend=0).tolist(),
        "outside": np.diff(stage.outside_bytes, prepend=0).tolist(),
        "overhead": np.diff(stage.overhead_bytes, prepend=0).tolist(),
        "copies": None if stage.copies is None else _copies_data(stage.copies),
    }


def _copies_data(copies: StepCopies) -> dict[str, Any]:
    """Copies in the order in which each direction makes them, and their names once each."""
    names = list(dict.fromkeys(copy.name for copy in copies.copies))
    number = {name: at for at, name in enumerate(names)}
    return {
        "names": names,
        "ways": [
            [
                (*_span(copy), number[copy.name], copy.microbatch, copy.bytes)
                for copy in sorted(copies.copies, key=lambda copy: copy.begin_ms)
                if copy.to_host == to_host
            ]
            for to_host in (True, False)
        ],
        "waits": [[list(wait) for wait in waits] for waits in copies.waits],
        "bytes": [own.tolist() for own in copies.unit_bytes],
        "after": copies.after_bytes.tolist(),
    }


def _span(copy: Copy) -> tuple[float, float]:
    return round(copy.begin_ms, 6), round(copy.end_ms, 6)


def _unit_data(plan: Plan, unit: UnitCost) -> dict[str, Any]:
    return {
        "name": unit.name,
        "choice": plan.recompute_policy[unit.layers[0]] if unit.layers else "",
        "outside": not unit.is_layer,
        "held": unit.held_bytes,
        "transient": [unit.forward_transient_bytes, unit.backward_transient_bytes],
        "ms": [unit.forward_ms, unit.backward_ms],
        "recompute": unit.recompute_ms,
    }


def tightest_stage(plan: Plan) -> int:
    """The stage with the least room under its budget."""
    room = [
        budget - cost.peak_high_bytes
        for budget, cost in zip(plan.budget_bytes, plan.cost.stages, strict=True)
    ]
    return room.index(min(room))


def busiest_stage(plan: Plan) -> StageCost:
    """The stage that works longest; the others wait for it."""
    return max(plan.cost.stages, key=lambda stage: stage.busy_ms)


def _shape(plan: Plan) -> str:
    shape, schedule = plan.profile.parallelism, plan.schedule
    chunks = f" × {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    stages = f"{schedule.num_stages} stage{'s' * (schedule.num_stages > 1)}"
    sizes = {"tp": shape.tensor_parallel, "cp": shape.context_parallel, "ep": shape.expert_parallel}
    parts = [
        f"{plan.profile.num_layers} layers",
        stages + chunks,
        f"{schedule.num_microbatches} microbatches",
        f"micro-batch {shape.micro_batch_size} × {shape.seq_length:,} tokens",
        *(f"{name} {ranks}" for name, ranks in sizes.items() if ranks > 1),
        plan.profile.fingerprint.get("device", ""),
        came_from(plan.profile),
    ]
    return " · ".join(filter(None, parts))


def _answer(plan: Plan) -> str:
    stage = tightest_stage(plan)
    budget, peak = plan.budget_bytes[stage], plan.cost.stages[stage].peak_high_bytes
    one = plan.layout.num_stages == 1
    tight = "" if one else f"; the tightest, stage {stage}, has {size(budget - peak)} left"
    if peak <= budget:
        within = (
            f"{size(peak)} of {size(budget)}" if one else f"every stage within {_budgets(plan)}"
        )
        fits = f'<span class="yes">Fits</span>: {within}{tight}.'
    else:
        fits = (
            f'<span class="no">Does not fit</span>: stage {stage} needs {size(peak)} '
            f"of {size(budget)}."
        )
    step = f"A step takes {duration(plan.cost.step_ms)}{_gain(plan)}.{_interval(plan)}"
    return f"{fits} {step} {binds(plan)}".rstrip()


def _interval(plan: Plan) -> str:
    found = plan.step_interval
    if found is None:
        return ""
    return f" Interval: {duration(found.low_ms)} to {duration(found.high_ms)}. {COVERS}"


def _budgets(plan: Plan) -> str:
    low, high = min(plan.budget_bytes), max(plan.budget_bytes)
    return size(low) if low == high else f"its budget ({size(low)} to {size(high)})"


def _gain(plan: Plan) -> str:
    manual = plan.best_manual
    if manual is None:
        return "; none of Megatron's own settings fits"
    name = escape(manual.name.removeprefix("megatron:"))
    gain = 1 - plan.cost.step_ms / manual.step_ms
    setting = best_own_setting(plan)
    if gain < 0.0005:
        return f", as long as with {setting}, {name}"
    return (
        f", {percent(gain)} less than with {setting} that fits, {name} ({duration(manual.step_ms)})"
    )


def _cards(data: ReportData) -> str:
    plan = data.plan
    return "".join(
        (
            _memory_card(data),
            _time_card(plan),
            _paste_card(data.pastes[0].where, data.pastes[0].text),
        )
    )


def _memory_card(data: ReportData) -> str:
    plan = data.plan
    stage = tightest_stage(plan)
    cost, budget = plan.cost.stages[stage], plan.budget_bytes[stage]
    where = cost.peak.moment.partition(", ")[2]
    parts = {what: getattr(cost.peak.breakdown, field) for what, field in _PARTS}
    return (
        '<div class="card"><h2>Where memory is tight</h2>'
        f"<b>stage {stage}</b>: {size(cost.peak_high_bytes)} of {size(budget)}"
        f"{_memory_bar(cost.peak.breakdown, budget)}"
        f'<p class="quiet">{size(parts["static"])} static, {size(parts["in-flight"])} in flight'
        f"<br>at: {escape(where)}</p></div>"
    )


def _memory_bar(split: Breakdown, budget_bytes: int) -> str:
    most = max(budget_bytes, split.total_bytes)
    pieces = [
        f'<i style="width:{100 * getattr(split, field) / most:.2f}%;background:var(--{name})"></i>'
        for name, field in _PARTS
        if getattr(split, field)
    ]
    mark = f'<u style="left:calc({100 * budget_bytes / most:.2f}% - 2px)"></u>'
    return f'<div class="bar">{"".join(pieces)}{mark}</div>'


def _time_card(plan: Plan) -> str:
    cost = plan.cost
    busiest = busiest_stage(plan)
    lost = {"recomputing": cost.recompute_ms, "waiting": cost.bubble_ms}
    if plan.policy.offloads:
        lost["waiting for copies"] = cost.stall_ms
    if plan.policy.is_ahead:
        lost["less by recompute that begins while stages wait"] = cost.ahead_ms
    if cost.is_host_bound:
        lost["waiting for the host to launch kernels"] = cost.launch_ms
    what = ", ".join(
        f"<b>{duration(time)}</b> ({percent(time / cost.step_ms)}) {how}"
        for how, time in lost.items()
    )
    return (
        f'<div class="card"><h2>Where time is lost</h2>{what}'
        f"{_time_bar(busiest, cost.step_ms)}"
        f'<p class="quiet">{_time_keys()}<br>of {duration(cost.step_ms)}, on stage '
        f"{busiest.stage}, the busiest</p></div>"
    )


def _time_keys() -> str:
    kinds = (
        ("work", "var(--backward-1)", ""),
        ("recompute", "var(--recompute-1)", "hatched"),
        ("waiting", "var(--idle)", ""),
    )
    return "".join(
        f'<span class="key"><i class="{extra}" style="background-color:{colour}"></i>{name}</span>'
        for name, colour, extra in kinds
    )


def _time_bar(stage: StageCost, step_ms: float) -> str:
    work = stage.busy_ms - stage.recompute_ms
    return (
        '<div class="bar">'
        f'<i style="width:{100 * work / step_ms:.2f}%;background:var(--backward-1)"></i>'
        f'<i class="hatched" style="width:{100 * max(stage.recompute_ms, 0) / step_ms:.2f}%;'
        'background-color:var(--recompute-1)"></i></div>'
    )


def _paste_card(where: str, text: str) -> str:
    return (
        '<div class="card"><h2 style="display:flex;justify-content:space-between">What to paste '
        '<button class="copy" data-copy="paste-0">Copy</button></h2>'
        f'<span class="quiet">{escape(where)}:</span>'
        f"<pre>{escape(text)}</pre></div>"
    )


def _paste(number: int, where: str, text: str) -> str:
    return (
        f'<div class="paste"><header><b>{escape(where)}</b>'
        f'<button class="copy" data-copy="paste-{number}">Copy</button></header>'
        f'<pre id="paste-{number}" tabindex="0">{escape(text)}</pre></div>'
    )


def _stages_note(plan: Plan) -> str:
    tight, slow = tightest_stage(plan), busiest_stage(plan).stage
    if plan.layout.num_stages == 1:
        return ""
    both = f"Stage {tight} has the least room"
    return f"{both} and works longest." if tight == slow else f"{both}, stage {slow} works longest."


def _step_note(data: ReportData) -> str:
    drawn, whole = data.timeline.num_microbatches, data.plan.schedule.num_microbatches
    if drawn == whole:
        return ""
    return f"The middle of a step repeats: {drawn} of {whole:,} microbatches are drawn."


def _stages(data: ReportData) -> str:
    plan = data.plan
    tight, slow = tightest_stage(plan), busiest_stage(plan).stage
    rows = []
    for cost, budget, chunks in zip(
        plan.cost.stages, plan.budget_bytes, plan.layout.stages, strict=True
    ):
        layers = sum(len(chunk.layers) for chunk in chunks)
        idle = plan.cost.step_ms - cost.busy_ms
        classes = [c for c, s in (("tight", tight), ("slow", slow)) if s == cost.stage]
        rows.append(
            f'<tr class="{" ".join(classes)}"><td>{cost.stage}</td><td class="n">{layers}</td>'
            f'<td class="wide">{_memory_bar(cost.peak.breakdown, budget)}</td>'
            f'<td class="n"><b>{size(cost.peak_high_bytes)}</b></td>'
            f'<td class="n">{size(budget - cost.peak_high_bytes)}</td>'
            f'<td class="wide">{_time_bar(cost, plan.cost.step_ms)}</td>'
            f'<td class="n">{duration(cost.recompute_ms)}</td>'
            f'<td class="n">{duration(idle)}</td></tr>'
        )
    return (
        '<table class="stages"><thead><tr><th>stage</th><th class="n">layers</th>'
        '<th>memory at its fullest moment; ❙ budget</th><th class="n">peak</th>'
        '<th class="n">free</th><th>the step: work, recompute, waiting</th>'
        '<th class="n">recompute</th><th class="n">waiting</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _curve_note(data: ReportData) -> str:
    return (
        "The line is the step with each stage's fastest choices at every budget. A plan may be "
        "faster still. Points are Megatron's own settings; a hollow one does not fit."
    )


def _evidence(data: ReportData) -> str:
    plan = data.plan
    return (
        f"<p>{proof(plan)} By stage, the time that it is busy with one microbatch:</p>"
        f"{_stage_evidence(plan)}{_measured(plan)}"
        '<div class="columns">'
        f"<div><h3>Rests on</h3>{_list(plan.profile.assumptions) or '<p>measured figures.</p>'}"
        f"{_list(plan.notes)}</div>"
        f"<div><h3>Holds for</h3>{_pairs(plan.fingerprint.items())}</div></div>"
        f"{_records(plan)}"
    )


def _stage_evidence(plan: Plan) -> str:
    rows = [
        (
            str(item.stage),
            _range(cost.peak_low_bytes, cost.peak_high_bytes),
            size(item.budget_bytes),
            item.binding.partition(", ")[2] or item.binding,
            duration(item.objective_ms),
            "" if item.bound_ms is None else duration(item.bound_ms),
            "" if item.gap is None else percent(item.gap),
        )
        for item, cost in zip(plan.evidence, plan.cost.stages, strict=True)
    ]
    heads = (
        "stage",
        "peak",
        "budget",
        "kept from faster choices by",
        "a microbatch",
        "bound",
        "gap",
    )
    return _scrolling(_table(heads, rows, numbers=(1, 2, 4, 5, 6)))


def _range(low: int, high: int) -> str:
    return size(low) if low == high else f"{size(low)} to {size(high)}"


def _measured(plan: Plan) -> str:
    """Residuals that a job measured above the prediction, by stage."""
    stages = plan.profile.stages
    if not any(s.residual_bytes or s.residual_ms or s.uncertainty_bytes for s in stages):
        return ""
    rows = [
        (
            str(number),
            size(stage.residual_bytes),
            size(stage.uncertainty_bytes),
            f"{stage.residual_ms:+.2f} ms",
        )
        for number, stage in enumerate(stages)
    ]
    heads = (
        "stage",
        "measured minus predicted peak",
        "open",
        "measured minus predicted, a microbatch",
    )
    table = _table(heads, rows, numbers=(1, 2, 3))
    return "<h3>Measured in the job</h3>" + _scrolling(table)


def _records(plan: Plan) -> str:
    """The cost of every choice, from the profile."""
    rows = [
        (
            kind.name,
            record.choice,
            size(record.held_bytes),
            size(record.forward_transient_bytes),
            size(record.backward_transient_bytes),
            duration(record.forward_ms),
            duration(record.backward_ms),
            record.source,
        )
        for kind in plan.profile.kinds
        for record in kind.choices
    ]
    heads = (
        "layers",
        "choice",
        "held",
        "transient, forward",
        "transient, backward",
        "forward",
        "backward",
        "source",
    )
    return (
        "<details><summary>What every choice costs on one layer</summary>"
        f"{_scrolling(_table(heads, rows, numbers=(2, 3, 4, 5, 6)))}</details>"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> str:
    def cells(tag: str, row: Sequence[str]) -> Iterator[str]:
        for i, text in enumerate(row):
            number = ' class="n"' if i in numbers else ""
            yield f"<{tag}{number}>{escape(text)}</{tag}>"

    head = "".join(cells("th", heads))
    body = "".join(f"<tr>{''.join(cells('td', row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _scrolling(table: str) -> str:
    """A table that scrolls by itself where it is wider than the page, with the arrow keys too."""
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _list(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    return _table(("", ""), list(pairs), numbers=())
