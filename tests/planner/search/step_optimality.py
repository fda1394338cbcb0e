"""How far plans are from the shortest step, against all policies of small random problems.

    python -m tests.planner.search.step_optimality [--instances 400] [--most 20000]

Printed, and written as JSON. Two sorts of problems: with random times, and with times in the
proportions of measured ones. Those with more than `--most` combinations of their stages' choices
are left out, and counted. The shortest step is found by replaying every combination.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.solve import solve
from scripts.tables import markdown
from tests.planner.search.random_steps import (
    ONE_CHUNK,
    SEVERAL_CHUNKS,
    random_step,
    realistic_step,
    shortest_step_ps,
)

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "step_optimality.json"
MORE_CHUNKS = (*SEVERAL_CHUNKS, (4, 2), (2, 4), (3, 3))
COLUMNS = (
    *("times", "chunks of a stage", "problems", "left out", "proven", "optimal"),
    *("mean", "p50", "p95", "p99", "worst", "bounds too high"),
)
MOST_LAYERS = 3
"""Of a chunk."""
FIRST_SEED = 10_000
"""Tests begin with 0."""


@dataclass(frozen=True)
class Result:
    times: str
    chunks: str
    instances: int
    left_out: int
    proven: int
    """Plans whose own gap is 0."""
    optimal: int
    """Plans with the shortest step."""
    mean: float
    """By how much steps are longer than the shortest one, as a share of it; so are the next."""
    p50: float
    p95: float
    p99: float
    worst: float
    bounds_above: int
    """Bounds above the shortest step: there must be none."""


def measure(times: str, chunks: str, instances: int, most: int) -> Result:
    make = {"random": random_step, "realistic": realistic_step}[times]
    shapes = {"one": ONE_CHUNK, "several": MORE_CHUNKS}[chunks]
    shares, left_out, proven, above = [], 0, 0, 0
    for seed in track(range(FIRST_SEED, FIRST_SEED + instances), f"{times}, {chunks}"):
        problem, budgets = make(seed, shapes, MOST_LAYERS)
        shortest = shortest_step_ps(problem, budgets, most)
        if not shortest:
            left_out += 1
            continue
        solution = solve(problem.at(budgets))
        shares.append(round(solution.cost.step_ms * PS_PER_MS) / shortest - 1)
        proven += solution.step_evidence.gap == 0
        above += solution.step_evidence.bound_ms * PS_PER_MS > shortest + 0.5
    shares.sort()
    at = [shares[math.ceil(share * len(shares)) - 1] for share in (0.5, 0.95, 0.99, 1)]
    optimal, mean = shares.count(0), statistics.fmean(shares)
    return Result(times, chunks, len(shares), left_out, proven, optimal, mean, *at, above)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--instances", type=int, default=400, help="of each of the four kinds")
    parser.add_argument("--most", type=int, default=20_000, help="combinations of a problem")
    args = parser.parse_args()
    results = [
        measure(times, chunks, args.instances, args.most)
        for times in ("random", "realistic")
        for chunks in ("one", "several")
    ]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(markdown(COLUMNS, map(row, results)))
    shown = Table(*COLUMNS, box=None, padding=(0, 1, 0, 0))
    for result in results:
        shown.add_row(*row(result))
    Console().print(shown)


def row(result: Result) -> list[str]:
    counts = result.instances, result.left_out, result.proven, result.optimal
    shares = result.mean, result.p50, result.p95, result.p99, result.worst
    texts = *map(str, counts), *(f"{100 * x:.3f}%" for x in shares), str(result.bounds_above)
    return [result.times, result.chunks, *texts]


if __name__ == "__main__":
    main()
