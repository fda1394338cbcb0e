import json
import re
from dataclasses import replace

import pytest

from megatron_autorecompute import json_records
from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.planner.plan import Plan, changes, make_plan
from megatron_autorecompute.planner.search.curve import pareto
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import solve, try_solve
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Profile
from tests.planner.random_profiles import drawn, problem_of_many


@pytest.fixture(scope="module")
def plan():
    profile, layout, schedule, budget = problem_of_many()
    profile = replace(profile, fingerprint={"torch": "2.13.0", "device": "cpu"})
    return make_plan(Problem(profile, layout, schedule).at(budget))


def test_a_saved_plan_is_read_back_equal(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_the_profile_is_read_from_the_plan_file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert Profile.load(tmp_path / "plan.json") == plan.profile


def test_the_policy_reads_its_choices_from_the_plan_file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    read = RecomputePolicy.parse(f"@{tmp_path / 'plan.json'}", num_layers=12)
    assert read == plan.policy


def test_solving_the_loaded_plan_again_gives_the_same_policy(plan):
    again = Plan.from_json(plan.to_json())
    assert solve(again.problem().at(again.budget_bytes)).policy == plan.policy


def test_the_curve_steps_down_to_the_leanest_policy(plan):
    curve = pareto(plan.problem(), 5)
    peaks = [point.peak_high_bytes for point in curve]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] == max(choice.peak_bytes for choice in plan.problem().stages.leanest)
    for point in curve:
        policy = RecomputePolicy.parse(point.recompute_policy, num_layers=12)
        assert plan.problem().cost(policy).step_ms == pytest.approx(point.step_ms)


def test_a_plan_from_before_that_has_a_curve_is_read_with_its_proof(plan):
    data = json.loads(plan.to_json())
    del data["digest"]
    data["curve"] = [{"budget_bytes": 9, "step_ms": 1.0}]
    text = json.dumps({**data, "digest": json_records.digest(data)})
    assert Plan.from_json(text) == plan


def test_a_plan_from_before_that_says_nothing_of_its_step_is_read_without_proof(plan):
    data = json.loads(plan.to_json())
    del data["digest"], data["step_evidence"]
    text = json.dumps({**data, "digest": json_records.digest(data)})
    found = Plan.from_json(text)
    assert (found.cost, found.evidence) == (plan.cost, plan.evidence)
    assert (found.step_evidence.bound_ms, found.proven) == (None, False)


def test_the_best_manual_strategy_is_kept_and_is_slower(plan):
    assert plan.best_manual.fits
    assert plan.best_manual.step_ms > plan.cost.step_ms


def test_a_changed_fingerprint_says_what_changed(plan):
    assert changes(plan.profile.fingerprint, {"torch": "2.13.0", "device": "cpu"}) == ()
    assert changes(plan.profile.fingerprint, {"torch": "2.14.0", "tp": "2"}) == (
        "device: cpu, now absent",
        "torch: 2.13.0, now 2.14.0",
        "tp: absent, now 2",
    )


@pytest.mark.parametrize("end", [1, 100, -2])
def test_a_cut_off_plan_is_refused(plan, end):
    with pytest.raises(ProfileError, match="not whole JSON"):
        Plan.from_json(plan.to_json()[:end])


def test_a_bad_field_deep_in_a_plan_is_refused_with_its_path(plan):
    data = json.loads(plan.to_json())
    data["cost"]["stages"][0]["peak"]["breakdown"]["static_bytes"] = "much"
    with pytest.raises(ProfileError, match=r"cost.stages\[0\].peak.breakdown.static_bytes: 'much'"):
        Plan.from_json(json.dumps(data))


def test_a_plan_whose_parts_do_not_belong_together_is_refused(plan):
    data = json.loads(plan.to_json())
    data["recompute_policy"].append("none")
    with pytest.raises(ProfileError, match="13 choices, the profile's model 12 layers"):
        Plan.from_json(json.dumps(data))
    data = json.loads(plan.to_json())
    data["budget_bytes"] = [1, 2]
    with pytest.raises(ProfileError, match="budget_bytes has 2 entries, the layout 1 stages"):
        Plan.from_json(json.dumps(data))


