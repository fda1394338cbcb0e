"""Step time over memory: axes, the budget, points and their names; and a plan's curve."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from megatron_autorecompute.planner.plan import ManualResult
from megatron_autorecompute.planner.search.curve import CurvePoint
from megatron_autorecompute.report.data import Curve
from megatron_autorecompute.report.figures import POINTS
from megatron_autorecompute.report.terminal import unbeaten
from megatron_autorecompute.report.words import duration, size
from megatron_autorecompute.units import GIB, MIB

MOST_SAID = 300
"""Characters of a policy that are said of a step."""
INK, QUIET = "#1c2024", "#5d666f"
WIDTH, HEIGHT = 1180, 330
"""Points of the picture."""
SMALL = 11
_DISTANCES = (7, 14, 24)
"""Points between a point of the picture and its name."""
_SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the picture, and what is said of it."""

    size_bytes: int
    time_ms: float
    tip: str
    """What is said where it is pointed at."""
    kind: str = "step"
    """Its class in a page's style sheet."""
    ink: str = "#0072b2"
    """Its colour."""
    radius: int = 3
    """In points."""
    hollow: bool = False
    """Whether it is a ring."""
    name: str = ""
    """What stands beside it, where there is room."""
    colour: str = QUIET
    """The name's colour."""
    strong: bool = False
    """Whether the name is bold."""
    spread_ms: float | None = None
    """The length of the bar that it is the middle of; None: it has none."""


def chart(
    points: Sequence[Point],
    budget_bytes: int | None,
    line: Sequence[Point] = (),
    title: str = "",
) -> Figure:
    """The picture; a page may style its classes otherwise.

    Args:
        points: those whose names matter most first.
        budget_bytes: is drawn as a line; None for none.
        line: the steps of a line, fewest bytes first.
        title: stands above the picture.
    """
    every = [*points, *line]
    sizes = [p.size_bytes for p in every] + ([budget_bytes] if budget_bytes else [])
    times = [p.time_ms + way * (p.spread_ms or 0) / 2 for p in every for way in (-1, 1)]
    (left, right), (low, high) = _around(sizes or [0, GIB], 0.06), _around(times or [0, 1000], 0.1)
    unit, name = (GIB, "GiB") if right > 2 * GIB else (MIB, "MiB")
    scale, time = (1000, "s") if high >= 2000 else (1, "ms")
    figure = Figure(figsize=(WIDTH / POINTS, HEIGHT / POINTS), dpi=POINTS)
    axes = figure.add_axes((0.053, 0.14, 0.929, 0.818), facecolor="none")
    axes.set(xlim=(left / unit, right / unit), ylim=(low / scale, high / scale))
    _grid(axes, f"{name} of the fullest stage", time)
    axes.text(0, 1.01, title, transform=axes.transAxes, color=INK, size=SMALL)
    taken: list[Bbox] = []

    def draw(point: Point) -> None:
        reach = (point.spread_ms or 0) / 2 / scale
        x, y = point.size_bytes / unit, point.time_ms / scale
        if reach:
            axes.vlines(x, y - reach, y + reach, color=point.ink, lw=1)
        face = "none" if point.hollow else point.ink
        area, mark = (2 * point.radius) ** 2, f"@{point.kind}: {point.tip}"
        axes.scatter(x, y, area, face, edgecolor=point.ink, lw=1, gid=mark, zorder=3, clip_on=False)
        taken.append(_covered(axes, (x, y - reach), (x, y + reach)).padded(4))

    if line:
        _line(axes, [(p.size_bytes / unit, p.time_ms / scale) for p in line], taken)
    for point in [*line, *reversed(points)]:
        draw(point)
    named = [((p.size_bytes / unit, p.time_ms / scale), p) for p in points]
    if budget_bytes:
        x, top = budget_bytes / unit, high / scale
        axes.vlines(x, *axes.get_ylim(), color=INK, ls=(0, (5, 4)), lw=1, gid="@budget")
        taken.append(_covered(axes, (x, low / scale), (x, top)).padded(1))
        label = Point(budget_bytes, 0, "", name=f"budget {size(budget_bytes)}")
        named.insert(1, ((x, top - 0.04 * (high - low) / scale), label))
    for at, point in named:
        _name(axes, at, point, taken)
    return figure


