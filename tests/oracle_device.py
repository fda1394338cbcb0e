"""A GPU with a virtual clock, on which real Megatron layers run on CPU: an oracle of times.

The host launches one operation after another, and the device runs their kernels in a queue. What
waits for the device (a synchronisation, an event's, a value that is read, a full queue) moves the
host's clock on. Nothing reads a real clock, so every figure follows from the seed alone.

An operation of torch's costs the host 22 us, views too (docs/decisions/time-model.md); reading the
allocator costs 90 us. Steps differ as the committed runs on an H100 do: a step's factors are drawn
from the ratios of their raw steps to the lower quartile of the same strategy.
"""

import json
import random
import statistics
from collections import deque
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

RESULTS = Path(__file__).parents[1] / "benchmarks/results/gpu"
OPERATION_MS, READING_MS, EVENT_MS, QUERY_MS = 0.022, 0.09, 0.005, 0.001
QUEUE = 1024
"""Kernels that wait on the device before a launch blocks the host."""
CYCLES_PER_MS = 1_755_000
"""The boost clock of an H100."""
DRIFT = 0.001
"""Of the host's speed from step to step: `none` first and last in run 7 is 0.7% apart, with some
80 steps between."""
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
_WITHOUT_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view"}
_ON_THE_HOST = {torch.uint8, torch.bool, torch.int32}
_READS = {"_local_scalar_dense", "nonzero", "equal"}
_RUNS = {
    "device": (1, "5-gpt-350m-unfused"),
    "mixed": (3, "5-gpt-600m-te"),
    "host": (4, "5-mla-350m"),
}
"""What the noise is of: a run whose steps the device decides, one that the host decides, and one in
between."""


@cache
def ratios(like):
    """Steps over the lower quartile of the same strategy in the same run."""
    run, section = _RUNS[like]
    found = json.loads((RESULTS / str(run) / "results.json").read_text())["sections"][section]
    lists = [item[who] for item in found["items"].values() for who in ("megatron_ms", "ours_ms")]
    return [ms / lower_quartile(times) for times in lists for ms in times]


def lower_quartile(values):
    return statistics.quantiles(values, n=4, method="inclusive")[0]


