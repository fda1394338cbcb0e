import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_autorecompute.cli import main
from megatron_autorecompute.errors import MachineError, ProfileError
from megatron_autorecompute.packages import needed
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.planner.search.curve import pareto
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.report.figures import strip_svg
from megatron_autorecompute.report.terminal import shortened, strip
from tests.cli.test_shown import on_a_terminal
from tests.report.snapshots import as_planned, dumped

ROOT = Path(__file__).parents[2]
PROFILES = ROOT / "examples" / "profiles"
LLAMA = str(PROFILES / "llama3-70b.json")
COMMAND = [sys.executable, "-m", "megatron_autorecompute"]
SHAPE = ["--pp", "4", "--vp", "2", "--num-microbatches", "32"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    path = tmp_path_factory.mktemp("planned") / "plan.json"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(["plan", "--profile", LLAMA, *SHAPE, "--budget-gib", "28", "-o", str(path)])
    return code, path, out.getvalue()


def printed(words, capsys):
    assert main(words) == 0
    return " ".join(capsys.readouterr().out.split())


def widest(out):
    """Columns of the longest line, not counting those to be pasted."""
    return max(len(line) for line in out.splitlines() if not line.startswith("--"))


def test_plan_writes_a_plan_and_prints_strips_of_80_columns(planned):
    code, path, out = planned
    assert code == 0
    assert widest(out) <= 80
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


def test_a_plan_changed_by_hand_is_not_shown_as_proven(planned, tmp_path, capsys):
    data = json.loads(planned[1].read_text())
    assert "The step is proven" in printed(["show", str(planned[1])], capsys)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**data, "notes": ["mine"]}))
    shown = printed(["show", str(path)], capsys)
    assert "mine" in shown
    assert "Not proven: the file was changed after it was written" in shown
    path.write_text(json.dumps({**data, "recompute_policy": ["none"] * 80}))
    for verb in ("show", "explain", "verify"):
        assert main([verb, str(path)]) == 4
        printed_error = capsys.readouterr().err
        assert "its policy needs more than budget_bytes" in printed_error
        assert printed_error.count("\n") == 1


def test_a_plan_with_a_bad_choice_for_every_layer_is_refused_in_a_screenful(
    planned, tmp_path, capsys
):
    data = json.loads(planned[1].read_text())
    path = tmp_path / "plan.json"
    choices = [f"ful{'l' * layer}" for layer in range(2, 82)]
    path.write_text(json.dumps({**data, "recompute_policy": choices}))
    assert main(["show", str(path)]) == 4
    said = capsys.readouterr().err
    assert "recompute_policy[0]: 'fulll', Cannot read 'fulll' as a choice.\n" in said
    assert "72 more" in said
    assert len(said) < 80 * 45


