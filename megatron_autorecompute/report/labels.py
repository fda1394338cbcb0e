"""Places names beside points in a picture so that no two overlap; units are pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
        """Common area."""
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


def placed(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    inside: Box,
    keep_free: Sequence[Box] = (),
) -> list[Box]:
    """A box for each point's name, near the point and overlapping nothing; earlier points go first.

    If there is no free place, the one that covers least is used.
    """
    taken = [*keep_free, *(Box(x - 4, y - 4, 8, 8) for x, y in points)]
    found = []
    for point, size in zip(points, sizes, strict=True):
        box = _best(list(_around(point, size)), inside, taken)
        found.append(box)
        taken.append(box)
    return found


def _best(candidates: list[Box], inside: Box, taken: Sequence[Box]) -> Box:
    possible = [box for box in candidates if box.within(inside)]
    possible = possible or [box.moved_into(inside) for box in candidates]
    free = (box for box in possible if not any(box.overlap(other) for other in taken))
    return next(free, None) or min(possible, key=lambda b: sum(b.overlap(o) for o in taken))


def _around(point: tuple[float, float], size: tuple[float, float]) -> Iterator[Box]:
    """Candidate boxes around a point, nearest first: among equally free places the first wins."""
    (x, y), (width, height) = point, size
    for distance in _DISTANCES:
        for right, down in _SIDES:
            left = x + right * distance - (width if right < 0 else width / 2 if not right else 0)
            top = y + down * distance - (height if down < 0 else height / 2 if not down else 0)
            yield Box(left, top, width, height)
