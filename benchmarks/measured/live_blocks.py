"""Blocks of torch's allocator for tensors on meta, while they are alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from benchmarks.measured.caching_allocator import Block, CachingAllocator
from megatron_autorecompute.meta import kept_bytes, ops
from megatron_autorecompute.runtime.live_bytes import Entry, LiveBytes

PRODUCTS_OF_TORCH = frozenset(
    getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")
)


class FirstUse:
    """Buffers of `shared_buffers`, each made just before the first operation that needs it: what is
    alive then decides in which hole it lies. `rest` makes all others."""

    def __init__(self, allocator: CachingAllocator, sizes: dict[str, int]) -> None:
        self._allocator = allocator
        self._left = {name: (1, size_bytes) for name, size_bytes in sizes.items()}
        _, of_torch = self._left.pop(kept_bytes.OF_TORCH, (1, 0))
        self._left |= {"forward": (1, of_torch // 2), "backward": (1, of_torch // 2)}
        if of_grouped := sizes.get(kept_bytes.OF_GROUPED):
            streams_of_grouped = kept_bytes.GROUPED_STREAMS
            self._left[kept_bytes.OF_GROUPED] = (
                streams_of_grouped,
                of_grouped // streams_of_grouped,
            )

    def before(self, func: Any, args: Sequence[Any]) -> None:
        """Make those that an operation is the first to need."""
        if not self._left:
            return
        if func in PRODUCTS_OF_TORCH:  # a handle for each thread, forward's and autograd's
            running = torch._C._current_graph_task_id() != -1
            self._make("backward" if running else "forward")
        elif func is ops.gemm.default:
            grouped = args[1].dim() == 3
            self._make(kept_bytes.OF_GROUPED if grouped else kept_bytes.OF_LINEAR)
        elif func is ops.general_gemm.default:
            self._make(kept_bytes.OF_LINEAR)
        elif func is ops.gemm_weight_gradient.default:
            self._make(kept_bytes.dummy_name(args[2].shape[-2:]))

    def rest(self) -> None:
        """Make what no operation has asked for."""
        for name in list(self._left):
            self._make(name)

    def _make(self, name: str) -> None:
        number, size_bytes = self._left.pop(name, (0, 0))
        for _ in range(number if size_bytes else 0):
            self._allocator.allocate(size_bytes)


class LiveBlocks(LiveBytes):
    """As LiveBytes, with a block of the allocator for everything that it counts."""

    def __init__(
        self, allocator: CachingAllocator, static: Iterable[torch.Tensor], buffers: FirstUse
    ) -> None:
        super().__init__(static)
        self._allocator, self._buffers = allocator, buffers
        self._blocks: dict[int, Block] = {}
        self._given_back: list[Block] = []
        self._busy = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._buffers.before(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def exclude(self, tensor: torch.Tensor) -> None:
        """As LiveBytes; the tensor's block stays while its storage does (GlobalMemoryBuffer's is
        replaced when a larger one is asked for)."""
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata)
        block = None if entry is None else self._blocks.pop(id(entry), None)
        super().exclude(tensor)
        if block is not None:
            weakref.finalize(storage, self._given_back.append, block).atexit = False

    def _count(self, entry: Entry, size_bytes: int) -> None:
        super()._count(entry, size_bytes)
        old = self._blocks.pop(id(entry), None)
        if old is not None:
            self._given_back.append(old)
        if self._busy:  # called by the collector of garbage, within what follows
            return
        self._busy = True
        while self._given_back:
            self._allocator.free(self._given_back.pop())
        if size_bytes:
            self._blocks[id(entry)] = self._allocator.allocate(size_bytes, ops.current_stream)
        self._busy = False