def test_explain_splits_every_stages_peak(planned, capsys):
    _, path, _ = planned
    assert main(["explain", str(path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("bound by") == 4
    assert main(["explain", str(path), "--json"]) == 0
    assert [row["stage"] for row in json.loads(capsys.readouterr().out)] == [0, 1, 2, 3]


def test_report_draws_a_snapshot_beside_the_prediction_of_its_stage(planned, tmp_path, capsys):
    page = tmp_path / "page.html"
    plan, snapshot = Plan.load(planned[1]), tmp_path / "snapshot_oom_rank-0.pickle"
    dumped(as_planned(plan, 0).snapshot(), snapshot)
    words = ["report", str(planned[1]), "--snapshot", str(snapshot), "--stage", "0"]
    words += ["-o", str(page)]
    assert main(words) == 0
    assert f"Written: {page}" in capsys.readouterr().out
    assert "Recorded beside predicted: stage 0" in page.read_text()


@pytest.mark.parametrize(
    ("name", "flags", "code", "message"),
    [
        ("absent.pickle", ["--stage", "0"], 4, "absent.pickle cannot be read: No such file"),
        ("plan.json", ["--stage", "1"], 4, "plan.json is no whole snapshot"),
        ("plan.json", [], 9, "give the pipeline stage of the process that wrote the snapshot"),
        ("plan.json", ["--stage", "9"], 9, "the plan has stages 0 to 3."),
    ],
)
def test_a_snapshot_that_cannot_be_used_is_one_line(
    planned, tmp_path, name, flags, code, message, capsys
):
    plan, page = planned[1], tmp_path / "page.html"
    snapshot = ["--snapshot", str(plan.parent / name), *flags]
    assert main(["report", str(plan), *snapshot, "-o", str(page)]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not page.exists()


def test_a_stage_without_a_snapshot_is_refused(planned, capsys):
    assert main(["report", str(planned[1]), "--stage", "1"]) == 9
    assert "give --snapshot FILE with it" in capsys.readouterr().err


def test_show_draws_the_policy_for_a_document_and_prints_the_same(planned, tmp_path, capsys):
    _, path, out = planned
    strip_path = tmp_path / "strip.svg"
    assert main(["show", str(path), "--svg", str(strip_path)]) == 0
    printed = capsys.readouterr()
    assert printed.out == out
    assert str(strip_path) in printed.err
    assert strip_path.read_text() == strip_svg(Plan.load(path))


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_pareto_draws_a_picture_of_the_kind_that_its_name_says(name, begins, tmp_path, capsys):
    words = ["pareto", "--profile", LLAMA, *SHAPE, "--points", "2"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert main([*words, "--plot", str(tmp_path / name)]) == 0
    assert capsys.readouterr().out == plain
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_picture_of_an_unknown_kind_or_in_no_folder_is_refused(tmp_path, capsys):
    words = ["pareto", "--profile", LLAMA, *SHAPE, "--points", "2", "--plot"]
    with pytest.raises(SystemExit, match="2"):
        main([*words, "a.jpg"])
    assert "ends with .png or .svg" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "none" / "a.png")]) == ProfileError.exit_code
    assert "Cannot write" in capsys.readouterr().err


PARETO = ["pareto", "--profile", LLAMA, *SHAPE, "--points", "20"]


CURVE_OF_COMMAND = "megatron_autorecompute.cli.pareto.pareto"


@pytest.fixture(scope="module")
def curve():
    """What pareto prints as a table and as JSON, of one curve."""
    printed, points = [], []

    def once(*args, **options):
        if not points:
            points.extend(pareto(*args, **options))
        return tuple(points)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CURVE_OF_COMMAND, once)
        for form in ([], ["--json"]):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                assert main([*PARETO, *form]) == 0
            printed.append(out.getvalue())
    return printed[0], json.loads(printed[1])


def test_pareto_as_json_has_every_budget_and_every_setting_of_megatrons(curve):
    _, data = curve
    points = data["points"]
    assert len(points) >= 20
    for own in data["strategies"]:  # no setting of Megatron's beats the curve in the same bytes
        within = [p["step_ms"] for p in points if p["budget_bytes"] <= own["peak_high_bytes"]]
        assert min(within, default=0.0) <= own["step_ms"] * (1 + 1e-9)
    assert [p["step_ms"] for p in points] == sorted(p["step_ms"] for p in points)
    assert {"megatron:none", "megatron:block/1", "megatron:uniform/2"} <= {
        strategy["name"] for strategy in data["strategies"]
    }
    for point in points:
        RecomputePolicy.parse(point["recompute_policy"], num_layers=80)


def test_pareto_fits_a_screen_and_has_megatrons_settings_among_its_plans(curve):
    table, data = curve
    lines = [line for line in table.splitlines() if "--json" not in line]
    assert len(lines) <= 14
    rows = [
        line.split(maxsplit=3) for line in lines if line.lstrip()[:1].isdigit() or " - " in line
    ]
    peaks = [float(row[2]) for row in rows]
    assert peaks == sorted(peaks, reverse=True)
    assert 8 <= len(rows) <= 12
    settings = {row[3].strip() for row in rows if row[0] == "-"}
    assert settings
    assert settings <= {strategy["name"] for strategy in data["strategies"]}
    assert "selective" not in "".join(row[3] for row in rows if row[0] != "-")


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("none*80", "80 none"),
        ("full/4*36,full*4,none*40", "40 full, 40 none"),
        ("selective[layernorm+mlp]*3,none*1,selective[layernorm+mlp]*2", "5 layernorm+mlp, 1 none"),
        (
            "none*4,full*3,selective[mlp]*2,selective[moe]*1,selective[layernorm]*1",
            "4 none, 3 full, 2 mlp, 2 others",
        ),
    ],
)
def test_a_shortened_policy_counts_layers(policy, said):
    assert shortened(policy) == said


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_table_is_cut_off(planned, width, capsys, monkeypatch):
    _, path, _ = planned
    monkeypatch.setenv("COLUMNS", str(width))
    for words in (
        ["show", str(path)],
        ["show", LLAMA],
        ["explain", str(path)],
        [*PARETO[:-1], "4"],
    ):
        assert main(words) == 0
        out = capsys.readouterr().out
        assert "…" not in out
        assert widest(out) <= width


