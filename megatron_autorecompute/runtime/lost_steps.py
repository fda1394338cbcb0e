"""Steps that are lost: how many a job may lose, and how far each takes a plan down."""

from __future__ import annotations

from collections.abc import Callable

from megatron_autorecompute.errors import LostStepsError
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.runtime.call_guard import Guard
from megatron_autorecompute.runtime.oom_guard import FAILED

NOTCHES = 16
"""Number of notches from a stage's plan down to its leanest policy. After each lost step in a row
it goes down twice as many as after the one before."""
LOST_IN_A_ROW = NOTCHES.bit_length() + 1
"""Lost steps in a row that end the job; the last of them ran the leanest policy."""


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
