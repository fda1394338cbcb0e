"""Survives a step in which one rank runs out of memory.

The other ranks wait for this rank's tensors, so it must not simply leave the step. After the
failure it computes nothing more and sends zeros. At the places of its remaining forwards and
backwards it enters the collectives that they would have entered. Before gradients are made final,
each rank contributes one number, and all agree that the step is lost: no weight, optimizer state or
buffer changes. Megatron counts the step as skipped, as after an overflow.

This works between pipeline stages and between data-parallel ranks. With collectives inside layers
(such as tensor parallelism) no stand-in is possible: the error is raised and ends the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup

from megatron_autorecompute.compat import lost_step, model_layers
from megatron_autorecompute.compat.untyped import Chunk
from megatron_autorecompute.patched import Temporary, patched, replaced
from megatron_autorecompute.runtime.ranks import all_reduce_max

FINE, SHORT, FAILED = 0, 1, 2
"""Outcome of a step on the worst rank: as planned; above the budget; out of memory, step lost."""


class StepGuard:
    """Lets all ranks go on after a step that fails on some of them; every rank makes one.

    In its first step it learns about forwards and backwards: which collectives they enter, what
    they return, which buffers they change. An error during that step is raised.

    Args:
        chunks: this rank's model chunks.
        optimizer: Megatron's optimizer.
        is_short: whether this rank went above its budget, or its allocator retried, in the step.
        on_end: called before an out-of-memory error ends the job, with the reason why the other
            ranks cannot go on.
        why_not: a reason why an out-of-memory error must be raised in any case; None if there is
            none.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        is_short: Callable[[], bool],
        on_end: Callable[[str], None] = lambda why: None,
        why_not: str | None = None,
    ) -> None:
        self.outcome = self.own_outcome = FINE
        self.lost_in_a_row = 0
        """How many of the last steps were lost, without a completed one between them."""
        self.steps = 0
        """Training steps done, lost ones included."""
        self._chunks: list[Chunk] = list(chunks)
        self._optimizer = optimizer
        self._is_short = is_short
        self._on_end = on_end
        self._config: Any = getattr(chunks[0], "config", None)
        self._inside = self._failed = self._agreed = self._knows = False
        self._meetings = Meetings()
        self._why_not = why_not
        if why_not is None and self._config is not None:
            self._why_not = lost_step.why_no_stand_in(self._config)
        self._buffers = _MovingBuffers(chunks)
        self._loss_groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._syncs = [lost_step.BucketSyncs(chunk, self._meetings.elsewhere) for chunk in chunks]
        self._returned: dict[int, _Output] = {}
        """The output of each chunk's last forward, or of an earlier one of equal sizes."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Guard one training step. Outside of it, as in an evaluation, errors are simply raised."""
        self.outcome = self.own_outcome = FINE
        self._inside, self._failed, self._agreed = True, False, False
        finalize = getattr(self._config, "finalize_model_grads_func", None)
        if finalize is not None:  # a training loop sets it when it starts
            agreed = Temporary(self._agreed_finalize(finalize), finalize)
            self._config.finalize_model_grads_func = agreed
        if self._why_not is None:
            self._buffers.keep()
        try:
            with self._guarded(), nullcontext() if self._knows else self._meetings.watched():
                yield
            if not self._agreed:
                self._agree()
        except Exception as error:  # of many types: torch, cuBLAS and NCCL each raise their own
            if is_out_of_memory(error):
                self._on_end(self._why_not or "it happened outside forward and backward")
            raise
        finally:
            self._inside = self._failed = False
            if finalize is not None:
                self._config.finalize_model_grads_func = finalize
        self.lost_in_a_row = self.lost_in_a_row + 1 if self.outcome == FAILED else 0
        self.steps += 1

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Replace functions of the model, the optimizer and Megatron's schedule for one step."""
        with replaced() as replace:
            replace(self._optimizer, "step", self._agreed_step)
            if self._why_not is None:
                for number, chunk in enumerate(self._chunks):
                    self._syncs[number].note(replace)
                    replace(chunk, "forward", partial(self._guarded_forward, number))
                backward = self._guarded_backward
                lost_step.replace_backward(replace, self._chunks, self._config, backward)
            yield

    # --- on a rank that runs out of memory --------------------------------------------------------

    def _can_stand_in(self) -> bool:
        """Whether this rank may go on with zeros; otherwise the error is raised."""
        if not self._knows:
            self._why_not = "in the first step it is not known yet where ranks communicate"
        elif self._why_not is None and any(syncs.lacks_order for syncs in self._syncs):
            self._why_not = "no step has shown yet in which order parameters are gathered"
        return self._why_not is None

    def _fail(self) -> None:
        self._failed = True
        lost_step.leave_interrupted_checkpoint(self._chunks)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _guarded_forward(self, number: int, original: Callable[..., Any]) -> Callable[..., Any]:
        model = model_layers.unwrapped(self._chunks[number])
        block = getattr(model, "decoder", None)

        def forward(*args: Any, **named: Any) -> Any:
            last = self._returned.get(number)
            if not self._inside:
                return original(*args, **named)
            tokens = named.get("input_ids", args[0] if args else None)
            received = getattr(block, "input_tensor", None)
            sizes = getattr(tokens, "shape", None), getattr(received, "shape", None)
            if not self._failed:
                self._meetings.inside = True
                try:
                    output = original(*args, **named)
                    if last is None or last.sizes != sizes or sizes == (None, None):
                        self._returned[number] = _Output(sizes, _zeros_of(output))
                    return output
                except torch.OutOfMemoryError:
                    if not self._can_stand_in():
                        raise
                finally:
                    self._meetings.inside = False
                self._fail()
            assert last is not None, "a forward fails before there was one"
            self._syncs[number].gather_owed()
            zeros = last.stand_in(model, sizes)
            if zeros is None:
                self._why_not = (
                    f"what the model returns for {sizes} is not known, only {last.sizes}"
                )
                raise torch.OutOfMemoryError("A step that ran out of memory cannot be finished.")
            return zeros

        return forward

    def _guarded_backward(self, number: int, inputs: Any, original: Callable[[], Any]) -> Any:
        if not self._inside:
            return original()
        if not self._failed:
            self._meetings.inside = True
            try:
                return original()
            except torch.OutOfMemoryError:
                if not self._can_stand_in():
                    raise
            finally:
                self._meetings.inside = False
            self._fail()
            lost_step.stop_interrupted_timer(self._config)
        self._syncs[number].reduce_owed()
        return _zeros_like(inputs)

    # --- on every rank ----------------------------------------------------------------------------

    def _agree(self, *, finalizes: bool = False) -> None:
        """Exchange outcomes: the worst rank's counts. All ranks call it at the same place."""
        self.own_outcome = FAILED if self._failed else SHORT if self._is_short() else FINE
        (self.outcome,) = all_reduce_max(self.own_outcome)
        self._agreed = True
        if self.outcome == FAILED:
            self._abandon(finalizes)
        elif not self._knows:
            self._learn()

    def _learn(self) -> None:
        """Keep what the first step has shown, after all its passes."""
        self._knows = True
        self._buffers.find_moved()
        self._loss_groups = lost_step.loss_groups()
        if self._meetings.found and self._why_not is None:
            self._why_not = f"ranks communicate inside layers: {', '.join(self._meetings.found)}"

    def _agreed_finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def finalize_model_grads(*args: Any, **named: Any) -> Any:
            if not self._inside:  # called through a shallow copy of the config
                return original(*args, **named)
            self._agree(finalizes=True)
            if self.outcome == FAILED:
                return None
            result = original(*args, **named)
            for syncs in self._syncs:
                syncs.finished()
            return result

        return finalize_model_grads

    def _agreed_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **named: Any) -> Any:
            if not self._agreed:
                self._agree()
            if self.outcome == FAILED:
                self._optimizer.zero_grad()
                # For Megatron's train_step: no success, no gradient norm, no count of zeros.
                return False, None, None
            return original(*args, **named)

        return step

    def _abandon(self, finalizes: bool) -> None:
        """Wait for the collectives that all have entered, and restore the state before the step."""
        for syncs in self._syncs:
            syncs.abandon(finalizes)
        self._buffers.put_back()
        if self._config is not None:
            lost_step.forget_lost_step(self._config, self._chunks)
        for tracker, groups in self._loss_groups:
            tracker.update({name: group for name, group in groups.items() if group is not None})