def test_an_unchanged_plan_is_proven_however_its_text_is_laid_out(plan):
    data = json.loads(plan.to_json())
    text = json.dumps(dict(reversed(data.items())), indent=7)
    assert Plan.from_json(text) == plan
    assert plan.proven


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("budget_bytes", 0), -1, "budget_bytes[0]: -1, must be greater than 0"),
        (("budget_bytes", 0), 9, "holds no plan that could run: it was changed after it was"),
        (("recompute_policy", 3), "half", "recompute_policy[3]: 'half', Cannot read 'half'"),
        (("recompute_policy", 3), "full/2", "holds no plan that could run: full/2 from layer"),
        (("allowed",), ["full"], "or has choices that are not in allowed"),
        (("imbalance_percentile",), float("nan"), "imbalance_percentile: nan, must be "),
        (("layout", "stages", 0, 0, "layers"), [0] * 12, "must be 0, 1, 2, … in model order"),
        (("schema_version",), 0, "schema_version: 0, must be ≥ 1"),
    ],
)
def test_a_plan_that_could_not_run_is_refused_with_the_reason(plan, path, value, message):
    with pytest.raises(ProfileError, match=re.escape(message)) as caught:
        Plan.from_json(changed(plan, {path: value}), "p.json")
    assert str(caught.value).startswith("p.json")


def changed(plan, values):
    data = json.loads(plan.to_json())
    for (*parents, name), value in values.items():
        node = data
        for parent in parents:
            node = node[parent]
        node[name] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("cost", "step_ms"), float("nan")),
        (("step_interval",), {"low_ms": 1.0, "high_ms": 2.0, "coverage": 0.95}),
        (("cost", "stages", 0, "peak", "moment"), "at night"),
        (("step_evidence", "gap"), 0.5),
        (("step_evidence", "bound_ms"), 10.0**9),
        (("step_evidence", "bound_ms"), None),
        (("evidence", 0, "objective_ms"), 1.0),
        (("best_manual", "step_ms"), 1.0),
        (("best_manual",), None),
    ],
)
def test_a_figure_changed_by_hand_is_worked_out_again_and_nothing_is_proven(plan, path, value):
    found = Plan.from_json(changed(plan, {path: value}))
    unproven = Plan.from_json(changed(plan, {("digest",): "none"}))
    assert replace(found, notes=()) == unproven
    assert not found.proven
    assert (found.cost, found.best_manual) == (plan.cost, plan.best_manual)
    assert [each.objective_ms for each in found.evidence] == [
        each.objective_ms for each in plan.evidence
    ]


def test_a_plan_with_other_microbatches_has_their_step(plan):
    found = Plan.from_json(changed(plan, {("schedule", "num_microbatches"): 8}))
    assert found.cost == found.problem().cost(plan.policy)
    assert found.cost.step_ms != plan.cost.step_ms


def test_a_policy_changed_by_hand_that_does_not_fit_is_no_plan_but_still_a_policy(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(changed(plan, {("recompute_policy",): ["none"] * 12}))
    with pytest.raises(
        ProfileError, match=r"give --recompute-policy @FILE, which reads no figures"
    ):
        Plan.load(path)
    read = RecomputePolicy.parse(f"@{path}", num_layers=12)
    assert read.to_config() == ["none"] * 12


def test_a_plan_changed_in_what_proves_it_has_no_proof(plan):
    """A larger budget leaves the policy no longer the best."""
    found = Plan.from_json(changed(plan, {("budget_bytes", 0): 10**6}))
    assert not found.proven
    assert found.evidence[0].budget_bytes == 10**6
    assert (found.step_evidence.bound_ms, found.step_evidence.gap) == (None, None)
    assert not Plan.from_json(found.to_json()).proven  # writing it again proves nothing


def test_a_plan_without_a_digest_is_read_and_has_no_proof(plan):
    data = json.loads(plan.to_json())
    del data["digest"]
    found = Plan.from_json(json.dumps(data))
    assert not found.proven
    assert found.cost == plan.cost


def test_a_plan_of_a_version_that_predicted_otherwise_gets_the_figures_of_this_one(plan):
    slower = replace(plan, cost=replace(plan.cost, step_ms=2 * plan.cost.step_ms))
    found = Plan.from_json(slower.to_json())
    assert found.cost == plan.cost
    assert not found.proven
    assert f"said {2 * plan.cost.step_ms:,.1f} ms a step" in found.notes[-1]


def test_the_figures_of_every_plan_can_be_worked_out_again():
    solved = 0
    for seed in range(40):
        profile, layout, schedule, budget = drawn(seed)
        problem = Problem(profile, layout, schedule)
        if try_solve(problem.at(budget)) is None:
            continue
        data = json.loads(make_plan(problem.at(budget)).to_json())
        del data["digest"]
        assert Plan.from_json(json.dumps(data)).cost == solve(problem.at(budget)).cost
        solved += 1
    assert solved > 15


def test_a_plan_of_a_newer_schema_is_refused(plan):
    data = json.loads(plan.to_json())
    data["schema_version"] = 9
    with pytest.raises(ProfileError, match="schema_version 9"):
        Plan.from_json(json.dumps(data))


def test_a_plan_with_an_unreadable_choice_is_refused_when_the_policy_is_asked_for(plan):
    broken = replace(plan, recompute_policy=("half", *plan.recompute_policy[1:]))
    with pytest.raises(PolicyError, match="half"):
        _ = broken.policy
