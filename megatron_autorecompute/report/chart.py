"""Step time over memory as SVG: the axes, the budget's line, points and their names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from megatron_autorecompute.report.words import size
from megatron_autorecompute.units import GIB, MIB

_DISTANCES = (7, 14, 24, 38, 56, 80)
_SIDES = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; x and y are its corner with the smallest coordinates."""

    x: float
    y: float
    width: float
    height: float

    def overlap(self, other: Box) -> float:
        """The area that two boxes share."""
        wide = min(self.x + self.width, other.x + other.width) - max(self.x, other.x)
        high = min(self.y + self.height, other.y + other.height) - max(self.y, other.y)
        return wide * high if wide > 0 and high > 0 else 0.0

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """The nearest of its points to one."""
        across, up = self.x + self.width, self.y + self.height
        return min(max(x, self.x), across), min(max(y, self.y), up)

    def within(self, other: Box) -> bool:
        """Whether it lies completely in another box."""
        return (
            other.x <= self.x
            and other.y <= self.y
            and self.x + self.width <= other.x + other.width
            and self.y + self.height <= other.y + other.height
        )

    def moved_into(self, other: Box) -> Box:
        """This box, moved to the nearest place within another."""
        x = min(max(self.x, other.x), other.x + other.width - self.width)
        y = min(max(self.y, other.y), other.y + other.height - self.height)
        return Box(x, y, self.width, self.height)


def beside(
    point: tuple[float, float], extent: tuple[float, float], inside: Box, taken: Sequence[Box]
) -> Box:
    """A box of this width and height near a point, on nothing that is taken; where there is no free
    place, the one that covers least."""
    candidates = list(_around(point, extent))
    possible = [box for box in candidates if box.within(inside)]
    possible = possible or [box.moved_into(inside) for box in candidates]
    free = (box for box in possible if not any(box.overlap(other) for other in taken))
    return next(free, None) or min(possible, key=lambda b: sum(b.overlap(o) for o in taken))


def _around(point: tuple[float, float], extent: tuple[float, float]) -> Iterator[Box]:
    """Candidate boxes around a point, nearest first: among equally free places the first wins."""
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
_LEADER = 12
"""A thin line joins a point and its name if they are at least so many pixels apart."""


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
        written: list[Box] = []
        for name in names:
            extent = (6.4 * len(name.text), 13.0)
            box = beside((name.x, name.y), extent, FRAME, [*taken, *written])
            x, y = box.nearest(name.x, name.y)
            leads = math.dist((x, y), (name.x, name.y)) > _LEADER
            leader = list(_along(name.x, name.y, x, y)) if leads else []
            if _covers([box], taken) or _covers([box, *leader], written):
                continue
            written += [box, *leader]
            if leads:
                yield path("leader", f"M{name.x} {name.y}L{x:.1f} {y:.1f}", name.colour)
            yield text(box.x, box.y + 10, name.text, colour=name.colour, strong=name.strong)


def _along(x: float, y: float, end_x: float, end_y: float) -> Iterator[Box]:
    """Small boxes on a thin line, without its ends."""
    for share in (i / 20 for i in range(1, 20)):
        yield Box(x + share * (end_x - x) - 2, y + share * (end_y - y) - 2, 4, 4)


def _covers(boxes: Sequence[Box], others: Sequence[Box]) -> bool:
    return any(box.overlap(other) for box in boxes for other in others)


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