Sizes = tuple[torch.Size | None, torch.Size | None]
"""Sizes of a microbatch's tokens, and of the hidden states from the previous stage, or None."""


@dataclass(frozen=True, slots=True)
class _Output:
    """What a forward returned for a microbatch of certain sizes."""

    sizes: Sizes
    zeros: Callable[[], Any]

    def stand_in(self, model: torch.nn.Module, sizes: Sizes) -> Any:
        """Zeros in the form of the output for other sizes; None if that form is not known."""
        zeros = self.zeros()
        if sizes == self.sizes:
            return zeros
        if isinstance(zeros, torch.Tensor):
            usual = lost_step.output_shape(model, *self.sizes, zeros.shape)
            shape = lost_step.output_shape(model, *sizes, zeros.shape)
            if usual == zeros.shape and shape is not None:
                return zeros.new_zeros(shape, requires_grad=zeros.requires_grad)
        return None


class _MovingBuffers:
    """Buffers of a model that a forward or backward changes, such as running statistics."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._places = [
            (module._buffers, name)
            for chunk in chunks
            for module in chunk.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._kept: list[torch.Tensor] | None = None

    def keep(self) -> None:
        """Remember, before a step, what the buffers hold."""
        if self._kept is None:
            self._kept = [buffer.clone() for buffer in self._now()]
        elif self._kept:
            torch._foreach_copy_(self._kept, self._now())

    def find_moved(self) -> None:
        """Keep, from the end of this step on, only the buffers that it has changed."""
        kept = self._kept or []
        moved = [n for n, now in enumerate(self._now()) if not torch.equal(now, kept[n])]
        self._places = [self._places[n] for n in moved]
        self._kept = [kept[n] for n in moved]

    def put_back(self) -> None:
        """Restore the buffers after a lost step."""
        for now, kept in zip(self._now(), self._kept or [], strict=True):
            now.copy_(kept)

    def _now(self) -> list[torch.Tensor]:
        return [cast(torch.Tensor, buffers[name]) for buffers, name in self._places]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device has no memory left; also for cuBLAS and NCCL."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in said or "_ALLOC_FAILED" in said)
    )


def _zeros_of(output: Any) -> Callable[[], Any]:
    """A function that makes zeros in the form of a model's output: one tensor (GPT), several
    (BERT), a dictionary, a dataclass. Other outputs are not kept, because they could hold all
    activations."""
    if isinstance(output, torch.Tensor):
        shape, dtype, device = output.shape, output.dtype, output.device
        trained = output.is_floating_point()
        return lambda: torch.zeros(shape, dtype=dtype, device=device, requires_grad=trained)
    if isinstance(output, Mapping):
        values = {name: _zeros_of(value) for name, value in output.items()}
        return lambda: {name: make() for name, make in values.items()}
    if isinstance(output, (list, tuple)):
        parts = [_zeros_of(part) for part in output]
        return lambda: tuple(make() for make in parts)
    if is_dataclass(output):
        attributes, kind = _zeros_of(vars(output)), cast(Callable[..., Any], type(output))
        return lambda: kind(**attributes())
    return lambda: None


def _zeros_like(tensors: Any) -> Any:
    if isinstance(tensors, (list, tuple)):
        return [_zeros_like(tensor) for tensor in tensors]
    return None if tensors is None else torch.zeros_like(tensors)


_ENTER = ("all", "reduce", "broadcast", "barrier", "gather", "scatter", "send", "recv")
"""Parts of the names of a process group's methods that enter a collective. Collectives entered from
C++ are not seen: functional collectives, and those of other libraries' transports."""


class Meetings:
    """Collectives of several ranks that are entered while `inside` is set.

    with meetings.watched():
        meetings.inside = True
        layer(hidden_states)
        meetings.inside = False
    meetings.found  # ["allreduce of 4 ranks"]
    """

    def __init__(self) -> None:
        self.inside = False
        self.found: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch every call of a process group's methods in the block."""
        entering = [name for name in vars(ProcessGroup) if any(part in name for part in _ENTER)]
        with ExitStack() as undo:
            for name in entering:
                noted = self._noted(name, getattr(ProcessGroup, name))
                undo.enter_context(patched(ProcessGroup, name, noted))
            yield

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Do not count collectives in the block, although `inside` is set."""
        was, self.inside = self.inside, False
        try:
            yield
        finally:
            self.inside = was

    def _noted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if self.inside and group.size() > 1:
                entered = f"{name.strip('_')} of {group.size()} ranks"
                if entered not in self.found:
                    self.found.append(entered)
            return original(group, *args, **kwargs)

        return method
