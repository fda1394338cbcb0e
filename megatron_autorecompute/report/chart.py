"""Step time over memory as SVG: axes, the budget, points and their names; and a plan's curve."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from megatron_autorecompute.planner.plan import ManualResult
from megatron_autorecompute.planner.search.curve import CurvePoint
from megatron_autorecompute.report.data import Curve
from megatron_autorecompute.report.terminal import unbeaten
from megatron_autorecompute.report.words import duration, size
from megatron_autorecompute.units import GIB, MIB

_DISTANCES = (7, 14, 24)
"""Pixels between a point and its name."""
_SIDES = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; x and y are its corner with the smallest coordinates."""

    x: float
    y: float
    width: float
    height: float

    def overlaps(self, other: Box) -> bool:
        """Whether two boxes share more than an edge."""
        wide = min(self.x + self.width, other.x + other.width) - max(self.x, other.x)
        high = min(self.y + self.height, other.y + other.height) - max(self.y, other.y)
        return wide > 0 and high > 0

    def within(self, other: Box) -> bool:
        """Whether it lies completely in another box."""
        return (
            other.x <= self.x
            and other.y <= self.y
            and self.x + self.width <= other.x + other.width
            and self.y + self.height <= other.y + other.height
        )


def beside(
    point: tuple[float, float], extent: tuple[float, float], inside: Box, taken: Sequence[Box]
) -> Box | None:
    """The nearest box of this width and height at a point that is on nothing taken, to the right
    where several are as near; None if there is none."""
    possible = (box for box in _around(point, extent) if box.within(inside))
    return next((b for b in possible if not any(b.overlaps(other) for other in taken)), None)


def _around(point: tuple[float, float], extent: tuple[float, float]) -> Iterator[Box]:
    (x, y), (width, height) = point, extent
    for distance in _DISTANCES:
        for right, down in _SIDES:
            left = x + right * distance - (width if right < 0 else width / 2 if not right else 0)
            top = y + down * distance - (height if down < 0 else height / 2 if not down else 0)
            yield Box(left, top, width, height)


FRAME = Box(62, 14, 1096, 270)
INK, QUIET, GRID = "#1c2024", "#5d666f", "#d9dee3"
_WIDTH, _HEIGHT = 1180, 330
_BELOW = FRAME.y + FRAME.height
_RIGHT = FRAME.x + FRAME.width


