"""Whole measuring steps, in Megatron's own timers (`compat.timers`) and torch's own statistics.

`probe` measures layer times. The times read here are shown beside the sum of layers, and the
difference is the stage's residual.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import MeasuredStep, RankStep, covers
from megatron_autorecompute.runtime.samples import lower_quartile


@dataclass(frozen=True, slots=True)
class WholeStep:
    """One measuring step on one rank."""

    iteration: int
    """The iteration as Megatron logs it."""
    policy: RecomputePolicy
    """What ran."""
    num_microbatches: int
    """The number of microbatches of the step."""
    seen: RankStep
    """The figures."""

    @property
    def compute_ms(self) -> float | None:
        """Forward plus backward of all microbatches; None if a timer did not run."""
        forward_ms, backward_ms = self.seen.forward_compute_ms, self.seen.backward_compute_ms
        return None if forward_ms is None or backward_ms is None else forward_ms + backward_ms


def residuals_ms(problem: Problem, ranks: Sequence[Sequence[WholeStep]]) -> tuple[float, ...]:
    """Time of one microbatch that layers do not explain, for every stage; 0 if no timer ran.

    Of each policy's steps the lower quartile counts, and of policies the one that leaves least:
    what disturbs steps makes them longer. It is never negative, because no step takes less than its
    layers.

    Args:
        problem: the problem of a profile whose residual times are 0.
        ranks: the steps of every rank: at least one each, or none on all.
    """
    by_stage: list[list[float]] = [[] for _ in range(problem.layout.num_stages)]
    costs = {policy: problem.costs.met_ms(policy) for policy in {s.policy for s in ranks[0]}}
    for steps in ranks:
        left: dict[RecomputePolicy, list[float]] = defaultdict(list)
        for step in steps:
            if step.compute_ms is not None:
                took_ms = step.compute_ms / step.num_microbatches
                left[step.policy].append(took_ms - costs[step.policy][step.seen.stage])
        if left:
            by_stage[steps[0].seen.stage].append(min(map(lower_quartile, left.values())))
    return tuple(max(0.0, statistics.mean(values)) if values else 0.0 for values in by_stage)


def covered(problem: Problem, steps: Sequence[WholeStep]) -> list[WholeStep]:
    """The steps whose choices all have a record; the last step may have other choices."""
    return [step for step in steps if covers(problem.profile.kinds, step.policy)]


def median_step(ranks: Sequence[Sequence[WholeStep]]) -> MeasuredStep | None:
    """The step of median time (forward plus backward, slowest rank), with all ranks' figures."""
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
