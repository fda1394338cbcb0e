"""Which choices contain the work of others, and times in which more work is never faster.

Recompute only adds operations to a layer's backward: a choice that recomputes the same as another
choice, and more, takes longer. Measured times are noisy and may say the opposite; a planner that
believed them would recompute where memory is free. This module depends neither on how times are
measured nor on how plans use them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.policy import LayerPolicy

Floats = NDArray[np.float64]
Pairs = Sequence[tuple[int, int]]
"""Pairs of positions: the choice with less work, and the one with more."""

RERUN_WITH = {
    "moe": ("moe_act", "shared_experts", "experts"),
    "experts": ("moe_act",),
    "mlp": ("mlp_act",),
    "qkv": ("mla_up_proj",),
}
"""Modules inside each module, which are recomputed with it."""
_WORK = {
    "core_attn": ("core_attn",),
    "mlp": ("fc1", "mlp_act"),
    "moe": ("router", "dispatch", "experts", "moe_act", "shared_experts", "mlp_act"),
    "shared_experts": ("shared_experts", "mlp_act"),
    "experts": ("experts", "moe_act"),
    "qkv": ("qkv", "mla_up_proj"),
}
"""What each module reruns. A module that is not here reruns what has its name."""
_DEAD = {"core_attn": ("context",), "mlp": ("fc2",), "moe": ("experts_fc2", "combine")}
"""What each module also reruns with `rerun_all`."""
_DEAD_IN_FULL = frozenset({"fc2", "experts_fc2", "combine"})
"""What full does not rerun. It reruns the context, because the linear after it reads that."""
GAP_MS = 1e-6
"""The least time, in ms, by which a choice takes longer than one whose work it contains. It is far
below the resolution of any clock, and enough for a planner to prefer the choice with less work."""


def contains(larger: LayerPolicy, smaller: LayerPolicy) -> bool:
    """Whether a layer recomputes at `larger` all that it recomputes at `smaller`, and more.

    Every choice contains none, and a set of modules contains its subsets. Full contains the sets
    that rerun nothing that it leaves out: kept parts, and, but with `rerun_all`, what no backward
    reads. A checkpoint more inside a depth's stack is more work. The number of layers that share a
    checkpoint makes no difference. A choice that offloads is compared with those that offload the
    same or less of the layer.
    """
    if larger.offload or smaller.offload:
        one, other = larger.recompute, smaller.recompute
        return set(smaller.offload) <= set(larger.offload) and (
            contains(one, other) or (one == other and larger != smaller)
        )
    if "inner" in (larger.granularity, smaller.granularity) or larger.inner != smaller.inner:
        of_depth = larger.granularity == smaller.granularity and larger.inner > smaller.inner
        return (
            of_depth
            or smaller.granularity == "none"
            or (larger.granularity == "full" != smaller.granularity)
        )
    if "full" in (larger.granularity, smaller.granularity):
        return _full_contains(larger, smaller)
    return reruns(smaller) < reruns(larger)


def launches_more(larger: LayerPolicy, smaller: LayerPolicy) -> bool:
    """Whether a host launches at `larger` all that it does at `smaller`, and more.

    A checkpoint costs the host something of its own, so that one of the whole layer may take it
    less than several of modules, though the device runs more.
    """
    is_one_for_several = larger.granularity == "full" and smaller.granularity == "selective"
    return contains(larger, smaller) and not is_one_for_several


def _full_contains(larger: LayerPolicy, smaller: LayerPolicy) -> bool:
    if larger.granularity != "full":
        return False
    if smaller.granularity == "full":
        return _left_out(larger) < _left_out(smaller)
    return _left_out(larger).isdisjoint(reruns(smaller))


def _left_out(full: LayerPolicy) -> frozenset[str]:
    """What a layer at full does not rerun."""
    dead: frozenset[str] = frozenset() if full.rerun_all or full.inner else _DEAD_IN_FULL
    return dead.union(full.keep)


def reruns(choice: LayerPolicy) -> frozenset[str]:
    """The work that a selective choice reruns, of all modules and what lies inside them."""
    found = set(itertools.chain.from_iterable(_WORK.get(m, (m,)) for m in choice.modules))
    if choice.rerun_all or choice.offload:
        found.update(*(_DEAD.get(module, ()) for module in choice.modules))
    return frozenset(found).difference(choice.keep)


def ordered_ms(
    choices: Sequence[LayerPolicy],
    forward_ms: Sequence[float],
    backward_ms: Sequence[float],
    weights: Sequence[float],
    is_more: Callable[[LayerPolicy, LayerPolicy], bool] = contains,
) -> tuple[list[float], list[float]]:
    """The nearest times of one layer in which a choice takes longer than all choices it contains.

    Runs isotonic regression twice: on the backward, and on forward plus backward. Forward alone is
    not ordered, because a checkpoint's forward saves nothing for the backward and can be faster.
    Times that are in order already are returned unchanged.

    Args:
        choices: the choices of the layer; the other lists have one entry for each.
        forward_ms: forward of one layer for one microbatch.
        backward_ms: its backward, recompute included.
        weights: the weights of each choice's times, above 0; for example the number of samples.
        is_more: whether the first of two choices takes longer: `contains`, or `launches_more`.

    Returns the forward and the backward times, in ms, in the order of `choices`.
    """
    forward, backward = np.array(forward_ms, np.float64), np.array(backward_ms, np.float64)
    order = _order(choices, is_more)
    below = [sum(upper == position for _, upper in order) for position in range(len(choices))]
    least = GAP_MS * np.array(below)
    shares = np.array(weights, np.float64)
    later = isotonic(backward - least, shares, order) - (backward - least)
    total = forward + backward
    both = isotonic(total - least, shares, order) - (total - least)
    backward += later
    backward += max(0.0, -backward.min())  # a shift of about GAP_MS, if all times are 0
    # Regression keeps sums above their parts: forward is below 0 by rounding alone.
    return np.maximum(forward + (both - later), 0.0).tolist(), backward.tolist()


def isotonic(values: Floats, weights: Floats, order: Pairs) -> Floats:
    """The values nearest by weighted least squares in which no upper is below its lower.

    Scikit-learn and SciPy have it for a total order; here the order is partial. The problem's dual
    is least squares with a multiplier of 0 or more for each pair. Values that are in order already
    are returned unchanged.

    Args:
        values: shape (n,).
        weights: shape (n,), above 0.
        order: pairs of positions in `values`.

    Returns shape (n,).
    """
    if all(values[lower] <= values[upper] for lower, upper in order):
        return values.copy()
    from scipy.optimize import nnls  # 0.2 s to import, and needed for noisy times alone

    pairs = np.zeros((len(order), len(values)))
    for row, (lower, upper) in zip(pairs, order, strict=True):
        row[lower], row[upper] = -1.0, 1.0
    root = np.sqrt(weights)
    multipliers, _ = nnls((pairs / root).T, -root * values)
    found: Floats = values + multipliers @ pairs / weights
    return found


def _order(
    choices: Sequence[LayerPolicy], is_more: Callable[[LayerPolicy, LayerPolicy], bool]
) -> list[tuple[int, int]]:
    numbered = itertools.permutations(enumerate(choices), 2)
    return [(a, b) for (a, lower), (b, upper) in numbered if is_more(upper, lower)]
