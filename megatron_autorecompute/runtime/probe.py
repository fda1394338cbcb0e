"""Notes time and bytes at every boundary between two layers, in ordinary training steps.

It only sets hooks on modules and on the hidden states between them, so steps run as usual.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from torch.utils._pytree import tree_leaves

from megatron_autorecompute.compat import model_layers
from megatron_autorecompute.patched import TemporaryHook

Place = int | Literal["embedding", "between", "final_norm", "head", "output"]
"""A part of the model between two boundaries: a layer (0-based global index), the part before the
first layer (embedding), between encoder and decoder (between), or after the last layer (head).
`output` is only the boundary after everything. With multi-token prediction the norm after the
decoder is a separate place (final_norm), and the head comes after the last depth."""


class Memory(Protocol):
    """Bytes alive now, and the most since `reset_peak`: `LiveBytes` or `CudaBytes`."""

    @property
    def current_bytes(self) -> int:
        """Bytes alive now."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive since `reset_peak`."""

    def reset_peak(self, leaving_bytes: int = 0) -> None:
        """Restart the peak from the bytes alive now; leaving_bytes: of them, those being freed."""


class CudaBytes:
    """torch's own allocator counters; reading them does not synchronise."""

    @property
    def current_bytes(self) -> int:
        """Bytes allocated now."""
        return torch.cuda.memory_allocated()

    @property
    def peak_bytes(self) -> int:
        """The most bytes allocated since `reset_peak`."""
        return torch.cuda.max_memory_allocated()

    def reset_peak(self, leaving_bytes: int = 0) -> None:
        """Restart the peak; the allocator counts what is being freed as alive."""
        torch.cuda.reset_peak_memory_stats()


class Clock(Protocol):
    """Takes moments, and computes the time between two of them."""

    def now(self) -> Any:
        """The present moment, in the order of the work submitted so far."""

    def ms_between(self, begin: Any, end: Any) -> float:
        """Milliseconds from one moment to a later one."""


class DeviceClock:
    """CUDA events, which do not synchronise when recorded. Without CUDA, the processor time of this
    thread, so that other processes on the machine do not count."""

    def now(self) -> Any:
        """A recorded event, or seconds."""
        if not torch.cuda.is_available():
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms_between(self, begin: Any, end: Any) -> float:
        """Milliseconds between two moments; waits for the later event."""
        if isinstance(begin, float):
            return float(end - begin) * 1e3
        end.synchronize()
        return float(begin.elapsed_time(end))


DEVICE_CLOCK = DeviceClock()

CYCLES_PER_MS = 2_000_000
"""A clock that no GPU reaches, in cycles per ms, so that a wait is no shorter than asked."""


class Host:
    """The host beside a CUDA device: its own clock, and work that keeps the device busy meanwhile.

    Events around a layer measure its launches where the device waits for them. Behind a wait that
    lasts until the host has launched it, they measure the device.
    """

    def now_s(self) -> float:
        """The present moment on the host, without waiting for the device."""
        return time.perf_counter()

    def is_ahead_of(self, event: Any) -> bool:
        """Whether the device has not come to an event yet."""
        return not event.query()

    def run_ahead(self, ms: float) -> None:
        """Let the device wait, while the host goes on."""
        torch.cuda._sleep(math.ceil(ms * CYCLES_PER_MS))


def host_beside() -> Host | None:
    """The host of a CUDA device; None without one, where both are the same."""
    return Host() if torch.cuda.is_available() else None


@dataclass(frozen=True, slots=True)
class Mark:
    """A pass crosses a boundary. In forward the place begins here, in backward it ends here."""

    place: Place
    at: Any
    current_bytes: int
    peak_bytes: int
    input_bytes: int = 0
    """Size of the hidden state that crosses here, the place's input; 0 before everything."""
    alive_bytes: int = 0
    """Forward only: bytes of the hidden states at earlier boundaries that are still alive."""
    kept_peak_bytes: int = 0
    """Backward only: `peak_bytes`, had the gradient of the place's output stayed alive, as a
    schedule keeps that of a chunk's output."""
    host_s: float | None = None
    """The time by the host's clock; None if it is not read."""
    is_ahead: bool = False
    """Whether the device had not even come to the mark before when the host came here."""


