"""The step of a plan, and its bound, against all policies of small random problems."""

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from benchmarks import solve_speed
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.curve import pareto
from megatron_autorecompute.planner.search.manual import best_manual
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import solve, try_solve
from megatron_autorecompute.planner.search.stage_problem import put_together
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerKind,
    Model,
    Parallelism,
    Profile,
    StaticBytes,
)
from tests.planner.random_profiles import problem_of_many
from tests.planner.search.random_steps import (
    ONE_CHUNK,
    SEVERAL_CHUNKS,
    random_step,
    realistic_step,
    shortest_step_ps,
    stage_times,
)


def excess(problem, budgets, *, proven=False):
    """By what share the plan's step is above the shortest one; None where that is not known."""
    shortest = shortest_step_ps(problem, budgets)
    if shortest is None:
        return None
    solution = solve(problem.at(budgets))
    evidence, step = solution.step_evidence, round(solution.cost.step_ms * PS_PER_MS)
    assert evidence.gap == 0 or not proven
    assert evidence.bound_ms * PS_PER_MS <= shortest + 0.5
    assert step >= shortest
    assert evidence.gap == pytest.approx(
        1 - evidence.bound_ms / solution.cost.step_ms if step else 0
    )
    for stage, budget in zip(solution.cost.stages, budgets, strict=True):
        assert stage.peak_high_bytes <= budget
    return step / shortest - 1 if shortest else float(step > 0)


@pytest.mark.long
@pytest.mark.parametrize("make", [random_step, realistic_step])
def test_with_one_chunk_a_stage_the_step_is_the_shortest_and_proven(make):
    for seed in range(50):
        assert excess(*make(seed, ONE_CHUNK), proven=True) == 0, seed


@pytest.mark.long
@pytest.mark.parametrize("make", [random_step, realistic_step])
def test_with_several_chunks_a_stage_the_step_is_the_shortest_or_little_longer(make):
    shares = [excess(*make(seed, SEVERAL_CHUNKS)) for seed in range(40)]
    known = sorted(share for share in shares if share is not None)
    assert len(known) > 36
    assert median(known) == 0
    assert known[math.ceil(0.99 * len(known)) - 1] <= 0.01


@pytest.mark.long
def test_where_forwards_are_all_the_same_the_least_busy_stages_make_the_shortest_step():
    """Recompute is in backwards alone; then no schedule is needed to know the best choices."""
    seen = 0
    for seed in range(60):
        problem, budgets = random_step(seed, ONE_CHUNK)
        stages = enumerate(budgets)
        if any(len(stage_times(problem, stage, budget)) > 1 for stage, budget in stages):
            continue
        choices = [
            problem.stages.stage(stage).fastest(budget) for stage, budget in enumerate(budgets)
        ]
        busy = put_together(problem.layout, [choice.policies for choice in choices])
        assert solve(problem.at(budgets)).cost.step_ms == problem.cost(busy).step_ms
        seen += 1
    assert seen > 10


def uneven_chunks():
    """Six chunks of unlike length on two stages; forwards take the same whatever is chosen."""

    def record(choice, held, forward, backward, *ms):
        return ChoiceRecord(choice, held, forward, backward, *ms)

    records = record("none", 60, 14, 3, 1.2, 2.6), record("full", 2, 14, 43, 1.2, 3.7)
    profile = Profile(
        Model("uneven", 8),
        Parallelism(1, 8),
        (LayerKind("k", tuple(range(8)), records, static=StaticBytes()),),
        embedding=record("none", 35, 3, 29, 0.8, 3.4),
        head=record("none", 26, 12, 15, 1.5, 1.4),
        boundary_bytes=0,
        embedding_static=StaticBytes(),
        head_static=StaticBytes(),
    )
    return Problem(profile, Layout.parse("E|t|t|tttt|tt|L", 2, 3), Schedule(2, 3, 4, 4))


def test_no_setting_of_megatrons_that_fits_is_faster_at_any_budget():
    problem = uneven_chunks()
    compared = 0
    for budget in range(150, 1400, 50):
        solution, manual = try_solve(problem.at(budget)), best_manual(problem.at(budget))
        if solution is None or manual is None:
            continue
        assert solution.cost.step_ms <= manual.cost.step_ms
        assert solution.step_evidence.gap == 0
        compared += 1
    assert compared > 15


