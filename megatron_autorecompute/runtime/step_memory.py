"""Bytes of this rank in training steps: those that it keeps through them, their peak, the
allocator's retries, its fragmentation.

What is kept is counted from tensors, not from the allocator, on the training device alone, the
device of the first parameter: for any device and all of Megatron's optimizers, through attribute
names that 0.16 to 0.19 share. A storage counts once, however many views it has.

torch has one set of peak statistics per process, and Megatron logs them without resetting them.
While measuring, this package resets them at every boundary between layers; afterwards at the
beginning of each step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_autorecompute.compat import model_layers, parallel
from megatron_autorecompute.profile import StaticBytes
from megatron_autorecompute.runtime.live_bytes import LiveBytes, storage_bytes
from megatron_autorecompute.runtime.probe import CudaBytes, Memory


class StepMemory:
    """Reads the bytes of this rank's model chunks and of Megatron's optimizer on them, one step
    after the other; `without_cuda` from `LiveBytes`, because there is no CUDA allocator."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        without_cuda: bool,
    ) -> None:
        self.peak_bytes = 0
        """The most bytes allocated in the last step that was read."""
        self.fragmentation_bytes = 0
        """The most reserved less the most allocated, over all measuring steps."""
        self._chunks, self._optimizer = chunks, optimizer
        self._without_cuda = without_cuda
        self.torch_peaks: tuple[int | None, int | None] = (None, None)
        """The most bytes allocated, and reserved, by the process in the last step of `beside`;
        None without CUDA."""
        self.others_bytes: int | None = None
        """Bytes other than model and optimizer at the beginning of a step, the most of those read;
        None without CUDA."""
        self._allocated = self._reserved = 0
        self._reading: Memory | None = None
        self._static_bytes = self._retries_before = 0

    def static(self) -> StaticBytes:
        """What this rank keeps through steps."""
        return static_bytes(self._chunks, self._optimizer)

    def read_others(self) -> None:
        """Note, at the beginning of a step, what others hold in this process."""
        if self._without_cuda:
            return
        gc.collect()  # unreachable cycles are not held by anyone
        more_bytes = torch.cuda.memory_allocated() - self.static().total_bytes
        self.others_bytes = max(self.others_bytes or 0, more_bytes)

    @property
    def is_cheap(self) -> bool:
        """Whether every step can be read: `LiveBytes` slows a step down."""
        return not self._without_cuda

    def begin_measuring(self) -> None:
        """Free cached memory left from building the model, which would count as fragmentation."""
        if not self._without_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def measuring(self) -> Iterator[Memory]:
        """Surround a measuring step, in which the peak may be reset; call `note` at its end."""
        with self._opened() as memory:
            self._note_fragmentation(memory.peak_bytes)  # includes an evaluation before the step
            memory.reset_peak()
            yield memory

    def note(self, memory: Memory, peak_bytes: int) -> None:
        """Keep the peak of a step that was measured."""
        self.peak_bytes = self._with_static(memory, peak_bytes)
        self._note_fragmentation(peak_bytes)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Surround a measuring step inside which nothing is read; keeps torch's peaks of it."""
        if self._without_cuda:
            yield
            return
        self._note_fragmentation(torch.cuda.max_memory_allocated())  # as in `measuring`
        torch.cuda.reset_peak_memory_stats()
        yield
        self.torch_peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        self._note_fragmentation(torch.cuda.max_memory_allocated())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Surround a step under a plan; at its end ask `is_short`, which keeps its peak."""
        with self._opened() as memory:
            memory.reset_peak()
            self._reading, self._retries_before = memory, self._retries()
            try:
                yield
            finally:
                self._reading = None

    def is_short(self, budget_bytes: int) -> bool:
        """Whether the step inside `watching` went above the budget, or the allocator retried.

        Only this step counts: an evaluation or a checkpoint before it may have needed more.
        """
        if self._reading is None:
            return False
        self.peak_bytes = self._with_static(self._reading, self._reading.peak_bytes)
        return self._retries() > self._retries_before or self.peak_bytes > budget_bytes

    def _retries(self) -> int:
        if self._without_cuda:
            return 0
        stats = torch.cuda.memory_stats()
        return int(stats.get("num_alloc_retries", 0) + stats.get("num_ooms", 0))

    @contextmanager
    def _opened(self) -> Iterator[Memory]:
        if not self._without_cuda:
            yield CudaBytes()
            return
        # Static tensors made in this step, such as optimizer state, count as they are made.
        self._static_bytes = self.static().total_bytes
        with LiveBytes(tensors(self._chunks, self._optimizer)) as memory:
            memory.reset_peak()
            yield memory

    def _with_static(self, memory: Memory, peak_bytes: int) -> int:
        """The peak including static bytes; torch's allocator counts these already."""
        return peak_bytes if isinstance(memory, CudaBytes) else self._static_bytes + peak_bytes

    def _note_fragmentation(self, allocated_bytes: int) -> None:
        if self._without_cuda:
            return
        self._allocated = max(self._allocated, allocated_bytes)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())
        self.fragmentation_bytes = max(0, self._reserved - self._allocated)


