"""The policy and the memory curve of a plan as images for TensorBoard and W&B, and its costs.

matplotlib's figures are used without pyplot, so a training program's own backend and figures stay
as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import ChoiceRecord
from megatron_autorecompute.report.figures import DPI, Image, pixels, strip
from megatron_autorecompute.report.timeline import StageTimeline, timeline
from megatron_autorecompute.report.words import by_room, duration, size
from megatron_autorecompute.units import GIB, MIB

MOST_LANES = 8
"""Stages in the picture of memory; of more, those with the least room are shown."""


def policy_image(plan: Plan) -> Image:
    """What every layer recomputes: a row per stage, a cell per layer, darker where it is more."""
    return pixels(strip(plan))


def memory_image(plan: Plan, measured_bytes: Sequence[int] | None) -> Image:
    """Predicted bytes of every stage over the step, its budget, and its measured peak.

    measured_bytes: peak of every stage in a step under the plan; None if none was read.
    """
    stages, step = by_room(plan), timeline(plan)
    shown = sorted(stages[:MOST_LANES])
    figure = Figure(figsize=(10.5, 0.8 + 1.15 * len(shown)), dpi=DPI, layout="constrained")
    lanes = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    for axes, stage in zip(lanes, shown, strict=True):
        _lane(axes, step.stages[stage], None if measured_bytes is None else measured_bytes[stage])
    lanes[-1].set_xlim(0, step.step_ms)
    lanes[-1].set_xlabel("ms since the step began", fontsize=8)
    of = f"; of {len(stages)} stages those with the least room" * (shown != sorted(stages))
    figure.suptitle(f"{plan.profile.model.name}: predicted memory over the step{of}", fontsize=9)
    handles, labels = lanes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, fontsize=8, frameon=False)
    return pixels(figure)


def _lane(axes: Axes, stage: StageTimeline, measured_bytes: int | None) -> None:
    unit, name = (GIB, "GiB") if stage.budget_bytes >= GIB else (MIB, "MiB")
    peaks = stage.peak_bytes / unit
    times = np.append(stage.start_ms, stage.end_ms[-1])
    low = min(stage.static_bytes / unit, float(peaks.min()))
    label = "predicted, the most in each forward and backward"
    axes.stairs(peaks, times, baseline=0, fill=True, color="#0072b2", label=label)
    axes.axhline(stage.budget_bytes / unit, color="black", ls="--", lw=1, label="budget")
    top = max(stage.budget_bytes / unit, float(peaks.max()))
    if measured_bytes is not None:
        top = max(top, measured_bytes / unit)
        axes.axhline(measured_bytes / unit, color="#d55e00", lw=1.5, label="measured peak")
    axes.set_ylim(max(0.0, low - 0.2 * (top - low)), top + 0.05 * (top - low))
    axes.set_ylabel(f"stage {stage.stage}\n{name}", fontsize=8)
    axes.tick_params(labelsize=7)


COSTS = (
    "layers",
    "how many",
    "choice",
    "in the plan",
    "held_bytes",
    "forward_transient_bytes",
    "backward_transient_bytes",
    "forward_ms",
    "backward_ms",
    "spread_ms",
    "source",
)
"""Columns of `cost_rows`."""


def cost_rows(plan: Plan) -> list[list[str | int | float]]:
    """What one layer of every kind costs under every choice, for one microbatch, as measured.

    "in the plan": how many layers of the kind have the choice, groups of several layers included.
    """
    rows: list[tuple[str, int, int, ChoiceRecord]] = []
    for kind in plan.profile.kinds:
        chosen = [plan.recompute_policy[layer] for layer in kind.layers]
        for record in kind.choices:
            count = sum(_is_of(kind.inert.get(choice, choice), record) for choice in chosen)
            rows.append((kind.name, len(kind.layers), count, record))
    rows += [("embedding", 1, 1, plan.profile.embedding), ("head", 1, 1, plan.profile.head)]
    return [
        [name, layers, record.choice, count, *(getattr(record, each) for each in COSTS[4:])]
        for name, layers, count, record in rows
    ]


def _is_of(choice: str, record: ChoiceRecord) -> bool:
    """Whether a layer's choice is a record's; that of `full` is also of layers in a group."""
    return choice == record.choice or (record.choice == "full" and choice.startswith("full/"))


def costs_markdown(plan: Plan) -> str:
    """`cost_rows` as a Markdown table."""
    heads = [name.removesuffix("_bytes").removesuffix("_ms").replace("_", " ") for name in COSTS]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row in cost_rows(plan):
        cells = [_cell(name, value) for name, value in zip(COSTS, row, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(name: str, value: str | int | float) -> str:
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if name.endswith("_bytes"):
        return size(value)
    return duration(value) if name.endswith("_ms") else str(value)
