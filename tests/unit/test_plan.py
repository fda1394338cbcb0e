import json
from dataclasses import replace

import pytest

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.plan import Plan, make_plan
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.solve import Planner
from tests.unit.test_solve import problem_of_many


@pytest.fixture(scope="module")
def plan():
    profile, layout, schedule, budget = problem_of_many()
    profile = replace(profile, fingerprint={"torch": "2.13.0", "device": "cpu"})
    return make_plan(Planner(profile, layout, schedule), budget, curve_points=5)


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
    assert again.planner().solve(again.budget_bytes).policy == plan.policy


def test_the_curve_steps_down_to_the_leanest_policy(plan):
    peaks = [point.peak_high_bytes for point in plan.curve]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] == max(choice.peak_bytes for choice in plan.planner().leanest)
    for point in plan.curve:
        policy = RecomputePolicy.parse(point.recompute_policy, num_layers=12)
        assert plan.planner().evaluate(policy).step_ms == pytest.approx(point.step_ms)


def test_the_best_manual_strategy_is_kept_and_is_slower(plan):
    assert plan.best_manual.fits
    assert plan.best_manual.step_ms > plan.cost.step_ms


def test_a_changed_fingerprint_says_what_changed(plan):
    assert plan.changed({"torch": "2.13.0", "device": "cpu"}) == ()
    assert plan.changed({"torch": "2.14.0", "tp": "2"}) == (
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


def test_a_plan_of_a_newer_schema_is_refused(plan):
    data = json.loads(plan.to_json())
    data["schema_version"] = 9
    with pytest.raises(ProfileError, match="schema_version 9"):
        Plan.from_json(json.dumps(data))


def test_a_plan_with_an_unreadable_choice_is_refused_when_the_policy_is_asked_for(plan):
    broken = replace(plan, recompute_policy=("half", *plan.recompute_policy[1:]))
    with pytest.raises(PolicyError, match="half"):
        _ = broken.policy
