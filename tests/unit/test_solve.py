import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import solve_speed
from megatron_autorecompute.cost_model import PS_PER_MS
from megatron_autorecompute.errors import InfeasibleError, PolicyError, ProfileError
from megatron_autorecompute.pipeline import Layout, Schedule
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord, Imbalance, LayerKind, StaticBytes
from megatron_autorecompute.solve import Planner, best_manual, neighbours, solve
from megatron_autorecompute.stage_search import WIDTHS, search
from tests.unit.random_profiles import brute_force, problem, record, simulate

SEEDS = st.integers(0, 10**6)
INSTANCES = 2400  # of 1.8 stages on average: more than 4,000 searches


def found(planner, stage, budget):
    choice = planner.choose(stage, budget)
    return choice and (choice.time_ps / PS_PER_MS, choice.peak_bytes, choice.runs)


@pytest.mark.parametrize("part", range(4))
def test_the_optimum_is_that_of_brute_force_in_time_then_peak_then_runs(part, monkeypatch):
    compared = feasible = 0
    for seed in range(part * INSTANCES // 4, (part + 1) * INSTANCES // 4):
        profile, layout, schedule, budget = problem(seed)
        kept, searched = (Planner(profile, layout, schedule) for _ in range(2))
        for stage in range(layout.num_stages):
            expected = brute_force(profile, layout, schedule, stage, budget)
            assert found(kept, stage, budget) == expected, (seed, stage)
            with monkeypatch.context() as patch:  # as chunks of many layers are searched
                patch.setattr("megatron_autorecompute.stage_search.COMPLETE_LAYERS", -1)
                assert found(searched, stage, budget) == expected, (seed, stage)
            compared += 1
            feasible += expected is not None
    assert compared > 500
    assert compared / 4 < feasible < compared


def test_an_optimum_known_from_a_smaller_budget_changes_no_answer():
    for seed in range(200):
        profile, layout, schedule, budget = problem(seed)
        planner = Planner(profile, layout, schedule)
        for stage in range(layout.num_stages):
            planner.choose(stage, budget)
            fresh = Planner(profile, layout, schedule)
            assert found(planner, stage, budget + 7) == found(fresh, stage, budget + 7)


def test_narrow_rounds_end_in_the_same_optimum(monkeypatch):
    problems = [problem(seed) for seed in range(60)]
    wide = [Planner(*p[:3]).choose(0, p[3]) for p in problems]
    monkeypatch.setattr("megatron_autorecompute.stage_search.WIDTHS", (1, 3, *WIDTHS))
    narrow = [Planner(*p[:3]).choose(0, p[3]) for p in problems]
    for one, other in zip(wide, narrow, strict=True):
        assert (one is None) == (other is None)
        if one and other:
            assert (one.time_ps, one.peak_bytes) == (other.time_ps, other.peak_bytes)


def test_a_search_cut_off_too_early_reports_a_gap_and_a_bound_that_holds(monkeypatch):
    exact = Planner(*problem_of_many()[:3]).choose(0, 700)
    monkeypatch.setattr("megatron_autorecompute.stage_search.WIDTHS", (2,))
    cut = Planner(*problem_of_many()[:3]).choose(0, 700)
    assert exact.gap == 0
    assert cut.bound_ps <= exact.time_ps <= cut.time_ps
    assert cut.gap > 0


def test_the_bound_of_a_search_cut_short_is_never_above_the_optimum(monkeypatch):
    monkeypatch.setattr("megatron_autorecompute.stage_search.COMPLETE_LAYERS", -1)
    budgets = range(300, 1000, 25)
    exact = [Planner(*problem_of_many()[:3]).choose(0, budget) for budget in budgets]
    gaps = []
    for width in (2, 4, 8, 16):
        monkeypatch.setattr("megatron_autorecompute.stage_search.WIDTHS", (width,))
        cut = [Planner(*problem_of_many()[:3]).choose(0, budget) for budget in budgets]
        for one, other in zip(exact, cut, strict=True):
            assert (one is None) == (other is None)
            if one and other:
                assert other.bound_ps <= one.time_ps <= other.time_ps
        gaps.append(sum(choice.gap for choice in cut if choice))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > gaps[-1]


def problem_of_many(num_layers=12):
    """One kind whose choices do not nest, so that labels abound."""
    costs = ((100, 9, 30, 10), (61, 20, 45, 13), (37, 31, 77, 17), (3, 40, 130, 40))
    names = ("none", "selective[mlp]", "selective[core_attn]", "full")
    choices = tuple(
        ChoiceRecord(name, h, f, b, float(ms), 2.0 * ms)
        for name, (h, f, b, ms) in zip(names, costs, strict=True)
    )
    base, _, _, _ = problem(0)
    nothing = ChoiceRecord("none", 0, 0, 0, 0.0, 0.0)
    profile = replace(
        base,
        model=replace(base.model, num_layers=num_layers, mtp_num_layers=0),
        kinds=(LayerKind("k", tuple(range(num_layers)), choices, static=StaticBytes()),),
        embedding=nothing,
        head=nothing,
        stages=(),
        boundary_bytes=0,
        embedding_static=StaticBytes(),
        head_static=StaticBytes(),
    )
    return profile, Layout.even(num_layers, 1), Schedule(1, 1, 4), 700


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
        replace(kind, choices=(*kind.choices, record(rng, "selective[layernorm]")))
        for kind in profile.kinds
    )
    for stage in range(layout.num_stages):
        before = Planner(profile, layout, schedule).choose(stage, budget)
        after = Planner(replace(profile, kinds=kinds), layout, schedule).choose(stage, budget)
        if before is not None:
            assert after is not None
            assert after.time_ps <= before.time_ps


