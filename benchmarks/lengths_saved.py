"""What plans by length can save: one for the cap, one for each call, one for each microbatch.

    python -m benchmarks.lengths_saved PROFILE JOB [--budget-gib 70]

PROFILE is what `megatron-autorecompute estimate JOB` wrote, of a job of one pipeline stage with
max_tokens_per_microbatch. 64 calls are simulated, in several ways of packing. Ranks of a call share
a policy: with one for each microbatch, the ranks of an expert-parallel group that of the group's
longest one at the same place. A call takes as long as its slowest rank. All times are the model's.
"""

from __future__ import annotations

import argparse
import json
import random
from functools import cache
from pathlib import Path

from megatron_autorecompute.lines import Microbatch
from megatron_autorecompute.meta.job import Job, load_job
from megatron_autorecompute.meta.lengths import CALLS, lengths_of, packed
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.lengths import profile_at
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.search.buckets import bucket
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import solve
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.units import GIB

RESULTS = Path(__file__).parent / "results" / "lengths_saved.json"


class Times:
    """Times of one microbatch on a stage of its own, by length and by the length planned for."""

    def __init__(self, profile: Profile, budget: int, microbatches: int) -> None:
        self._profile, self._budget, self._microbatches = profile, budget, microbatches
        self._layout = Layout.from_flags(num_layers=profile.model.num_layers, pp=1)

    @cache  # noqa: B019  # as long as the script
    def problem(self, tokens: int) -> Problem:
        longest = Microbatch.longest(tokens)
        profile = profile_at(self._profile, longest, tokens * self._microbatches)
        return Problem(profile, self._layout, Schedule(1, 1, self._microbatches))

    @cache  # noqa: B019
    def policy(self, tokens: int) -> RecomputePolicy:
        return solve(self.problem(tokens).at(self._budget)).policy

    @cache  # noqa: B019
    def ms(self, tokens: int, planned: int) -> float:
        cost = self.problem(tokens).cost(self.policy(planned))
        return cost.step_ms / self._microbatches


def calls(job: Job, per_microbatch: int | None) -> list[list[list[int]]]:
    """Of every call and rank: tokens of each microbatch; packed to the cap, or so many samples."""
    lengths, weights = lengths_of(job)
    cap, split = job.max_tokens_per_microbatch, job.size("context")
    draw, own = random.Random(0), job.global_batch_size // job.data_parallel

    def one() -> list[int]:
        samples = draw.choices(lengths, weights, k=own)
        if per_microbatch is None:
            found = packed(samples, cap * split)
        else:
            groups = range(0, own, per_microbatch)
            found = [sum(samples[at : at + per_microbatch]) for at in groups]
        return [-(-tokens // split) for tokens in found]

    return [[one() for _ in range(job.data_parallel)] for _ in range(CALLS)]


def saved(job: Job, times: Times, ways: list[list[list[int]]]) -> dict[str, float]:
    """Shares of the time of one plan, for the longest microbatch of all calls."""
    cap = job.max_tokens_per_microbatch
    top = bucket(max(tokens for ranks in ways for rank in ranks for tokens in rank), cap)
    group = job.size("expert") // job.size("tensor") or 1
    took = {"one plan": 0.0, "by call": 0.0, "by microbatch": 0.0}
    tokens = 0
    for ranks in ways:
        longest = bucket(max(tokens for rank in ranks for tokens in rank), cap)

        def planned(rank: int, at: int, ranks: list[list[int]] = ranks) -> int:
            first = rank // group * group
            peers = ranks[first : first + group]
            return bucket(max(peer[at] for peer in peers if at < len(peer)), cap)

        def slowest(length, ranks: list[list[int]] = ranks) -> float:
            return max(
                sum(times.ms(tokens, length(number, at)) for at, tokens in enumerate(rank))
                for number, rank in enumerate(ranks)
            )

        took["one plan"] += slowest(lambda *_: top)
        took["by call"] += slowest(lambda *_, longest=longest: longest)
        took["by microbatch"] += slowest(planned)
        tokens += sum(map(sum, ranks))
    mean = tokens / sum(len(rank) for ranks in ways for rank in ranks) / top
    whole = took.pop("one plan")
    return {"mean fill": mean, **{how: 1 - ms / whole for how, ms in took.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("profile", type=Path)
    parser.add_argument("job", type=Path)
    parser.add_argument("--budget-gib", type=float, default=70.0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args()
    job, profile = load_job(asked.job), Profile.load(asked.profile)
    if job.size("pipeline") > 1:
        parser.error("several stages: give a job of one.")
    times = Times(profile, int(asked.budget_gib * GIB), 4)
    found = {
        "job": job.name,
        "budget_gib": asked.budget_gib,
        "first fit to the cap": saved(job, times, calls(job, None)),
        "one sample each": saved(job, times, calls(job, 1)),
    }
    text = json.dumps(found, indent=1)
    print(text)
    asked.output.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
