"""Wraps every training step of a job, and ends the job after too many lost steps in a row.

A loop that cannot lose a training call has a guard of its own: running out of memory is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager

from megatron_autorecompute.errors import LostStepsError
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.runtime.oom_guard import (
    FAILED,
    FINE,
    SHORT,
    StepGuard,
    is_out_of_memory,
)

RAISED = 3
"""Outcome of a call that ended with an exception, on any rank: it shows nothing. As FINE, SHORT and
FAILED."""
WHY = "this training loop does not go on after a skipped update"

NOTCHES = 16
"""Number of notches from a stage's plan down to its leanest policy. After each lost step in a row
it goes down twice as many as after the one before."""
LOST_IN_A_ROW = NOTCHES.bit_length() + 1
"""Lost steps in a row that end the job; the last of them ran the leanest policy."""


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
        """The outcome of the last call: on the worst rank, once agreed, and on this one."""
        self.steps = 0
        """Training calls done."""
        self._is_short, self._on_end = is_short, on_end

    @contextmanager
    def step(self) -> Iterator[None]:
        """Guard one training call."""
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


def was_lost(guard: Guard, policy: RecomputePolicy, say: Callable[[str], None]) -> bool:
    """Whether a rank ran out of memory in the step that has just run; says so.

    Raises:
        LostStepsError: the steps before it were lost too, down to the leanest policy.
    """
    if guard.outcome != FAILED:
        return False
    if guard.lost_in_a_row == LOST_IN_A_ROW:
        raise LostStepsError(
            f"The last {LOST_IN_A_ROW} steps ran out of memory and were lost, the last one "
            f"under {policy.format()}, and no policy needs less memory. "
            "Give the job more memory for each layer: a smaller --micro-batch-size, more "
            "tensor, context or pipeline parallel ranks, or fewer other things on the device."
        )
    say("recompute auto: out of memory; this step's update was skipped.")
    return True


def notches(guard: Guard) -> int:
    """How many notches to go down: twice as many after every further lost step in a row."""
    return int(min(NOTCHES, 2 ** max(0, guard.lost_in_a_row - 1)))
