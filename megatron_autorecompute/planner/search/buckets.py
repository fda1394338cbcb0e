"""Lengths for which a loop has plans, and a plan for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_autorecompute.lines import Microbatch
from megatron_autorecompute.planner.cost.lengths import profile_at
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import try_solve

BUCKETS = (0.25, 0.375, 0.5, 0.75, 1.0)
"""Shares of the cap for which there are plans."""
ABOVE = 0.25
"""The step of plans above the cap, as a share of the cap."""
LARGEST = "calls by tokens of their largest microbatch"
"""A fact of the model: shares of calls, by bucket."""
EXAMPLES = "tokens of each microbatch in some calls"
"""A fact of the model: a text of numbers for each."""


def bucket(tokens: int, cap: int) -> int:
    """The length to plan for: the smallest share of the cap that is enough, or steps above it."""
    shares = (math.ceil(cap * share) for share in BUCKETS)
    inside = next((each for each in shares if each >= tokens), None)
    step = max(1, math.ceil(cap * ABOVE))
    return cap + math.ceil((tokens - cap) / step) * step if inside is None else inside


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """A plan for calls whose largest microbatch has at most so many tokens."""

    tokens: int
    """The tokens on a rank."""
    share: float | None
    """The share of all calls; None if their lengths are not known."""
    policy: str | None
    """The policy; None: even the leanest policy needs more than the budget."""
    peak_bytes: int
    """The peak of the fullest stage."""
    step_ms: float
    """The step if every microbatch is that long; 0 without a policy."""
    saved: float
    """Share of the step that it saves against the plan for the cap."""


def bucket_plans(problem: Problem) -> list[BucketPlan]:
    """A plan for every bucket.

    Args:
        problem: the problem of a profile with lines, at the cap.
    """
    cap = problem.profile.parallelism.seq_length // problem.profile.parallelism.context_parallel
    facts: Mapping[str, float] | None = problem.profile.model.facts.get(LARGEST)
    known = {} if facts is None else {int(tokens): share for tokens, share in facts.items()}
    tokens = sorted({*known, *(math.ceil(cap * share) for share in BUCKETS)})
    at_cap = _at_length(problem, cap)
    found = try_solve(at_cap)
    one = None if found is None else found.policy
    plans = []
    for each in tokens:
        own = _at_length(problem, each)
        share = None if facts is None else known.get(each, 0.0)
        solution = try_solve(own)
        if solution is None:
            least = max(choice.peak_bytes for choice in own.stages.leanest)
            plans.append(BucketPlan(each, share, None, least, 0.0, 0.0))
            continue
        cost = own.cost(solution.policy)
        alone_ms = cost.step_ms if one is None else own.cost(one).step_ms
        saved = max(0.0, 1 - cost.step_ms / alone_ms) if each < cap else 0.0
        text = solution.policy.format()
        plans.append(BucketPlan(each, share, text, cost.peak_high_bytes, cost.step_ms, saved))
    return plans


def _at_length(problem: Problem, tokens: int) -> Problem:
    longest = Microbatch.longest(tokens)
    calls = problem.schedule.num_microbatches
    return replace(problem, profile=profile_at(problem.profile, longest, tokens * calls))
