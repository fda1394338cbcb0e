"""Surrounds training calls of a loop that cannot lose one: running out of memory is raised."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager

from megatron_autorecompute.runtime.oom_guard import FINE, SHORT, StepGuard, is_out_of_memory

RAISED = 3
"""Outcome of a call that ended with an exception, on any rank: it shows nothing. As FINE, SHORT and
FAILED."""
WHY = "this training loop does not go on after a skipped update"


class CallGuard:
    """Counts calls and notes which were short of memory; it replaces nothing in model or optimizer.

    The outcome of a call is agreed before the next one (`Calls.agree`), so a call itself has no
    communication of ours.

    Args:
        is_short: whether this rank went above its budget, or its allocator retried, in the call.
        on_end: called with the reason before an out-of-memory error is raised.
    """

    lost_in_a_row = 0
    """No call is ever lost."""

    def __init__(self, is_short: Callable[[], bool], on_end: Callable[[str], None]) -> None:
        self.outcome = self.own_outcome = FINE
        """Of the last call: on the worst rank, once agreed, and on this one."""
        self.steps = 0
        """Training calls done."""
        self._is_short, self._on_end = is_short, on_end

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround one training call."""
        self.outcome = self.own_outcome = FINE
        try:
            yield
        except Exception as error:  # of many types: torch, cuBLAS and NCCL each raise their own
            if is_out_of_memory(error):
                self._on_end(WHY)
            raise
        finally:
            self.own_outcome = SHORT if self._is_short() else FINE
        self.steps += 1


Guard = StepGuard | CallGuard
"""What surrounds every step of a job."""
Step = AbstractContextManager[None]
"""A context around one training step."""


def until_done(guard: Guard, step: Callable[[], Step]) -> Generator[Step, None, None]:
    """A step, made anew as long as it ends with an exception that the training loop survives."""
    yield step()
    while guard.outcome == RAISED:
        yield step()
