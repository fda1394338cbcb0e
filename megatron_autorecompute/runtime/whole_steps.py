"""Whole measuring steps, as Megatron's own timers and torch's own statistics saw them.

Layer times come from elsewhere (`probe`); what is read here stands beside their sum, and what it
shows above it is the stage's residual.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_autorecompute.planner.planner import Planner
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import MeasuredStep, RankStep, covers

FORWARD, BACKWARD, OPTIMIZER = "forward-compute", "backward-compute", "optimizer"
"""Megatron's names of the timers that are read."""
MOST_TIMERS_LEVEL = 2
"""Of Megatron's `--timing-log-level`: every timer runs."""


@contextmanager
def running(timers: Any | None) -> Iterator[dict[str, float]]:
    """Megatron's timers of every level around a step.

    Their level is raised for this step alone, as at level 2 they synchronise every microbatch.

    Args:
        timers: Megatron's `Timers`, or None where the job has none.

    Yields:
        After the step, ms by name of each timer above that ran in it; nothing before.
    """
    took_ms: dict[str, float] = {}
    if timers is None:
        yield took_ms
        return
    level, timers._log_level = timers._log_level, MOST_TIMERS_LEVEL
    before_s = {name: timer.active_time() for name, timer in timers._timers.items()}
    try:
        yield took_ms
        for name in (FORWARD, BACKWARD, OPTIMIZER):
            timer = timers._timers.get(name)
            ran_s = 0.0 if timer is None else timer.active_time() - before_s.get(name, 0.0)
            if ran_s > 0:
                took_ms[name] = ran_s * 1e3
    finally:
        timers._log_level = level
        # A timer that exists is used whatever the level, and would synchronise for ever.
        for name in set(timers._timers) - set(before_s):
            del timers._timers[name], timers._log_levels[name]


@dataclass(frozen=True, slots=True)
class WholeStep:
    """One measuring step on one rank."""

    iteration: int
    """As Megatron logs it."""
    policy: RecomputePolicy
    """What ran."""
    num_microbatches: int
    """Of the step."""
    seen: RankStep
    """The figures."""

    @property
    def compute_ms(self) -> float | None:
        """Forward and backward of all microbatches; None where a timer did not run."""
        forward_ms, backward_ms = self.seen.forward_compute_ms, self.seen.backward_compute_ms
        return None if forward_ms is None or backward_ms is None else forward_ms + backward_ms


def residuals_ms(planner: Planner, ranks: Sequence[Sequence[WholeStep]]) -> tuple[float, ...]:
    """What layers leave of one microbatch's time, for every stage: 0 where no timer ran.

    Args:
        planner: of a profile without such residuals.
        ranks: the steps that every rank saw, each rank at least one or all none.
    """
    by_stage: list[list[float]] = [[] for _ in range(planner.layout.num_stages)]
    costs = [planner.evaluate(step.policy).stages for step in ranks[0]]
    for steps in ranks:
        left = [
            step.compute_ms / step.num_microbatches - sum(own.forward_ms) - sum(own.backward_ms)
            for step, cost in zip(steps, costs, strict=True)
            for own in (cost[step.seen.stage],)
            if step.compute_ms is not None
        ]
        if left:
            by_stage[steps[0].seen.stage].append(statistics.median(left))
    return tuple(statistics.mean(values) if values else 0.0 for values in by_stage)


def covered(planner: Planner, steps: Sequence[WholeStep]) -> list[WholeStep]:
    """Steps of which every choice has a record: the last one measured may lack some."""
    return [step for step in steps if covers(planner.profile.kinds, step.policy)]


def median_step(ranks: Sequence[Sequence[WholeStep]]) -> MeasuredStep | None:
    """The step of median forward and backward time on the slowest rank, as every rank saw it."""
    steps = list(zip(*ranks, strict=True))
    if not steps:
        return None
    slowest_ms = [max(step.compute_ms or 0.0 for step in by_rank) for by_rank in steps]
    chosen = steps[slowest_ms.index(statistics.median_low(slowest_ms))]
    return MeasuredStep(
        iteration=chosen[0].iteration,
        recompute_policy=chosen[0].policy.format(),
        num_microbatches=chosen[0].num_microbatches,
        ranks=tuple(step.seen for step in chosen),
    )
