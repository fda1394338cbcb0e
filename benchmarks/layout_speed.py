"""How long the search for layers per stage takes: printed, and written as JSON.

    python -m benchmarks.layout_speed

One core, processor time, costs as in `solve_speed`. Budgets are 1/8, 4/8 and 7/8 of the way from
the leanest to the fastest need of the even layout.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.solve_speed import Case, problem, profile
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.shapes import same_samples, search_shapes
from megatron_autorecompute.planner.search.solve import solve
from megatron_autorecompute.profile import Profile
from scripts.tables import markdown

RESULTS = Path(__file__).parent / "results" / "layout_speed.json"
CASES = (
    Case(64, 8),
    Case(128, 16),
    Case(128, 16, choices=12, kinds=2),
    Case(128, 16, chunks=2),
    Case(128, 16, chunks=4),
)
COLUMNS = (
    *("layers", "p", "v", "choices", "kinds", "layouts, s", "with 2 sizes, s"),
    "most gained",
)
SIZES = (1, 2)
SPEEDUP = 0.95
"""A layer's time for twice the samples, as a share of twice its time."""


@dataclass(frozen=True)
class Result:
    case: Case
    layouts_s: tuple[float, ...]
    """At the three budgets."""
    sizes_too_s: tuple[float, ...]
    """With micro-batch sizes 1 and 2."""
    gained: tuple[float, ...]
    """By how much the step is shorter than with the even layout, as a share."""


def of_size(case: Case, size: int) -> Profile:
    """The profile at another micro-batch size."""
    data = profile(case)
    share = SPEEDUP if size > 1 else 1.0

    def grown(record):
        return replace(
            record,
            held_bytes=size * record.held_bytes,
            forward_transient_bytes=size * record.forward_transient_bytes,
            backward_transient_bytes=size * record.backward_transient_bytes,
            forward_ms=size * share * record.forward_ms,
            backward_ms=size * share * record.backward_ms,
        )

    kinds = (replace(kind, choices=tuple(map(grown, kind.choices))) for kind in data.kinds)
    return replace(
        data,
        parallelism=replace(data.parallelism, micro_batch_size=size),
        kinds=tuple(kinds),
        embedding=grown(data.embedding),
        head=grown(data.head),
        boundary_bytes=size * data.boundary_bytes,
    )


def measure(case: Case) -> Result:
    even = problem(case)
    low = max(choice.peak_bytes for choice in even.stages.leanest)
    high = max(choice.peak_bytes for choice in even.stages.fastest)
    layouts_s, sizes_s, gained = [], [], []
    for eighths in (1, 4, 7):
        budget = low + (high - low) * eighths // 8
        start = time.process_time()
        found = search_shapes([problem(case).at(budget)], layouts=True)
        layouts_s.append(time.process_time() - start)
        gained.append(1 - found.solution.cost.step_ms / solve(even.at(budget)).cost.step_ms)
        start = time.process_time()
        problems = [_problem(case, size) for size in SIZES]
        search_shapes([own.at(budget) for own in problems], layouts=True)
        sizes_s.append(time.process_time() - start)
    return Result(case, tuple(layouts_s), tuple(sizes_s), tuple(gained))


def _problem(case: Case, size: int) -> Problem:
    one, other = problem(case), of_size(case, size)
    return replace(one, profile=other, schedule=same_samples(one.schedule, one.profile, other))


def main() -> None:
    results = [measure(case) for case in track(CASES, description="searching")]
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    data = {"machine": machine, "cores": 1, "results": [asdict(result) for result in results]}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(markdown(COLUMNS, map(row, results)))
    shown = Table(*COLUMNS, box=None)
    for result in results:
        shown.add_row(*row(result))
    Console().print(shown)


def row(result: Result) -> list[str]:
    case = result.case
    numbers = (case.layers, case.stages, case.chunks, case.choices, case.kinds)
    times = (f"{min(x):.1f} to {max(x):.1f}" for x in (result.layouts_s, result.sizes_too_s))
    return [*map(str, numbers), *times, f"{max(result.gained):.2%}"]


if __name__ == "__main__":
    main()
