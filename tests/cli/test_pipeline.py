"""Which pipeline `plan` and `pareto` plan for: the flags', else the profile's own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_autorecompute.cli import main
from megatron_autorecompute.cli.pipeline import known_of, read_profile, shape_words
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import MeasuredStep, Profile, RankStep, StageRecord, StaticBytes

LLAMA = Path(__file__).parents[2] / "examples" / "profiles" / "llama3-70b.json"
CONFIG = {
    "num_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "tensor_model_parallel_size": 8,
    "pipeline_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": 2,
    "microbatch_group_size_per_vp_stage": 8,
}
JOB = {
    "name": "llama",
    "config": CONFIG,
    "num_gpus": 64,
    "global_batch_size": 64,
    "seq_length": 8192,
    "vocab_size": 128256,
    "lora_rank": 0,
    "described_by": "flags",
}
BUDGET = ["--budget-gib", "52"]  # a plan of nearly no recompute is found at once


def saved(path, **facts):
    """The example's profile with facts about its job."""
    profile = Profile.load(LLAMA)
    model = replace(profile.model, facts={**profile.model.facts, **facts})
    replace(profile, model=model).save(path)
    return str(path)


@pytest.fixture
def estimated(tmp_path):
    return saved(tmp_path / "profile.json", job=JOB)


def plan(*words, capsys):
    assert main(["plan", "--profile", *words, "--json"]) == 0
    return Plan.from_json(capsys.readouterr().out)


def refusal(*words, capsys):
    code = main(["plan", "--profile", *words])
    return code, capsys.readouterr().err


def test_an_estimated_profile_is_planned_for_its_jobs_own_pipeline(estimated, capsys):
    found = plan(estimated, *BUDGET, capsys=capsys)
    assert found.layout == Layout.from_flags(80, 4, 2)
    assert (found.schedule.num_microbatches, found.schedule.group_size) == (32, 8)
    assert found.notes == ()


def test_the_flags_that_say_the_jobs_own_pipeline_give_the_same_plan(estimated, capsys):
    flags = ["--pp", "4", "--vp", "2", "--num-microbatches", "32", "--microbatch-group-size", "8"]
    assert plan(estimated, *flags, *BUDGET, capsys=capsys) == plan(
        estimated, *BUDGET, capsys=capsys
    )


def test_flags_override_the_profile_and_the_contradiction_is_said(estimated, capsys):
    found = plan(estimated, "--vp", "5", "--num-microbatches", "16", *BUDGET, capsys=capsys)
    assert found.layout == Layout.from_flags(80, 4, 5)
    assert found.notes == (
        "The profile is of 4 stages of 2 chunks, 32 microbatches; this is planned for 4 stages of "
        "5 chunks, 16 microbatches, as the flags say.",
    )
    assert main(["plan", "--profile", estimated, "--vp", "5", *BUDGET]) == 0
    assert "The profile is of 4 stages" in capsys.readouterr().out


def test_other_layers_on_as_many_stages_are_said(estimated, capsys):
    uneven = ["--pp", "4", "--num-layers-in-first-pipeline-stage", "18", "--vp", "2"]
    uneven += ["--num-layers-in-last-pipeline-stage", "18"]
    found = plan(estimated, *uneven, *BUDGET, capsys=capsys)
    assert found.notes[0].endswith("planned for other layers on these stages, as the flags say.")


def test_another_layout_of_a_hybrid_model_is_a_pattern_and_flags_it_lacks_are_refused(
    tmp_path, capsys
):
    config = {**CONFIG, "hybrid_layer_pattern": "|".join(["*-" * 5] * 8)}
    profile = saved(tmp_path / "hybrid.json", job={**JOB, "config": config})
    found = plan(profile, *BUDGET, "--vp", "4", capsys=capsys).megatron_flags
    assert found["--hybrid-layer-pattern"] == "|".join(["*-*-*", "-*-*-"] * 8)
    for words in (["--account-for-loss-in-pipeline-split"], ["--overlap-moe-expert-parallel-comm"]):
        code, said = refusal(profile, *BUDGET, *words, capsys=capsys)
        assert code == 9
        assert f"{words[0]}: Megatron does not run it with a HybridModel" in said
    for words in (["--pp", "7", "--num-microbatches", "8"], ["--vp", "3"]):
        code, said = refusal(profile, *BUDGET, *words, capsys=capsys)
        assert code == 8
        assert "cannot be divided evenly" in said
        assert "account_for" not in said


def test_with_pp_the_layout_is_what_the_flags_alone_say(estimated, capsys):
    found = plan(estimated, "--pp", "4", *BUDGET, capsys=capsys)
    assert found.layout == Layout.from_flags(80, 4)
    assert found.schedule.num_microbatches == 32


def test_another_number_of_stages_asks_for_its_number_of_microbatches(estimated, capsys):
    code, said = refusal(estimated, "--pp", "8", *BUDGET, capsys=capsys)
    assert code == 9
    assert "--pp 8" in said
    assert "give --num-microbatches" in said