def test_changing_one_stages_budget_leaves_the_others_alone():
    profile, layout, schedule, _ = problem_of_many()
    layout, schedule = Layout.even(12, 3), Schedule(3, 1, 6)
    one = solve(profile, layout, schedule, [2000, 1200, 700])
    other = solve(profile, layout, schedule, [2000, 700, 700])
    assert one.policy.layers[:4] == other.policy.layers[:4]
    assert one.policy.layers[8:] == other.policy.layers[8:]
    assert one.policy.layers[4:8] != other.policy.layers[4:8]


def test_adding_a_stage_in_front_leaves_the_last_stages_choices_alone():
    # Stages are counted from the end by what they hold in flight, so a model with one more stage
    # of layers in front has the same problem on the last two.
    short, _, _, _ = problem_of_many(8)
    long, _, _, _ = problem_of_many(12)
    two = solve(short, Layout.even(8, 2), Schedule(2, 1, 6), 900)
    three = solve(long, Layout.even(12, 3), Schedule(3, 1, 6), 900)
    assert two.policy.layers[4:] == three.policy.layers[8:]


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


def scale(profile, size, time):
    def one(r):
        return replace(
            r,
            held_bytes=r.held_bytes * size,
            forward_transient_bytes=r.forward_transient_bytes * size,
            backward_transient_bytes=r.backward_transient_bytes * size,
            forward_ms=r.forward_ms * time,
            backward_ms=r.backward_ms * time,
        )

    def static(s):
        return StaticBytes(
            s.parameter_bytes * size,
            s.gradient_bytes * size,
            s.optimizer_state_bytes * size,
            s.buffer_bytes * size,
        )

    kinds = tuple(
        replace(k, choices=tuple(map(one, k.choices)), static=static(k.static))
        for k in profile.kinds
    )
    stages = tuple(
        replace(
            s,
            static=static(s.static),
            optimizer_step_peak_bytes=s.optimizer_step_peak_bytes * size,
            residual_bytes=s.residual_bytes * size,
        )
        for s in profile.stages
    )
    return replace(
        profile,
        kinds=kinds,
        embedding=one(profile.embedding),
        head=one(profile.head),
        boundary_bytes=profile.boundary_bytes * size,
        embedding_static=static(profile.embedding_static),
        head_static=static(profile.head_static),
        stages=stages,
    )


@settings(max_examples=80)
@given(SEEDS)
def test_never_slower_per_stage_than_any_manual_strategy_that_fits(seed):
    profile, layout, schedule, budget = problem(seed)
    planner = Planner(profile, layout, schedule)
    for manual in planner.manual_strategies(budget):
        if not manual.fits:
            continue
        solution = planner.solve(budget)
        for ours, theirs in zip(solution.cost.stages, manual.cost.stages, strict=True):
            assert ours.busy_ms <= theirs.busy_ms * (1 + 1e-12)


def test_manual_strategies_count_layers_as_megatron_does():
    profile, _, _, _ = problem_of_many(10)
    layout = Layout.even(10, 2, num_layers_in_first_pipeline_stage=7)
    manual = {
        s.name: s for s in Planner(profile, layout, Schedule(2, 1, 4)).manual_strategies(10**6)
    }
    # TransformerBlock counts block layers from each stage's first, and its uniform loop clamps
    # the last checkpoint to the layers that are left.
    assert manual["megatron:block/2"].policy.format() == "full*2,none*5,full*2,none*1"
    assert manual["megatron:block/5"].policy.format() == "full*5,none*2,full*3"
    assert manual["megatron:uniform/3"].policy.format() == "full/3*6,full*1,full/3*3"
    assert manual["megatron:uniform/7"].policy.format() == "full/7*7,full/3*3"
    assert len(manual) == 1 + 2 + 7 + 7


def test_the_best_manual_strategy_is_the_fastest_that_fits():
    planner = Planner(*problem_of_many()[:3])
    manual = planner.manual_strategies(700)
    best = best_manual(manual)
    fitting = [s.cost.step_ms for s in manual if s.fits]
    assert fitting
    assert best.cost.step_ms == min(fitting)
    assert best.cost.step_ms > planner.solve(700).cost.step_ms
    assert best_manual(planner.manual_strategies(1)) is None


