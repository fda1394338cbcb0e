import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import solve_speed
from megatron_autorecompute.errors import InfeasibleError, OptionError, PolicyError, ProfileError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.search.curve import pareto
from megatron_autorecompute.planner.search.manual import best_manual, manual_policy
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import StepEvidence, stage_evidence
from megatron_autorecompute.planner.search.solve import solve, try_solve
from megatron_autorecompute.planner.search.stage_problem import put_together
from megatron_autorecompute.policy import MegatronStrategy, RecomputePolicy
from megatron_autorecompute.profile import (
    ChoiceRecord,
    Imbalance,
    LayerKind,
    Model,
    Parallelism,
    Profile,
    StageRecord,
    StaticBytes,
)
from tests.planner.asked import every_manual_setting
from tests.planner.definitions import simulate
from tests.planner.random_profiles import drawn, problem_of_many, scale

SEEDS = st.integers(0, 10**6)


def test_changing_one_stages_budget_leaves_the_others_alone():
    profile, layout, schedule, _ = problem_of_many()
    layout, schedule = Layout.from_flags(12, 3), Schedule(3, 1, 6)
    one = solve(Problem(profile, layout, schedule, [2000, 1200, 700]))
    other = solve(Problem(profile, layout, schedule, [2000, 700, 700]))
    assert one.policy.layers[:4] == other.policy.layers[:4]
    assert one.policy.layers[8:] == other.policy.layers[8:]
    assert one.policy.layers[4:8] != other.policy.layers[4:8]


def test_adding_a_stage_in_front_leaves_the_last_stages_choices_alone():
    # Stages are counted from the end by what they hold in flight, so a model with one more stage
    # of layers in front has the same problem on the last two.
    short, _, _, _ = problem_of_many(8)
    long, _, _, _ = problem_of_many(12)
    two = solve(Problem(short, Layout.from_flags(8, 2), Schedule(2, 1, 6), 900))
    three = solve(Problem(long, Layout.from_flags(12, 3), Schedule(3, 1, 6), 900))
    assert two.policy.layers[4:] == three.policy.layers[8:]


@settings(max_examples=50)
@given(SEEDS)
def test_never_slower_than_any_manual_strategy_that_fits(seed):
    profile, layout, schedule, budget = drawn(seed)
    problem = Problem(profile, layout, schedule)
    for manual in every_manual_setting(problem.at(budget)):
        if not manual.fits:
            continue
        solution = solve(problem.at(budget))
        assert solution.cost.step_ms <= manual.cost.step_ms * (1 + 1e-12)


def test_manual_strategies_count_layers_as_megatron_does():
    profile, _, _, _ = problem_of_many(10)
    layout = Layout.from_flags(10, 2, num_layers_in_first_pipeline_stage=7)
    manual = {
        s.name: s
        for s in every_manual_setting(Problem(profile, layout, Schedule(2, 1, 4)).at(10**6))
    }
    # TransformerBlock counts block layers from each stage's first, and its uniform loop clamps
    # the last checkpoint to the layers that are left.
    assert manual["megatron:block/2"].policy.format() == "full+all*2,none*5,full+all*2,none*1"
    assert manual["megatron:block/5"].policy.format() == "full+all*5,none*2,full+all*3"
    assert manual["megatron:uniform/3"].policy.format() == "full/3+all*6,full+all*1,full/3+all*3"
    assert manual["megatron:uniform/7"].policy.format() == "full/7+all*7,full/3+all*3"
    assert len(manual) == 1 + 3 + 7 + 7
    assert manual["megatron:selective[core_attn+mlp]"].refused.startswith(
        "The profile has no record"
    )


def test_the_best_manual_strategy_is_the_fastest_that_fits():
    problem = Problem(*problem_of_many()[:3])
    manual = every_manual_setting(problem.at(700))
    best = best_manual(problem.at(700))
    fitting = [s.cost.step_ms for s in manual if s.fits]
    assert fitting
    assert best.cost.step_ms == min(fitting)
    assert best.cost.step_ms > solve(problem.at(700)).cost.step_ms
    assert best_manual(problem.at(1)) is None


