"""Formulas of Narayanan et al. 2021 for equal stages, equal layers and equal checkpoints.

The planner does not use them: it replays schedules and memory. In the special cases of the paper
its answers equal these formulas, which also give a first guess by hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_autorecompute.planner.cost.layout import check_at_least


def one_forward_one_backward_ms(stage_ms: Sequence[float], num_microbatches: int) -> float:
    """Return `sum(stage_ms) + (num_microbatches - 1) * max(stage_ms)`: the time of a 1F1B step.

    `stage_ms` is a stage's forward plus backward for one microbatch; messages are free. Exact if
    the last stage is the slowest in forward and in backward. This includes equal stages, for which
    it is the `(m + p - 1) * (t_f + t_b)` of Narayanan et al. 2021. An upper bound if all stages
    have the same ratio of backward to forward: a slow stage s runs up to `p - 1 - s` forwards while
    it waits for the first gradient. Otherwise neither, because the fixed order can make stages wait
    for each other: over 1,500 random sets of times the replay took 0.77 to 1.03 of it.
    """
    check_at_least(1, num_microbatches=num_microbatches, num_stages=len(stage_ms))
    return sum(stage_ms) + (num_microbatches - 1) * max(stage_ms)


def micro_batch_step_ms(
    samples: int, micro_batch_size: int, num_stages: int, forward_ms: float, backward_ms: float
) -> float:
    """`(b'/b + p - 1) * (t_f(b) + t_b(b))`: the step of equal stages at micro-batch size b.

    Section 3.4 of the paper.

    Args:
        samples: b', samples of one data-parallel rank in one step.
        micro_batch_size: b.
        num_stages: p.
        forward_ms: t_f(b), a stage's forward of one microbatch.
        backward_ms: t_b(b), recompute included.
    """
    return (samples / micro_batch_size + num_stages - 1) * (forward_ms + backward_ms)


def uniform_chunk_bytes(
    input_bytes: float, intermediate_bytes: float, num_layers: int, num_chunks: float
) -> float:
    """`c * A_input + (l / c) * A_intermediate`: checkpoints of equal size, one microbatch.

    Section 3.5 of the paper. The planner's peak equals it if all layers are alike, each holds only
    its input under full, and only what a checkpoint recomputes is transient.
    """
    return num_chunks * input_bytes + num_layers / num_chunks * intermediate_bytes


def best_uniform_chunks(input_bytes: float, intermediate_bytes: float, num_layers: int) -> float:
    """`sqrt(l * A_intermediate / A_input)`: the number of chunks with the least bytes above."""
    return math.sqrt(num_layers * intermediate_bytes / input_bytes)
