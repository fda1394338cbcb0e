"""Plans of the last units of a chunk, as rows of `COLUMNS`: put together, compared, thinned.

A unit in front of a plan adds to its times and held bytes, and lifts its highest points by what the
unit holds. So these columns are all of a plan that matters to the units in front of it.
"""

from __future__ import annotations

import numpy as np

from megatron_autorecompute.planner.cost.arrays import Bools, Floats, Ints
from megatron_autorecompute.planner.search.stage_problem import (
    BACKWARD,
    BACKWARD_PS,
    FORWARD_PS,
    HELD,
    HIGHEST,
)

_MIX: Ints = np.array(
    [
        0x1E3779B97F4A7C15,
        0x42B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x27220A95FE6D1B3F,
        0x3C6EF372FE94F82B,
    ],
    np.int64,
)
"""Odd numbers: rows that are equal have the same sum of products."""
_BLOCK = 256
_HEIGHTS = 6
"""The number of cells of what plans need beyond what they hold; each cell keeps one plan."""


def behind(units: Ints, rows: Ints) -> Ints:
    """Each unit before its row, `[row, column]`."""
    new = rows + units
    lifted = np.maximum(units[:, HIGHEST], rows[:, HIGHEST])
    new[:, HIGHEST] = units[:, HELD, None] + lifted
    return new


def different(rows: Ints, order: Ints) -> Ints:
    """The rows without duplicates; the first one in an order stays."""
    with np.errstate(over="ignore"):
        mixed = rows[order] @ _MIX
    first: Ints = np.sort(np.unique(mixed, return_index=True)[1])
    return order[first]


def undominated(values: Ints | Floats) -> Ints:
    """The points that no other point beats: lower in something and higher in nothing. There may be
    none: where a checkpoint lies around a place, no plan within a limit begins there.

    There may be none: where a checkpoint lies around a place, no plan within a limit begins there.
    """
    if not len(values):
        return np.zeros(0, np.int64)
    used = np.flatnonzero(values.min(axis=0) != values.max(axis=0))
    scale = np.maximum(np.abs(values).max(axis=0), 1.0)
    order = np.argsort((values / scale).sum(axis=1), kind="stable")
    own, kept = values[order][:, used], np.zeros(0, np.int64)
    for start in range(0, len(own), _BLOCK):
        left = np.arange(start, min(start + _BLOCK, len(own)))
        for part in range(0, len(kept), 4 * _BLOCK):
            left = left[~_is_above(own[left], own[kept[part : part + 4 * _BLOCK]])]
        kept = np.concatenate([kept, left[_not_above_each_other(own[left])]])
    return order[kept]


def _is_above(points: Ints | Floats, others: Ints | Floats) -> Bools:
    above = np.ones((len(points), len(others)), np.bool_)
    for column in range(points.shape[1]):
        above &= others[None, :, column] <= points[:, column, None]
    return np.asarray(above.any(axis=1))


def _not_above_each_other(points: Ints | Floats) -> Ints:
    """The points that no other is below; the first of equal points stays."""
    above = np.ones((len(points), len(points)), np.bool_)
    for column in range(points.shape[1]):
        above &= points[None, :, column] <= points[:, column, None]
    np.fill_diagonal(above, False)
    same = above & above.T
    dropped = (above & ~same).any(axis=1) | np.tril(same, -1).any(axis=1)
    return np.flatnonzero(~dropped)


def nearest(rows: Ints, width: int) -> Ints:
    """The row nearest to the least time for what it holds, in each of so many cells of bytes."""
    held = rows[:, HELD].astype(np.float64)
    time = (rows[:, FORWARD_PS] + rows[:, BACKWARD_PS]).astype(np.float64)
    over = (rows[:, BACKWARD] - rows[:, HELD]).astype(np.float64)
    above = time - np.interp(held, *_hull(held, time))
    cells = _cells(held, max(1, width // _HEIGHTS)) * _HEIGHTS + _cells(over, _HEIGHTS)
    ranked = np.lexsort((over, above, cells))
    first = np.append(True, np.diff(cells[ranked]) > 0)
    high = rows[:, BACKWARD]
    ends = [time.argmin(), np.lexsort((time, high, held))[0], np.lexsort((time, held, high))[0]]
    return np.union1d(ranked[first], np.array(ends))


def _hull(held: Floats, time: Floats) -> tuple[Floats, Floats]:
    """The lower hull of time over bytes, falling."""
    order = np.lexsort((time, held))
    best = order[time[order] <= np.minimum.accumulate(time[order])]
    found: list[tuple[float, float]] = []
    for x, y in zip(held[best].tolist(), time[best].tolist(), strict=True):
        while len(found) > 1 and _turns_up(found[-2], found[-1], (x, y)):
            found.pop()
        if not found or x > found[-1][0]:
            found.append((x, y))
    points = np.array(found)
    return points[:, 0], points[:, 1]


def _turns_up(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether the middle one of three points is on or above the line through the others."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _cells(values: Floats, number: int) -> Ints:
    low, high = float(values.min()), float(values.max())
    own = ((values - low) / max(high - low, 1.0) * number).astype(np.int64)
    return np.minimum(own, number - 1)