@settings(max_examples=50)
@given(SEEDS)
def test_the_best_manual_strategy_is_found_without_looking_at_all_of_them(seed):
    profile, layout, schedule, budget = drawn(seed)
    problem = Problem(profile, layout, schedule)
    fitting = [s.cost.step_ms for s in every_manual_setting(problem.at(budget)) if s.fits]
    best = best_manual(problem.at(budget))
    assert (best and best.cost.step_ms) == min(fitting, default=None)


def test_every_set_of_the_modules_of_all_kinds_together_is_a_manual_strategy():
    """Megatron's list is one for all layers: what a layer has not does nothing there."""
    profile, layout, schedule, _ = problem_of_many(4)
    one, other = (
        tuple(replace(c, choice=c.choice.replace("core_attn", name)) for c in kind.choices)
        for kind in profile.kinds
        for name in ("core_attn", "moe")
    )
    dense, moe = (replace(profile.kinds[0], name=n, inert={}) for n in ("dense", "moe"))
    without_mlp = tuple(c for c in other if "mlp" not in c.choice)
    kinds = (
        replace(dense, layers=(0, 1), choices=one),
        replace(moe, layers=(2, 3), choices=without_mlp),
    )
    problem = Problem(replace(profile, kinds=kinds), layout, schedule)
    costs = {s.name: s.cost for s in every_manual_setting(problem.at(10**6))}
    both = RecomputePolicy.parse("selective[mlp]*2,selective[moe]*2", num_layers=4)
    assert costs["megatron:selective[mlp+moe]"] == problem.cost(both)


def test_what_megatron_never_returns_from_is_no_manual_strategy():
    profile, layout, schedule, _ = problem_of_many()
    names = {"selective[mlp]", "selective[core_attn]"}
    for facts, runnable in (({}, names), ({"add_bias_linear": False}, names)):
        assert offered(profile, facts, layout, schedule) >= runnable
    assert offered(profile, {"hidden_size": 8}, layout, schedule) & names == {
        "selective[core_attn]"
    }


def offered(profile, config, layout, schedule):
    facts = {"transformer_config": config} if config else {}
    model = replace(profile.model, facts=facts)
    problem = Problem(replace(profile, model=model), layout, schedule)
    offers = [s for s in every_manual_setting(problem.at(10**6)) if s.cost]
    return {strategy.name.removeprefix("megatron:") for strategy in offers}


def test_infeasible_names_the_tightest_stage_its_need_and_the_budget():
    profile, _, _, _ = problem_of_many()
    gib = 1 << 30
    profile = scale(profile, gib, 1.0)
    with pytest.raises(InfeasibleError, match=r"Stage 0 needs \S+ GiB .*full.*the budget is 60.00"):
        solve(Problem(profile, Layout.from_flags(12, 3), Schedule(3, 1, 6), 60 * gib))


@pytest.mark.parametrize("unit_bytes", [(1 << 30) + 12345, 123457, 1])
def test_the_need_that_an_infeasible_plan_names_is_enough_as_a_budget(unit_bytes):
    profile, layout, schedule, _ = problem_of_many()
    problem = Problem(scale(profile, unit_bytes, 1.0), layout, schedule)
    with pytest.raises(InfeasibleError) as caught:
        solve(problem.at(60 * unit_bytes))
    named = float(re.findall(r"needs (\S+) GiB", str(caught.value))[0])
    assert solve(problem.at(round(named * (1 << 30)))).cost.peak_high_bytes <= named * (1 << 30)


def test_pareto_falls_in_time_as_the_budget_grows_and_each_point_is_the_optimum():
    problem = Problem(*problem_of_many()[:3])
    points = pareto(problem, 20)
    for large, small in itertools.pairwise(points):
        assert large.budget_bytes > small.budget_bytes
        assert large.step_ms <= small.step_ms
    for point in points:
        fresh = solve(Problem(*problem_of_many()[:3]).at(point.budget_bytes))
        assert fresh.cost.step_ms == pytest.approx(point.step_ms)
        assert fresh.cost.peak_high_bytes == point.peak_high_bytes


