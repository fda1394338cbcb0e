from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import solve_speed
from megatron_autorecompute.planner.budget_curve import BudgetCurve
from megatron_autorecompute.planner.chunk_splits import put_together
from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.planner.planner import Planner
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.planner.stage_search import search
from megatron_autorecompute.planner.stage_search.search import Effort
from megatron_autorecompute.planner.step_search import search as step_search
from megatron_autorecompute.planner.unit_costs import PS_PER_MS
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
from tests.planner.random_profiles import another, problem, problem_of_many, scale
from tests.planner.step_search.random_steps import SEVERAL_CHUNKS, random_step

SEEDS = st.integers(0, 10**6)
INSTANCES = 1000  # of 1.8 stages on average, each searched in two ways
AS_LONG_CHUNKS = Effort(complete_layers=-1)
"""Every budget is searched as chunks of many layers are."""


def found(planner, stage, budget):
    choice = planner.choose(stage, budget)
    return choice and (choice.time_ps / PS_PER_MS, choice.peak_bytes, choice.runs)


@pytest.mark.parametrize("part", range(4))
def test_the_optimum_is_that_of_brute_force_in_time_then_peak_then_runs(part):
    compared = feasible = 0
    for seed in range(part * INSTANCES // 4, (part + 1) * INSTANCES // 4):
        profile, layout, schedule, budget = problem(seed)
        kept = Planner(profile, layout, schedule)
        searched = Planner(profile, layout, schedule, effort=AS_LONG_CHUNKS)
        for stage in range(layout.num_stages):
            expected = brute_force(profile, layout, schedule, stage, budget)
            assert found(kept, stage, budget) == expected, (seed, stage)
            assert found(searched, stage, budget) == expected, (seed, stage)
            compared += 1
            feasible += expected is not None
    assert compared > 400
    assert compared / 4 < feasible < compared


def test_an_optimum_known_from_a_smaller_budget_changes_no_answer():
    for seed in range(200):
        profile, layout, schedule, budget = problem(seed)
        curve = BudgetCurve(Planner(profile, layout, schedule))
        for stage in range(layout.num_stages):
            curve.choose(stage, budget)
            fresh = Planner(profile, layout, schedule)
            assert found(curve, stage, budget + 7) == found(fresh, stage, budget + 7)


@pytest.fixture
def work(monkeypatch):
    """Counted as in `Tally`, of what a function does."""
    tallies = []

    class Counted(search.Tally):
        def __init__(self, most):
            super().__init__(most)
            tallies.append(self)

    def of(does):
        tallies.clear()
        found = does()
        return found, sum(tally.done for tally in tallies)

    monkeypatch.setattr(search, "Tally", Counted)
    return of


def nine_budgets(planner):
    low = max(choice.peak_bytes for choice in planner.leanest)
    high = max(choice.peak_bytes for choice in planner.fastest)
    return [low + (high - low) * i // 8 for i in range(9)]


def test_nine_budgets_of_one_planner_are_a_quarter_of_the_work_of_nine_planners(work):
    planners = [solve_speed.planner(solve_speed.Case(16, 4)) for _ in range(11)]
    budgets = nine_budgets(planners[0])
    _, apart = work(lambda: [p.solve(b) for p, b in zip(planners, budgets, strict=False)])
    for planner, order in zip(planners[9:], (budgets, budgets[::-1]), strict=True):
        _, together = work(lambda p=planner, o=order: [p.solve(budget) for budget in o])
        assert together < apart / 4


def test_a_curve_of_longer_chunks_is_a_quarter_of_the_work_of_its_budgets(work):
    planner = solve_speed.planner(solve_speed.Case(16, 2))
    again = Effort(many_layers=0)
    other = Planner(planner.profile, planner.layout, planner.schedule, effort=again)
    curve, together = work(lambda: planner.pareto(33))
    same, apart = work(lambda: other.pareto(33))
    assert [point.step_ms for point in curve] == [point.step_ms for point in same]
    assert together < apart / 4


def test_what_is_proven_of_a_larger_budget_is_proven_of_a_smaller_one(monkeypatch):
    """No smaller budget has a shorter step, and its own search may prove less."""
    found = []
    for seed in range(20):
        planner, _ = random_step(seed, SEVERAL_CHUNKS[:1])
        budget = max(choice.peak_bytes for choice in planner.fastest)
        above = planner.solve(budget)
        with monkeypatch.context() as patched:
            least = step_search.Work(mixing=0, least_mixtures=1, events=0, nodes=0, most_proofs=0)
            patched.setattr(step_search, "Work", lambda least=least: least)
            below = planner.try_solve(budget - 1)
        if below is not None:
            assert below.step_evidence.bound_ms >= above.step_evidence.bound_ms
            found.append(below)
    assert found


def test_a_budget_solved_with_a_gap_is_at_most_as_far_off_as_a_larger_ones_bound():
    effort = replace(AS_LONG_CHUNKS, widths=(4,))
    curve = BudgetCurve(Planner(*problem_of_many()[:3], effort=effort))
    above, found = curve.choose(0, 720), curve.choose(0, 700)
    exact = Planner(*problem_of_many()[:3]).choose(0, 700)
    assert above.bound_ps <= found.bound_ps <= exact.time_ps <= found.time_ps


def test_narrow_rounds_end_in_the_same_optimum():
    problems = [problem(seed) for seed in range(60)]
    narrow_first = Effort(widths=(1, 3, *Effort().widths))
    wide = [Planner(*p[:3]).choose(0, p[3]) for p in problems]
    narrow = [Planner(*p[:3], effort=narrow_first).choose(0, p[3]) for p in problems]
    for one, other in zip(wide, narrow, strict=True):
        assert (one is None) == (other is None)
        if one and other:
            assert (one.time_ps, one.peak_bytes) == (other.time_ps, other.peak_bytes)


def test_a_search_cut_off_too_early_reports_a_gap_and_a_bound_that_holds():
    exact = Planner(*problem_of_many()[:3]).choose(0, 700)
    cut = Planner(*problem_of_many()[:3], effort=Effort(widths=(2,))).choose(0, 700)
    assert exact.gap == 0
    assert cut.bound_ps <= exact.time_ps <= cut.time_ps
    assert cut.gap > 0


def test_the_bound_of_a_search_cut_short_is_never_above_the_optimum():
    def chosen(budget, effort):
        return Planner(*problem_of_many()[:3], effort=effort).choose(0, budget)

    budgets = range(300, 1000, 25)
    exact = [chosen(budget, AS_LONG_CHUNKS) for budget in budgets]
    gaps = []
    for width in (2, 4, 8, 16):
        effort = replace(AS_LONG_CHUNKS, widths=(width,))
        cut = [chosen(budget, effort) for budget in budgets]
        for one, other in zip(exact, cut, strict=True):
            assert (one is None) == (other is None)
            if one and other:
                assert other.bound_ps <= one.time_ps <= other.time_ps
        gaps.append(sum(choice.gap for choice in cut if choice))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > gaps[-1]


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 40))
def test_more_budget_is_never_slower(seed, more):
    profile, layout, schedule, budget = problem(seed)
    for stage in range(layout.num_stages):
        less = Planner(profile, layout, schedule).choose(stage, budget)
        richer = Planner(profile, layout, schedule).choose(stage, budget + more)
        if less is not None:
            assert richer is not None
            assert richer.time_ps <= less.time_ps


