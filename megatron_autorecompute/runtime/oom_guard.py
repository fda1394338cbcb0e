"""Surrounds every training step of a job, and survives one in which one rank runs out of memory.

The other ranks wait for this rank's tensors, so it must not simply leave the step. After the
failure it computes nothing more and sends zeros. At the places of its remaining forwards and
backwards it enters the collectives that they would have entered. Before gradients are made final,
each rank contributes one number, and all agree that the step is lost: no weight, optimizer state or
buffer changes. Megatron counts the step as skipped, as after an overflow.

This works between pipeline stages and between data-parallel ranks. With collectives inside layers
(such as tensor parallelism) no stand-in is possible: the error is raised and ends the job. So it is
in a loop that does not go on after a skipped update, which has a `CallGuard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import is_dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from megatron_autorecompute.compat import lost_step, model_layers
from megatron_autorecompute.compat.untyped import Chunk
from megatron_autorecompute.errors import LostStepsError
from megatron_autorecompute.patched import replaced
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.runtime.ranks import all_reduce_max

FINE, SHORT, FAILED, RAISED = 0, 1, 2, 3
"""Outcome of a step on the worst rank: as planned; above the budget; out of memory, step lost;
ended with an exception that the training loop survives, so that it shows nothing."""
NOTCHES = 16
"""Number of notches from a stage's plan down to its leanest policy. After each lost step in a row
it goes down twice as many as after the one before."""
LOST_IN_A_ROW = NOTCHES.bit_length() + 1
"""Lost steps in a row that end the job; the last of them ran the leanest policy."""
Step = AbstractContextManager[None]
"""A context around one training step."""


class CallGuard:
    """Counts steps and notes which were short of memory; it replaces nothing in model or optimizer.

    The outcome of a call is agreed before the next one (`Calls.agree`), so a call itself has no
    communication of ours.

    Args:
        is_short: whether this rank went above its budget, or its allocator retried, in the step.
        on_end: called before an out-of-memory error ends the job, with the reason why the other
            ranks cannot go on.
    """

    def __init__(
        self, is_short: Callable[[], bool], on_end: Callable[[str], None] = lambda why: None
    ) -> None:
        self.outcome = self.own_outcome = FINE
        """The outcome of the last step: on the worst rank, once agreed, and on this one."""
        self.lost_in_a_row = 0
        """How many of the last steps were lost, without a completed one between them."""
        self.steps = 0
        """Training steps done, lost ones included."""
        self._is_short, self._on_end = is_short, on_end

    @contextmanager
    def step(self) -> Iterator[None]:
        """Guard one training step. Outside of it, as in an evaluation, errors are simply raised."""
        self.outcome = self.own_outcome = FINE
        try:
            with self._guarded():
                yield
        except Exception as error:  # of many types: torch, cuBLAS and NCCL each raise their own
            if is_out_of_memory(error):
                self._on_end(self._why_it_ends())
            raise
        self.lost_in_a_row = self.lost_in_a_row + 1 if self.outcome == FAILED else 0
        self.steps += 1

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.own_outcome = SHORT if self._is_short() else FINE

    def _why_it_ends(self) -> str:
        return "this training loop does not go on after a skipped update"


class StepGuard(CallGuard):
    """Lets all ranks go on after a step that fails on some of them; every rank makes one.

    In its first step it learns what forwards return, and in which order Megatron reduces gradients.
    An error during that step is raised.

    Args:
        chunks: this rank's model chunks.
        optimizer: Megatron's optimizer.
        is_short: as `CallGuard`.
        on_end: as `CallGuard`.
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
        super().__init__(is_short, on_end)
        self._chunks: list[Chunk] = list(chunks)
        self._optimizer = optimizer
        self._config: Any = getattr(chunks[0], "config", None)
        self._failed = self._agreed = self._knows = False
        self._why_not = why_not or lost_step.why_no_stand_in(self._config, self._chunks)
        models = map(model_layers.unwrapped, chunks)
        self._buffers = [buffer for model in models for buffer in model.buffers()]
        self._buffers_before: list[torch.Tensor] = []
        """What a forward or backward may change, such as running statistics, before the step."""
        self._loss_groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._syncs = [lost_step.BucketSyncs(chunk) for chunk in chunks]
        self._returned: dict[int, tuple[Sizes, Callable[[], Any]]] = {}
        """What each chunk's last forward got, and zeros in the form of what it returned."""

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Replace functions of the model, the optimizer and Megatron's schedule for one step."""
        self._failed = self._agreed = False
        with replaced() as replace:
            replace(self._optimizer, "step", self._agreed_step)
            if getattr(self._config, "finalize_model_grads_func", None) is not None:
                replace(self._config, "finalize_model_grads_func", self._agreed_finalize)
            if self._why_not is None:
                self._keep_buffers()
                for number, chunk in enumerate(self._chunks):
                    self._syncs[number].note(replace)
                    replace(chunk, "forward", partial(self._guarded_forward, number))
                backward = self._guarded_backward
                lost_step.replace_backward(replace, len(self._chunks), self._config, backward)
            yield
        if not self._agreed:
            self._agree()

    def _why_it_ends(self) -> str:
        return self._why_not or "it happened outside forward and backward"

    # --- on a rank that runs out of memory --------------------------------------------------------

    def _fail(self) -> bool:
        """Whether this rank goes on with zeros; otherwise the error is raised."""
        if not self._knows:
            self._why_not = "in the first step it is not known yet what is to be sent"
        elif any(syncs.lacks_order for syncs in self._syncs):
            self._why_not = "no step has shown yet in which order parameters are gathered"
        if self._why_not is not None:
            return False
        self._failed = True
        lost_step.leave_interrupted_checkpoint(self._chunks)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return True

    def _guarded_forward(self, number: int, original: Callable[..., Any]) -> Callable[..., Any]:
        model = model_layers.unwrapped(self._chunks[number])
        block = getattr(model, "decoder", None)

        def forward(*args: Any, **named: Any) -> Any:
            tokens = named.get("input_ids", args[0] if args else None)
            received = getattr(block, "input_tensor", None)
            sizes = getattr(tokens, "shape", None), getattr(received, "shape", None)
            if not self._failed:
                try:
                    output = original(*args, **named)
                    if number not in self._returned or self._returned[number][0] != sizes:
                        self._returned[number] = sizes, _zeros_of(output)
                    return lost_step.of_chunk(output, number)
                except torch.OutOfMemoryError:
                    if not self._fail():
                        raise
            self._syncs[number].gather_owed()
            return lost_step.of_chunk(self._stand_in(number, model, sizes), number)

        return forward

    def _stand_in(self, number: int, model: torch.nn.Module, sizes: Sizes) -> Any:
        """Zeros in the form of a chunk's output."""
        last, make = self._returned[number]
        zeros = make()
        if sizes == last:
            return zeros
        shape = lost_step.output_shape(model, *sizes, zeros)
        if shape is None or lost_step.output_shape(model, *last, zeros) != zeros.shape:
            self._why_not = f"what the model returns for {sizes} is not known, only {last}"
            raise torch.OutOfMemoryError("A step that ran out of memory cannot be finished.")
        return zeros.new_zeros(shape, requires_grad=zeros.requires_grad)

    def _guarded_backward(self, number: int, inputs: Any, original: Callable[[], Any]) -> Any:
        if not self._failed:
            try:
                return original()
            except torch.OutOfMemoryError:
                if not self._fail():
                    raise
            lost_step.stop_interrupted_timer(self._config)
        self._syncs[number].reduce_owed()
        return tree_map_only(torch.Tensor, torch.zeros_like, inputs)

    # --- on every rank ----------------------------------------------------------------------------

    def _agree(self, *, finalizes: bool = False) -> None:
        """Exchange outcomes: the worst rank's counts. All ranks call it at the same place."""
        self.own_outcome = FAILED if self._failed else SHORT if self._is_short() else FINE
        (self.outcome,) = all_reduce_max(self.own_outcome)
        self._agreed = True
        if self.outcome == FAILED:
            self._abandon(finalizes)
        elif not self._knows:
            self._knows = True
            self._loss_groups = lost_step.loss_groups()

    def _agreed_finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def finalize_model_grads(*args: Any, **named: Any) -> Any:
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
        for now, before in zip(self._buffers, self._buffers_before, strict=False):
            now.copy_(before)
        if self._config is not None:
            lost_step.forget_lost_step(self._config, self._chunks)
        for tracker, groups in self._loss_groups:
            tracker.update({name: group for name, group in groups.items() if group is not None})

    def _keep_buffers(self) -> None:
        if self._buffers_before:
            torch._foreach_copy_(self._buffers_before, self._buffers)
        else:
            self._buffers_before = [buffer.clone() for buffer in self._buffers]