def test_interleaved_more_budget_on_the_curve_is_never_a_slower_step():
    problem = solve_speed.problem(solve_speed.Case(32, 4, 2))
    points = pareto(problem, 24)
    # Stage by stage nothing is slower, but what waits for what can make the step so.
    alone = [busy_step_ms(problem, point.budget_bytes) for point in points]
    assert any(large > small for large, small in itertools.pairwise(alone))
    assert all(large.step_ms <= small.step_ms for large, small in itertools.pairwise(points))
    assert all(point.peak_high_bytes <= point.budget_bytes for point in points)


def busy_step_ms(problem, budget):
    """Where every stage has its choices of the least busy time."""
    stages = range(problem.layout.num_stages)
    choices = [problem.stages.stage(stage).fastest(budget).policies for stage in stages]
    return problem.cost(put_together(problem.layout, choices)).step_ms


def test_evidence_carries_objective_and_binding_moment():
    problem = Problem(*problem_of_many()[:3])
    solution = solve(problem.at(700))
    (evidence,) = stage_evidence(problem.at(700), solution.policy)
    busy_ms = solution.cost.stages[0].busy_ms / problem.schedule.num_microbatches
    assert evidence.objective_ms == pytest.approx(busy_ms)
    assert evidence.peak_high_bytes <= 700
    assert evidence.binding.startswith("stage 0, backward of layer")
    assert solution.step_evidence == StepEvidence(solution.cost.step_ms, 0.0)
    large = problem.at(10**9)
    (free,) = stage_evidence(large, solve(large).policy)
    assert free.binding.startswith("nothing")


def test_the_budget_is_met_at_the_high_end_of_the_uncertainty():
    profile, layout, schedule, budget = problem_of_many()
    kinds = tuple(
        replace(k, choices=tuple(replace(c, uncertainty_bytes=5) for c in k.choices))
        for k in profile.kinds
    )
    solution = solve(Problem(replace(profile, kinds=kinds), layout, schedule, budget))
    (stage,) = solution.cost.stages
    assert stage.peak_low_bytes < stage.peak.bytes < stage.peak_high_bytes <= budget
    certain = solve(Problem(profile, layout, schedule, budget))
    assert certain.cost.step_ms < solution.cost.step_ms


def test_budgeting_for_a_moe_percentile_costs_time_and_leaves_room():
    profile, layout, schedule, budget = problem_of_many()
    uneven = (Imbalance(50.0, 1.0), Imbalance(99.0, 1.25))
    profile = replace(
        profile, kinds=tuple(replace(kind, imbalance=uneven) for kind in profile.kinds)
    )
    mean = solve(Problem(profile, layout, schedule, budget, percentile=None))
    careful = solve(Problem(profile, layout, schedule, budget, percentile=99.0))
    assert solve(Problem(profile, layout, schedule, budget)) == careful
    assert careful.cost.step_ms > mean.cost.step_ms
    names = [[layer for layer in careful.policy.layers]]
    peak, _ = simulate(profile, layout, schedule, 0, names)
    assert peak * 1.2 < budget


def test_only_allowed_choices_are_used():
    profile, layout, schedule, _ = problem_of_many()
    solution = solve(Problem(profile, layout, schedule, 700, allowed=["none", "full"]))
    assert {str(layer) for layer in solution.policy.layers} <= {"none", "full"}
    with pytest.raises(ProfileError, match="None of the allowed choices"):
        solve(Problem(profile, layout, schedule, 700, allowed=["selective[moe]"]))


def test_a_wrong_number_of_budgets_is_refused():
    with pytest.raises(PolicyError, match="2 budgets for 1 stages"):
        solve(Problem(*problem_of_many()[:3]).at([1, 2]))


def test_the_curve_is_of_the_same_steps_as_plans_where_residuals_were_measured():
    profile, layout, schedule, _ = problem_of_many()
    record = StageRecord(tuple(range(12)), StaticBytes(), residual_ms=7.0)
    problem = Problem(replace(profile, stages=(record,)), layout, schedule)
    for point in pareto(problem, 3):
        assert point.step_ms == pytest.approx(solve(problem.at(point.budget_bytes)).cost.step_ms)
        policy = RecomputePolicy.parse(point.recompute_policy, num_layers=12)
        assert point.step_ms == problem.cost(policy).step_ms