def _around(values: Sequence[float], margin: float) -> tuple[float, float]:
    """Limits that hold all values, and beside them this share of their distance."""
    wide = max(values) - min(values) or max(values)
    return max(0, min(values) - margin * wide), max(values) + margin * wide


def _grid(axes: Axes, size_label: str, time: str) -> None:
    axes.spines[:].set_visible(False)
    axes.locator_params("x", nbins=10)
    axes.locator_params("y", nbins=6)
    axes.set_xlabel(size_label, color=QUIET, size=SMALL)
    axes.yaxis.set_major_formatter(f"{{x:g}} {time}")
    axes.tick_params(length=0, labelsize=SMALL, labelcolor=QUIET)
    axes.grid(color="#d9dee3", lw=1, gid="@axis", clip_on=False)


def _line(axes: Axes, places: Sequence[tuple[float, float]], taken: list[Bbox]) -> None:
    """The line as steps: a plan is best for all budgets up to the next faster plan's."""
    (left, right), (first, _) = axes.get_xlim(), places[0]
    axes.axvspan(left, first, color="#e6e9ec", lw=0, zorder=0, gid="@no-fit", clip_on=False)
    xs, ys = map(list, zip(*places, (right, places[-1][1]), strict=True))
    axes.step(xs, ys, where="post", color="#0072b2", lw=2, gid="@line", clip_on=False)
    levels = zip(xs, ys, xs[1:], strict=False)
    taken += [_covered(axes, (x, y), (end, y)).padded(0, 2) for x, y, end in levels]


def _covered(axes: Axes, first: tuple[float, float], second: tuple[float, float]) -> Bbox:
    return Bbox(axes.transData.transform([first, second]))


def _name(axes: Axes, at: tuple[float, float], point: Point, taken: list[Bbox]) -> None:
    """Write a point's name in the nearest free place beside it, to the right where several are as
    near; not at all where there is none."""
    text = axes.annotate(point.name, at, (0, 0), textcoords="offset points", size=SMALL)
    text.set(color=point.colour, weight="bold" if point.strong else "normal")
    if point.strong:
        text.set_gid("@strong")
    for distance, (right, up) in itertools.product(_DISTANCES, _SIDES):
        text.set(position=(right * distance, up * distance))
        text.set(ha=("center", "left", "right")[right], va=("center", "bottom", "top")[up])
        box = text.get_window_extent()
        inside = axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max)
        if inside and not any(box.overlaps(other) for other in taken):
            taken.append(box)
            return
    text.remove()


def named(curve: Curve) -> list[ManualResult]:
    """The strategies, those first whose names matter most: the best that fits, and those that no
    other beats."""
    fastest = unbeaten(own for own in curve.strategies if own.fits)[::-1]
    others = unbeaten(curve.strategies)[::-1]
    return list(dict.fromkeys([*fastest[:1], *others, *curve.strategies]))


def curve_chart(curve: Curve, title: str = "") -> Figure:
    """The curve of a plan, with Megatron's own settings."""
    plan = [_plan(curve.plan)] if curve.plan else []
    points = [*plan, *map(_strategy, named(curve))]
    line = map(_step, sorted(curve.points, key=lambda p: p.budget_bytes))
    return chart(points, curve.budget_bytes, list(line), title)


def _step(point: CurvePoint) -> Point:
    policy = point.recompute_policy
    shown = policy if len(policy) <= MOST_SAID else policy[:MOST_SAID] + " …"
    tip = f"Budget {size(point.budget_bytes)}: {duration(point.step_ms)}\n{shown}"
    return Point(point.budget_bytes, point.step_ms, tip)


def _strategy(own: ManualResult) -> Point:
    over = "" if own.fits else ": does not fit"
    tip = f"{own.name}{over}\n{duration(own.step_ms)}, {size(own.peak_high_bytes)}"
    at, kind = (own.peak_high_bytes, own.step_ms), "manual" if own.fits else "over"
    name = own.name.removeprefix("megatron:")
    return Point(*at, tip, kind, "#9aa4ad", 4, hollow=not own.fits, name=name)


def _plan(own: CurvePoint) -> Point:
    tip = f"This plan: {duration(own.step_ms)}, {size(own.peak_high_bytes)}"
    at = own.peak_high_bytes, own.step_ms
    return Point(*at, tip, "ours", "#b84a00", 7, name="this plan", colour=INK, strong=True)