@dataclass(frozen=True, slots=True)
class Name:
    """What stands beside a point, in pixels."""

    x: float
    y: float
    text: str
    colour: str = QUIET
    strong: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Bytes from left to right, milliseconds upwards."""

    low_bytes: float
    high_bytes: float
    low_ms: float
    high_ms: float
    budget_bytes: int | None = None

    @classmethod
    def around(cls, sizes: Sequence[int], times: Sequence[float], budget: int | None) -> Chart:
        """The axes that hold all these, and the budget if there is one; any axes for nothing."""
        sizes = [*sizes, *([budget] if budget else [])] or [0, GIB]
        times = times or [0.0, 1000.0]
        widths = (max(sizes) - min(sizes) or max(sizes)), (max(times) - min(times) or max(times))
        return cls(
            max(0, min(sizes) - 0.06 * widths[0]),
            max(sizes) + 0.06 * widths[0],
            max(0, min(times) - 0.1 * widths[1]),
            max(times) + 0.1 * widths[1],
            budget,
        )

    def x(self, size_bytes: float) -> float:
        """The horizontal place of a size, in pixels."""
        share = (size_bytes - self.low_bytes) / (self.high_bytes - self.low_bytes)
        return round(FRAME.x + share * FRAME.width, 1)

    def y(self, time_ms: float) -> float:
        """The vertical place of a time, in pixels."""
        share = (time_ms - self.low_ms) / (self.high_ms - self.low_ms)
        return round(FRAME.y + (1 - share) * FRAME.height, 1)

    def svg(
        self, parts: Iterable[str], names: Sequence[Name], occupied: Iterable[Box], title: str = ""
    ) -> str:
        """The picture; the names that matter most come first, and do not cover what is occupied."""
        inside = [*self._ground(), *parts, *self._names(names, occupied)]
        inside += [text(FRAME.x, FRAME.y - 3, title, colour=INK)] * bool(title)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="curve" viewBox="0 0 {_WIDTH} '
            f'{_HEIGHT}" font-family="system-ui, sans-serif" role="group" '
            'aria-label="Step time against memory">\n' + "\n".join(inside) + "\n</svg>"
        )

    def _ground(self) -> Iterator[str]:
        unit = GIB if self.high_bytes > 2 * GIB else MIB
        for at in ticks(self.low_bytes / unit, self.high_bytes / unit, 10):
            x = self.x(at * unit)
            yield path("axis", f"M{x} {FRAME.y}V{_BELOW}", GRID)
            yield text(x, _BELOW + 16, f"{at:g}", "middle")
        name = f"{'GiB' if unit == GIB else 'MiB'} of the fullest stage"
        yield text(FRAME.x + FRAME.width / 2, _BELOW + 36, name, "middle")
        seconds = self.high_ms >= 2000
        for at in ticks(self.low_ms, self.high_ms, 6):
            y = self.y(at)
            yield path("axis", f"M{FRAME.x} {y}H{_RIGHT}", GRID)
            yield text(FRAME.x - 6, y + 4, f"{at / 1000:g} s" if seconds else f"{at:g} ms", "end")
        if self.budget_bytes:
            where = f"M{self.x(self.budget_bytes)} {FRAME.y}V{_BELOW}"
            yield path("budget", where, INK, ' stroke-dasharray="5 4"')

    def _names(self, names: Sequence[Name], occupied: Iterable[Box]) -> Iterator[str]:
        """Names beside their points; one that finds no free place is left out."""
        taken = list(occupied)
        if self.budget_bytes:
            x, budget = self.x(self.budget_bytes), f"budget {size(self.budget_bytes)}"
            taken.append(Box(x - 1, FRAME.y, 2, FRAME.height))
            names = [*names[:1], Name(x, FRAME.y + 10, budget), *names[1:]]
        taken += [Box(name.x - 4, name.y - 4, 8, 8) for name in names]
        for name in names:
            box = beside((name.x, name.y), (6.4 * len(name.text), 13.0), FRAME, taken)
            if box is not None:
                taken.append(box)
                yield text(box.x, box.y + 10, name.text, colour=name.colour, strong=name.strong)


def ticks(low: float, high: float, about: int) -> list[float]:
    """About `about` round numbers within an interval."""
    least = (high - low) / about
    power = 10 ** math.floor(math.log10(least))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= least)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step) + 1)]


def text(
    x: float, y: float, words: str, anchor: str = "start", colour: str = QUIET, strong: bool = False
) -> str:
    """A line of text that stands on y."""
    about = ' class="strong" font-weight="bold"' if strong else ""
    return (
        f'<text{about} x="{x:.1f}" y="{y:.1f}" font-size="11" text-anchor="{anchor}" '
        f'fill="{colour}">{escape(words)}</text>'
    )


def path(kind: str, points: str, colour: str, more: str = "") -> str:
    """A line of M, L, H and V."""
    return f'<path class="{kind}" d="{points}" fill="none" stroke="{colour}"{more}/>'


def circle(kind: str, x: float, y: float, radius: float, looks: str, tip: str) -> str:
    """A point, and what is said of it where a page is pointed at."""
    return (
        f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}" {looks} tabindex="0" '
        f'data-tip="{escape(tip)}" aria-label="{escape(tip)}"/>'
    )


_OWN, _OVER = 'fill="#9aa4ad"', 'fill="none" stroke="#9aa4ad"'


def named(curve: Curve) -> list[ManualResult]:
    """The strategies, those first whose names matter most: the best that fits, both ends, and those
    that no other beats."""
    if not curve.strategies:
        return []
    fitting = [s for s in curve.strategies if s.fits]
    ends = (
        min(fitting, key=lambda s: s.step_ms, default=None),
        min(curve.strategies, key=lambda s: s.step_ms),
        min(curve.strategies, key=lambda s: s.peak_high_bytes),
        next((s for s in curve.strategies if s.name == "megatron:selective[core_attn]"), None),
    )
    first = [s for s in ends if s is not None]
    return list(dict.fromkeys([*first, *unbeaten(curve.strategies), *curve.strategies]))


def curve_svg(curve: Curve, title: str = "") -> str:
    """The curve; a page may style its classes otherwise, and show `data-tip` on hover."""
    ours = [curve.plan] if curve.plan else []
    peaks: list[ManualResult | CurvePoint] = [*curve.strategies, *ours]
    chart = Chart.around(
        [*(p.budget_bytes for p in curve.points), *(p.peak_high_bytes for p in peaks)],
        [p.step_ms for p in (*curve.points, *peaks)],
        curve.budget_bytes,
    )
    points = sorted(curve.points, key=lambda p: p.budget_bytes)
    own = [(chart.x(s.peak_high_bytes), chart.y(s.step_ms)) for s in named(curve)]
    line = [(chart.x(p.budget_bytes), chart.y(p.step_ms)) for p in points]
    names = [Name(chart.x(p.peak_high_bytes), chart.y(p.step_ms), *_THIS) for p in ours]
    texts = (s.name.removeprefix("megatron:") for s in named(curve))
    names += [Name(*place, name) for place, name in zip(own, texts, strict=True)]
    ends = [*(x for x, _ in line), FRAME.x + FRAME.width][1:]
    occupied = [Box(x - 4, y - 4, 8, 8) for x, y in [*line, *own]]
    levels = [Box(x, y - 2, end - x, 4) for (x, y), end in zip(line, ends, strict=True)]
    return chart.svg(
        [*_line(points, line), *_strategies(curve, chart)], names, [*occupied, *levels], title
    )


_THIS = ("this plan", INK, True)


def _line(points: list[CurvePoint], places: list[tuple[float, float]]) -> Iterator[str]:
    """The line as steps: a plan is best for all budgets up to the next faster plan's."""
    if not points:
        return
    (left, top), bottom = places[0], FRAME.y + FRAME.height
    yield (
        f'<rect class="no-fit" x="{FRAME.x}" y="{FRAME.y}" width="{left - FRAME.x:.1f}" '
        f'height="{FRAME.height}" fill="#e6e9ec"/>'
    )
    if left - FRAME.x > 70:
        yield text(FRAME.x + 6, bottom - 8, "no policy fits")
    steps = f"M{left} {top}" + "".join(f"H{x}V{y}" for x, y in places[1:])
    yield path("line", f"{steps}H{FRAME.x + FRAME.width}", "#0072b2", ' stroke-width="2"')
    for point, (x, y) in zip(points, places, strict=True):
        tip = (
            f"Budget {size(point.budget_bytes)}: {duration(point.step_ms)}\n"
            f"{_shortened(point.recompute_policy)}"
        )
        yield circle("step", x, y, 3, 'fill="#0072b2"', tip)


def _strategies(curve: Curve, chart: Chart) -> Iterator[str]:
    for strategy in named(curve)[::-1]:
        over = "" if strategy.fits else ": does not fit"
        tip = (
            f"{strategy.name}{over}\n{duration(strategy.step_ms)}, {size(strategy.peak_high_bytes)}"
        )
        x, y = chart.x(strategy.peak_high_bytes), chart.y(strategy.step_ms)
        kind, looks = ("manual", _OWN) if strategy.fits else ("over", _OVER)
        yield circle(kind, x, y, 4, looks, tip)
    if curve.plan:
        tip = f"This plan: {duration(curve.plan.step_ms)}, {size(curve.plan.peak_high_bytes)}"
        x, y = chart.x(curve.plan.peak_high_bytes), chart.y(curve.plan.step_ms)
        yield circle("ours", x, y, 7, 'fill="#b84a00"', tip)


def _shortened(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[:most] + " …"