def model_of(*kinds, num_layers):
    nothing = ChoiceRecord("none", 0, 0, 0, 0.0, 0.0)
    return Profile(
        Model("by hand", num_layers),
        Parallelism(1, 8),
        kinds,
        embedding=nothing,
        head=nothing,
        boundary_bytes=0,
        embedding_static=StaticBytes(),
        head_static=StaticBytes(),
    )


def test_a_setting_of_all_layers_recomputes_the_modules_that_each_kind_has():
    none = ChoiceRecord("none", 100, 0, 0, 1.0, 2.0)
    full = ChoiceRecord("full", 2, 0, 100, 1.0, 3.0)
    moe = ChoiceRecord("selective[moe]", 40, 0, 0, 1.0, 2.2)
    both = ChoiceRecord("selective[core_attn+moe]", 30, 0, 0, 1.0, 2.3)
    attention = ChoiceRecord("selective[core_attn]", 90, 0, 0, 1.0, 2.1)
    kinds = (
        LayerKind("dense", (0,), (none, full, attention), static=StaticBytes()),
        LayerKind("moe", (1, 2, 3), (none, full, attention, moe, both), static=StaticBytes()),
    )
    problem = Problem(model_of(*kinds, num_layers=4), Layout.from_flags(4, 1), Schedule(1, 1, 4))
    found = {s.name: s for s in every_manual_setting(problem.at(10**6))}
    assert found["megatron:selective[moe]"].policy.format() == "none*1,selective[moe]+all*3"
    assert (
        found["megatron:selective[core_attn+moe]"].policy.format()
        == "selective[core_attn]+all*1,selective[core_attn+moe]+all*3"
    )
    assert not [s.name for s in found.values() if s.refused]
    assert best_manual(problem.at(100 + 3 * 40)).name == "megatron:selective[moe]"


def test_allowing_what_is_inert_allows_what_it_equals():
    kind = LayerKind(
        "k",
        (0,),
        (ChoiceRecord("none", 10, 0, 0, 1.0, 2.0), ChoiceRecord("full", 1, 0, 9, 1.0, 3.0)),
        inert={"selective[core_attn]": "none"},
        static=StaticBytes(),
    )
    problem = Problem(
        model_of(kind, num_layers=1),
        Layout.from_flags(1, 1),
        Schedule(1, 1, 1),
        allowed=["full", "selective[core_attn]"],
    )
    assert solve(problem.at(100)).policy.format() == "none*1"
    assert solve(problem.at(10)).policy.format() == "none*1"
    with pytest.raises(InfeasibleError):
        solve(problem.at(9))


def test_a_setting_runs_what_a_layer_has_of_its_modules_and_of_its_offload():
    attention = ("selective[layernorm]", "none+offload[core_attn]")
    kind = LayerKind(
        "attention",
        (0,),
        tuple(ChoiceRecord(text, 10, 0, 0, 1.0, 2.0) for text in ("none", *attention)),
        inert={
            "selective[layernorm+moe_act]": "selective[layernorm]",
            "selective[layernorm]+offload[expert_fc1]": "selective[layernorm]",
        },
        static=StaticBytes(),
    )
    problem = Problem(model_of(kind, num_layers=1), Layout.from_flags(1, 1), Schedule(1, 1, 1))
    text = "megatron:selective[layernorm+moe_act]+offload[expert_fc1]"
    policy = manual_policy(problem, MegatronStrategy.parse(text))
    assert problem.cost(policy).peak_high_bytes == 10


@pytest.mark.parametrize(
    ("record", "factor", "num_layers"),
    [
        (ChoiceRecord("none", 1 << 44, 0, 0, 1.0, 2.0), 1024.0, 1024),
        (ChoiceRecord("none", 1, 0, 0, 1e6, 1e6), 1.0, 1200),
    ],
)
def test_figures_whose_sums_leave_64_bits_are_refused(record, factor, num_layers):
    kind = LayerKind(
        "k",
        tuple(range(num_layers)),
        (record,),
        imbalance=(Imbalance(99.0, factor),),
        static=StaticBytes(),
    )
    profile = model_of(kind, num_layers=num_layers)
    with pytest.raises(ProfileError, match="The records add up to"):
        Problem(profile, Layout.from_flags(num_layers, 1), Schedule(1, 1, 1), percentile=99.0)


