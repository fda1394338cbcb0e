"""How long the solver takes, and how that grows: printed, and written as JSON.

    python -m benchmarks.solve_speed [--quick | --leanest | --planner]

One core, processor time. A machine that does other things still shows in it, by its caches and its
clock. With `--leanest` only the leanest needs are measured again, and the other figures stay as the
file has them; with `--planner` all but HiGHS'. Costs are those of unfused attention (Korthikanti et
al. 2022) with selective sets around them; two kinds differ by 37%. Beside it HiGHS on the problem
of the first stage, see `milp`.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # numpy reads it when imported

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.milp import Answer, solved
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.curve import pareto
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import solve
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerKind,
    Model,
    Parallelism,
    Profile,
    StaticBytes,
)
from scripts.tables import markdown

RESULTS = Path(__file__).parent / "results" / "solve_speed.json"
UNIT = 32 << 20  # bytes of sequence * micro-batch * hidden elements
# choice, held, forward transient, backward transient (units), forward ms, backward ms
CHOICES = (
    ("none", 114.008, 10, 28, 10.0, 20.0),
    ("full", 2, 34, 142.1, 10.0, 30.0),
    ("selective[core_attn]", 34.01, 90, 112.3, 10.1, 23.1),
    ("selective[layernorm]", 110.02, 12, 32, 10.05, 20.31),
    ("selective[mlp]", 98.3, 20, 48.7, 10.02, 24.4),
    ("selective[core_attn+layernorm]", 30.11, 92, 116.2, 10.15, 23.43),
    ("selective[core_attn+mlp]", 18.4, 95, 130.2, 10.12, 27.52),
    ("selective[core_attn+layernorm+mlp]", 14.2, 99, 134.1, 10.17, 27.83),
    ("selective[moe]", 70.3, 40, 75, 10.03, 25.7),
    ("selective[layernorm+mlp]", 94.2, 22, 52, 10.07, 24.75),
    ("selective[moe_act]", 88.8, 15, 44, 10.01, 21.37),
    ("selective[layernorm+moe_act]", 84.1, 17, 49, 10.06, 21.71),
    ("selective[core_attn+moe_act]", 20.9, 93, 128.4, 10.11, 25.32),
    ("selective[core_attn+layernorm+moe_act]", 16.9, 96, 131.6, 10.16, 25.61),
    ("selective[mlp+moe]", 61.2, 43, 79.3, 10.05, 27.97),
    ("selective[core_attn+moe]", 9.8, 101, 137.2, 10.13, 29.11),
)


@dataclass(frozen=True)
class Case:
    layers: int
    stages: int
    chunks: int = 1
    choices: int = 8
    kinds: int = 1
    pareto_points: int = 0
    microbatches: int = 0
    """0 is 4 for each stage."""


@dataclass(frozen=True)
class Result:
    case: Case
    leanest_s: float
    """For the leanest need of every stage, all set-up included."""
    solve_s: tuple[float, ...]
    """At budgets 1/8, 4/8 and 7/8 of the way from the leanest to the fastest need."""
    worst_gap: float
    """Of the step."""
    pareto_s: float | None
    milp: Answer
    """HiGHS on the first stage at the second budget, within `MILP_S`."""
    stage_s: float
    """The planner on the same stage and budget, its set-up included."""
    stage_ms: float
    stage_gap: float


@dataclass(frozen=True)
class Reuse:
    """Nine budgets of one problem, the largest first, against nine problems."""

    case: Case
    apart_s: float
    together_s: float


MILP_S = 20
COLUMNS = (
    *("layers", "p", "v", "choices", "kinds", "microbatches", "leanest, s", "solve, s"),
    *("largest gap", "64 points, s", "stage 0, s", "stage 0, ms: gap"),
    *(f"HiGHS, stage 0 alone, at most {MILP_S} s", "HiGHS, ms: gap"),
)
HEADLINE = Case(126, 16, 8, pareto_points=64)
CASES = (
    HEADLINE,
    Case(32, 4),
    # Layers: of one chunk, and with them as many of each stage.
    Case(128, 1, 1, 8),
    Case(128, 8),
    Case(512, 8),
    Case(512, 1, 1, 16),
    # Stages.
    Case(512, 64),
    Case(512, 64, 1, 16, 2),
    # Choices.
    Case(512, 8, 1, 16),
    # Chunks.
    Case(128, 4, 8, 12),
    Case(512, 8, 8, 16),
    Case(512, 64, 8, 16, 2),
    # The slowest of a random sample of large ones.
    Case(512, 4, 8, 16, 2),
    Case(512, 16, 8, 16),
    Case(512, 32, 8, 16, 2),
    # Twice the layers and stages of any other.
    Case(1024, 128, 4, 16, 2),
    # Microbatches.
    Case(32, 4, 2),
    Case(32, 4, 2, microbatches=1 << 16),
    Case(32, 4, 2, microbatches=10**6),
)
GROWTH = (
    ("layers of a chunk", "layers", Case(128, 8), Case(512, 8)),
    ("stages", "stages", Case(512, 8), Case(512, 64)),
    ("chunks", "chunks", Case(512, 8, 1, 16), Case(512, 8, 8, 16)),
    ("choices", "choices", Case(512, 8), Case(512, 8, 1, 16)),
    ("microbatches", "microbatches", CASES[-2], CASES[-1]),
)
"""Pairs of cases that differ in one dimension: the time grows as its power."""
REUSED = (Case(16, 4), Case(32, 4), Case(64, 4), Case(32, 4, 2))
"""Of 4, 8 and 16 layers a chunk."""
QUICK = (HEADLINE, Case(32, 4), Case(48, 1))


def profile(case: Case) -> Profile:
    kinds = tuple(_kind(case, number) for number in range(case.kinds))
    return Profile(
        Model("synthetic", case.layers),
        Parallelism(1, 4096),
        kinds,
        embedding=_record(("none", 2, 4, 4, 0.5, 0.5)),
        head=_record(("none", 30, 20, 40, 5.0, 10.0)),
        boundary_bytes=2 * UNIT,
        embedding_static=StaticBytes(10 * UNIT),
        head_static=StaticBytes(10 * UNIT),
    )


def _kind(case: Case, number: int) -> LayerKind:
    size = 1 + 0.37 * number
    choices = tuple(_record((name, *(size * x for x in costs))) for name, *costs in CHOICES)
    layers = tuple(range(number, case.layers, case.kinds))
    return LayerKind(f"kind{number}", layers, choices[: case.choices], static=StaticBytes(UNIT))


def _record(costs) -> ChoiceRecord:
    name, held, forward, backward, forward_ms, backward_ms = costs
    sizes = (round(held * UNIT), round(forward * UNIT), round(backward * UNIT))
    return ChoiceRecord(name, *sizes, round(forward_ms, 6), round(backward_ms, 6))


def problem(case: Case) -> Problem:
    ends = (case.layers + 2) % (case.stages * case.chunks) == 0
    layout = Layout.from_flags(
        case.layers,
        case.stages,
        case.chunks,
        account_for_embedding_in_pipeline_split=ends,
        account_for_loss_in_pipeline_split=ends,
    )
    schedule = Schedule(case.stages, case.chunks, case.microbatches or 4 * case.stages)
    return Problem(profile(case), layout, schedule)


def measure(case: Case, milp: Answer | None = None) -> Result:
    """All of a case; `milp` is what HiGHS is known to find."""
    first_s, (low, high) = leanest_s(case), needs(problem(case))
    times, gaps = zip(*solves(case, low, high), strict=True)
    pareto_s = None
    if case.pareto_points:
        start = time.process_time()
        pareto(problem(case), case.pareto_points)
        pareto_s = time.process_time() - start
    budget = low + (high - low) // 2
    stage, start = problem(case), time.process_time()
    found = stage.stages.stage(0).fastest(budget)
    stage_s = time.process_time() - start
    answer = milp or solved(stage.stages.stage(0).problem, budget, MILP_S)
    own = answer, stage_s, found.time_ps / PS_PER_MS, found.gap
    return Result(case, first_s, times, max(gaps), pareto_s, *own)


def needs(one: Problem) -> tuple[int, int]:
    """Bytes that the largest stage needs, when all are the leanest and when all are the fastest."""
    kinds = one.stages.leanest, one.stages.fastest
    low, high = (max(choice.peak_bytes for choice in choices) for choices in kinds)
    return low, high


def solves(case: Case, low: int, high: int) -> Iterator[tuple[float, float]]:
    """Seconds of the processor and the step's gap at three budgets between two, in bytes."""
    for eighths in (1, 4, 7):
        start = time.process_time()
        solution = solve(problem(case).at(low + (high - low) * eighths // 8))
        yield time.process_time() - start, solution.step_evidence.gap


def measure_reuse(case: Case) -> Reuse:
    low, high = needs(problem(case))
    budgets = [high - (high - low) * i // 8 for i in range(9)]
    start = time.process_time()
    for budget in budgets:
        solve(problem(case).at(budget))
    apart_s = time.process_time() - start
    one, start = problem(case), time.process_time()
    for budget in budgets:
        solve(one.at(budget))
    return Reuse(case, apart_s, time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three cases, nothing written")
    parser.add_argument("--leanest", action="store_true", help="only the leanest needs")
    parser.add_argument("--planner", action="store_true", help="HiGHS only where it is not known")
    args = parser.parse_args()
    highs = {old.case: old.milp for old in known()} if args.planner else {}
    results = []
    if args.leanest:
        results = [replace(old, leanest_s=leanest_s(old.case)) for old in track(known())]
        write(results, known_reuse())
    for case in track([] if args.leanest else QUICK if args.quick else CASES):
        results.append(measure(case, highs.get(case)))
        if not args.quick:  # as they come, so that an interrupted run leaves what it has
            write(results, known_reuse())
    if not args.quick and not args.leanest:
        write(results, [measure_reuse(case) for case in track(REUSED)])
    shown = Table(*COLUMNS, box=None)
    for result in results:
        shown.add_row(*row(result))
    Console().print(shown)
    Console().print(growth(results))


def leanest_s(case: Case) -> float:
    """Seconds of the processor for a problem's first answer: what every stage needs at least."""
    first, start = problem(case), time.process_time()
    assert first.stages.leanest
    return time.process_time() - start


def write(results: list[Result], reuse: list[Reuse]) -> None:
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    RESULTS.parent.mkdir(exist_ok=True)
    data = {
        "machine": machine,
        "cores": 1,
        "milp_limit_s": MILP_S,
        "growth": growth(results),
        "results": [asdict(result) for result in results],
        "reuse": [asdict(one) for one in reuse],
    }
    RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(page(results, reuse))


def known() -> list[Result]:
    """What the file has."""
    return [
        Result(
            **{
                **one,
                "case": Case(**one["case"]),
                "solve_s": tuple(one["solve_s"]),
                "milp": Answer(**one["milp"]),
            }
        )
        for one in json.loads(RESULTS.read_text())["results"]
    ]


def known_reuse() -> list[Reuse]:
    """What the file has."""
    found = json.loads(RESULTS.read_text()).get("reuse", [])
    return [Reuse(**{**one, "case": Case(**one["case"])}) for one in found]


def page(results: list[Result], reuse: list[Reuse]) -> str:
    """As the documentation quotes it."""
    powers = [
        [name, *(f"{found[what]:.1f}" for what in ("solve", "leanest"))]
        for name, found in growth(results).items()
    ]
    heads = "between rows that differ in", "slowest solve", "leanest need"
    grows = "Time grows as so much a power of it:"
    again = [
        [
            *map(str, (own.case.layers, own.case.stages, own.case.chunks)),
            str(own.case.layers // (own.case.stages * own.case.chunks)),
            f"{own.apart_s:.1f}",
            f"{own.together_s:.1f}",
            f"{own.together_s / own.apart_s:.0%}",
        ]
        for own in reuse
    ]
    names = "layers", "p", "v", "layers of a chunk", "nine problems, s", "one problem, s", "share"
    return (
        f"{markdown(COLUMNS, map(row, results))}\n{grows}\n\n{markdown(heads, powers)}\n"
        f"Nine budgets of one problem, the largest first, against nine problems:\n\n"
        f"{markdown(names, again)}"
    )


def growth(results: list[Result]) -> dict[str, dict[str, float]]:
    """The powers of each dimension as which the slowest solve, and the leanest need, grow."""
    known = {result.case: result for result in results}
    found = {}
    for name, field, one, other in GROWTH:
        if one in known and other in known:
            size = math.log(getattr(other, field) / getattr(one, field))
            pairs = {
                "solve": [max(known[case].solve_s) for case in (one, other)],
                "leanest": [known[case].leanest_s for case in (one, other)],
            }
            found[name] = {what: math.log(b / a) / size for what, (a, b) in pairs.items()}
    return found


def row(result: Result) -> list[str]:
    case, milp = result.case, result.milp
    pareto = "" if result.pareto_s is None else f"{result.pareto_s:.1f}"
    found = "none" if milp.gap is None else f"{milp.objective_ms:.2f}: {milp.gap:.3%}"
    cells = (
        *(case.layers, case.stages, case.chunks, case.choices, case.kinds),
        f"{case.microbatches or 4 * case.stages:,}",
        f"{result.leanest_s:.2f}",
        f"{min(result.solve_s):.1f} to {max(result.solve_s):.1f}",
        *(f"{result.worst_gap:.3%}", pareto, f"{result.stage_s:.1f}"),
        *(f"{result.stage_ms:.2f}: {result.stage_gap:.3%}", f"{milp.seconds:.1f}", found),
    )
    return [str(cell) for cell in cells]


if __name__ == "__main__":
    main()
