"""The byte limits of one search at each moment, and the price of a byte at each.

Floats are multiplied one by one, and added exactly (`math.fsum`) or in one order, never by a matrix
product or numpy's sum: so that their last bit, too, is the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_autorecompute.planner.arrays import Bools, Floats, Ints
from megatron_autorecompute.planner.stage_search.labels import BACKWARD, FORWARD, HELD, TIME, Tally
from megatron_autorecompute.planner.stage_search.problem import StageProblem

SLACK = 1e-9  # relative; the bound is a float sum of about 1e3 terms, wrong by at most 1e-12
NO_LIMIT = np.int64(1) << 60
NEVER = np.int64(1) << 60  # ps


@dataclass(frozen=True)
class Limits:
    """The limits of a search, and the prices (Lagrange multipliers) for its bound."""

    problem: StageProblem
    room: Ints
    """Bytes that the chunks may need at each moment, of shape [moment]."""
    price: Floats
    """Picoseconds per byte, of shape [moment]; any values >= 0 give a valid bound."""
    tally: Tally
    """Of the search's work."""
    apart: bool = False
    """Whether the time of forwards and that of backwards each count by themselves, too."""

    @property
    def budget_price(self) -> float:
        """The limits times their prices, in picoseconds."""
        return math.fsum((self.price * self.room).tolist())

    def prices(self, c: int) -> tuple[float, float, float]:
        """Prices of a byte of H, of M forward and of M backward of a chunk."""
        runs, forward = self.problem.running == c, self.problem.is_forward
        return (
            math.fsum((self.price * self.problem.counts[:, c]).tolist()),
            math.fsum(self.price[runs & forward].tolist()),
            math.fsum(self.price[runs & ~forward].tolist()),
        )

    def unsearched_bound(self, c: int) -> float:
        """Least time plus priced bytes of a chunk if every layer could choose independently."""
        chunk, price = self.problem.chunks[c], math.fsum(self.prices(c))
        after = math.fsum(chunk.unit_ps(u) + price * u.held_bytes for u in chunk.after)
        return float(chunk.covering(price)[-1]) + after

    def priced(self, rows: Ints, c: int) -> Floats:
        """Time plus priced bytes of labels of a chunk."""
        held, forward, backward = self.prices(c)
        priced: Floats = (
            rows[:, TIME]
            + held * rows[:, HELD]
            + forward * rows[:, FORWARD]
            + backward * rows[:, BACKWARD]
        )
        return priced

    def priced_loads(self, loads: Ints) -> Floats:
        """Priced bytes of `[label, moment]`."""
        priced = np.zeros(len(loads))
        for moment in np.flatnonzero(self.price).tolist():
            priced += loads[:, moment] * self.price[moment]
        return priced

    def may_win(self, priced: Floats, upper_ps: int | None) -> Bools:
        """Whether labels with these bounds can still end at a time of at most `upper_ps`."""
        if upper_ps is None:
            return np.ones(len(priced), np.bool_)
        ceiling = upper_ps + self.budget_price
        allowed: Bools = priced <= ceiling + SLACK * max(abs(ceiling), upper_ps)
        return allowed