def test_a_step_of_a_million_microbatches_is_planned():
    profile, _, _, _ = problem_of_many()
    for layout in (Layout.from_flags(12, 2), Layout.from_flags(12, 2, 3)):
        few, many = (Schedule.of_layout(layout, m) for m in (64, 10**6))
        solutions = [solve(Problem(profile, layout, schedule, 900)) for schedule in (few, many)]
        costs = [solution.cost for solution in solutions]
        assert solutions[0].policy == solutions[1].policy
        assert [s.peak.bytes for s in costs[0].stages] == [s.peak.bytes for s in costs[1].stages]
        busy_ms = max(stage.busy_ms for stage in costs[1].stages)
        assert busy_ms <= costs[1].step_ms <= busy_ms * (1 + 1e-3)


def test_a_setting_of_megatrons_that_fits_is_taken_where_its_step_is_faster():
    # Equally busy choices whose forwards and backwards differ: only the fill and the drain of the
    # pipeline tell them apart.
    full = ChoiceRecord("full", 1, 0, 0, 1.0, 5.0)
    attention = ChoiceRecord("selective[core_attn]", 2, 0, 0, 3.0, 3.0)
    none = ChoiceRecord("none", 1, 0, 0, 0.0, 3.0)
    kinds = (
        LayerKind("a", (0,), (full, attention), static=StaticBytes()),
        LayerKind("b", (1,), (none,), inert={"selective[core_attn]": "none"}, static=StaticBytes()),
    )
    problem = model_of(*kinds, num_layers=2), Layout.from_flags(2, 2), Schedule(2, 1, 6)
    solution = solve(Problem(*problem).at(10**6))
    assert solution.cost.step_ms == best_manual(Problem(*problem).at(10**6)).cost.step_ms == 36.0
    narrower = solve(Problem(*problem, allowed=["full", "none"]).at(10**6))
    assert narrower.cost.step_ms == 38.0


def test_a_group_of_megatrons_choices_is_megatrons_and_costs_what_it_does():
    records = (
        ChoiceRecord("none", 5, 0, 0, 1.0, 2.0),
        ChoiceRecord("full", 4, 0, 5, 1.0, 2.5),
        ChoiceRecord("full+all", 4, 0, 5, 1.0, 3.0),
    )
    profile = model_of(LayerKind("a", range(8), records, static=StaticBytes()), num_layers=8)
    pipeline = Layout.from_flags(8, 1), Schedule(1, 1, 1)
    own, every = Problem(profile.as_megatron(), *pipeline), Problem(profile, *pipeline)
    need = own.stages.leanest[0].peak_bytes
    found = solve(own.at(need))
    assert found.policy.format() == "full/3+all*3,full/2+all*2,full+all*2,none*1"
    assert found.cost.step_ms == every.cost(found.policy).step_ms == 7 * 4.0 + 3.0
    assert solve(every.at(need)).policy.format() == "full/3*3,full/2*2,full*2,none*1"


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_no_setting_of_megatrons_that_fits_has_a_faster_step(seed):
    profile, layout, schedule, budget = drawn(seed)
    problem = Problem(profile, layout, schedule)
    solution = try_solve(problem.at(budget))
    for manual in every_manual_setting(problem.at(budget)):
        if manual.fits:
            assert solution.cost.step_ms <= manual.cost.step_ms * (1 + 1e-9), manual.name
    for stage in solution.cost.stages if solution else ():
        assert stage.peak_high_bytes <= budget


@pytest.mark.parametrize(
    "budget", [70e9, float("nan"), None, 10**30, "70GiB", True, [70e9], ["1"], b"1"]
)
def test_a_budget_that_is_no_whole_number_of_bytes_is_refused(budget):
    profile, layout, schedule, _ = problem_of_many(4)
    with pytest.raises(OptionError, match="is no whole number of bytes"):
        Problem(profile, layout, schedule).at(budget)


def test_solve_of_anything_else_than_a_problem_says_how_to_make_one():
    profile, _, _, _ = problem_of_many(4)
    for wrong in (profile, None):
        with pytest.raises(OptionError, match=r"takes a Problem.*Problem\(profile, layout"):
            solve(wrong)