@dataclass(slots=True)
class Pass:
    """The boundaries of one forward or backward of one chunk and microbatch, in order of time."""

    phase: Literal["forward", "backward"]
    chunk: int
    marks: list[Mark]
    kept: dict[Place, int] = field(default_factory=dict)
    """Forward only: places whose input was alive at the end, and its size. For example, an unfused
    RMSNorm saves a copy in fp32 and frees its input, but an input from another stage stays."""
    backward: Pass | None = None
    """Forward only: the backward pass of this forward."""
    without_gradient: dict[Place, int] = field(default_factory=dict)
    """Forward only: places whose input needs no gradient, because all parameters before it are
    frozen, and the input's size."""
    output_has_gradient: bool = False
    """Forward only: whether the model's output received a gradient."""
    samples: int = 0
    """Forward only: of the microbatch, as the first hidden state has them; a packed one has one."""
    packed: torch.Tensor | None = None
    """Forward only: where the samples of a packed microbatch begin and end, padding included."""
    tokens: int = 0
    """Forward only: tokens of all samples, as this rank holds them (sequence parallelism splits
    them). In a model with a tower: the decoder's tokens."""
    after: Mark | None = None
    """Forward only: where the next pass begins. What runs until then is the loss, and after it the
    beginning of the backward, if the loss is computed outside the model."""

    @property
    def host_ms(self) -> float:
        """Time from the first boundary to the last by the host's clock; 0 if that is not read."""
        return host_ms_between(self.marks[0], self.marks[-1]) or 0.0

    @property
    def first_place(self) -> Place:
        """The first layer, or head, of the chunk."""
        return self.marks[1].place if self.phase == "forward" else self.marks[-2].place