def test_a_profile_that_does_not_know_its_microbatches_asks_for_them(capsys):
    code, said = refusal(str(LLAMA), "--pp", "4", *BUDGET, capsys=capsys)
    assert code == 9
    assert "llama3-70b.json does not say how many microbatches" in said


def test_a_plan_file_is_planned_again_for_its_own_pipeline(estimated, tmp_path, capsys):
    path = tmp_path / "plan.json"
    first = plan(
        estimated, "--vp", "5", "--num-microbatches", "16", *BUDGET, "-o", str(path), capsys=capsys
    )
    again = plan(str(path), "--budget-gib", "53", capsys=capsys)
    assert (again.layout, again.schedule) == (first.layout, first.schedule)
    assert again.notes == ()


def test_a_searched_layout_keeps_its_flags_when_it_is_planned_again(tmp_path, capsys):
    profile, small = Profile.load(LLAMA), tmp_path / "small.json"
    (kind,) = profile.kinds
    kinds = (replace(kind, layers=tuple(range(24))),)
    replace(profile, model=replace(profile.model, num_layers=24), kinds=kinds).save(small)
    path, asked = tmp_path / "plan.json", ["--pp", "4", "--num-microbatches", "16"]
    search = [*asked, "--search-layout", "--budget-gib", "6.4", "-o", str(path)]
    first = plan(str(small), *search, capsys=capsys)
    assert first.megatron_flags
    again = plan(str(path), "--budget-gib", "7", capsys=capsys)
    assert (again.layout, again.megatron_flags) == (first.layout, first.megatron_flags)
    even = plan(str(path), "--pp", "4", "--budget-gib", "7", capsys=capsys)
    assert (even.layout, even.megatron_flags) == (Layout.from_flags(24, 4), {})


def measured(layout, **changed):
    """The example's profile as if it had been measured with a layout."""
    stages = tuple(
        StageRecord(tuple(sorted(i for chunk in chunks for i in chunk.layers)), StaticBytes())
        for chunks in layout.stages
    )
    return replace(Profile.load(LLAMA), stages=stages, **changed)


@pytest.mark.parametrize(
    "layout",
    [
        Layout.from_flags(80, 1),
        Layout.from_flags(80, 4),
        Layout.from_flags(80, 4, 5),
        Layout.from_flags(80, 8, num_layers_in_first_pipeline_stage=3),
    ],
    ids=["one stage", "four", "four of five chunks", "uneven"],
)
def test_a_measured_profile_knows_the_layout_of_its_stages(layout):
    assert known_of(measured(layout)).layout == layout


def test_a_measured_profile_knows_its_steps_microbatches():
    step = MeasuredStep(7, "full", 24, (RankStep(0, 0),))
    known = known_of(measured(Layout.from_flags(80, 4), measured_step=step))
    assert known.num_microbatches == 24
    assert shape_words(known) == "4 stages, 24 microbatches"


def test_stages_whose_chunks_cannot_be_told_are_not_known():
    layout = Layout.from_flags(80, 2)
    profile = measured(layout)
    first, second = profile.stages
    torn = (replace(first, layers=(*range(39), 79)), replace(second, layers=tuple(range(39, 79))))
    assert known_of(replace(profile, stages=torn)).layout is None
    assert known_of(Profile.load(LLAMA)).layout is None


def test_a_job_that_another_version_described_is_not_asked(tmp_path, capsys):
    path = saved(tmp_path / "profile.json", job={**JOB, "of_the_future": 1})
    _, known = read_profile(path)
    assert known.layout is None


def test_the_profile_in_a_plan_file_without_layout_is_still_read(tmp_path):
    path = tmp_path / "wrapped.json"
    path.write_text(json.dumps({"profile": json.loads(LLAMA.read_text())}))
    profile, known = read_profile(path)
    assert profile == Profile.load(LLAMA)
    assert known.layout is None


@pytest.mark.parametrize(
    "words",
    [
        ["--pp", "0"],
        ["--vp", "0"],
        ["--num-microbatches", "0"],
        ["--microbatch-group-size", "0"],
        ["--num-layers-in-first-pipeline-stage", "0"],
        ["--pipeline-model-parallel-layout", ""],
    ],
)
def test_nothing_is_not_taken_for_not_given(estimated, words, capsys):
    code, _ = refusal(estimated, *words, *BUDGET, capsys=capsys)
    assert code == 8


def test_show_refuses_json_beside_a_picture_that_is_printed_alone(estimated, tmp_path, capsys):
    path = str(tmp_path / "plan.json")
    plan(estimated, *BUDGET, "-o", path, capsys=capsys)
    assert main(["show", path, "--svg", "-", "--json"]) == 9
    assert "--json has no effect with --svg -" in capsys.readouterr().err


def test_overlap_of_an_exchange_that_nobody_makes_is_refused(estimated, capsys):
    words = ("--overlap-moe-expert-parallel-comm", *BUDGET)
    code, said = refusal(estimated, *words, capsys=capsys)
    assert code == 9
    assert "has no effect with a profile of expert parallel size 1" in said
