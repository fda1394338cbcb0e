"""A step of one pipeline stage by Megatron's own schedule, with its bytes in every part of it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from megatron_autorecompute.compat import model_layers
from megatron_autorecompute.meta.fake_ranks import StepShape
from megatron_autorecompute.meta.meta_step import ForwardStep, StageStep, trace_step
from megatron_autorecompute.patched import patched
from megatron_autorecompute.runtime.live_bytes import LiveBytes

Phase = Literal["forward", "backward", "combined", "between"]


class Where(NamedTuple):
    """Which part of a step: phase "between" is communication and bookkeeping of the schedule, phase
    "combined" a forward beside another microbatch's backward, named by the forward."""

    phase: Phase
    chunk: int | None = None
    microbatch: int | None = None
    layer: int | None = None
    """Global 0-based layer; None outside the layers (embedding, head, before and after)."""

    def __str__(self) -> str:
        if self.phase == "between":
            return "between forwards and backwards"
        if self.phase == "combined":
            return f"forward of microbatch {self.microbatch} beside a backward"
        of = "outside layers" if self.layer is None else f"of layer {self.layer}"
        return f"{self.phase} {of}"


@dataclass(frozen=True, slots=True)
class StepSpan:
    """One part of a step in one place, with its bytes of activations (all that is not static)."""

    where: Where
    start_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class RecordedStep(StageStep):
    """One stage's step; spans are in order of time and cover all of it."""

    spans: tuple[StepSpan, ...]

    @property
    def peak_span(self) -> StepSpan:
        """The first span in which the peak occurs."""
        return next(span for span in self.spans if span.peak_bytes == self.peak_bytes)


def recorded_step(
    models: list[torch.nn.Module], shape: StepShape, forward_step: ForwardStep
) -> RecordedStep:
    """Run one step on built chunks, as `trace_step` does."""
    found: list[StepSpan] = []

    @contextlib.contextmanager
    def recorded(live: LiveBytes) -> Iterator[None]:
        with _recorded(models, live):
            yield
        for span in live.spans():
            where = cast(Where, span.label or Where("between"))
            found.append(StepSpan(where, span.start_bytes, span.peak_bytes))

    step = trace_step(models, shape, forward_step, recorded)
    return RecordedStep(**asdict(step), spans=tuple(found))


class _Recorder:
    """Marks the parts of the step in the live-bytes timeline."""

    def __init__(self, models: list[torch.nn.Module], live: LiveBytes) -> None:
        self.live = live
        self.where = Where("between")
        self.chunks = {id(model): chunk for chunk, model in enumerate(models)}
        self.forwards = [0] * len(models)
        # By output tensor: backward_step gets neither chunk nor microbatch.
        self.outputs = WeakIdKeyDictionary()

    def move(self, where: Where) -> None:
        self.where = where
        self.live.mark(where)

    def forward_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(step_function: Any, iterator: Any, model: Any, *args: Any, **kw: Any) -> Any:
            chunk = self.chunks[id(model)]
            microbatch = self.forwards[chunk]
            self.forwards[chunk] += 1

            def begin(*step_args: Any) -> Any:  # after set_input_tensor freed the old input
                self.move(Where("forward", chunk, microbatch))
                return step_function(*step_args)

            result = original(begin, iterator, model, *args, **kw)
            self.outputs[next(iter(tree_iter(result)))] = (chunk, microbatch)
            self.move(Where("between"))
            return result

        return wrapper

    def backward_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(input_tensor: Any, output_tensor: Any, *args: Any, **kw: Any) -> Any:
            chunk, microbatch = self.outputs[next(iter(tree_iter(output_tensor)))]
            self.move(Where("backward", chunk, microbatch))
            result = original(input_tensor, output_tensor, *args, **kw)
            self.move(Where("between"))
            return result

        return wrapper

    def combined_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """One step of EP overlap: a forward, a backward, or one beside the other."""

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            forward, backward = (given.get(name) for name in ("f_model", "b_model"))
            model = backward if forward is None else forward
            chunk = self.chunks[id(model)]
            if forward is None:
                self.move(Where("backward", chunk))
            else:
                phase: Phase = "forward" if backward is None else "combined"
                self.move(Where(phase, chunk, self.forwards[chunk]))
                self.forwards[chunk] += 1
            result = original(*args, **kwargs)
            self.move(Where("between"))
            return result

        return wrapper

    def watch(self, layer: torch.nn.Module, index: int) -> list[Any]:
        """Hooks that mark the begin of the layer's forward (also a recomputed one) and backward.

        A layer's backward begins with the gradient of its output and ends with that of its input.
        The hooks are on tensors, because module backward hooks would add nodes to the graph.
        """

        def enter(layer: Any, args: Any, kwargs: Any) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            if hidden.requires_grad and torch.is_grad_enabled():
                hidden.register_hook(lambda gradient: self.move(self.where._replace(layer=None)))
            self.move(self.where._replace(layer=index))

        def leave(layer: Any, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: self.move(self.where._replace(layer=index)))
            self.move(self.where._replace(layer=None))

        # Hooks of the package act on no value (`runtime.onlookers`), and nor do these.
        enter.__module__ = leave.__module__ = StageStep.__module__
        return [
            layer.register_forward_pre_hook(enter, with_kwargs=True),
            layer.register_forward_hook(leave),
        ]


@contextlib.contextmanager
def _recorded(models: list[torch.nn.Module], live: LiveBytes) -> Iterator[None]:
    from megatron.core.pipeline_parallel import combined_1f1b, schedules

    recorder = _Recorder(models, live)
    with contextlib.ExitStack() as undo:
        for name, noted in {
            "forward_step": recorder.forward_step(schedules.forward_step),
            "backward_step": recorder.backward_step(schedules.backward_step),
        }.items():
            undo.enter_context(patched(schedules, name, noted))
        combined = recorder.combined_step(combined_1f1b.combined_forward_backward_step)
        undo.enter_context(patched(combined_1f1b, "combined_forward_backward_step", combined))
        layers = [
            pair
            for site in model_layers.block_sites(models)
            for pair in zip(site.block.layers, site.layers, strict=True)
        ]
        layers += [(site.layer, site.indices[0]) for site in model_layers.mtp_sites(models)]
        for layer, index in layers:
            for handle in recorder.watch(layer, index):
                undo.callback(handle.remove)
        yield