class Probe:
    """Notes every boundary between layers inside its `with` block; no overhead outside of it.

    Only forwards with a backward count. Others (an evaluation, a teacher's or a log-prob pass
    inside the step) are ignored.

    Args:
        chunks: this rank's model chunks, wrapped or bare.
        memory: source of bytes, or None to note times only.
        clock: source of times.
        host: its clock is read as well; None where the clock is the host's.
        ahead_ms: for how long the device waits at the beginning of a forward and of a backward.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        memory: Memory | None,
        clock: Clock = DEVICE_CLOCK,
        host: Host | None = None,
        ahead_ms: Mapping[str, float] | None = None,
    ) -> None:
        self.passes: list[Pass] = []
        self.peak_bytes = 0
        """The most bytes alive from the first boundary to the last."""
        self.boundary_bytes = 0
        """Size of the largest hidden state between two layers, not those of a tower."""
        self._chunks = chunks
        self._memory = memory
        self._clock = clock
        self._host, self._ahead_ms = host, ahead_ms or {}
        self._hooks: list[TemporaryHook] = []
        self._forward: Pass | None = None
        self._inputs: dict[Place, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._gradient: OutputGradient | None = None
        self._tower_layers = model_layers.tower_layers(chunks)

    def __enter__(self) -> Probe:
        for number, chunk in enumerate(self._chunks):
            self._watch(number, chunk)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.passes = [one for one in self.passes if one.phase == "backward" or one.backward]

    def _watch(self, number: int, chunk: torch.nn.Module) -> None:
        model = model_layers.unwrapped(chunk)

        def model_begins(*_: Any) -> None:
            self._inputs.clear()
            self._forward = None
            if torch.is_grad_enabled():
                self._forward = self._begun("forward", number, "embedding")

        def model_ends(_: Any, __: Any, output: Any) -> None:
            if self._forward is not None:
                self._end_forward(self._forward, output)
                self._forward = None

        self._call(model.register_forward_pre_hook, model_begins)
        encoder_ends = (model_layers.first_block([chunk])[1] - 1,)
        depths = model_layers.mtp_sites([chunk])
        for site in model_layers.block_sites([chunk]):
            for layer, index in zip(site.block.layers, site.layers, strict=True):
                self._watch_layer(layer, (index,))
            if site.block.config.mtp_num_layers:
                self._watch_input(model_layers.final_norm(site.block), "final_norm")
                if depths:
                    self._watch_output(depths[-1].mtp, "head", after=depths[-1].indices[-1])
                else:
                    self._watch_output(site.block, "head")
            else:
                ends: Place = "between" if site.layers[-1:] == encoder_ends else "head"
                self._watch_end(site.block, ends)
        for depth in depths:
            self._watch_layer(depth.mtp, depth.indices)
        self._call(model.register_forward_hook, model_ends)

    def _watch_layer(self, layer: torch.nn.Module, indices: Sequence[int]) -> None:
        """Note where a layer begins; several indices: one for each time that a forward runs it."""

        def begins(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._forward is not None and not is_recomputing():
                index = next((i for i in indices if not self._has_begun(i)), indices[-1])
                hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
                if index >= self._tower_layers:
                    size_bytes = hidden_states.untyped_storage().nbytes()
                    self.boundary_bytes = max(self.boundary_bytes, size_bytes)
                self._boundary(index, hidden_states)
                self._forward.packed = _cu_seqlens(kwargs.get("packed_seq_params"))

        self._call(layer.register_forward_pre_hook, begins, with_kwargs=True)

    def _watch_end(self, block: torch.nn.Module, place: Place) -> None:
        norm = model_layers.final_norm(block)
        if norm is not None:
            self._watch_input(norm, place)
        else:
            self._watch_output(block, place)

    def _call(self, register: Callable[..., Any], do: Callable[..., None], **options: Any) -> None:
        self._hooks.append(TemporaryHook(register, do, **options))

    def _watch_input(self, module: torch.nn.Module | None, place: Place) -> None:
        if module is not None:
            hook = module.register_forward_pre_hook
            self._call(hook, lambda _, args: self._boundary(place, args[0]))

    def _watch_output(
        self, module: torch.nn.Module, place: Place, after: Place | None = None
    ) -> None:
        """after: the place that must have begun; a layer that is repeated returns several times."""

        def ends(*call: Any) -> None:
            if after is None or self._has_begun(after):
                self._boundary(place, _tensor(call))

        self._call(module.register_forward_hook, ends)

    def _has_begun(self, place: Place) -> bool:
        forward = self._forward
        return forward is not None and any(mark.place == place for mark in forward.marks)

    def _end_forward(self, forward: Pass, output: Any) -> None:
        def on_gradient(_: torch.Tensor) -> None:
            forward.output_has_gradient = True
            self._backward_of(forward)

        self._mark(forward, "output")
        forward.kept.update(self._alive())
        self._inputs.clear()
        for tensor in _tensors_in(output):
            self._on_gradient(tensor, on_gradient)

    def _alive(self) -> dict[Place, int]:
        """Places of the running forward whose input is alive, and its size."""
        return {place: size for place, (ref, size) in self._inputs.items() if ref() is not None}

    def _boundary(self, place: Place, hidden_states: torch.Tensor) -> None:
        forward = self._forward
        if forward is None:
            return
        storage = hidden_states.untyped_storage()
        size_bytes = storage.nbytes()
        if not forward.tokens and not self._is_in_front(place):
            forward.tokens = hidden_states.numel() // hidden_states.shape[-1]
            forward.samples = hidden_states.shape[1] if hidden_states.dim() == 3 else 1
        self._mark(forward, place, size_bytes)
        self._inputs[place] = (weakref.ref(storage), size_bytes)
        if not hidden_states.requires_grad:
            forward.without_gradient[place] = size_bytes

        def on_gradient(gradient: torch.Tensor) -> None:
            self._mark(self._backward_of(forward), place, size_bytes)
            if self._memory is not None:
                self._gradient = OutputGradient(gradient, self._memory)

        self._on_gradient(hidden_states, on_gradient)

    def _is_in_front(self, place: Place) -> bool:
        """Whether the hidden state at this place has a tower's tokens, and not the decoder's."""
        return place == "between" or (isinstance(place, int) and place < self._tower_layers)

    def _on_gradient(self, tensor: torch.Tensor, do: Callable[[torch.Tensor], None]) -> None:
        if tensor.requires_grad:
            tensor.register_hook(do)

    def _backward_of(self, forward: Pass) -> Pass:
        """The running backward of a forward; begins one at the first gradient."""
        running = forward.backward
        if running is not None and running.marks[-1].place != "embedding":
            return running
        backward = forward.backward = self._begun("backward", forward.chunk, "output")
        # The engine calls this when the current backward has finished, embedding included.
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: self._end_backward(forward, backward)
        )
        return backward

    def _end_backward(self, forward: Pass, backward: Pass) -> None:
        """End a backward; after frozen parameters it ends in the first layer with trained ones."""
        for place, size_bytes in reversed(forward.without_gradient.items()):
            self._mark(backward, place, size_bytes)
        self._mark(backward, "embedding")

    def _begun(self, phase: Literal["forward", "backward"], chunk: int, at: Place) -> Pass:
        one = Pass(phase, chunk, [])
        self.passes.append(one)
        if self._host is not None and self._ahead_ms.get(phase):
            self._host.run_ahead(self._ahead_ms[phase])
        self._mark(one, at)
        if len(self.passes) > 1:
            self.passes[-2].after = one.marks[0]
        return one

    def _mark(self, one: Pass, place: Place, input_bytes: int = 0) -> None:
        memory = self._memory
        current, peak = (memory.current_bytes, memory.peak_bytes) if memory else (0, 0)
        kept_peak = peak
        if self._gradient is not None:
            peak, kept_peak = self._gradient.peaks(peak)
            self._gradient = None
        alive_bytes = sum(self._alive().values())
        host, before = self._host, one.marks[-1:]
        one.marks.append(
            Mark(
                place,
                self._clock.now(),
                current,
                peak,
                input_bytes,
                alive_bytes,
                kept_peak,
                None if host is None else host.now_s(),
                host is not None and bool(before) and host.is_ahead_of(before[0].at),
            )
        )
        self.peak_bytes = max(self.peak_bytes, peak)
        if memory:
            memory.reset_peak()


class OutputGradient:
    """The gradient of a place's output, from where the place's backward gets it: the peak until it
    is freed, and from there on."""

    def __init__(self, gradient: torch.Tensor, memory: Memory) -> None:
        storage = gradient.untyped_storage()
        self._size_bytes = storage.nbytes()
        self._before: int | None = None

        def freed(_: Any) -> None:
            self._before = memory.peak_bytes
            memory.reset_peak(self._size_bytes)

        self._freed: weakref.ref[torch.UntypedStorage] | None = weakref.ref(storage, freed)
        self._tensor, self._version = weakref.ref(gradient), gradient._version

    def peaks(self, peak_bytes: int) -> tuple[int, int]:
        """The peak of the place's backward, and the same had this gradient stayed alive.

        peak_bytes: the memory's peak where the backward ends. From here on it is not watched.
        """
        self._freed = None
        if self._before is not None:
            return max(self._before, peak_bytes), max(self._before, peak_bytes + self._size_bytes)
        tensor = self._tensor()
        # Autograd may have added to it in place: it became the gradient of the place's input.
        reused = tensor is not None and tensor._version != self._version
        return peak_bytes, peak_bytes + self._size_bytes * reused


def _cu_seqlens(packed: Any) -> torch.Tensor | None:
    """The bounds of samples in Megatron's PackedSeqParams; None if they are not packed."""
    if packed is None or packed.cu_seqlens_q_padded is None:
        return None if packed is None else packed.cu_seqlens_q
    return packed.cu_seqlens_q_padded


