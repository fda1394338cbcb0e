from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import solve_speed
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search import chunk_plans
from megatron_autorecompute.planner.search.chunk_plans import Priced, Pruned, Walk
from megatron_autorecompute.planner.search.curve import pareto
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.stage_problem import put_together, runs
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerKind,
    Model,
    Parallelism,
    Profile,
    ScheduleOverhead,
    StageRecord,
    StaticBytes,
)
from tests.planner.definitions import brute_force
from tests.planner.random_profiles import another, drawn, scale

SEEDS = st.integers(0, 10**6)
INSTANCES = 600  # of 1.8 stages on average


@pytest.fixture
def thin(monkeypatch):
    """Tables with hardly a plan, as of the longest chunks."""
    monkeypatch.setattr(chunk_plans, "WIDTHS", (1, 1))


def fastest(problem, stage, budget):
    return of(problem.stages.stage(stage).fastest(budget))


def of(choice):
    return choice and (choice.time_ps / PS_PER_MS, choice.peak_bytes)


@pytest.mark.long
@pytest.mark.parametrize("part", range(4))
def test_the_optimum_is_that_of_brute_force_in_time_then_peak_then_mostly_runs(part):
    compared = feasible = more_runs = 0
    for seed in range(part * INSTANCES // 4, (part + 1) * INSTANCES // 4):
        profile, layout, schedule, budget = drawn(seed)
        problem = Problem(profile, layout, schedule)
        for stage in range(layout.num_stages):
            expected = brute_force(profile, layout, schedule, stage, budget)
            assert fastest(problem, stage, budget) == (expected and expected[:2]), (seed, stage)
            compared += 1
            if expected is not None:
                choice = problem.stages.stage(stage).fastest(budget)
                assert choice.gap == 0
                more_runs += sum(map(runs, choice.policies)) > expected[2]
                feasible += 1
    assert compared > 240
    assert compared / 4 < feasible < compared
    assert more_runs < feasible / 50


def test_with_hardly_a_plan_in_tables_one_chunk_is_solved_and_several_are_bounded(thin):
    solved = bounded = 0
    for seed in range(200):
        profile, layout, schedule, budget = drawn(seed)
        problem = Problem(profile, layout, schedule)
        for stage in range(layout.num_stages):
            expected = brute_force(profile, layout, schedule, stage, budget)
            choice = problem.stages.stage(stage).fastest(budget)
            assert (choice is None) == (expected is None), (seed, stage)
            if choice is None:
                continue
            least_ps = round(expected[0] * PS_PER_MS)
            assert choice.bound_ps <= least_ps <= choice.time_ps, (seed, stage)
            assert choice.peak_bytes <= budget
            if layout.num_chunks == 1:
                assert choice.time_ps <= least_ps * (1 + 1e-4), (seed, stage)
                solved += 1
            bounded += choice.bound_ps > 0.8 * least_ps
    assert solved > 50
    assert bounded > 150


def test_what_is_known_of_a_larger_budget_changes_no_point_of_a_curve():
    compared = 0
    for seed in range(200):
        profile, layout, schedule, budget = drawn(seed)
        if layout.num_stages > 1:  # there a step says less than a stage's time
            continue
        for point in pareto(Problem(profile, layout, schedule), 4, also=[budget]):
            fresh = Problem(profile, layout, schedule)
            choice = fresh.stages.stage(0).fastest(point.budget_bytes)
            alone = put_together(layout, [choice.policies])
            assert point.step_ms == pytest.approx(fresh.cost(alone).step_ms), seed
            assert point.peak_high_bytes <= point.budget_bytes
            compared += 1
    assert compared > 150


def test_prices_bound_long_chunks_closely():
    problem = solve_speed.problem(solve_speed.Case(24, 1))
    low, high = (own[0].peak_bytes for own in (problem.stages.leanest, problem.stages.fastest))
    stage = problem.stages.stage(0)
    for eighths in range(1, 8):
        budget = low + (high - low) * eighths // 8
        plans = stage.plans(budget)
        units = plans.plans[0].table.units
        # Bytes cost what makes the fastest and the leanest choices equally dear.
        dear = (problem.stages.leanest[0].time_ps - problem.stages.fastest[0].time_ps) / (
            high - low
        )
        prices = plans.prices(np.ones((2, 1)), np.full(len(plans.room), dear))[0]
        cheapest = (plans.plans[0].rows @ prices).min()
        assert Priced(units, prices).after()[0] <= cheapest * (1 + 1e-12)
        choice = stage.fastest(budget)
        assert choice.gap <= 1e-4


def test_where_no_plan_within_a_limit_begins_a_unit_nothing_is_kept():
    """One checkpoint around all layers is within the limit: no plan begins a unit between."""
    costs = ("none", 100, 1.0, 2.0), ("full", 100, 1.0, 3.0), ("full/4", 1, 4.0, 12.0)
    records = tuple(ChoiceRecord(name, held, 1, 1, a, b) for name, held, a, b in costs)
    none = ChoiceRecord("none", 0, 0, 0, 0.0, 0.0)
    profile = Profile(
        Model("groups", 4),
        Parallelism(1, 8),
        (LayerKind("k", (0, 1, 2, 3), records, static=StaticBytes()),),
        embedding=none,
        head=none,
        boundary_bytes=1,
        embedding_static=StaticBytes(),
        head_static=StaticBytes(),
    )
    problem = Problem(profile, Layout.from_flags(4, 1), Schedule(1, 1, 1))
    units = problem.stages.stage(0).problem.chunks[0]
    a_byte = np.array([0.0, 0.0, 1.0, 0.0, 0.0])
    pruned = Pruned(Priced(units, a_byte), np.ones(2), 2.0, 10)
    walk = Walk(units, pruned, forward=True)
    assert [walk.policies(row)[0].group for row in range(len(walk.rows))] == [4]


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 40))
def test_more_budget_is_never_slower(seed, more):
    profile, layout, schedule, budget = drawn(seed)
    for stage in range(layout.num_stages):
        less = Problem(profile, layout, schedule).stages.stage(stage).fastest(budget)
        richer = Problem(profile, layout, schedule).stages.stage(stage).fastest(budget + more)
        if less is not None:
            assert richer is not None
            assert richer.time_ps <= less.time_ps


