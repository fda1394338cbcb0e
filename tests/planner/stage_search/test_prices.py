"""Prices of bytes against the duals that HiGHS finds."""

import numpy as np
import pytest
from scipy.optimize import linprog

from megatron_autorecompute.planner.stage_search.prices import duals


def test_prices_are_as_good_as_those_of_highs():
    rng, priced = np.random.default_rng(0), 0
    for _ in range(150):
        classes = rng.integers(1, 9, size=rng.integers(1, 7))
        owner = np.repeat(np.arange(len(classes)), rng.integers(1, 6, size=len(classes)))
        time = rng.integers(0, 9, size=len(owner)) / 8
        loads = rng.integers(0, 5, size=(rng.integers(1, 6), len(owner))) * rng.random(len(owner))
        least, most = (
            sum(n * pick(loads[:, owner == c], axis=1) for c, n in enumerate(classes))
            for pick in (np.min, np.max)
        )
        room = least + (most - least) * rng.random()
        prices = duals(time, owner, classes.tolist(), loads, room)
        assert (prices >= 0).all()
        own = owner == np.arange(len(classes))[:, None]
        found = linprog(time, loads, room, own.astype(float), classes)
        if found.status == 0:
            cost = np.where(own, time + prices @ loads, np.inf).min(axis=1)
            assert classes @ cost - prices @ room == pytest.approx(found.fun, abs=1e-9)
            priced += found.fun > classes @ np.where(own, time, np.inf).min(axis=1)
    assert priced > 50
