"""A CUDA device on CPU, as far as torch's memory counters go: for tests of what reads them.

Tensors' bytes are counted by `LiveBytes`. As torch's own caching allocator, it gives nothing back
but in `empty_cache`, and `reset_peak_memory_stats` resets the peaks of allocated and reserved bytes
alike. Blocks fit tensors exactly: there is no fragmentation but what a test asks for.
"""

from contextlib import contextmanager
from unittest import mock

import torch

from megatron_autorecompute.runtime.live_bytes import LiveBytes


class Device(LiveBytes):
    """Counts everything made in its context.

    total_bytes: of the device. lost_bytes: what the allocator reserves beyond what is allocated.
    """

    def __init__(self, total_bytes, lost_bytes=0):
        super().__init__()
        self.total_bytes, self.lost_bytes = total_bytes, lost_bytes
        self.outside_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = lost_bytes
        self.retries = self.resets = 0
        self.most_bytes = 0
        """As `peak_bytes`, but for tests to reset and for nobody else."""

    def _count(self, change_bytes):
        super()._count(change_bytes)
        self.most_bytes = max(self.most_bytes, self.current_bytes)
        self.reserved_bytes = max(self.reserved_bytes, self.current_bytes + self.lost_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def reset_statistics(self):
        self.resets += 1
        self.reset_peak()
        self.peak_reserved_bytes = self.reserved_bytes

    def give_back(self):
        self.reserved_bytes = self.current_bytes + self.lost_bytes

    def free_bytes(self):
        return self.total_bytes - self.outside_bytes - self.reserved_bytes


@contextmanager
def fake_cuda(total_bytes, lost_bytes=0):
    device = Device(total_bytes, lost_bytes)
    counters = {
        "memory_allocated": lambda: device.current_bytes,
        "max_memory_allocated": lambda: device.peak_bytes,
        "memory_reserved": lambda: device.reserved_bytes,
        "max_memory_reserved": lambda: device.peak_reserved_bytes,
        "reset_peak_memory_stats": device.reset_statistics,
        "empty_cache": device.give_back,
        "mem_get_info": lambda: (device.free_bytes(), device.total_bytes),
        "memory_stats": lambda: {"num_alloc_retries": device.retries, "num_ooms": 0},
        "get_device_name": lambda: "a fake device",
    }
    with mock.patch.multiple(torch.cuda, **counters), device:
        yield device