def test_infeasible_names_the_tightest_stage_its_need_and_the_budget():
    profile, _, _, _ = problem_of_many()
    gib = 1 << 30
    profile = scale(profile, gib, 1.0)
    with pytest.raises(InfeasibleError, match=r"Stage 0 needs \S+ GiB .*full.*the budget is 60.00"):
        solve(profile, Layout.even(12, 3), Schedule(3, 1, 6), 60 * gib)


def test_the_leanest_need_is_the_least_budget_that_is_feasible():
    for seed in range(40):
        profile, layout, schedule, _ = problem(seed)
        planner = Planner(profile, layout, schedule)
        for stage, lean in enumerate(planner.leanest):
            assert planner.choose(stage, lean.peak_bytes) is not None
            assert planner.choose(stage, lean.peak_bytes - 1) is None


def test_pareto_falls_in_time_as_the_budget_grows_and_each_point_is_the_optimum():
    planner = Planner(*problem_of_many()[:3])
    points = planner.pareto(20)
    for large, small in itertools.pairwise(points):
        assert large.budget_bytes > small.budget_bytes
        assert large.step_ms <= small.step_ms
    for point in points:
        fresh = Planner(*problem_of_many()[:3]).solve(point.budget_bytes)
        assert fresh.cost.step_ms == pytest.approx(point.step_ms)
        assert fresh.cost.peak_high_bytes == point.peak_high_bytes


def test_interleaved_more_budget_on_the_curve_is_never_a_slower_step():
    planner = solve_speed.planner(solve_speed.Case(32, 4, 2))
    points = planner.pareto(24)
    # Stage by stage nothing is slower, but what waits for what can make the step so.
    alone = [planner.solve(point.budget_bytes).cost.step_ms for point in points]
    assert any(large > small for large, small in itertools.pairwise(alone))
    assert all(large.step_ms <= small.step_ms for large, small in itertools.pairwise(points))
    assert all(point.peak_high_bytes <= point.budget_bytes for point in points)


def test_evidence_carries_objective_bound_gap_and_binding_moment():
    planner = Planner(*problem_of_many()[:3])
    (evidence,) = planner.solve(700).evidence
    assert evidence.gap == 0
    assert evidence.objective_ms == evidence.bound_ms
    assert evidence.peak_high_bytes <= 700
    assert evidence.binding.startswith("stage 0, backward of layer")
    (free,) = planner.solve(10**9).evidence
    assert free.binding.startswith("nothing")


def test_the_budget_is_met_at_the_high_end_of_the_uncertainty():
    profile, layout, schedule, budget = problem_of_many()
    kinds = tuple(
        replace(k, choices=tuple(replace(c, uncertainty_bytes=5) for c in k.choices))
        for k in profile.kinds
    )
    solution = solve(replace(profile, kinds=kinds), layout, schedule, budget)
    (stage,) = solution.cost.stages
    assert stage.peak_low_bytes < stage.peak.bytes < stage.peak_high_bytes <= budget
    certain = solve(profile, layout, schedule, budget)
    assert certain.cost.step_ms < solution.cost.step_ms


def test_budgeting_for_a_moe_percentile_costs_time_and_leaves_room():
    profile, layout, schedule, budget = problem_of_many()
    uneven = (Imbalance(50.0, 1.0), Imbalance(99.0, 1.25))
    profile = replace(
        profile, kinds=tuple(replace(kind, imbalance=uneven) for kind in profile.kinds)
    )
    mean = solve(profile, layout, schedule, budget)
    careful = solve(profile, layout, schedule, budget, percentile=99.0)
    assert careful.cost.step_ms > mean.cost.step_ms
    names = [[layer for layer in careful.policy.layers]]
    peak, _ = simulate(profile, layout, schedule, 0, names)
    assert peak * 1.2 < budget


def test_only_allowed_choices_are_used():
    profile, layout, schedule, _ = problem_of_many()
    solution = solve(profile, layout, schedule, 700, allowed=["none", "full"])
    assert {str(layer) for layer in solution.policy.layers} <= {"none", "full"}
    with pytest.raises(ProfileError, match="None of the allowed choices"):
        solve(profile, layout, schedule, 700, allowed=["selective[moe]"])


def test_neighbours_are_every_other_choice_of_a_layer_with_the_rest_unchanged():
    planner = Planner(*problem_of_many()[:3])
    policy = RecomputePolicy.parse("full/3*6,none*6", num_layers=12)
    found_choices = dict(neighbours(planner, policy, 1))
    assert {str(choice) for choice in found_choices} == {
        "none",
        "full",
        "selective[mlp]",
        "selective[core_attn]",
    }
    with pytest.raises(PolicyError, match="Layer 12 does not exist"):
        neighbours(planner, policy, 12)


def test_a_wrong_number_of_budgets_is_refused():
    with pytest.raises(PolicyError, match="2 budgets for 1 stages"):
        Planner(*problem_of_many()[:3]).solve([1, 2])


def test_a_search_below_static_bytes_finds_nothing():
    profile, layout, schedule, _ = problem(3)
    planner = Planner(profile, layout, schedule)
    assert search(planner.problems[0], 0) is None
