"""Random mixes of lengths in a loop with `attach`: results, budget and prediction in every call.

    python -m benchmarks.any_loop [--calls 500] [--only PP2]

Printed, and written as JSON beside what the file has of other jobs. Each job trains twice: with
`attach` and without. Both have the same microbatches: in every call another number of them, each of
another length. The bytes of every call are counted outside of what is judged, by a `LiveBytes` of
this script.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from examples.loops.small_gpt import MAX_TOKENS, SmallGPT, get_forward_backward_func
from megatron_autorecompute import attach
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from megatron_autorecompute.runtime.step_memory import static_bytes, tensors
from testing.predicted import predicted_peaks
from testing.ranks import run_ranks

RESULTS = Path(__file__).parent / "results" / "any_loop.json"
SHARES = (0.25, 0.5, 1.0)
"""Of the cap: the most tokens of a microbatch in short, middle and long calls."""


@dataclass(frozen=True)
class Job:
    name: str
    pp: int
    vpp: int | None
    ep: int
    budget_kib: int
    """Between what the leanest policy and none need."""
    says: bool = True
    """Whether the loop says the lengths of its next call."""
    layers: int = 6
    microbatches: int = 6
    """The most in a call."""

    @property
    def ranks(self) -> int:
        return max(self.pp, self.ep)


JOBS = (
    Job("PP1", 1, None, 1, 13_000),
    Job("PP1, lengths not said", 1, None, 1, 13_000, says=False),
    Job("PP2", 2, None, 1, 7_900),
    Job("PP2, VPP3", 2, 3, 1, 8_600),
    Job("EP2", 1, None, 2, 16_000),
)


@dataclass(frozen=True)
class Call:
    """What one rank saw of one call."""

    result: str
    """Digest of losses and gradients."""
    peak_bytes: int
    predicted_bytes: int | None
    """For the lengths of the call, and what its experts got; None while measuring."""
    bound_bytes: int | None
    """Of the plan."""
    policy: str


def lengths(job: Job, call: int) -> list[list[int]]:
    """Tokens of each microbatch, for every data-parallel rank."""
    draw = random.Random(call)
    top = int(MAX_TOKENS * draw.choice(SHARES))
    most = job.microbatches
    count = draw.choice(range(2, most + 1, 2)) if job.vpp else draw.randint(2, most)
    return [[8 * draw.randint(3, top // 8) for _ in range(count)] for _ in range(job.ep)]


def trained(job: Job, calls: int, with_auto: bool) -> list[Call]:
    """Runs on every rank."""
    gpt, auto = SmallGPT(job.pp, job.vpp, job.ep, layers=job.layers), None
    forward_backward = get_forward_backward_func()
    if with_auto:
        budget_gib = job.budget_kib / 2**20
        auto = attach(
            gpt.chunks,
            gpt.optimizer,
            max_tokens=MAX_TOKENS,
            budget_gib=budget_gib,
            say=lambda _: None,
        )
        forward_backward = auto.schedule(forward_backward)
    found = []
    for number in range(calls):
        by_rank = lengths(job, number)
        own = by_rank[torch.distributed.get_rank() % job.ep]
        if auto is not None and job.says:
            auto.tokens(own)
        batches = gpt.microbatches(own, number)
        if number % 3 == 0:  # old log-probs: such calls are not counted
            with torch.no_grad():
                gpt.call(batches, forward_backward, forward_only=True)
        if number % 3 != 2:  # sometimes two calls to an update
            gpt.zero_grad()
        peak_bytes = 0
        if with_auto:
            with LiveBytes(tensors(gpt.chunks, gpt.optimizer)) as memory:
                static = static_bytes(gpt.chunks, gpt.optimizer).total_bytes
                losses = gpt.call(batches, forward_backward)
            peak_bytes = static + memory.peak_bytes
        else:
            losses = gpt.call(batches, forward_backward)
        found.append(Call(digest(gpt, losses), peak_bytes, *prediction(auto, own)))
        if number % 3 != 1 and number % 7 != 6:  # sometimes the update is left out
            gpt.optimizer.step()
    if auto is not None:
        auto.close()
    return found


def digest(gpt, losses) -> str:
    found = hashlib.sha256(repr([float(each["loss"]) for each in losses]).encode())
    for chunk in gpt.chunks:
        for parameter in chunk.parameters():
            found.update(parameter.main_grad.numpy().tobytes())
    return found.hexdigest()


def prediction(auto, own) -> tuple[int | None, int | None, str]:
    if auto is None:
        return None, None, ""
    if auto.plan is None:
        return None, None, auto.policy.format()
    stage = auto.shard.stage
    bound = auto.plan.cost.stages[stage].peak_high_bytes
    return predicted_peaks(auto, own, auto.routed)[stage], bound, auto.policy.format()


@dataclass(frozen=True)
class Result:
    """Of all ranks and calls of a job."""

    job: Job
    calls: int
    different: int
    """Calls whose losses or gradients are not those of the loop without `attach`, bit by bit."""
    over_budget: int
    fullest: float
    """The most bytes of a call, as a share of the budget."""
    planned: int
    """Calls under a plan, times ranks; the others measure."""
    within_1_percent: int
    """Of these, calls whose peak was within 1% of the one predicted for their lengths."""
    lowest: float
    """Measured against predicted, relative; so is the next."""
    highest: float
    above_bound: int
    """Calls that needed more than the plan says for its length."""
    policies: int


def judged(job: Job, calls: int) -> Result:
    ours = run_ranks(trained, job.ranks, job, calls, True, timeout_s=36_000)
    theirs = run_ranks(trained, job.ranks, job, calls, False, timeout_s=36_000)
    every = [call for rank in ours for call in rank]
    budget = job.budget_kib * 1024
    planned = [call for call in every if call.predicted_bytes is not None]
    errors = [call.peak_bytes / call.predicted_bytes - 1 for call in planned]
    same = [[call.result for call in rank] for rank in theirs]
    return Result(
        job,
        calls,
        sum(
            a.result != b
            for rank, plain in zip(ours, same, strict=True)
            for a, b in zip(rank, plain, strict=True)
        ),
        sum(call.peak_bytes > budget for call in every),
        max(call.peak_bytes for call in every) / budget,
        len(planned),
        sum(abs(error) <= 0.01 for error in errors),
        min(errors),
        max(errors),
        sum(call.peak_bytes > call.bound_bytes for call in planned),
        len({call.policy for call in every}),
    )


def table(results) -> Table:
    shown = Table(box=None)
    for name in ("job", "calls", "different", "over budget", "fullest", "within 1%", "error"):
        shown.add_column(name, justify="left" if name == "job" else "right")
    for one in results:
        shown.add_row(
            one.job.name,
            f"{one.calls:,}",
            str(one.different),
            str(one.over_budget),
            f"{one.fullest:.1%}",
            f"{one.within_1_percent:,} of {one.planned:,}",
            f"{one.lowest:+.2%} to {one.highest:+.2%}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--only", help="name of one job")
    parser.add_argument("--output", type=Path, default=RESULTS)
    asked = parser.parse_args()
    jobs = [job for job in JOBS if asked.only in (None, job.name)]
    old = json.loads(asked.output.read_text()) if asked.output.exists() else []
    found = {one["job"]["name"]: one for one in old}
    results = []
    for job in jobs:
        results.append(judged(job, asked.calls))
        Console(width=120).print(table(results))
        found[job.name] = asdict(results[-1])
        ordered = [found[one.name] for one in JOBS if one.name in found]
        asked.output.write_text(f"{json.dumps(ordered, indent=1)}\n")


if __name__ == "__main__":
    main()
