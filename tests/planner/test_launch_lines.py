"""What `plan` prints to be pasted, for a job that was described by flags or by a recipe."""

import importlib.util
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.launch_lines import flags, launch_lines
from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Profile

LLAMA = Path(__file__).parents[2] / "examples" / "profiles" / "llama3-70b.json"


@pytest.fixture(scope="module")
def plan():
    layout = Layout.from_flags(80, 4, 2)
    return make_plan(Problem(Profile.load(LLAMA), layout, Schedule(4, 2, 16)).at(28 << 30))


def printed(plan, policy, described_by="flags", **changed):
    job = {"described_by": described_by, "lora_rank": 0, "config": {"add_bias_linear": False}}
    model = replace(plan.profile.model, facts={"job": job | changed})
    chosen = RecomputePolicy.parse(policy, num_layers=80, layout=plan.layout.chunk_layers())
    profile = replace(plan.profile, model=model)
    return launch_lines(replace(plan, profile=profile, recompute_policy=tuple(chosen.to_config())))


def test_a_plan_that_megatron_can_say_is_printed_in_its_own_flags(plan):
    assert printed(plan, "megatron:block/4")[1:] == [
        "--recompute-granularity full --recompute-method block --recompute-num-layers 4"
    ]
    assert printed(plan, "megatron:selective[core_attn+mlp]")[1:] == [
        "--recompute-granularity selective --recompute-modules core_attn mlp"
    ]
    assert "no flags of recompute" in printed(plan, "none")[0]
    assert printed(plan, "megatron:selective[mlp]+offload[core_attn+attn_proj]")[1:] == [
        "--recompute-granularity selective --recompute-modules mlp "
        "--fine-grained-activation-offloading --offload-modules attn_proj core_attn"
    ]
    assert printed(plan, "none+offload[mlp_norm]*2,none*78")[1].startswith("--recompute-policy")


def test_any_other_plan_is_one_flag_that_a_shell_reads_back(plan):
    text = "full*3,selective[mlp]*57,none*20"
    name, value = shlex.split(printed(plan, text)[1])
    assert name == "--recompute-policy"
    assert RecomputePolicy.parse(value, num_layers=80) == RecomputePolicy.parse(text, num_layers=80)


def test_mlp_with_a_linear_bias_is_left_to_the_policy(plan):
    config = {"add_bias_linear": True}
    assert printed(plan, "selective[mlp]", config=config)[1].startswith("--recompute-policy")


def test_frozen_layers_are_left_to_the_policy(plan):
    assert printed(plan, "full", lora_rank=16)[1].startswith("--recompute-policy")


def test_a_recipe_gets_lines_that_set_every_field(plan):
    for policy, field in (("megatron:uniform/2", "recompute_method"), ("full,none*79", None)):
        lines = printed(plan, policy, "recipe")[1:]
        said = dict(line.removeprefix("cfg.model.").split(" = ") for line in lines)
        assert said["recompute_method"] == ("'uniform'" if field else "None")
        assert ("recompute_policy" in said) == (field is None)


def test_a_searched_layout_is_among_the_flags(plan):
    job = {"described_by": "flags", "lora_rank": 0, "config": {}}
    facts = replace(plan.profile.model, facts={"job": job})
    searched = replace(
        plan,
        profile=replace(plan.profile, model=facts),
        megatron_flags={"--pipeline-model-parallel-layout": "Et|tL"},
    )
    assert launch_lines(searched)[1].endswith("--pipeline-model-parallel-layout 'Et|tL'")
    pattern = replace(searched, megatron_flags={"--hybrid-layer-pattern": "-*|*-"})
    assert launch_lines(pattern)[1].endswith("--hybrid-layer-pattern='-*|*-'")


def test_without_its_job_a_profiles_plan_is_printed_as_text_for_pretrain_gpt_and_bridge(plan):
    asked, line, recipe = launch_lines(plan)
    name, value = shlex.split(line)
    launched = "-m megatron_autorecompute.pretrain pretrain_gpt.py"
    assert (asked, name) == (f"Add to the flags of {launched}:", "--recompute-policy")
    assert RecomputePolicy.parse(value, num_layers=80) == plan.policy
    assert recipe.endswith("cfg.model.recompute_policy.")
    # Layers leave as a whole by Megatron's own setting alone.
    whole = ("none+offload[cpu_offloading]",) * 3 + ("none",) * 77
    _, line, recipe = launch_lines(replace(plan, recompute_policy=whole))
    assert line == "--cpu-offloading-num-layers 3"
    assert recipe.endswith("cpu_offloading = True; cfg.model.cpu_offloading_num_layers = 3")


def test_what_runs_our_flag_or_field_is_named_where_a_plan_takes_one_and_exists(plan):
    def named(policy, described_by="flags"):
        words = printed(plan, policy, described_by)[0].rstrip(":").split()
        module = words[words.index("-m") + 1] if "-m" in words else None
        assert module is None or importlib.util.find_spec(module)
        return module

    assert named("full*3,none*77") == "megatron_autorecompute.pretrain"
    assert named("full*3,none*77", "recipe") == "megatron_autorecompute.bridge_pretrain"
    assert named("megatron:block/4") is named("megatron:block/4", "recipe") is None


def test_names_of_flags_in_an_edited_plan_are_quoted_too(plan):
    given = {"--pp; touch bad": "2; touch worse", "--a b": "-c d"}
    line = launch_lines(replace(plan, megatron_flags=given))[1]
    assert shlex.split(line)[2:] == ["--pp; touch bad", "2; touch worse", "--a b=-c d"]


def test_without_its_job_a_searched_layout_is_printed_too(plan):
    searched = replace(plan, megatron_flags={"--pipeline-model-parallel-layout": "Et|tL"})
    assert launch_lines(searched)[1].endswith("--pipeline-model-parallel-layout 'Et|tL'")


def test_without_its_job_no_recompute_takes_no_flag(plan):
    none = replace(plan, recompute_policy=("none",) * 80)
    assert launch_lines(none) == ["No recompute: give pretrain_gpt.py no flags of recompute."]


def test_flags_of_no_recompute_are_none():
    assert flags(RecomputePolicy.parse("none", num_layers=2), {"recompute_method": None}) == ""
