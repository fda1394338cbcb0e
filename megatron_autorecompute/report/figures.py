"""Pictures in files, PNG or SVG by the file's name, in which names stand beside their points."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_autorecompute.json_records import write_atomically
from megatron_autorecompute.report.curve import named
from megatron_autorecompute.report.data import Curve
from megatron_autorecompute.report.labels import Box, placed
from megatron_autorecompute.units import GIB, MIB

_LINE, _OWN = "#0072b2", "#5d666f"
_LEADER = 12.0
"""Points between a mark and its name from which on a thin line joins them."""


@dataclass(frozen=True, slots=True)
class Name:
    """What stands beside a point."""

    x: float
    """In the units of the axes."""
    y: float
    """In the units of the axes."""
    text: str
    """The name."""
    colour: str = "#333333"
    """Of the text."""
    size: float = 9.0
    """Of the text, in typographic points."""
    bold: bool = False
    """Whether the text is bold."""


def write_names(
    axes: Axes,
    names: Sequence[Name],
    *,
    free: Sequence[tuple[float, float, float, float]] = (),
    columns: Sequence[float] = (),
) -> None:
    """Write every name beside its point, so that none covers another or what is to stay free.

    To be called when all else is drawn.

    Args:
        axes: of the picture.
        names: the most important first.
        free: boxes that no name may cover: x and y from, x and y to, in the units of the axes.
        columns: x of vertical lines that no name may cross.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.canvas.draw()  # lays out
    figure.set_layout_engine("none")
    scale = 72 / figure.dpi
    frame = axes.get_window_extent()
    inside = Box(frame.x0 * scale, frame.y0 * scale, frame.width * scale, frame.height * scale)

    def at(x: float, y: float) -> tuple[float, float]:
        across, up = axes.transData.transform((x, y))
        return float(across) * scale, float(up) * scale

    points = [at(name.x, name.y) for name in names]
    boxes = [_around(at(x0, y0), at(x1, y1)) for x0, y0, x1, y1 in free]
    boxes += [Box(at(x, 0)[0] - 1, inside.y, 2, inside.height) for x in columns]
    sizes = [_size(axes, name) for name in names]
    for name, point, box in zip(names, points, placed(points, sizes, inside, boxes), strict=True):
        _write(axes, name, (box.x - point[0], box.y - point[1]), _distance(point, box))


def _around(low: tuple[float, float], high: tuple[float, float]) -> Box:
    return Box(low[0] - 3, low[1] - 3, high[0] - low[0] + 6, high[1] - low[1] + 6)


def _size(axes: Axes, name: Name) -> tuple[float, float]:
    figure = axes.get_figure(root=True)
    assert figure is not None
    text = axes.text(name.x, name.y, name.text, fontsize=name.size, weight=_weight(name))
    extent = text.get_window_extent()
    text.remove()
    scale = 72 / figure.dpi
    return float(extent.width) * scale + 2, float(extent.height) * scale + 1


def _distance(point: tuple[float, float], box: Box) -> float:
    across = max(box.x - point[0], 0, point[0] - box.x - box.width)
    up = max(box.y - point[1], 0, point[1] - box.y - box.height)
    return float((across**2 + up**2) ** 0.5)


def _write(axes: Axes, name: Name, offset: tuple[float, float], distance: float) -> None:
    leader = {"arrowstyle": "-", "color": name.colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
    axes.annotate(
        name.text,
        (name.x, name.y),
        xytext=(offset[0] + 1, offset[1] + 1),
        textcoords="offset points",
        ha="left",
        va="bottom",
        fontsize=name.size,
        color=name.colour,
        weight=_weight(name),
        arrowprops=leader if distance > _LEADER else None,
    )


def _weight(name: Name) -> str:
    return "bold" if name.bold else "normal"


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture, whole or not at all, and close it. Raises: ProfileError if the file cannot
    be written."""
    drawn = io.BytesIO()
    # With a salt and no date, equal pictures are equal files.
    with matplotlib.rc_context({"svg.hashsalt": "megatron-autorecompute"}):
        dated = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(drawn, format=path.suffix[1:], dpi=figure.dpi, metadata=dated)
    pyplot.close(figure)
    write_atomically(drawn.getvalue(), path)


def curve_picture(curve: Curve, path: Path) -> None:
    """Draw step time against the budget, with Megatron's own settings as points beside the line.

    Raises: ProfileError if the file cannot be written.
    """
    figure, axes = pyplot.subplots(figsize=(8.5, 4.6), dpi=150, layout="constrained")
    points = sorted(curve.points, key=lambda point: point.budget_bytes)
    unit = GIB if points[-1].budget_bytes > 2 * GIB else MIB
    budgets = [point.budget_bytes / unit for point in points]
    times = [point.step_ms for point in points]
    own = [(s.peak_high_bytes / unit, s.step_ms) for s in curve.strategies]
    right = max([*budgets, *(x for x, _ in own)])
    axes.step([*budgets, right], [*times, times[-1]], where="post", color=_LINE, linewidth=1.6)
    axes.plot(budgets, times, "o", color=_LINE, markersize=3)
    axes.plot([x for x, _ in own], [y for _, y in own], "o", color="#9aa4ad", markersize=5)
    axes.set_xlabel(f"memory of the fullest stage ({'GiB' if unit == GIB else 'MiB'})")
    axes.set_ylabel("step time (ms)")
    axes.set_title(
        f"{curve.title}: the best policy for every budget (line), Megatron's own settings (points)",
        fontsize=10,
    )
    axes.margins(0.06)
    axes.grid(alpha=0.25)
    ends, lower = [*budgets[1:], right], [*times[1:], times[-1]]
    write_names(
        axes,
        [
            Name(s.peak_high_bytes / unit, s.step_ms, s.name.removeprefix("megatron:"), _OWN)
            for s in named(curve)
        ],
        free=[
            *((x0, y, x1, y) for x0, x1, y in zip(budgets, ends, times, strict=True)),
            *((x, y0, x, y1) for x, y0, y1 in zip(ends, lower, times, strict=True)),
            *((x, y, x, y) for x, y in own),
        ],
    )
    save_figure(figure, path)
