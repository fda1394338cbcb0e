"""How a plan changes if the assumed shares of a device's peaks are wrong by a fifth.

    python -m benchmarks.sensitivity

Of the example llama3-70b on H100s, at the budget that estimate ends with: plans again with each
share a fifth lower and a fifth higher, and writes benchmarks/results/no_device/sensitivity.txt.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")  # megatron-core on a machine without CUDA, TE and Apex

from megatron_autorecompute.cli.estimate import default_budget_bytes  # noqa: E402
from megatron_autorecompute.meta.devices import SHARES, Device, Efficiency, device  # noqa: E402
from megatron_autorecompute.meta.job import Job, load_job  # noqa: E402
from megatron_autorecompute.meta.profiling import problem_of  # noqa: E402
from megatron_autorecompute.planner.search.solve import solve  # noqa: E402
from megatron_autorecompute.policy import RecomputePolicy  # noqa: E402

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "megatron_autorecompute" / "examples" / "llama3-70b.yaml"
RESULT = ROOT / "benchmarks" / "results" / "no_device" / "sensitivity.txt"
MOVED = 0.2


def sensitivity(
    job: Job,
    device: Device,
    efficiency: Efficiency,
    budget_bytes: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[str]:
    """One sentence for each share moved up or down: which layers would get another choice, and what
    it would cost to keep the original plan.

    Raises InfeasibleError if nothing fits the budget.
    """
    progress(f"{job.name}: planning")
    assumed = solve(problem_of(job, device, efficiency, budget_bytes))
    lines = []
    for name in SHARES:
        for factor in (1 - MOVED, 1 + MOVED):
            progress(f"{job.name}: {name} x {factor:g}")
            there = problem_of(job, device, efficiency.scaled(name, factor), budget_bytes)
            best = solve(replace(there, known=(assumed.policy,)))
            loss = there.cost(assumed.policy).step_ms / best.cost.step_ms - 1
            said = f"{_changed(assumed.policy, best.policy)}; keeping the plan costs {loss:.2%}"
            lines.append(f"{name} share x {factor:g}: {said}")
    return lines


def _changed(one: RecomputePolicy, other: RecomputePolicy) -> str:
    """Changes in the number of layers per choice; layers of a kind are interchangeable."""
    counts = [
        {choice: list(policy.layers).count(choice) for choice in {*one.layers, *other.layers}}
        for policy in (one, other)
    ]
    parts = [
        f"{choice} on {counts[0][choice]} -> {counts[1][choice]} layers"
        for choice in sorted(counts[0])
        if counts[0][choice] != counts[1][choice]
    ]
    return ", ".join(parts) or "the same choices"


def main() -> None:
    """Write the sentences."""
    job, gpu = load_job(EXAMPLE), device("h100-80gb")
    lines = sensitivity(job, gpu, gpu.reaches, default_budget_bytes(gpu, None, job), print)
    RESULT.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