Sizes = tuple[torch.Size | None, torch.Size | None]
"""Sizes of a microbatch's tokens, and of the hidden states from the previous stage, or None."""


def say_if_lost(guard: CallGuard, policy: RecomputePolicy, say: Callable[[str], None]) -> None:
    """Say that a rank ran out of memory in the step that has just run, if one did.

    Raises:
        LostStepsError: the steps before it were lost too, down to the leanest policy.
    """
    if guard.outcome != FAILED:
        return
    if guard.lost_in_a_row == LOST_IN_A_ROW:
        raise LostStepsError(
            f"The last {LOST_IN_A_ROW} steps ran out of memory and were lost, the last one "
            f"under {policy.format()}, and no policy needs less memory. "
            "Give the job more memory for each layer: a smaller --micro-batch-size, more "
            "tensor, context or pipeline parallel ranks, or fewer other things on the device."
        )
    say("recompute auto: out of memory; this step's update was skipped.")


def notches(guard: CallGuard) -> int:
    """How many notches to go down: twice as many after every further lost step in a row."""
    return int(min(NOTCHES, 2 ** max(0, guard.lost_in_a_row - 1)))


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
    if is_dataclass(output):
        attributes, kind = _zeros_of(vars(output)), cast(Callable[..., Any], type(output))
        return lambda: kind(**attributes())
    leaves, form = tree_flatten(output)
    made = [_zeros(leaf) if isinstance(leaf, torch.Tensor) else lambda: None for leaf in leaves]
    return lambda: tree_unflatten([make() for make in made], form)


def _zeros(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    trained, kind = tensor.is_floating_point(), {"dtype": tensor.dtype, "device": tensor.device}
    return partial(torch.zeros, tensor.shape, requires_grad=trained, **kind)
