#!/usr/bin/env python3
"""Megatron's own recompute settings for a job without a device: peaks, and which fit.

python scripts/settings.py JOB.yaml PROFILE.json SETTING...    (none, selective[moe], uniform/1)

JOB.yaml is what `estimate -o PROFILE.json` read, on one stage of H100 80 GB.
"""

import sys
from collections.abc import Iterable

from megatron_autorecompute.cli.estimate import default_budget_bytes
from megatron_autorecompute.meta.devices import device
from megatron_autorecompute.meta.job import Job, load_job
from megatron_autorecompute.meta.static_bytes import outside_torch
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.units import GIB

FITS = "fits"
GPU = device("h100-80gb")


def main(job_file: str, profile_file: str, *names: str) -> None:
    """Print one line for each setting."""
    job, profile = load_job(job_file), Profile.load(profile_file)
    print(page(job, peaks(job, profile, names)), end="")


def peaks(job: Job, profile: Profile, names: Iterable[str]) -> dict[str, int]:
    """The bytes at each setting's peak, spread of the records included."""
    problem = Problem(profile, job.layout(), job.schedule())
    layers, chunks = profile.num_layers, problem.layout.counted_chunks()
    policies = {
        name: RecomputePolicy.parse(f"megatron:{name}", num_layers=layers, layout=chunks)
        for name in names
    }
    return {name: problem.cost(policy).peak_high_bytes for name, policy in policies.items()}


def verdict(job: Job, peak_bytes: int) -> str:
    """Whether a planner with the default budget of the job may use it."""
    if peak_bytes <= default_budget_bytes(GPU, None, job):
        return FITS
    return "does not fit" if peak_bytes > _torchs_bytes(job) else "over the budget"


def page(job: Job, peak_of: dict[str, int]) -> str:
    """One line for each setting, and what verdicts mean."""
    lines = [f"{'setting':28} {'peak GiB':>8}"]
    lines += [f"{n:28} {peak / GIB:8.2f}  {verdict(job, peak)}" for n, peak in peak_of.items()]
    budget = default_budget_bytes(GPU, None, job) / GIB
    lines += [
        f"fits: up to {budget:.2f} GiB, the budget;",
        "over the budget: into the 5% for fragmentation;",
        f"does not fit: above {_torchs_bytes(job) / GIB:.2f} GiB, all that is left to torch",
    ]
    return "\n".join(lines) + "\n"


def _torchs_bytes(job: Job) -> int:
    return GPU.memory_bytes - outside_torch(job, GPU)[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