@settings(max_examples=40)
@given(SEEDS, st.randoms(use_true_random=False))
def test_adding_a_choice_is_never_slower(seed, rng):
    profile, layout, schedule, budget = drawn(seed)
    kinds = tuple(
        replace(kind, choices=(*kind.choices, another(rng, kind.choices))) for kind in profile.kinds
    )
    for stage in range(layout.num_stages):
        before = Problem(profile, layout, schedule).stages.stage(stage).fastest(budget)
        after = (
            Problem(replace(profile, kinds=kinds), layout, schedule)
            .stages.stage(stage)
            .fastest(budget)
        )
        if before is not None:
            assert after is not None
            assert after.time_ps <= before.time_ps


@settings(max_examples=40)
@given(SEEDS, st.sampled_from([3, 1000, 2**30]), st.sampled_from([2.0, 10.0, 1000.0]))
def test_other_units_of_bytes_and_time_change_nothing(seed, bytes_unit, time_unit):
    profile, layout, schedule, budget = drawn(seed)
    scaled = scale(profile, bytes_unit, time_unit)
    for stage in range(layout.num_stages):
        plain = Problem(profile, layout, schedule).stages.stage(stage).fastest(budget)
        other = Problem(scaled, layout, schedule).stages.stage(stage).fastest(budget * bytes_unit)
        assert (plain is None) == (other is None)
        if plain and other:
            assert other.time_ps == plain.time_ps * time_unit
            assert other.peak_bytes == plain.peak_bytes * bytes_unit


def test_a_search_below_static_bytes_finds_nothing():
    profile, layout, schedule, _ = drawn(3)
    problem = Problem(profile, layout, schedule)
    assert problem.stages.stage(0).fastest(0) is None


def test_the_leanest_need_is_the_least_budget_that_is_feasible():
    for seed in range(150):
        profile, layout, schedule, _ = drawn(seed)
        problem = Problem(profile, layout, schedule)
        for stage, lean in enumerate(problem.stages.leanest):
            policy = put_together(layout, [choice.policies for choice in problem.stages.leanest])
            assert problem.cost(policy).stages[stage].peak_high_bytes == lean.peak_bytes
            assert problem.stages.stage(stage).fastest(lean.peak_bytes) is not None
            assert problem.stages.stage(stage).fastest(lean.peak_bytes - 1) is None


@pytest.mark.parametrize("layer_bytes", range(1, 7))
def test_the_leanest_need_is_found_where_a_peak_tried_leaves_any_room_above_or_below_nothing(
    layer_bytes,
):
    """With a stage that needs 4 bytes besides its layer, a layer of 2 makes a peak be tried at
    which the room of its forward and of its backward is exactly -1."""
    record = ChoiceRecord("none", layer_bytes - 1, 1, 0, 1.0, 2.0)
    stage = StageRecord((0,), StaticBytes(100), overhead=ScheduleOverhead(4, 4))
    profile = Profile(
        Model("room", 1),
        Parallelism(1, 8),
        (LayerKind("k", (0,), (record,)),),
        embedding=ChoiceRecord("none", 0, 0, 0, 0.0, 0.0),
        head=ChoiceRecord("none", 0, 0, 0, 0.0, 0.0),
        boundary_bytes=0,
        stages=(stage,),
    )
    problem = Problem(profile, Layout.from_flags(1, 1), Schedule(1, 1, 1))
    assert problem.stages.leanest[0].peak_bytes == 104 + layer_bytes
