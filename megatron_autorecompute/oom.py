"""Surviving a step in which one rank runs out of memory.

The other ranks of the pipeline wait for this rank's tensors, so it may not simply leave the step:
from where it failed it computes nothing more and sends zeros, and when all have finished, no rank
updates its weights. Megatron counts the step as skipped, as it does after an overflow.

That works between pipeline stages and data-parallel ranks. Ranks of a tensor, context or expert
parallel group meet inside the layers, where nothing can stand in: there the error is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from megatron_autorecompute import compat
from megatron_autorecompute.ranks import most

FINE, SHORT, FAILED = 0, 1, 2
"""How a step went on the worst rank: as planned; near the budget; out of memory, not counted."""


class StepGuard:
    """Carries the ranks through a step that fails on some of them; made alike on every rank.

    Args:
        chunks: this rank's model chunks.
        optimizer: Megatron's optimizer, whose `step` is where ranks agree on how the step went.
        is_short: whether this rank came near its budget in the step so far.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], optimizer: Any, is_short: Callable[[], bool]
    ) -> None:
        self.outcome = self.own_outcome = FINE
        self._failed = self._inside = False
        self._optimizer = optimizer
        self._is_short = is_short
        self._undo: list[Callable[[], None]] = []
        if not compat.ranks_meet_inside_layers():
            for chunk in chunks:
                self._replace(compat.unwrapped(chunk), "forward", self._guarded_forward)
            self._replace(schedules, "backward_step", self._guarded_backward)
        self._replace(optimizer, "step", self._agreed_step)

    def close(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one training step. Outside, as in an evaluation, an error is simply raised."""
        self.outcome = self.own_outcome = FINE
        self._failed, self._inside = False, True
        try:
            yield
        finally:
            self._failed = self._inside = False

    def _replace(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        held = vars(owner).get(name)
        setattr(owner, name, around(getattr(owner, name)))
        self._undo.append(
            lambda: delattr(owner, name) if held is None else setattr(owner, name, held)
        )

    def _guarded_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        like: dict[str, Any] = {}

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not self._failed:
                try:
                    output = original(*args, **kwargs)
                    like.update(size=output.shape, dtype=output.dtype, device=output.device)
                    return output
                except torch.OutOfMemoryError:
                    if not like or not self._inside:
                        raise  # before the very first forward nothing is known of its output
                    self._fail()
            return torch.zeros(**like, requires_grad=True)

        return forward

    def _guarded_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward_step(input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._failed:
                try:
                    return original(input_tensor, *args, **kwargs)
                except torch.OutOfMemoryError:
                    if not self._inside:
                        raise
                    self._fail()
            return _zeros_like(input_tensor)

        return backward_step

    def _fail(self) -> None:
        self._failed = True
        compat.leave_interrupted_checkpoint()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _agreed_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self.own_outcome = FAILED if self._failed else SHORT if self._is_short() else FINE
            self.outcome = most(self.own_outcome)
            if self.outcome == FAILED:
                self._optimizer.zero_grad()
                # What Megatron's train_step reads: no success, no gradient norm, no zeros counted.
                return False, None, None
            return original(*args, **kwargs)

        return step


def _zeros_like(tensors: Any) -> Any:
    if isinstance(tensors, (list, tuple)):
        return [_zeros_like(tensor) for tensor in tensors]
    return None if tensors is None else torch.zeros_like(tensors)
