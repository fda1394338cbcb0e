"""Bounds from below what any plan of a chunk costs at given prices.

A plan costs its time in forwards and backwards, the bytes that it holds, and its highest points in
both directions, each at a price. The highest point is at least any mixture of the heights of its
units. So the price of the highest point can be spread over all places, and a sum over units bounds
a plan's cost. The least sum over all plans is found from place to place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_autorecompute.planner.cost.arrays import Floats, Ints
from megatron_autorecompute.planner.search.stage_problem import (
    FORWARD,
    HELD,
    HIGHEST,
    ChunkUnits,
)
from megatron_autorecompute.policy import LayerPolicy

_ROUNDS = 24
"""Cuts, which `_CLOSE` ends before; half as many or twice as many change no answer."""
_CLOSE = 1e-5
"""A bound that can rise by no more than this share of the prices is the highest."""


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """Prices of a chunk's plans, in shares at its places.

    Args:
        units: the units of the chunk.
        prices: by column.
        left: of the prices of the highest points the share at each place and all after it,
            `[direction, place]`, from 1 to 0.
    """

    units: ChunkUnits
    prices: Floats
    left: Floats

    @classmethod
    def at_the_end(cls, units: ChunkUnits, prices: Floats) -> Priced:
        """The price at the last place only, where most is held."""
        left = np.ones((2, units.places + 1))
        left[:, -1] = 0
        return cls(units, prices, left)

    def alone(self, place: int) -> Floats:
        """What every unit of one place costs."""
        return self._held(place, self.units.alone[place]) + self._high(
            self.units.alone[place], self.left[:, place] - self.left[:, place + 1]
        )

    def together(self, place: int) -> Floats:
        """What every checkpoint of several layers costs that begins at a place."""
        rows = self.units.together[place]
        share = self.left[:, place, None] - self.left[:, place + 2 : place + 2 + len(rows)]
        return self._held(place, rows) + self._high(rows, share.T)

    def _held(self, place: int, rows: Ints) -> Floats:
        prices = self.prices[:FORWARD].copy()
        prices[HELD] += self.prices[HIGHEST] @ self.left[:, place]
        found: Floats = rows[:, :FORWARD] @ prices
        return found

    def _high(self, rows: Ints, share: Floats) -> Floats:
        found: Floats = (rows[:, HIGHEST] * share) @ self.prices[HIGHEST]
        return found

    def before(self) -> Floats:
        """The least that all units before each place cost."""
        least = np.full(self.units.places + 1, np.inf)
        least[0] = 0
        for place in range(self.units.places):
            least[place + 1] = min(least[place + 1], least[place] + self.alone(place).min())
            more = self.together(place)
            reached = least[place + 2 : place + 2 + len(more)]
            np.minimum(reached, least[place] + more, out=reached)
        return least

    def after(self) -> Floats:
        """The least that all units from each place on cost; the first one bounds any plan."""
        least = np.zeros(self.units.places + 1)
        for place in reversed(range(self.units.places)):
            alone = self.alone(place).min() + least[place + 1]
            more = self.together(place) + least[place + 2 : place + 2 + len(self._sizes(place))]
            least[place] = min(alone, more.min(initial=np.inf))
        return least

    def _sizes(self, place: int) -> range:
        return range(2, 2 + len(self.units.together[place]))

    def cheapest(self, after: Floats) -> tuple[LayerPolicy, ...]:
        """A plan of that least cost."""
        found, place = list[LayerPolicy](), 0
        while place < self.units.places:
            alone, more = self.alone(place), self.together(place)
            more = more + after[place + 2 : place + 2 + len(more)]
            if alone.min() + after[place + 1] <= more.min(initial=np.inf):
                found += self.units.choice(place, int(alone.argmin()), 1)
                place += 1
            else:
                size = int(more.argmin()) + 2
                found += self.units.choice(place, 0, size)
                place += size
        return tuple(found)


def close(units: ChunkUnits, prices: Floats) -> tuple[Priced, float, list[tuple[LayerPolicy, ...]]]:
    """The shares with about the highest bound, the bound, and the plans that were met.

    By cutting planes: every plan says how high the bound can be at any shares.
    """
    best, high = Priced.at_the_end(units, prices), -np.inf
    own, cuts, met = best, list[Floats](), list[tuple[LayerPolicy, ...]]()
    for _ in range(_ROUNDS):
        after = own.after()
        if after[0] > high:
            best, high = own, float(after[0])
        if units.places < 2 or not prices[HIGHEST].any():
            break
        met.append(own.cheapest(after))
        cuts.append(_heights(own, met[-1]))
        shares, most = _best_shares(np.array(cuts), units.places)
        if most <= high + _CLOSE * abs(most):
            break
        between = (shares + best.left) / 2
        own = Priced(units, prices, between)
    return best, high, met


def _heights(priced: Priced, policies: Sequence[LayerPolicy]) -> Floats:
    """A plan's cost without its highest points, and for each direction and place the price of the
    height that it has there."""
    found = np.zeros((2, priced.units.places))
    held, rest = 0, 0.0
    for place, row in priced.units.rows(policies):
        held += int(row[HELD])
        rest += float(row[:FORWARD] @ priced.prices[:FORWARD])
        found[:, place:] = ((held + row[HIGHEST]) * priced.prices[HIGHEST])[:, None]
    return np.append(found.ravel(), rest)


def _best_shares(cuts: Floats, places: int) -> tuple[Floats, float]:
    """The shares where the cheapest plan costs most, in the form of `Priced.left`, and its cost."""
    scale = float(np.abs(cuts).max()) or 1.0
    rows = np.hstack([-cuts[:, :-1] / scale, np.ones((len(cuts), 1))])
    whole = np.kron(np.eye(2, 3), np.ones((1, places)))[:, : 2 * places + 1]
    goal = np.append(np.zeros(2 * places), -1.0)
    limits = [(0, None)] * (2 * places) + [(None, None)]
    from scipy.optimize import linprog  # 0.2 s to import

    found = linprog(goal, rows, cuts[:, -1] / scale, whole, np.ones(2), limits, method="highs")
    shares = np.maximum(found.x[:-1].reshape(2, places), 0)
    shares /= shares.sum(axis=1, keepdims=True)
    left = np.hstack([shares[:, ::-1].cumsum(axis=1)[:, ::-1], np.zeros((2, 1))])
    left[:, 0] = 1
    return left, -found.fun * scale
