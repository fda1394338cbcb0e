"""Step time over memory as SVG: axes, the budget, points and their names; and a plan's curve."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_autorecompute.planner.plan import ManualResult
from megatron_autorecompute.planner.search.curve import CurvePoint
from megatron_autorecompute.report.data import Curve
from megatron_autorecompute.report.terminal import unbeaten
from megatron_autorecompute.report.words import duration, size, template
from megatron_autorecompute.units import GIB, MIB

MOST_SAID = 300
"""Characters of a policy that are said of a step."""
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
INK, QUIET = "#1c2024", "#5d666f"


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the picture, and what is said of it."""

    size_bytes: int
    time_ms: float
    tip: str = ""
    """What a page says where it is pointed at."""
    kind: str = ""
    """Its class in a page's style sheet."""
    ink: str = ""
    """Its colour."""
    radius: int = 4
    """In pixels."""
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


class Placed(NamedTuple):
    """A point's place, in pixels."""

    x: float
    y: float
    point: Point
    reach: float | None = None
    """Half the length of its bar."""

    @property
    def box(self) -> Box:
        """What it covers."""
        reach = self.reach or 0
        return Box(self.x - 4, self.y - reach - 4, 8, 2 * reach + 8)


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values from `low` to `high`, on pixels from `begin` on."""

    low: float
    high: float
    begin: float
    length: float
    """In pixels; negative for an axis that goes up."""

    @classmethod
    def around(cls, values: Sequence[float], margin: float, begin: float, length: float) -> _Axis:
        """An axis that holds all values, and beside them this share of their distance."""
        wide = max(values) - min(values) or max(values)
        low, high = max(0, min(values) - margin * wide), max(values) + margin * wide
        return cls(low, high, begin, length)

    def at(self, value: float) -> float:
        """The place of a value, in pixels."""
        return round(self.begin + (value - self.low) / (self.high - self.low) * self.length, 1)


def chart_svg(
    points: Sequence[Point],
    budget_bytes: int | None,
    line: Sequence[Point] = (),
    title: str = "",
) -> str:
    """The picture; a page may style its classes otherwise, and show `data-tip` on hover.

    Args:
        points: those whose names matter most first.
        budget_bytes: is drawn as a line; None for none.
        line: the steps of a line, fewest bytes first.
        title: stands above the picture.
    """
    every = [*points, *line]
    sizes = [p.size_bytes for p in every] + ([budget_bytes] if budget_bytes else [])
    times = [p.time_ms + way * (p.spread_ms or 0) / 2 for p in every for way in (-1, 1)]
    across = _Axis.around(sizes or [0, GIB], 0.06, FRAME.x, FRAME.width)
    up = _Axis.around(times or [0, 1000], 0.1, FRAME.y + FRAME.height, -FRAME.height)

    def placed(point: Point) -> Placed:
        reach = point.spread_ms and point.spread_ms / (up.high - up.low) * FRAME.height / 2
        return Placed(across.at(point.size_bytes), up.at(point.time_ms), point, reach)

    places, steps = list(map(placed, points)), list(map(placed, line))
    ends = [*(step.x for step in steps), FRAME.x + FRAME.width][1:]
    levels = [Box(s.x, s.y - 2, end - s.x, 4) for s, end in zip(steps, ends, strict=True)]
    taken = [*(each.box for each in (*steps, *places)), *levels]
    budget_x, named = None, list(places)
    if budget_bytes:
        budget_x = across.at(budget_bytes)
        taken.append(Box(budget_x - 1, FRAME.y, 2, FRAME.height))
        label = Point(budget_bytes, 0, name=f"budget {size(budget_bytes)}")
        named.insert(1, Placed(budget_x, FRAME.y + 10, label))
    unit, seconds = GIB if across.high > 2 * GIB else MIB, up.high >= 2000
    return template("chart.svg").render(
        frame=FRAME,
        ink=INK,
        quiet=QUIET,
        sizes=[
            (across.at(at * unit), f"{at:g}")
            for at in ticks(across.low / unit, across.high / unit, 10)
        ],
        times=[
            (up.at(at), f"{at / 1000:g} s" if seconds else f"{at:g} ms")
            for at in ticks(up.low, up.high, 6)
        ],
        unit="GiB" if unit == GIB else "MiB",
        budget_x=budget_x,
        steps=steps,
        points=places,
        names=list(_names(named, taken)),
        title=title,
    )


def _names(places: Sequence[Placed], taken: list[Box]) -> Iterator[tuple[float, float, Point]]:
    """Where names stand, beside their points; one that finds no free place is left out."""
    taken += [Box(each.x - 4, each.y - 4, 8, 8) for each in places]
    for each in places:
        extent = 6.4 * len(each.point.name), 13.0
        box = beside((each.x, each.y), extent, FRAME, taken)
        if box is not None:
            taken.append(box)
            yield box.x, box.y + 10, each.point


def ticks(low: float, high: float, about: int) -> list[float]:
    """About `about` round numbers within an interval."""
    least = (high - low) / about
    power = 10 ** math.floor(math.log10(least))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= least)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step) + 1)]


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
    """The curve of a plan, with Megatron's own settings."""
    plan = [_plan(curve.plan)] if curve.plan else []
    points = [*plan, *map(_strategy, named(curve))]
    line = map(_step, sorted(curve.points, key=lambda p: p.budget_bytes))
    return chart_svg(points, curve.budget_bytes, list(line), title)


def _step(point: CurvePoint) -> Point:
    policy = point.recompute_policy
    shown = policy if len(policy) <= MOST_SAID else policy[:MOST_SAID] + " …"
    tip = f"Budget {size(point.budget_bytes)}: {duration(point.step_ms)}\n{shown}"
    return Point(point.budget_bytes, point.step_ms, tip)


def _strategy(own: ManualResult) -> Point:
    over = "" if own.fits else ": does not fit"
    tip = f"{own.name}{over}\n{duration(own.step_ms)}, {size(own.peak_high_bytes)}"
    kind, name = "manual" if own.fits else "over", own.name.removeprefix("megatron:")
    hollow = not own.fits
    return Point(own.peak_high_bytes, own.step_ms, tip, kind, "#9aa4ad", hollow=hollow, name=name)


def _plan(own: CurvePoint) -> Point:
    tip = f"This plan: {duration(own.step_ms)}, {size(own.peak_high_bytes)}"
    at = own.peak_high_bytes, own.step_ms
    return Point(*at, tip, "ours", "#b84a00", 7, name="this plan", colour=INK, strong=True)
