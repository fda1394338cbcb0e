"""Mixtures of paths that are long whatever is chosen: both sides of a game, in integers.

Any mixture of paths gives a bound on the step; which one gives a close bound is a linear program.
It is approached here by a game that two sides play many times, and not by a solver in floats, so
that every machine comes to the same mixture and hence to the same plan.
"""

from __future__ import annotations

import numpy as np

from megatron_autorecompute.planner.arrays import Ints

PARTS = 1 << 10
"""Of which a mixture is made."""
BITS = 40
"""Of the longest paths; sums of products then stay within 64."""
_EVERY = 16
"""Plays after which a mixture is looked at."""


def played(lengths: Ints, plays: int) -> tuple[Ints, Ints]:
    """Mixtures of paths, and of each stage's options, by a game played many times.

    One side mixes the paths to make them long, the other each stage's options to make them short,
    each giving more to what it regrets not to have had more of ("regret matching plus"). What all
    mixed on average comes near to the best that either side can do.

    Args:
        lengths: `[stage, path, option]`, of so many bits that all stages together have `BITS`.
        plays: how often; at most a thousand or so.

    Returns: parts of paths, `[path]`, and of options, `[stage, option]`.
    """
    stages, paths, options = lengths.shape
    regrets, own_regrets = np.zeros((1, paths), np.int64), np.zeros((stages, options), np.int64)
    mixed, own_mixed = np.zeros((1, paths), np.int64), np.zeros((stages, options), np.int64)
    mixture, own = _parts(regrets), _parts(own_regrets)
    best, most = mixture, -1
    for play in range(1, plays + 1):
        times = (lengths * mixture[0][:, None]).sum(axis=1) // PARTS
        mean = (times * own).sum(axis=1) // PARTS
        own_regrets = np.maximum(own_regrets + mean[:, None] - times, 0)
        own = _parts(own_regrets)
        values = (lengths * own[:, None, :]).sum(axis=(0, 2)) // PARTS
        regrets = np.maximum(regrets + values - (values * mixture).sum() // PARTS, 0)
        mixture = _parts(regrets)
        mixed += play * mixture
        own_mixed += play * own
        if play % _EVERY == 0:
            average = _parts(mixed)
            value = int((lengths * average[0][:, None]).sum(axis=1).min(axis=1).sum())
            best, most = (average, value) if value > most else (best, most)
    return best[0], _parts(own_mixed)


def _parts(amounts: Ints) -> Ints:
    """Each row in proportion, together `PARTS`; alike where all are nothing."""
    total = amounts.sum(axis=1, keepdims=True)
    amounts, total = amounts + (total == 0), np.where(total == 0, amounts.shape[1], total)
    parts: Ints = amounts * PARTS // total
    parts[np.arange(len(parts)), amounts.argmax(axis=1)] += PARTS - parts.sum(axis=1)
    return parts