@pytest.mark.parametrize("layout", [Layout.from_flags(12, 2), Layout.from_flags(12, 2, 3)])
def test_a_step_of_a_million_microbatches_has_a_bound(layout):
    profile, _, _, _ = problem_of_many()
    solution = solve(Problem(profile, layout, Schedule.of_layout(layout, 10**6), 900))
    assert 0 <= solution.step_evidence.gap < 1e-6


def test_more_budget_is_never_a_slower_plan():
    for seed in range(6):
        problem, _ = random_step(seed, SEVERAL_CHUNKS, 2)
        low, high = (
            max(choice.peak_bytes for choice in own)
            for own in (problem.stages.leanest, problem.stages.fastest)
        )
        budgets = [low + (high - low) * n // 6 for n in range(7)]
        alone = [solve(replace(problem, budget=budget)).cost.step_ms for budget in budgets]
        assert alone == sorted(alone, reverse=True), seed


def test_a_longer_menu_is_never_a_slower_plan():
    shorter = 0
    for seed in range(30):
        problem, budgets = random_step(seed, (*ONE_CHUNK, *SEVERAL_CHUNKS))
        kinds = [replace(k, choices=k.choices[::2]) for k in problem.profile.kinds]
        few = replace(problem, profile=replace(problem.profile, kinds=tuple(kinds)))
        less = try_solve(few.at(budgets))
        if less is not None:
            more = solve(problem.at(budgets))
            assert more.cost.step_ms <= less.cost.step_ms, seed
            shorter += more.cost.step_ms < less.cost.step_ms
    assert shorter > 2


def test_a_plan_is_the_same_whatever_was_asked_before():
    for seed, shape in ((31, ONE_CHUNK), (4, SEVERAL_CHUNKS)):
        problem, _ = random_step(seed, shape, 2)
        low, high = (
            max(choice.peak_bytes for choice in own)
            for own in (problem.stages.leanest, problem.stages.fastest)
        )
        budgets = [low + (high - low) * n // 4 for n in range(5)]
        fresh = [solve(replace(problem, budget=budget)) for budget in budgets]
        pareto(problem, 6)
        random.Random(seed).shuffle(order := budgets[:])
        solved = {budget: solve(problem.at(budget)) for budget in order}
        assert [solved[budget] for budget in budgets] == fresh, seed


SOLVE = """
import sys
from dataclasses import replace
from pathlib import Path
from benchmarks import solve_speed
from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.profile import Profile
problem = solve_speed.problem(solve_speed.Case(32, 4, 2))
problem = replace(problem, profile=Profile.load(Path(sys.argv[1])))
make_plan(problem.at(150 << 30)).save(Path(sys.argv[2]))
"""


@pytest.mark.long
def test_the_same_plan_comes_of_every_hash_seed_and_order_of_keys(tmp_path):
    path, out = tmp_path / "profile.json", tmp_path / "plan.json"
    solve_speed.profile(solve_speed.Case(32, 4, 2)).save(path)
    given, found = json.loads(path.read_text()), set()
    for seed in ("0", "1", "2"):
        path.write_text(json.dumps(shuffled(given, random.Random(seed))))
        subprocess.run(
            [sys.executable, "-c", SOLVE, str(path), str(out)],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
        )
        found.add(out.read_bytes())
    assert len(found) == 1


def shuffled(value, rng):
    """The same JSON with other orders of keys."""
    if isinstance(value, list):
        return [shuffled(each, rng) for each in value]
    if not isinstance(value, dict):
        return value
    keys = rng.sample(sorted(value), len(value))
    return {key: shuffled(value[key], rng) for key in keys}


def test_examples_with_several_chunks_are_within_a_hundredth_of_the_optimum():
    problem = solve_speed.problem(solve_speed.Case(32, 4, 2))
    low, high = (
        max(choice.peak_bytes for choice in own)
        for own in (problem.stages.leanest, problem.stages.fastest)
    )
    for eighths in (1, 4, 7):
        solution = solve(problem.at(low + (high - low) * eighths // 8))
        assert solution.step_evidence.gap < 0.01
