"""The byte limits of one search at each moment, and the price of a byte at each."""

from __future__ import annotations

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
        return float(self.price @ self.room)

    def prices(self, c: int) -> tuple[float, float, float]:
        """Prices of a byte of H, of M forward and of M backward of a chunk."""
        runs, forward = self.problem.running == c, self.problem.is_forward
        return (
            float(self.price @ self.problem.counts[:, c]),
            float(self.price[runs & forward].sum()),
            float(self.price[runs & ~forward].sum()),
        )

    def unsearched_bound(self, c: int) -> float:
        """Least time plus priced bytes of a chunk if every layer could choose independently."""
        chunk, price = self.problem.chunks[c], sum(self.prices(c))
        after = sum(chunk.unit_ps(u) + price * u.held_bytes for u in chunk.after)
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

    def may_win(self, priced: Floats, upper_ps: int | None) -> Bools:
        """Whether labels with these bounds can still end at a time of at most `upper_ps`."""
        if upper_ps is None:
            return np.ones(len(priced), np.bool_)
        ceiling = upper_ps + self.budget_price
        allowed: Bools = priced <= ceiling + SLACK * max(abs(ceiling), upper_ps)
        return allowed
