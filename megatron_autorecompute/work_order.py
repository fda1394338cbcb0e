"""Which choices do all the work of which others, and times in which doing more is never faster.

Recompute only ever adds operations to a layer's backward: a choice that reruns all that another
reruns, and more, takes longer. Measured times say so up to their noise only, and a planner that
believes them would recompute where memory is free. This module knows neither what a time was
measured on nor what a plan is made of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.policy import LayerPolicy

Floats = NDArray[np.float64]
Pairs = Sequence[tuple[int, int]]
"""(lower, upper) positions."""

RERUN_WITH = {"moe": ("moe_act", "shared_experts")}
"""Modules that a larger one reruns with itself."""
GAP_MS = 1e-6
"""What a choice takes at least on top of one whose work it contains: far below what any clock
resolves, and enough for a planner to whom equal times are equal to leave the work undone."""


def contains(larger: LayerPolicy, smaller: LayerPolicy) -> bool:
    """Whether a layer at `larger` reruns all that it reruns at `smaller`, and more.

    Every choice contains none, full every set of modules, and a set its subsets. How many layers
    share a checkpoint changes nothing about what each of them reruns.
    """
    if "full" in (larger.granularity, smaller.granularity):
        return smaller.granularity != "full"
    return reruns(smaller) < reruns(larger)


def reruns(choice: LayerPolicy) -> frozenset[str]:
    """The modules that run again, those within others by their own names, too."""
    within = (RERUN_WITH.get(module, ()) for module in choice.modules)
    return frozenset(choice.modules).union(*within)


def ordered_ms(
    choices: Sequence[LayerPolicy],
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    weights: Sequence[float],
) -> tuple[list[float], list[float]]:
    """The nearest times of one layer in which a choice takes longer than any that it contains.

    Isotonic regression twice: of the backward, and of forward and backward together. Forward alone
    is not ordered: a checkpoint's forward saves nothing for the backward, and can be the faster.
    What is in order comes back as it is.

    Args:
        choices: whose times they are.
        forward_ms: of one layer for one microbatch.
        backward_ms: the same, recompute included.
        weights: how much each choice's times are to be believed; numbers of samples.
    """
    forward, backward = np.array(forward_ms, np.float64), np.array(backward_ms, np.float64)
    order = _order(choices)
    least = GAP_MS * np.array(_heights(len(choices), order))
    shares = np.array(weights, np.float64)
    later = isotonic(backward - least, shares, order) - (backward - least)
    total = forward + backward
    both = isotonic(total - least, shares, order) - (total - least)
    backward += later
    backward += max(0.0, -backward.min())  # by GAP_MS, where nothing takes any time
    # Regression keeps sums above their parts: forward is below 0 by rounding alone.
    return np.maximum(forward + (both - later), 0.0).tolist(), backward.tolist()


def isotonic(values: Floats, weights: Floats, order: Pairs) -> Floats:
    """The nearest values, by weighted squares, of which no upper is below its lower.

    Scikit-learn and SciPy do this where all values stand in one line. Here a block of values is cut
    where an upper part of it lies above its mean by most, until no part does: Luss and Rosset 2014,
    "Generalized isotonic regression", section 2. Values that are in order come back as they are.
    """
    found = values.copy()
    waiting = [np.arange(len(values))]
    if all(values[lower] <= values[upper] for lower, upper in order):
        return found
    while waiting:
        block = waiting.pop()
        mean = np.average(values[block], weights=weights[block])
        upper = _upper_part(weights[block] * (values[block] - mean), block, order)
        if 0 < upper.sum() < len(block):
            waiting += [block[upper], block[~upper]]
        elif len(block) > 1:
            found[block] = mean
    return found


def _upper_part(excess: Floats, block: NDArray[np.int64], order: Pairs) -> NDArray[np.bool_]:
    """Of a block the part, with all above it, whose excess is largest; none where it is nothing."""
    from scipy.optimize import linprog  # 0.2 s to import, and needed for noisy times alone

    where = {int(position): number for number, position in enumerate(block)}
    inside = [(where[a], where[b]) for a, b in order if a in where and b in where]
    if not inside:
        return excess > 0
    # [z(upper) >= z(lower)]: who is in the part brings all above along.
    rows = np.zeros((len(inside), len(block)))
    for row, (lower, upper) in zip(rows, inside, strict=True):
        row[lower], row[upper] = 1.0, -1.0
    scale = np.abs(excess).max() or 1.0
    best = linprog(-excess / scale, A_ub=rows, b_ub=np.zeros(len(rows)), bounds=(0, 1))
    part: NDArray[np.bool_] = best.x > 0.5
    return part if -best.fun > 1e-9 else np.zeros(len(block), np.bool_)


def _order(choices: Sequence[LayerPolicy]) -> list[tuple[int, int]]:
    numbered = itertools.permutations(enumerate(choices), 2)
    return [(a, b) for (a, lower), (b, upper) in numbered if contains(upper, lower)]


def _heights(count: int, order: Pairs) -> list[int]:
    """For every position how many others lie below it, each below the next, at most."""
    below = [[lower for lower, upper in order if upper == position] for position in range(count)]
    heights: dict[int, int] = {}
    for position in sorted(range(count), key=lambda position: len(below[position])):
        heights[position] = max((heights[lower] + 1 for lower in below[position]), default=0)
    return [heights[position] for position in range(count)]