class Device(TorchDispatchMode):
    """The device and its host; run what is to be timed inside `running`.

    like: whose noise it has, "device", "mixed" or "host".
    """

    def __init__(self, seed, like):
        super().__init__()
        self._rng, self._seed, self._like = random.Random(seed), seed, like
        self.host_ms = self.device_ms = self.launched_ms = self.worked_ms = 0.0
        self.kernel_scale = 1.0
        """How slow kernels are."""
        self.is_quiet = True
        self._host_factor = self._kernel_factor = self._drift = 1.0
        self._pending = deque(maxlen=QUEUE)
        self._ran = []
        """What a step asked of host and device, in order."""
        self._sorts = {}
        self._fixed_ms, self._per_flop, self._per_byte = (
            base * self._rng.uniform(0.5, 1.5) for base in (0.004, 1e-8, 2e-8)
        )

    # --- what runs on it ---

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sort, cost = self._sorts.get(func) or self._sort(func)
        self._spend(cost)
        if _is_of_the_host(args):
            return result
        if sort == "read":
            self.synchronize()
        elif sort != "view":
            self._launch(self._work_ms(sort, args, result))
        return result

    def _sort(self, func):
        name = func._schema.name.removeprefix("aten::")
        returned = (each.alias_info for each in func._schema.returns)
        views = any(alias is not None and not alias.is_write for alias in returned)
        if views or name in _WITHOUT_KERNEL:
            sort = "view"
        else:
            sort = "read" if name in _READS else "product" if name in _PRODUCTS else "other"
        # Operations differ in what their Python costs, the same in every step.
        cost = OPERATION_MS * random.Random(f"{self._seed} {name}").uniform(0.6, 1.4)
        self._sorts[func] = sort, cost
        return sort, cost

    def _work_ms(self, sort, args, result):
        tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        work = self._fixed_ms + self._per_byte * sum(t.numel() * t.element_size() for t in tensors)
        if sort == "product":
            work += self._per_flop * 2 * tensors[-1].numel() * tensors[-2].shape[-2]
        return work

    def _spend(self, ms):
        self._ran.append((self._spend, ms))
        self.host_ms += ms * self._host_factor
        self.launched_ms += ms

    def _launch(self, work_ms):
        self._ran.append((self._launch, work_ms))
        if len(self._pending) == QUEUE:
            self.host_ms = max(self.host_ms, self._pending[0])
        took_ms = work_ms * self.kernel_scale * self._kernel_factor
        self.device_ms = max(self.device_ms, self.host_ms) + took_ms
        self.worked_ms += work_ms * self.kernel_scale
        self._pending.append(self.device_ms)

    # --- what waits for it ---

    def synchronize(self, *_):
        self._ran.append((self.synchronize, None))
        self.host_ms = max(self.host_ms, self.device_ms)

    def sleep(self, cycles):
        """A kernel that takes so many of the device's cycles."""
        self._spend(OPERATION_MS)
        self._launch(cycles / CYCLES_PER_MS / self.kernel_scale / self._kernel_factor)

    def seconds(self):
        return self.host_ms / 1e3

    def event(self, **_):
        return Event(self)

    # --- steps ---

    @contextmanager
    def running(self):
        """In this block torch's events, `synchronize` and `_sleep` are its, and so is the clock."""
        cuda = {"Event": self.event, "synchronize": self.synchronize, "_sleep": self.sleep}
        with (
            mock.patch.multiple(torch.cuda, **cuda),
            mock.patch("time.perf_counter", self.seconds),
            self,
        ):
            yield self

    def step_ms(self, step):
        """How long a step takes, from where the device is idle to where it is idle again."""
        self._draw()
        self.synchronize()
        begin_ms = self.host_ms
        self._ran.clear()
        step()
        self.synchronize()
        return self.host_ms - begin_ms

    def last_step(self):
        """The last step to be taken again, with nothing computed: it takes what the step itself
        would, as all figures follow from what it asked for. Not of steps in which events are
        recorded or the allocator is read."""
        ran = tuple(self._ran)

        def again():
            for asked, value in ran:
                asked(value)

        return again

    def _draw(self):
        """A quiet step is an undisturbed one on the host as it has become."""
        self._host_factor, self._kernel_factor = self._drift, 1.0
        if not self.is_quiet:
            self._drift *= self._rng.gauss(1.0, DRIFT)
            self._host_factor = self._drift * self._rng.choice(ratios(self._like))
            self._kernel_factor = self._rng.choice(ratios("device"))

    def binds(self, step, times_launches):
        """Make kernels so slow that those of a step take so many times what its launches take."""
        self.launched_ms = self.worked_ms = 0.0
        self.step_ms(step)
        self.kernel_scale *= times_launches * self.launched_ms / self.worked_ms


def _is_of_the_host(args):
    """Whether an operation is on what Megatron has on the CPU beside a GPU as well: states of
    random number generators (bytes) and the kind of an attention mask (int32)."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return bool(tensors) and all(each.dtype in _ON_THE_HOST for each in tensors)


class Event:
    """As torch.cuda.Event: recorded in the queue, and done when all before it is."""

    def __init__(self, device):
        self._device, self.at_ms = device, None

    def record(self, *_):
        self._device.host_ms += EVENT_MS
        self.at_ms = max(self._device.device_ms, self._device.host_ms)

    def query(self):
        self._device.host_ms += QUERY_MS
        return self.at_ms <= self._device.host_ms

    def synchronize(self):
        self._device.host_ms = max(self._device.host_ms, self.at_ms)

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


class Reader:
    """Bytes of another reader; to ask for them costs the host what torch's allocator does."""

    def __init__(self, device, live):
        self._device, self._live = device, live

    @property
    def current_bytes(self):
        self._device.host_ms += READING_MS
        return self._live.current_bytes

    @property
    def peak_bytes(self):
        self._device.host_ms += READING_MS
        return self._live.peak_bytes

    def reset_peak(self, leaving_bytes=0):
        self._device.host_ms += READING_MS
        self._live.reset_peak(leaving_bytes)
