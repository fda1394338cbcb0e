"""The policy and the memory curve of a plan as images for TensorBoard and W&B, and its costs.

matplotlib's figures are used without pyplot, so a training program's own backend and figures stay
as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from megatron_autorecompute.planner.layout import Chunk
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import ChoiceRecord
from megatron_autorecompute.report.terminal import legend
from megatron_autorecompute.report.timeline import StageTimeline, event_peaks, timeline
from megatron_autorecompute.report.words import (
    choice_colours,
    duration,
    ink_on,
    size,
    without_group,
)
from megatron_autorecompute.units import GIB, MIB

Image = NDArray[np.uint8]
"""Height, width, and red, green and blue."""
MOST_LANES = 8
"""Stages in the picture of memory; of more, those with the least room are shown."""
MOST_LETTERS = 48
"""Layers of a stage whose cells have letters; in more they would not be readable."""
MOST_FIRSTS = 3
"""Chunks of a stage whose first layer is named."""
CHUNK_GAP = 0.4
"""Between the chunks of a stage, as a share of a layer's cell."""
DPI = 110


def policy_image(plan: Plan) -> Image:
    """What every layer recomputes: a row per stage, a cell per layer, darker where it is more."""
    rows = [list(_cells(chunks)) for chunks in plan.layout.stages]
    right = max(place + 1 for row in rows for place, _ in [(0.0, None), *row])
    figure = Figure(figsize=(10.5, 0.9 + 0.26 * len(rows)), dpi=DPI, layout="constrained")
    axes = figure.subplots()
    colours, letters = choice_colours(plan), legend(plan.policy)
    for stage, row in enumerate(rows):
        for place, layer in row:
            choice = plan.policy.layers[layer]
            colour = colours[choice]
            axes.add_patch(
                Rectangle((place, stage + 0.04), 0.92, 0.92, facecolor=colour, linewidth=0)
            )
            if right <= MOST_LETTERS:
                axes.text(
                    place + 0.46,
                    stage + 0.5,
                    letters[choice],
                    color=ink_on(colour),
                    ha="center",
                    va="center",
                    fontsize=7,
                )
    axes.set(xlim=(0, right), ylim=(len(rows), 0), xticks=[])
    axes.set_yticks([stage + 0.5 for stage in range(len(rows))])
    axes.set_yticklabels([_row_name(*stage) for stage in enumerate(plan.layout.stages)])
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    axes.set_title(f"{plan.profile.model.name}: what every layer recomputes", fontsize=9)
    names = {str(without_group(choice)): colour for choice, colour in colours.items()}
    handles = [Patch(color=colour, label=name) for name, colour in names.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=8, frameon=False)
    return _pixels(figure)


def _cells(chunks: Sequence[Chunk]) -> Iterator[tuple[float, int]]:
    """Where a stage's layers are drawn, with a gap between chunks, and their indices."""
    place = 0.0
    for chunk in chunks:
        for layer in chunk.layers:
            yield place, layer
            place += 1
        place += CHUNK_GAP


def _row_name(stage: int, chunks: Sequence[Chunk]) -> str:
    firsts = [str(chunk.layers[0]) for chunk in chunks if chunk.layers]
    more = " …" if len(firsts) > MOST_FIRSTS else ""
    return f"stage {stage}, from layer {', '.join(firsts[:MOST_FIRSTS])}{more}"


def memory_image(plan: Plan, measured_bytes: Sequence[int] | None) -> Image:
    """Predicted bytes of every stage over the step, its budget, and its measured peak.

    measured_bytes: peak of every stage in a step under the plan; None if none was read.
    """
    room = [
        budget - cost.peak_high_bytes
        for budget, cost in zip(plan.budget_bytes, plan.cost.stages, strict=True)
    ]
    shown = sorted(sorted(range(len(room)), key=room.__getitem__)[:MOST_LANES])
    step = timeline(plan)
    figure = Figure(figsize=(10.5, 0.8 + 1.15 * len(shown)), dpi=DPI, layout="constrained")
    lanes = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    for axes, stage in zip(lanes, shown, strict=True):
        _lane(axes, step.stages[stage], None if measured_bytes is None else measured_bytes[stage])
    lanes[-1].set_xlim(0, step.step_ms)
    lanes[-1].set_xlabel("ms since the step began", fontsize=8)
    left_out = (
        f"; of {len(room)} stages those with the least room" if len(shown) < len(room) else ""
    )
    figure.suptitle(
        f"{plan.profile.model.name}: predicted memory over the step{left_out}", fontsize=9
    )
    handles, labels = lanes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, fontsize=8, frameon=False)
    return _pixels(figure)


def _lane(axes: Axes, stage: StageTimeline, measured_bytes: int | None) -> None:
    unit, name = (GIB, "GiB") if stage.budget_bytes >= GIB else (MIB, "MiB")
    peaks = event_peaks(stage) / unit
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


def _pixels(figure: Figure) -> Image:
    canvas: Any = FigureCanvasAgg(figure)  # its methods have no types
    canvas.draw()
    return np.array(canvas.buffer_rgba(), np.uint8)[:, :, :3].copy()


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
    rows: list[list[str | int | float]] = []
    for kind in plan.profile.kinds:
        chosen = [plan.recompute_policy[layer] for layer in kind.layers]
        for record in kind.choices:
            count = sum(_is_of(kind.inert.get(choice, choice), record) for choice in chosen)
            rows.append([kind.name, len(kind.layers), record.choice, count, *_figures(record)])
    for name, record in (("embedding", plan.profile.embedding), ("head", plan.profile.head)):
        rows.append([name, 1, record.choice, 1, *_figures(record)])
    return rows


def _is_of(choice: str, record: ChoiceRecord) -> bool:
    """Whether a layer's choice is a record's; that of `full` is also of layers in a group."""
    return choice == record.choice or (record.choice == "full" and choice.startswith("full/"))


def _figures(record: ChoiceRecord) -> Iterator[str | int | float]:
    yield from (getattr(record, name) for name in COSTS[4:])


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
