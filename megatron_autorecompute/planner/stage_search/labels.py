"""Labels: a partial solution, the choices for the last few layers of a chunk.

Prepending a unit (h, x) to a suffix of a chunk gives H' = H + h and M' = h + max(x, M). So all that
matters of a suffix is a *label* (time, H, M forward, M backward), and of two labels of the same
suffix the one that is not better in anything is dropped. Where forwards and backwards each count by
themselves, a label has the time of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.planner.arrays import Bools, Floats, Ints

COLUMNS = (
    "time",
    "held",
    "forward",
    "backward",
    "runs",
    "first",
    "parent",
    "position",
    "option",
    "forward_ps",
    "backward_ps",
)
TIME, HELD, FORWARD, BACKWARD, RUNS, FIRST, PARENT, POSITION, OPTION, *APART = range(len(COLUMNS))


class Labels:
    """Labels of all positions searched so far, in one growing table `[label, column]`."""

    def __init__(self) -> None:
        self.data = np.zeros((256, len(COLUMNS)), np.int64)
        self.stops: dict[int, int] = {}
        self.size = 0

    def append(self, rows: Ints, position: int) -> None:
        """Add the labels of a position, the next one towards the chunk's first layer."""
        while self.size + len(rows) > len(self.data):
            self.data = np.concatenate([self.data, np.zeros_like(self.data)])
        self.data[self.size : self.size + len(rows)] = rows
        self.size += len(rows)
        self.stops[position] = self.size

    def of(self, first: int, last: int) -> tuple[Ints, int]:
        """Labels of positions `first` .. `last`, and the index of the first one."""
        start = self.stops.get(last + 1, 0)
        return self.data[start : self.stops[first]], start


GROUP_IDS = 1 << 20  # ids of groups lie above those of single choices


def prepend(
    rows: Ints,
    parents: Ints,
    costs: tuple[Ints, Ints, Ints],
    times: tuple[Ints, Ints, Ints],
    ids: Ints,
) -> Ints:
    """Put one unit before each row, in place.

    `costs` is held, forward and backward transient; `times` the weighted one, forward, backward.
    """
    held, forward, backward = costs
    for column, time in zip((TIME, *APART), times, strict=True):
        rows[:, column] += time
    rows[:, HELD] += held
    rows[:, FORWARD] = held + np.maximum(rows[:, FORWARD], forward)
    rows[:, BACKWARD] = held + np.maximum(rows[:, BACKWARD], backward)
    rows[:, RUNS] += rows[:, FIRST] != ids
    rows[:, FIRST] = rows[:, OPTION] = ids
    rows[:, PARENT] = parents
    return rows


def spread(price: Floats, held: Ints, width: int) -> NDArray[np.intp]:
    """At most `width` labels: half of them the cheapest, half the cheapest per range of held bytes.

    The cheapest alone are not enough: along a mixture of two choices the price stays the same, so
    all of them may hold too much or too little for the remaining layers.
    """
    half = width // 2
    step = max(1, -(-int(held.max() - held.min() + 1) // max(half, 1)))
    ranges = (held - held.min()) // step
    order = np.lexsort((price, ranges))
    first = order[np.unique(ranges[order], return_index=True)[1]]
    return np.union1d(np.argsort(price, kind="stable")[: width - half], first[:half])


_ANY_NUMBER = 150_000
"""Work on labels however few they are."""
_NARROW = 64


@dataclass
class Tally:
    """Work done, counted: the same on every machine, and about as long anywhere."""

    most: int
    """Beyond it only narrow searches go on."""
    done: int = 0
    """About a nanosecond each."""

    def rows(self, number: int, columns: int) -> None:
        """Labels were made, or looked at, in so many columns."""
        self.done += number * (columns + 20) * 8 + _ANY_NUMBER

    def width(self, wanted: int) -> int:
        """So many labels are kept, fewer when most is done."""
        return wanted if self.done < self.most else min(wanted, _NARROW)

    def comparisons(self, number: int, columns: int) -> None:
        """Of two labels each, in so many columns."""
        self.done += number * columns


def front(dims: Ints, runs: Ints, first: Ints, tally: Tally, block: int = 256) -> NDArray[np.intp]:
    """Indices of the labels that no other label makes superfluous.

    Column 0 of `dims` is the time. A label makes another superfluous if it is nowhere worse, and is
    either faster or certain to end with at most as many runs. If their first choices differ, its
    number of runs may still grow by one more than the other's.
    """
    tally.rows(*dims.shape)
    order = np.lexsort((runs, *dims.T[::-1]))
    if not len(order):
        return order
    runs, first = runs[order].astype(np.int32), first[order].astype(np.int32)
    # Only the order matters, and ranks of two bytes are compared four times as fast.
    narrow = np.int16 if len(order) < 1 << 15 else np.int32
    ranks = np.empty((dims.shape[1], len(order)), narrow)
    for rank, column in zip(ranks, dims[order].T, strict=True):
        _rank(column, rank)
    kept = np.zeros(0, np.intp)
    for start in range(0, len(order), block):
        fresh = np.arange(start, min(start + block, len(order)))
        tally.comparisons(len(fresh) * (len(kept) + len(fresh)), len(ranks) + 1)
        fresh = fresh[~_dominated(ranks, runs, first, kept, fresh).any(axis=0)]
        inside = _dominated(ranks, runs, first, fresh, fresh)
        inside &= fresh[:, None] < fresh[None, :]
        # A label that dominates may itself be dominated, by a label that dominates both.
        kept = np.concatenate([kept, fresh[~inside.any(axis=0)]])
    return order[kept]


def _rank(column: Ints, rank: NDArray[Any]) -> None:
    """Put in how many lower values a column has."""
    order = column.argsort()
    ascending = column[order]
    rank[order[0]] = 0
    rank[order[1:]] = (ascending[1:] != ascending[:-1]).cumsum()


def _dominated(
    ranks: NDArray[Any],
    runs: NDArray[Any],
    first: NDArray[Any],
    by: NDArray[np.intp],
    what: NDArray[np.intp],
) -> Bools:
    """Whether `by` makes `what` superfluous, of shape [by, what]; `ranks` is `[column, label]`."""
    result: Bools = (ranks[0, by][:, None] < ranks[0, what]) | (
        runs[by][:, None] + (first[by][:, None] != first[what]) <= runs[what]
    )
    for rank in ranks[1:]:
        result &= rank[by][:, None] <= rank[what]
    return result
