"""torch's CUDA caching allocator without CUDA: in which blocks tensors lie.

By pytorch c10/cuda/CUDACachingAllocator.cpp (2.11), with its default settings.
`torch.cuda.memory_allocated` counts whole blocks. A block of up to 1 MiB is split to 512 bytes, but
a larger one only if more than 1 MiB of it would be left (`should_split`), so a tensor of 3 MiB in a
hole of 4 MiB counts 4. With expandable segments every block is split.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass

SMALLEST = 512
"""kMinBlockSize."""
SMALL = 1 << 20
"""kSmallSize: requests up to it have segments of their own, of `SMALL_SEGMENT`."""
SMALL_SEGMENT = 2 << 20
"""kSmallBuffer."""
SEGMENT = 20 << 20
"""kLargeBuffer: of requests below `LARGE`."""
LARGE = 10 << 20
"""kMinLargeAlloc: from here on a request has a segment of its size, rounded up to `ROUND`."""
ROUND = 2 << 20
"""kRoundLarge."""


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment."""

    address: int
    size_bytes: int
    pool: tuple[int, bool]
    """Stream, and whether it is of small blocks."""
    requested_bytes: int = 0
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """The blocks of one device; none of its memory is ever returned to it."""

    def __init__(self, *, expandable: bool = False) -> None:
        self._expandable = expandable
        self.allocated_bytes = self.requested_bytes = self.reserved_bytes = 0
        self.peak_bytes = 0
        """Most that was allocated."""
        self._free = defaultdict[tuple[int, bool], list[tuple[int, int]]](list)
        self._blocks: dict[int, Block] = {}  # free ones, by address

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """The block of a tensor, which has at least one byte."""
        size = -(-size_bytes // SMALLEST) * SMALLEST
        small = size <= SMALL
        pool = (stream, small)
        block = self._best_fit(size, pool) or self._segment(size, pool)
        left = block.size_bytes - size
        if left >= SMALLEST if small or self._expandable else left > SMALL:
            rest = Block(block.address + size, left, pool, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size_bytes = rest, size
            self._release(rest)
        block.requested_bytes = size_bytes
        self.requested_bytes += size_bytes
        self.allocated_bytes += block.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back; it grows by free neighbours."""
        self.requested_bytes -= block.requested_bytes
        self.allocated_bytes -= block.size_bytes
        if block.before is not None and block.before.free:
            block = self._joined(self._taken(block.before), block)
        if block.after is not None and block.after.free:
            block = self._joined(block, self._taken(block.after))
        self._release(block)

    def _best_fit(self, size: int, pool: tuple[int, bool]) -> Block | None:
        free = self._free[pool]
        place = bisect.bisect_left(free, (size, -1))
        return None if place == len(free) else self._taken(self._blocks[free[place][1]])

    def _segment(self, size: int, pool: tuple[int, bool]) -> Block:
        _, small = pool
        most = SMALL_SEGMENT if small else SEGMENT if size < LARGE else -(-size // ROUND) * ROUND
        self.reserved_bytes += most
        return Block(self._address(most), most, pool)

    def _address(self, size: int) -> int:
        """Where a new segment begins. CUDA's own choice is unknown; it decides between holes of
        equal size."""
        return self.reserved_bytes - size

    def _release(self, block: Block) -> None:
        block.free = True
        self._blocks[block.address] = block
        bisect.insort(self._free[block.pool], (block.size_bytes, block.address))

    def _taken(self, block: Block) -> Block:
        free = self._free[block.pool]
        del free[bisect.bisect_left(free, (block.size_bytes, block.address))]
        del self._blocks[block.address]
        block.free = False
        return block

    @staticmethod
    def _joined(first: Block, second: Block) -> Block:
        first.size_bytes += second.size_bytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first
