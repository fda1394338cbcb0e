"""How DistributedDataParallel lays out parameters in its buffers, from numbers of elements.

megatron-core 0.19.2 optimizer/param_layout.py and optimizer/distrib_optimizer.py
`_compute_per_buffer_param_layout`; without the distributed optimizer nothing is padded
(distributed/param_and_grad_buffer.py `_compute_default_per_buffer_param_layout`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PARAMETER_START = 64
"""Elements to whose multiple a parameter's start is padded."""
BUCKET_END = 128
"""The same of a bucket's end, beside the ranks that share it."""
BUSBW_END = 1 << 16
"""And with --ddp-pad-buckets-for-high-nccl-busbw."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer of parameters or gradients."""

    numel: int
    """With padding."""
    shards: tuple[int, ...]
    """Elements of each parameter whose state the rank has."""


def laid_out(
    counts: Sequence[int],
    ranks: int,
    bucket_size: int | None = None,
    own_bucket: Sequence[bool] = (),
    *,
    rank: int = -1,
    high_busbw: bool = False,
) -> Buffer:
    """The buffer of parameters for the distributed optimizer.

    Args:
        counts: elements of each parameter, in the model's order.
        ranks: that share the state.
        bucket_size: elements from which on a bucket ends; None: one bucket.
        own_bucket: whether a parameter is tied to another stage's, so in a bucket of its own.
        rank: whose shards are asked for, from the end where negative.
        high_busbw: as Megatron's pad_buckets_for_high_nccl_busbw.
    """
    divisor = math.lcm(ranks, BUCKET_END, BUSBW_END if high_busbw else 1)
    alone = own_bucket or [False] * len(counts)
    shards = [0] * len(counts)
    begin, end = 0, 0
    inside: list[tuple[int, int, int]] = []

    def close() -> None:
        nonlocal begin, end
        end = _padded(end, divisor)
        size = (end - begin) // ranks
        first = begin + rank % ranks * size
        for index, start, stop in inside:
            shards[index] = max(0, min(stop, first + size) - max(start, first))
        inside.clear()
        begin = end

    for index in reversed(range(len(counts))):
        end = _padded(end, PARAMETER_START)
        if alone[index] and inside:
            close()
        inside.append((index, end, end + counts[index]))
        end += counts[index]
        if alone[index] or (bucket_size is not None and end - begin >= bucket_size):
            close()
    if inside:
        close()
    return Buffer(end, tuple(shards))


def _padded(value: int, divisor: int) -> int:
    return -(-value // divisor) * divisor