def available_bytes() -> int:
    """The most bytes that torch can reserve on this rank's device: what others leave free."""
    free_bytes, _ = torch.cuda.mem_get_info()
    return free_bytes + torch.cuda.memory_reserved()


def tensors(chunks: Sequence[torch.nn.Module], optimizer: Any) -> list[torch.Tensor]:
    """Parameters, gradient buffers, optimizer state and shared buffers of this rank."""
    return [tensor for part in _of_rank(chunks, optimizer) for tensor in part]


def static_bytes(chunks: Sequence[torch.nn.Module], optimizer: Any) -> StaticBytes:
    """Bytes of these tensors by type; complete after the optimizer's first step."""
    parameters, gradients, state, buffers = _of_rank(chunks, optimizer)
    parameter_bytes = storage_bytes(parameters)
    gradient_bytes = storage_bytes(parameters + gradients) - parameter_bytes
    # In fp32 the optimizer works on the parameters themselves.
    everything = storage_bytes(parameters + gradients + state)
    return StaticBytes(
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_state_bytes=everything - parameter_bytes - gradient_bytes,
        buffer_bytes=storage_bytes(buffers),
    )


def _of_rank(chunks: Sequence[torch.nn.Module], optimizer: Any) -> list[list[torch.Tensor]]:
    """Parameters, gradient buffers, optimizer state and shared buffers on the training device: an
    optimizer may keep its state in host memory."""
    devices = [parameter.device for chunk in chunks for parameter in chunk.parameters()][:1]
    state, buffers = _optimizer_state(optimizer), parallel.global_buffers()
    parts = _parameters(chunks), _gradients(chunks), state, buffers
    return [[tensor for tensor in part if tensor.device in devices] for part in parts]


def _parameters(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for chunk in chunks:
        found += chunk.parameters()
        found += model_layers.unwrapped(chunk).buffers()
    return found


def _gradients(chunks: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """DistributedDataParallel's contiguous buffers, or plain `.grad` without it."""
    found = [p.grad for chunk in chunks for p in chunk.parameters() if p.grad is not None]
    for chunk in chunks:
        names = ("buffers", "expert_parallel_buffers")
        lists = [getattr(chunk, name, ()) for name in names]
        # Module.buffers of torch is a method; only DDP's attribute is a list.
        buffers = [buffer for part in lists if isinstance(part, list) for buffer in part]
        found += [buffer.grad_data for buffer in buffers]
        found += [b.param_data for b in buffers if getattr(b, "param_data", None) is not None]
    return found


def _optimizer_state(optimizer: Any) -> list[torch.Tensor]:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [part.optimizer for part in parts if getattr(part, "optimizer", None) is not None]
    state = [value for part in inner for entry in part.state.values() for value in entry.values()]
    masters = [p for part in inner for group in part.param_groups for p in group["params"]]
    return [value for value in state + masters if isinstance(value, torch.Tensor)]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device has no memory left; also for cuBLAS and NCCL."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in said or "_ALLOC_FAILED" in said)
    )
