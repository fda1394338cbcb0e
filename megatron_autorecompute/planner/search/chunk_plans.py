"""The plans of one chunk, built from its last unit to its first, without plans that others beat.

Plans are rows of `COLUMNS`. A unit in front of a plan adds to its times and held bytes, and lifts
its highest points by what the unit holds: so these columns are all of a plan that matters to the
units in front of it.

`table` does not depend on a budget. It has all plans of a short chunk, and of a long one those
nearest to the least time for what they hold. `Pruned` keeps those that can still win at some
prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_autorecompute.planner.cost import Bools, Floats, Ints
from megatron_autorecompute.planner.search.stage_problem import (
    BACKWARD,
    BACKWARD_PS,
    FORWARD,
    FORWARD_PS,
    HELD,
    HIGHEST,
    ChunkUnits,
)
from megatron_autorecompute.policy import LayerPolicy

_MIX: Ints = np.array([pow(0x1E3779B97F4A7C15, k, 1 << 62) for k in range(1, 6)], np.int64)
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
    """The points that no other point beats: lower in something and higher in nothing.

    There may be none: where a checkpoint lies around a place, no plan within a limit begins there.
    """
    if not len(values):
        return np.zeros(0, np.int64)
    scale = np.maximum(np.abs(values).max(axis=0), 1.0)
    # Others are beaten by those before alone, and most by the first ones.
    order = np.argsort((values / scale).sum(axis=1), kind="stable")
    own, kept = values[order], np.zeros(0, np.int64)
    for start in range(0, len(own), _BLOCK):
        left = np.arange(start, min(start + _BLOCK, len(own)))
        for part in range(0, len(kept), 4 * _BLOCK):
            some = kept[part : part + 4 * _BLOCK]
            left = left[~_beaten(own[left], own[some]).any(axis=1)]
        by_earlier = np.tril(_beaten(own[left], own[left]), -1)
        kept = np.concatenate([kept, left[~by_earlier.any(axis=1)]])
    return order[kept]


def _beaten(points: Ints | Floats, others: Ints | Floats) -> Bools:
    """Which points are by which others, `[point, other]`, lower in nothing."""
    found = np.ones((len(points), len(others)), np.bool_)
    for column in range(points.shape[1]):
        found &= others[None, :, column] <= points[:, column, None]
    return found


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
    """The lower hull of time over bytes, falling. With the fastest rows in place of those nearest
    to it, one interleaved step is 0.12% longer."""
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


SLACK = 1e-9
"""The limit of the error of sums of floats, as a share of them."""
_SHORT = 16
"""Places up to which checkpoints of every length are tried in a table."""
_LENGTHS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256)
"""The lengths of checkpoints in a longer chunk: up to 128 each is at most half as long again as the
one before. What is left out counts as not proven."""
_WORK = 24_000
"""Rows of all places of a table together, about."""
WIDTHS = (60, 600)
"""Plans that a table keeps at a place: of a chunk of many places, and of few."""
_SIZE, _CHOICE, _PARENT, _RUNS, _FIRST = range(5)


class Walk:
    """Plans of a chunk from its last unit to its first, of those that are picked at every place.
    `forward`: whether the highest point in a forward matters."""

    def __init__(self, units: ChunkUnits, pick: Thin | Pruned, *, forward: bool) -> None:
        self.units, self.forward = units, forward
        end = np.array([[0, -1, -1, 0, -1]], np.int64)
        self._rows, self._back = {units.places: np.zeros((1, 5), np.int64)}, {units.places: end}
        for place in reversed(range(units.places)):
            self._go_on(place, pick)
        self.complete = pick.complete
        """Whether no other plan is better in anything that was asked for."""

    @property
    def rows(self) -> Ints:
        """The rows of whole plans, `[plan, column]`."""
        return self._rows[0]

    def _go_on(self, place: int, pick: Thin | Pruned) -> None:
        own, sizes, ids = self.units.options(place, np.array([*pick.sizes(place)], np.int64))
        ends = [place + size for size in sizes.tolist()]
        counts = np.array([len(self._rows[end]) for end in ends])
        which = np.repeat(np.arange(len(own)), counts)
        rows = behind(own[which], np.concatenate([self._rows[end] for end in ends]))
        if not self.forward:
            rows[:, FORWARD] = 0
        known = np.concatenate([self._back[end][:, _RUNS:] for end in ends])
        runs = known[:, 0] + (known[:, 1] != ids[which])
        kept = pick.keep(place, rows, runs)
        which, parent = which[kept], kept - (counts.cumsum() - counts)[which[kept]]
        back = [sizes[which], which, parent, runs[kept], ids[which]]
        self._rows[place], self._back[place] = rows[kept], np.stack(back, 1)

    def policies(self, row: int) -> tuple[LayerPolicy, ...]:
        """The choices of a plan."""
        found, place = list[LayerPolicy](), 0
        while place < self.units.places:
            size, choice, parent = self._back[place][row, : _PARENT + 1].tolist()
            found += self.units.choice(place, choice, size)
            place, row = place + size, parent
        return tuple(found)


class Thin:
    """Keeps all that are not worse, up to a width: for a table of any budget."""

    def __init__(self, units: ChunkUnits) -> None:
        self.units, self.complete = units, True
        self.short = units.places <= _SHORT
        low, high = WIDTHS
        self.width = max(low, min(high, _WORK // max(1, units.places)))

    def sizes(self, place: int) -> Iterable[int]:
        """All in a short chunk."""
        most = len(self.units.together[place]) + 1
        if self.short:
            return range(2, most + 1)
        found = [size for size in _LENGTHS if size <= most]
        self.complete &= len(found) == max(0, most - 1)
        return found

    def keep(self, place: int, rows: Ints, runs: Ints) -> Ints:
        """The rows nearest to the least time for what they hold; more of whole plans."""
        width = self.width * (4 if place <= self.units.first else 1)
        kept = different(rows, np.argsort(runs, kind="stable"))
        kept = self._at_most(rows, kept, (6 if self.short else 2) * width)
        kept = kept[undominated(rows[kept])]
        return self._at_most(rows, kept, width)

    def _at_most(self, rows: Ints, kept: Ints, width: int) -> Ints:
        if len(kept) <= width:
            return kept
        self.complete = False
        return kept[nearest(rows[kept], width)]


class Priced:
    """A bound from below on what any plan of a chunk costs at given prices.

    A plan costs its times, the bytes that it holds, and its highest points in both directions. None
    of these is lower than what all units hold and the last one needs besides. So a sum over units
    bounds the cost, and the least sum is found from place to place. Prices are by column.
    """

    def __init__(self, units: ChunkUnits, prices: Floats) -> None:
        self.units, self.prices = units, prices
        alive = prices[:FORWARD].copy()
        alive[HELD] += prices[HIGHEST].sum()
        self.costs: list[Floats] = []
        """Of all units that may begin at each place, in the order of `ChunkUnits.every`."""
        for place, (rows, sizes, _) in enumerate(units.every):
            last = place + sizes == units.places
            self.costs.append(
                rows[:, :FORWARD] @ alive + last * (rows[:, HIGHEST] @ prices[HIGHEST])
            )

    def before(self) -> Floats:
        """The least that all units before each place cost."""
        least = np.full(self.units.places + 1, np.inf)
        least[0] = 0
        for place, cost in enumerate(self.costs):
            np.minimum.at(least, place + self.units.every[place][1], least[place] + cost)
        return least

    def after(self) -> Floats:
        """The least that all units from each place on cost; the first one bounds any plan."""
        least = np.zeros(self.units.places + 1)
        for place in reversed(range(self.units.places)):
            least[place] = (self.costs[place] + least[place + self.units.every[place][1]]).min()
        return least


class Pruned:
    """Keeps plans whose cost at some prices can be within a limit, at a place so many at most. The
    weights are of times in what is to be the least, forward and backward."""

    def __init__(self, priced: Priced, weights: Floats, limit: float, width: int) -> None:
        self.priced, self.weights, self.width = priced, weights, width
        self._before, self._after = priced.before(), priced.after()
        self.limit = limit + SLACK * abs(limit)
        self.left = np.inf
        """The least cost of what was left out because it was too much."""

    @property
    def complete(self) -> bool:
        """Whether nothing was left out."""
        return self.left == np.inf

    def sizes(self, place: int) -> Iterable[int]:
        """The sizes that may be in a plan within the limit."""
        sizes = self.priced.units.every[place][1]
        whole = self._before[place] + self.priced.costs[place] + self._after[place + sizes]
        found: list[int] = sizes[(whole <= self.limit) & (sizes > 1)].tolist()
        return found

    def keep(self, place: int, rows: Ints, runs: Ints) -> Ints:
        """The cheapest, some of them of every size."""
        cost = self._before[place] + rows @ self.priced.prices
        kept = np.flatnonzero(cost <= self.limit)
        alike = np.rint(cost[kept] / (SLACK * abs(self.limit)))
        kept = kept[np.lexsort((runs[kept], alike))]
        kept = self._at_most(rows, cost, different(rows, kept), 6 * self.width)
        points = np.column_stack([rows[kept, :HELD] @ self.weights, rows[kept, HELD:]])
        return self._at_most(rows, cost, kept[np.sort(undominated(points))], self.width)

    def _at_most(self, rows: Ints, cost: Floats, kept: Ints, width: int) -> Ints:
        """The first rows in order of cost."""
        if len(kept) <= width:
            return kept
        held = rows[kept, HELD]
        ranges = (held - held.min()) * (width // 2) // max(1, int(np.ptp(held)) + 1)
        first = np.unique(ranges, return_index=True)[1]
        chosen = np.union1d(np.arange(width - len(first)), first)
        others = np.delete(kept, chosen)
        self.left = min(self.left, float(cost[others].min()))
        return kept[chosen]


class Plans:
    """The plans of a chunk that one search knows: of its table, and those that it adds."""

    def __init__(self, table: Walk) -> None:
        self.table, self.rows = table, table.rows
        self._added: dict[int, tuple[LayerPolicy, ...]] = {}
        self._numbers: dict[tuple[LayerPolicy, ...], int] = {}

    def policies(self, row: int) -> tuple[LayerPolicy, ...]:
        """The choices of a plan."""
        return self._added[row] if row in self._added else self.table.policies(row)

    def add(self, policies: Sequence[LayerPolicy]) -> int:
        """The number of a plan from elsewhere."""
        own = tuple(policies)
        if own not in self._numbers:
            row = self.table.units.plan(own)
            if not self.table.forward:
                row[FORWARD] = 0
            self._numbers[own] = len(self.rows)
            self._added[len(self.rows)] = own
            self.rows = np.concatenate([self.rows, row[None]])
        return self._numbers[own]