@settings(max_examples=60)
@given(SEEDS, st.randoms(use_true_random=False))
def test_adding_a_choice_is_never_slower(seed, rng):
    profile, layout, schedule, budget = problem(seed)
    kinds = tuple(
        replace(kind, choices=(*kind.choices, another(rng, kind.choices))) for kind in profile.kinds
    )
    for stage in range(layout.num_stages):
        before = Planner(profile, layout, schedule).choose(stage, budget)
        after = Planner(replace(profile, kinds=kinds), layout, schedule).choose(stage, budget)
        if before is not None:
            assert after is not None
            assert after.time_ps <= before.time_ps


@settings(max_examples=40)
@given(SEEDS, st.sampled_from([3, 1000, 2**30]), st.sampled_from([2.0, 10.0, 1000.0]))
def test_other_units_of_bytes_and_time_change_nothing(seed, bytes_unit, time_unit):
    profile, layout, schedule, budget = problem(seed)
    scaled = scale(profile, bytes_unit, time_unit)
    for stage in range(layout.num_stages):
        plain = Planner(profile, layout, schedule).choose(stage, budget)
        other = Planner(scaled, layout, schedule).choose(stage, budget * bytes_unit)
        assert (plain is None) == (other is None)
        if plain and other:
            assert other.time_ps == plain.time_ps * time_unit
            assert other.peak_bytes == plain.peak_bytes * bytes_unit
            assert other.policies == plain.policies


def test_a_search_below_static_bytes_finds_nothing():
    profile, layout, schedule, _ = problem(3)
    planner = Planner(profile, layout, schedule)
    assert planner.searches[0].fastest(0) is None


def test_the_leanest_need_is_the_least_budget_that_is_feasible():
    for seed in range(150):
        profile, layout, schedule, _ = problem(seed)
        planner = Planner(profile, layout, schedule)
        for stage, lean in enumerate(planner.leanest):
            policy = put_together(layout, [choice.policies for choice in planner.leanest])
            assert planner.evaluate(policy).stages[stage].peak_high_bytes == lean.peak_bytes
            assert planner.choose(stage, lean.peak_bytes) is not None
            assert planner.choose(stage, lean.peak_bytes - 1) is None


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
    planner = Planner(profile, Layout.from_flags(1, 1), Schedule(1, 1, 1))
    assert planner.leanest[0].peak_bytes == 104 + layer_bytes
