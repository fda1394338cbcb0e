#!/usr/bin/env python3
"""Megatron's own recompute settings for a job without a device: peaks, and which fit.

python scripts/settings.py JOB.yaml PROFILE.json SETTING...    (none, selective[moe], uniform/1)

JOB.yaml is what `estimate -o PROFILE.json` read, on one stage of H100 80 GB.
"""

import sys

from megatron_autorecompute.cli.estimate import default_budget_bytes
from megatron_autorecompute.meta.devices import device
from megatron_autorecompute.meta.job import load_job
from megatron_autorecompute.meta.outside_torch import outside_torch
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.units import GIB


def main(job_file: str, profile_file: str, *names: str) -> None:
    """Print one line for each setting."""
    job, gpu = load_job(job_file), device("h100-80gb")
    problem = Problem(Profile.load(profile_file), job.layout(), job.schedule())
    budget = default_budget_bytes(gpu, None, job)
    most = gpu.memory_bytes - outside_torch(job, gpu).size_bytes
    print(f"{'setting':28} {'peak GiB':>8}")
    for name in names:
        policy = RecomputePolicy.parse(
            f"megatron:{name}",
            num_layers=problem.profile.num_layers,
            layout=problem.layout.counted_chunks(),
        )
        peak = problem.cost(policy).peak_high_bytes
        verdict = "fits" if peak <= budget else "too close to say"
        verdict = "does not fit" if peak > most else verdict
        print(f"{name:28} {peak / GIB:8.2f}  {verdict}")
    print(f"fits: up to {budget / GIB:.2f} GiB, the budget, with 5% for fragmentation;")
    print(f"does not fit: above {most / GIB:.2f} GiB, all that is left to torch")


if __name__ == "__main__":
    main(*sys.argv[1:])
