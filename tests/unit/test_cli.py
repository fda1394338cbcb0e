import json
from pathlib import Path

import pytest

from megatron_autorecompute.cli import main
from megatron_autorecompute.pipeline import Layout
from megatron_autorecompute.plan import Plan
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.terminal import strip

PROFILES = Path(__file__).parents[2] / "examples" / "profiles"
LLAMA = str(PROFILES / "llama3-70b.json")
SHAPE = ["--pp", "4", "--vp", "2", "--num-microbatches", "32"]


@pytest.fixture
def planned(tmp_path, capsys):
    path = tmp_path / "plan.json"
    code = main(["plan", "--profile", LLAMA, *SHAPE, "--budget-gib", "28", "-o", str(path)])
    return code, path, capsys.readouterr().out


def test_plan_writes_a_plan_and_prints_strips_of_80_columns(planned):
    code, path, out = planned
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    plan = Plan.load(path)
    for chunks in plan.layout.stages:
        assert strip(plan.policy, chunks) in out
    assert max(stage.peak_high_bytes for stage in plan.cost.stages) <= 28 * 2**30


def test_show_prints_what_plan_printed(planned, capsys):
    _, path, out = planned
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out == out


def test_show_json_is_the_plan(planned, capsys):
    _, path, _ = planned
    assert main(["show", str(path), "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out) == Plan.load(path)


def test_explain_a_layer_says_what_faster_choices_would_break(planned, capsys):
    _, path, _ = planned
    assert main(["explain", str(path), "--layer", "17", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["choice"] == Plan.load(path).recompute_policy[17]
    assert {row["choice"] for row in data["others"]} >= {"none"}
    for row in data["others"]:
        assert not (row["fits"] and row["stage_busy_ms"] < -1e-6)
    assert main(["explain", str(path), "--layer", "17"]) == 0
    assert "selective[mlp]" in capsys.readouterr().out


def test_explain_without_a_layer_splits_every_stages_peak(planned, capsys):
    _, path, _ = planned
    assert main(["explain", str(path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("bound by") == 4
    assert main(["explain", str(path), "--json"]) == 0
    assert [row["stage"] for row in json.loads(capsys.readouterr().out)] == [0, 1, 2, 3]


def test_pareto_prints_one_row_per_budget(capsys):
    assert main(["pareto", "--profile", LLAMA, *SHAPE, "--points", "5", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)
    assert len(points) == 5
    assert [p["step_ms"] for p in points] == sorted(p["step_ms"] for p in points)
    assert main(["pareto", "--profile", LLAMA, *SHAPE, "--points", "5"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--budget-gib", "5"], 3, "Stage 0 needs"),
        (["--budget-gib", "15"], 3, "Each of these alone would fit:\n  - "),
        (["--budget-gib", "30,40"], 2, "2 budgets for 4 stages"),
        (["--budget-gib", "30", "--num-layers-in-first-pipeline-stage", "7"], 8, "layers"),
        (["--budget-gib", "30", "--search-micro-batch", "1,2"], 4, "one file for each size"),
    ],
)
def test_errors_are_printed_once_and_end_with_their_exit_code(arguments, code, message, capsys):
    assert main(["plan", "--profile", LLAMA, *SHAPE, *arguments]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_missing_file_is_exit_code_4(tmp_path, capsys):
    assert main(["show", str(tmp_path / "absent.json")]) == 4
    assert "Cannot read" in capsys.readouterr().err


def test_wrong_usage_is_exit_code_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--profile", LLAMA, *SHAPE, "--budget-gib", "-3"])
    assert caught.value.code == 2
    assert "more than 0 GiB" in capsys.readouterr().err


def test_a_searched_layout_comes_with_megatrons_flags(capsys):
    arguments = ["--pp", "4", "--num-microbatches", "16", "--budget-gib", "26"]
    code = main(["plan", "--profile", LLAMA, *arguments, "--search-layout", "--json"])
    assert code == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.notes
    assert bool(plan.megatron_flags) == (plan.layout != Layout.even(80, 4))


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.json")), ids=lambda path: path.stem)
def test_example_profiles_are_valid_and_say_that_nothing_is_measured(path):
    profile = Profile.load(path)
    assert profile.assumptions
    assert all(r.source == "assumed" for kind in profile.kinds for r in kind.choices)


def test_strips_show_groups_chunks_embedding_and_head():
    policy = RecomputePolicy.parse("full/2*4,none*2,selective[mlp]*1,full*1", num_layers=8)
    layout = Layout.even(8, 2, 2)
    assert strip(policy, layout.stages[0]) == "E(FF)|.."
    assert strip(policy, layout.stages[1]) == "(FF)|aFL"
