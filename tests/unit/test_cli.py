import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_autorecompute.cli import main
from megatron_autorecompute.pipeline import Layout
from megatron_autorecompute.plan import Plan
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.solve import Planner
from megatron_autorecompute.terminal import strip

PROFILES = Path(__file__).parents[2] / "examples" / "profiles"
LLAMA = str(PROFILES / "llama3-70b.json")
COMMAND = [sys.executable, "-m", "megatron_autorecompute.cli"]
SHAPE = ["--pp", "4", "--vp", "2", "--num-microbatches", "32"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    path = tmp_path_factory.mktemp("planned") / "plan.json"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["plan", "--profile", LLAMA, *SHAPE, "--budget-gib", "28", "-o", str(path)])
    return code, path, out.getvalue()


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


@pytest.mark.parametrize("width", [60, 80])
def test_no_table_is_cut_off(planned, width, capsys, monkeypatch):
    _, path, _ = planned
    monkeypatch.setenv("COLUMNS", str(width))
    pareto = ["pareto", "--profile", LLAMA, *SHAPE, "--points", "5"]
    for words in (["show", str(path)], ["explain", str(path)], pareto):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert "…" not in out
        assert max(map(len, out.splitlines()[:-1])) <= width  # a line to paste ends a plan
    policies = "".join(line[31:] for line in out.splitlines()).replace(" ", "")
    assert main([*pareto, "--json"]) == 0
    for point in json.loads(capsys.readouterr().out):
        assert point["recompute_policy"] in policies


def test_pareto_shows_how_far_it_is_on_a_terminal_only():
    words = ["pareto", "--profile", LLAMA, *SHAPE, "--points", "3", "--json"]
    terminal, end = pty.openpty()
    ran = subprocess.run([*COMMAND, *words], stdout=subprocess.PIPE, stderr=end, check=True)
    os.close(end)
    assert b"Budgets" in os.read(terminal, 1 << 16)
    os.close(terminal)
    quiet = subprocess.run([*COMMAND, *words], capture_output=True, check=True)
    assert (quiet.stdout, quiet.stderr) == (ran.stdout, b"")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--budget-gib", "5"], 3, "Stage 0 needs"),
        (["--budget-gib", "15"], 3, "Each of these alone would fit:\n  - "),
        (["--budget-gib", "30,40"], 2, "2 budgets for 4 stages"),
        (["--budget-gib", "30", "--num-layers-in-first-pipeline-stage", "7"], 8, "layers"),
        (["--budget-gib", "30", "--search-micro-batch", "1,2"], 4, "one file for each size"),
        (["--budget-gib", "30", "--moe-percentile", "99"], 9, "records no routing imbalance"),
        (["--budget-gib", "30", "-o", "absent/p.json"], 4, "Cannot write absent/p.json: No such"),
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


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        *(("plan", ["--budget-gib", n], "from 0 to") for n in ("-3", "inf", "1e400", "nan", "abc")),
        ("plan", ["--budget-gib", "1e12"], "from 0 to"),
        ("plan", ["--budget-gib", "0"], "more than 0 GiB"),
        ("plan", ["--budget-gib", "30", "--search-micro-batch", "1,x"], "'x': give a whole number"),
        ("plan", ["--budget-gib", "30", "--search-micro-batch", "0"], "1 or more"),
        ("plan", ["--budget-gib", "30", "--curve-points", "-3"], "0 or more"),
        ("plan", ["--budget-gib", "30", "--moe-percentile", "nan"], "above 0 and at most 100"),
        ("plan", ["--budget-gib", "30", "--moe-percentile", "101"], "above 0 and at most 100"),
        ("plan", ["--budget-gib", "30", "-o", ""], "'' is no file name"),
        ("plan", ["--budget-gib", "30", "-o", "/"], "'/' is no file name"),
        ("plan", ["--budget-gib", "30", "--", "--bf16"], "-- --bf16: plan takes nothing after --"),
        ("pareto", ["--points", "0"], "1 or more"),
        ("pareto", ["--points", "-2"], "1 or more"),
    ],
)
def test_wrong_usage_is_exit_code_2(verb, words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main([verb, "--profile", LLAMA, *SHAPE, *words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("gib", ["nan", "inf", "-1"])
def test_a_reserve_is_a_number_of_gib(gib, capsys):
    with pytest.raises(SystemExit):
        main(["profile", "--no-device", "--gpu", "h100-80gb", "--reserve-gib", gib, "job.yaml"])
    assert "from 0 to" in capsys.readouterr().err


def test_a_percentile_is_planned_for_where_imbalance_is_recorded(capsys):
    words = ["--pp", "1", "--num-microbatches", "8", "--points", "2", "--json"]
    moe = ["pareto", "--profile", str(PROFILES / "moe-16b.json"), *words]
    assert main([*moe, "--moe-percentile", "99"]) == 0
    uneven = json.loads(capsys.readouterr().out)[-1]["peak_high_bytes"]
    assert main(moe) == 0
    assert uneven > json.loads(capsys.readouterr().out)[-1]["peak_high_bytes"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_output_to_a_full_disk_is_exit_code_7(planned, form):
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [*COMMAND, "show", str(planned[1]), *form], stdout=full, stderr=subprocess.PIPE
        )
    assert ran.returncode == 7
    assert ran.stderr.count(b"\n") == 1
    assert b"No space left on device" in ran.stderr


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_goes_away_is_no_news(planned, form):
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [*COMMAND, "show", str(planned[1]), *form], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (1, b"")


def test_an_interrupt_is_exit_code_130_and_one_line(monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Planner, "pareto", interrupted)
    assert main(["pareto", "--profile", LLAMA, *SHAPE]) == 130
    assert capsys.readouterr().err == "megatron-autorecompute pareto: interrupted\n"


def test_verify_without_torch_says_what_to_install(planned):
    _, path, _ = planned
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from megatron_autorecompute.cli import main\n"
        f"sys.exit(main(['verify', {str(path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert "torch is not installed" in done.stderr
    assert "Traceback" not in done.stderr


def test_verify_says_one_thing_without_what_upstream_warns_of(planned):
    # An example profile does not say how to build its model; that comes after the imports.
    ran = subprocess.run([*COMMAND, "verify", str(planned[1])], capture_output=True, text=True)
    assert ran.returncode == 4
    assert ran.stderr.startswith("megatron-autorecompute verify: ")
    assert ran.stderr.count("\n") == 1


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
