"""A CUDA device on CPU, as far as torch's memory counters go: for tests of what reads them.

Tensors' bytes are counted by `LiveBytes`. As torch's own caching allocator, it gives nothing back
but in `empty_cache`, and `reset_peak_memory_stats` resets the peaks of allocated and reserved bytes
alike. Blocks fit tensors exactly: there is no fragmentation but what a test asks for.
"""

from contextlib import contextmanager
from unittest import mock

import torch

from megatron_autorecompute.runtime.live_bytes import LiveBytes


class Device:
    """Tells what its counters show of the bytes that `live` counts.

    total_bytes: of the device. lost_bytes: what the allocator reserves beyond what is allocated.
    """

    def __init__(self, live, total_bytes, lost_bytes=0):
        self._live, self._lost_bytes = live, lost_bytes
        self.total_bytes, self.outside_bytes = total_bytes, 0
        self.retries = self.resets = 0
        self._peak_bytes = self._most_bytes = 0
        self._reserved_bytes = self._peak_reserved_bytes = lost_bytes

    def _look(self):
        """Take note of the most since the last look."""
        most_bytes = self._live.peak_bytes
        self._live.reset_peak()
        self._peak_bytes = max(self._peak_bytes, most_bytes)
        self._most_bytes = max(self._most_bytes, most_bytes)
        self._reserved_bytes = max(self._reserved_bytes, most_bytes + self._lost_bytes)
        self._peak_reserved_bytes = max(self._peak_reserved_bytes, self._reserved_bytes)

    def most_bytes(self):
        """The most that was allocated since this was last asked; nobody but tests asks."""
        self._look()
        most_bytes, self._most_bytes = self._most_bytes, self._live.current_bytes
        return most_bytes

    def allocated_bytes(self):
        return self._live.current_bytes

    def peak_bytes(self):
        self._look()
        return self._peak_bytes

    def reserved_bytes(self):
        self._look()
        return self._reserved_bytes

    def peak_reserved_bytes(self):
        self._look()
        return self._peak_reserved_bytes

    def reset_statistics(self):
        self._look()
        self.resets += 1
        self._peak_bytes, self._peak_reserved_bytes = self._live.current_bytes, self._reserved_bytes

    def give_back(self):
        self._look()
        self._reserved_bytes = self._live.current_bytes + self._lost_bytes

    def free_bytes(self):
        return self.total_bytes - self.outside_bytes - self.reserved_bytes()


@contextmanager
def fake_cuda(total_bytes, lost_bytes=0):
    with LiveBytes() as live:
        device = Device(live, total_bytes, lost_bytes)
        counters = {
            "memory_allocated": device.allocated_bytes,
            "max_memory_allocated": device.peak_bytes,
            "memory_reserved": device.reserved_bytes,
            "max_memory_reserved": device.peak_reserved_bytes,
            "reset_peak_memory_stats": device.reset_statistics,
            "empty_cache": device.give_back,
            "mem_get_info": lambda: (device.free_bytes(), device.total_bytes),
            "memory_stats": lambda: {"num_alloc_retries": device.retries, "num_ooms": 0},
            "get_device_name": lambda: "a fake device",
        }
        with mock.patch.multiple(torch.cuda, **counters):
            yield device