def test_pareto_shows_how_far_it_is_on_a_terminal_only():
    few = ["--pp", "2", "--num-microbatches", "4", "--points", "3"]
    words = ["pareto", "--profile", str(PROFILES / "moe-16b.json"), *few, "--json"]
    shown = on_a_terminal(*words)
    assert "Megatron's own settings" in shown["stderr"]
    quiet = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=True)
    assert (quiet.stdout, quiet.stderr) == (shown["stdout"].replace("\r\n", "\n"), "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--budget-gib", "5"], 3, "Stage 0 needs"),
        (["--budget-gib", "15"], 3, "More pipeline stages or tensor parallelism need less"),
        (["--budget-gib", "20", "--only", "none"], 3, "Each of these alone would fit:\n  - full"),
        (["--budget-gib", "30,40"], 2, "2 budgets for 4 stages"),
        (["--budget-gib", "30", "--num-layers-in-first-pipeline-stage", "7"], 8, "layers"),
        (["--budget-gib", "30", "--search-micro-batch", "1,2"], 4, "one file for each size"),
        (["--budget-gib", "30", "--imbalance-percentile", "99"], 9, "records no routing imbalance"),
        (["--budget-gib", "30", "--only", "nonsense"], 2, "Cannot read 'nonsense' as a choice"),
        (["--budget-gib", "30", "--only", "full/2"], 2, "groups are allowed all together"),
        (["--budget-gib", "30", "-o", "absent/p.json"], 4, "Cannot write absent/p.json: No such"),
    ],
)
def test_errors_are_printed_once_and_end_with_their_exit_code(arguments, code, message, capsys):
    assert main(["plan", "--profile", LLAMA, *SHAPE, *arguments]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_the_package_runs_as_a_module():
    words = [sys.executable, "-m", "megatron_autorecompute", "show", "absent.json"]
    ran = subprocess.run(words, capture_output=True, text=True)
    assert ran.returncode == 4
    assert ran.stderr.startswith("megatron-autorecompute show: Cannot read")


def test_a_missing_file_is_exit_code_4(tmp_path, capsys):
    absent = tmp_path / "absent.json"
    assert main(["show", str(absent)]) == 4
    assert f"Cannot read {absent}: No such file or directory. Give" in capsys.readouterr().err


def test_a_profile_in_a_plans_place_is_named_and_the_way_to_a_plan_is_said(capsys):
    assert main(["explain", LLAMA]) == 4
    said = capsys.readouterr().err
    assert f"{LLAMA} is a profile, and a plan was asked for" in said
    assert f"plan --profile {LLAMA} --budget-gib" in said


def test_a_job_in_a_profiles_place_and_the_reverse_are_named_with_the_command_for_it(capsys):
    job = ROOT / "megatron_autorecompute" / "examples" / "llama3-70b.yaml"
    assert main(["plan", "--profile", str(job), "--budget-gib", "30"]) == 4
    said = capsys.readouterr().err
    assert f"{job} is not whole JSON, as a Profile is" in said
    assert "A job in YAML becomes a Profile by megatron-autorecompute estimate" in said
    assert main(["estimate", "--gpu", "h100", LLAMA, "-o", "-"]) == 9
    assert f"{LLAMA} is a profile or a plan, and a job was asked" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        *(("plan", ["--budget-gib", n], "from 0 to") for n in ("-3", "inf", "1e400", "nan", "abc")),
        ("plan", ["--budget-gib", "1e12"], "from 0 to"),
        ("plan", ["--budget-gib", "0"], "more than 0 GiB"),
        ("plan", ["--budget-gib", "1e-12"], "more than 0 GiB, a byte at least"),
        ("plan", ["--budget-gib", "30", "--search-micro-batch", "1,x"], "'x': give a whole number"),
        ("plan", ["--budget-gib", "30", "--search-micro-batch", "0"], "1 or more"),
        ("pareto", ["--points", "0"], "1 to 4096"),
        ("pareto", ["--points", "1000000000"], "1 to 4096"),
        (
            "plan",
            ["--budget-gib", "30", "--imbalance-percentile", "nan"],
            "above 0 and at most 100",
        ),
        (
            "plan",
            ["--budget-gib", "30", "--imbalance-percentile", "101"],
            "above 0 and at most 100",
        ),
        ("plan", ["--budget-gib", "30", "-o", ""], "'' is no file name"),
        ("plan", ["--budget-gib", "30", "-o", "/"], "'/' is no file name"),
        ("pareto", ["--points", "-2"], "1 to 4096"),
    ],
)
def test_wrong_usage_is_exit_code_2(verb, words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main([verb, "--profile", LLAMA, *SHAPE, *words])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_command_that_reads_no_job_takes_nothing_after_the_dashes(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["show", LLAMA, "--", "--bf16"])
    assert caught.value.code == 2
    assert "-- --bf16: show takes nothing after --" in capsys.readouterr().err


@pytest.mark.parametrize("gib", ["nan", "inf", "-1"])
def test_a_reserve_is_a_number_of_gib(gib, capsys):
    with pytest.raises(SystemExit):
        main(["estimate", "--gpu", "h100-80gb", "--reserve-gib", gib, "job.yaml"])
    assert "from 0 to" in capsys.readouterr().err


MOE_PLAN = ["--pp", "1", "--num-microbatches", "8", "--budget-gib", "40"]


def test_stated_imbalance_is_planned_for_unasked_and_its_percentile_is_named(capsys, tmp_path):
    path = PROFILES / "moe-16b.json"
    moe = ["plan", "--profile", str(path), *MOE_PLAN, "-o", str(tmp_path / "plan.json")]
    said = "Imbalance: planned for percentile {} of what the profile states."
    assert said.format(99) in printed(moe, capsys)
    unasked = Plan.load(tmp_path / "plan.json")
    assert unasked.imbalance_percentile == 99
    assert said.format(50) in printed([*moe, "--imbalance-percentile", "50"], capsys)
    even = Plan.load(tmp_path / "plan.json")
    assert even.imbalance_percentile == 50
    assert even.cost.step_ms < unasked.cost.step_ms
    pareto = ["pareto", "--profile", str(path), *MOE_PLAN[:4], "--points", "1"]
    assert said.format(99) in printed(pareto, capsys)


def test_which_measured_routing_is_planned_for_is_said(capsys, tmp_path):
    data = json.loads((PROFILES / "moe-16b.json").read_text())
    for kind in data["kinds"]:
        kind["imbalance"] = []
    none = data["kinds"][-1]["choices"][0]
    sizes = {name: size for name, size in none.items() if name.endswith("_bytes")}
    del sizes["uncertainty_bytes"]
    none["source"] = "measured"
    none["percentiles"] = [
        {"percentile": 50.0, **{name: size // 2 for name, size in sizes.items()}},
        {"percentile": 100.0, **sizes},
    ]
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(data))
    moe = ["plan", "--profile", str(path), *MOE_PLAN]
    assert "planned for the most that was seen in measuring;" in printed(moe, capsys)
    half = printed([*moe, "--imbalance-percentile", "50"], capsys)
    assert "planned for percentile 50 of the measured microbatches." in half


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
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(CURVE_OF_COMMAND, interrupted)
    assert main(["pareto", "--profile", LLAMA, *SHAPE]) == 130
    assert capsys.readouterr().err == "megatron-autorecompute pareto: interrupted\n"


@pytest.mark.parametrize("package", ["torch", "megatron", "megatron.bridge", "triton"])
def test_a_missing_package_is_one_line_that_says_what_to_install(package):
    extra = {"torch": "megatron", "megatron.bridge": "megatron,bridge"}.get(package, package)
    said = f"verify runs .*{package}.* not installed: pip install .*{extra}"
    with pytest.raises(MachineError, match=said), needed("verify"):
        raise ModuleNotFoundError(name=f"{package}.language")


def test_a_missing_package_that_megatron_does_not_need_is_an_error_of_its_own():
    with pytest.raises(ModuleNotFoundError), needed("verify"):
        raise ModuleNotFoundError(name="torch_of_somebody")


WITHOUT_TORCH = {
    "verify": "megatron_autorecompute.cli import main; sys.exit(main(['verify', {plan!r}]))",
    "estimate": "megatron_autorecompute.cli import main; sys.exit(main(['estimate', "
    "'--gpu', 'h100-80gb', {job!r}]))",
    "launcher": "megatron_autorecompute.pretrain import main; main([{script!r}])",
    "comparison": "megatron_autorecompute.cli import main; sys.exit(main(['compare']))",
    "bridge": "megatron_autorecompute.bridge_pretrain import main; "
    "main(['--recipe', 'llama3_8b_pretrain_config'])",
}


@pytest.mark.parametrize("entry", WITHOUT_TORCH)
def test_without_torch_every_entry_says_what_to_install_in_one_line(planned, tmp_path, entry):
    (tmp_path / "megatron" / "training").mkdir(parents=True)  # a checkout, found beside the script
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("")
    given = {
        "plan": str(planned[1]),
        "job": str(ROOT / "megatron_autorecompute" / "examples" / "llama3-70b.yaml"),
        "script": str(script),
    }
    absent = tmp_path / "absent"  # for the processes that it starts, too
    absent.mkdir()
    (absent / "torch.py").write_text("raise ModuleNotFoundError(name='torch')\n")
    path = os.pathsep.join([str(absent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from " + WITHOUT_TORCH[entry].format(**given)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 7, done.stderr
    assert "torch is not installed: pip install" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_launcher_finds_modules_beside_the_script_that_a_link_points_to(tmp_path, monkeypatch):
    from megatron_autorecompute import pretrain

    real, links = tmp_path / "real", tmp_path / "links"
    real.mkdir()
    links.mkdir()
    (real / "beside_the_script.py").write_text("found = True\n")
    (real / "train.py").write_text("import beside_the_script\nprint(beside_the_script.found)\n")
    (links / "link.py").symlink_to(real / "train.py")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    for name in ("prepare_cpu", "install", "leave_together"):
        monkeypatch.setattr(pretrain.megatron_lm, name, lambda: None)
    pretrain.main([str(links / "link.py"), pretrain.RUN_ON_CPU])
    assert sys.path[0] == str(real)
    sys.modules.pop("beside_the_script")


def test_verify_says_one_thing_without_what_upstream_warns_of(planned):
    # An example profile does not say how to build its model; that comes after the imports.
    ran = subprocess.run([*COMMAND, "verify", str(planned[1])], capture_output=True, text=True)
    assert ran.returncode == 4
    assert ran.stderr.startswith("megatron-autorecompute verify: ")
    assert ran.stderr.count("\n") == 1


def test_a_searched_layout_comes_with_megatrons_flags(capsys):
    moe = str(PROFILES / "moe-16b.json")
    arguments = ["--pp", "2", "--num-microbatches", "8", "--budget-gib", "60"]
    code = main(["plan", "--profile", moe, *arguments, "--search-layout", "--json"])
    assert code == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.notes
    assert plan.layout != Layout.from_flags(28, 2)
    assert plan.megatron_flags


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.json")), ids=lambda path: path.stem)
def test_example_profiles_are_valid_and_say_that_nothing_is_measured(path):
    profile = Profile.load(path)
    assert profile.assumptions
    assert all(r.source == "assumed" for kind in profile.kinds for r in kind.choices)


def test_strips_show_groups_chunks_embedding_and_head():
    policy = RecomputePolicy.parse("full/2*4,none*2,selective[mlp]*1,full*1", num_layers=8)
    layout = Layout.from_flags(8, 2, 2)
    assert strip(policy, layout.stages[0]) == "E(FF)|.."
    assert strip(policy, layout.stages[1]) == "(FF)|aFL"