def _tensor(call: tuple[Any, ...]) -> torch.Tensor:
    output = call[-1]
    return output[0] if isinstance(output, tuple) else output


def _tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors in what a model returned: one (GPT), several (BERT), a dictionary, an object."""
    parts = vars(output) if is_dataclass(output) else output
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor)]


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward, as recompute does."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True, slots=True)
class Span:
    """One place in one pass: bytes at its begin and end, the most in between, and the time."""

    place: Place
    begin_bytes: int
    peak_bytes: int
    end_bytes: int
    ms: float
    input_bytes: int
    """Size of the hidden state that enters the place."""
    output_bytes: int
    """Size of the hidden state that leaves it; 0 at the end of the model."""
    let_go_bytes: int = 0
    """Forward only: bytes of earlier hidden states that were freed during the span."""
    kept_peak_bytes: int = 0
    """Backward only: `peak_bytes`, had the gradient of the place's output stayed alive."""
    host_ms: float | None = None
    """What the host took to launch it; None if its clock was not read."""
    is_ahead: bool = False
    """Whether all of it was launched before the device began with it, so that `ms` has no wait."""


def host_ms_between(begin: Mark, end: Mark) -> float | None:
    """Milliseconds by the host's clock; None if it was not read."""
    if begin.host_s is None or end.host_s is None:
        return None
    return (end.host_s - begin.host_s) * 1e3


def spans(one: Pass, clock: Clock = DEVICE_CLOCK) -> Iterator[Span]:
    """The spans between the boundaries of a pass, in the order in which the pass runs them."""
    for begin, end in itertools.pairwise(one.marks):
        forward = one.phase == "forward"
        first, last = (begin, end) if forward else (end, begin)
        yield Span(
            first.place,
            begin.current_bytes,
            max(end.peak_bytes, begin.current_bytes),
            end.current_bytes,
            clock.ms_between(begin.at, end.at),
            first.input_bytes,
            last.input_bytes,
            begin.alive_bytes + begin.input_bytes - end.alive_bytes if forward else 0,
            max(end.kept_peak_bytes, begin.current_bytes),
            host_ms_between(begin, end),
            end.is_ahead,
        )
