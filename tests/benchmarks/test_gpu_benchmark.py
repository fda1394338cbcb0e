"""The GPU benchmarks' own machinery, which needs no GPU: resuming, budgets, pages, parts."""

import contextlib
import json
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import cases, children, page, parts, processes, published, run, stages
from benchmarks.gpu.contest import OWN, Contest
from benchmarks.gpu.mixes import random_policies
from benchmarks.gpu.results import (
    BenchmarkError,
    Ledger,
    OutOfTimeError,
    Results,
    between,
    ratios,
    spread,
)
from megatron_autorecompute.errors import MachineError, OptionError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import Profile, StaticBytes
from megatron_autorecompute.units import GIB
from tests.report.snapshots import as_planned, dumped

ROOT = Path(__file__).parents[2]
MACHINE = {"device": "NVIDIA H200", "torch": "2.11.0"}
FULL, SELECTIVE = "megatron:uniform/1", "megatron:selective[core_attn]"


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "results.json", MACHINE, False, "2026-11-21")


# --- resuming -------------------------------------------------------------------------------------


def test_an_item_that_is_known_is_not_made_again(results):
    section = results.section(2, "gpt")
    assert Ledger(results, section, 60).item("a", lambda: [1, 2]) == [1, 2]
    again = Results.open(results.path, MACHINE, tiny=False)

    def never():
        raise AssertionError("made twice")

    assert Ledger(again, again.section(2, "gpt"), 60).item("a", never) == [1, 2]


def test_every_finished_item_is_on_the_disk_when_the_next_one_fails(results):
    ledger = Ledger(results, results.section(2, "gpt"), 60)
    ledger.item("a", lambda: 1)
    with pytest.raises(ZeroDivisionError):
        ledger.item("b", lambda: 1 // 0)
    assert Results.load(results.path).sections["2-gpt"].items == {"a": 1}


def test_no_item_is_begun_when_time_is_over_but_known_ones_are_read(results):
    section = results.section(2, "gpt")
    Ledger(results, section, 60).item("a", lambda: 1)
    late = Ledger(results, section, -1)
    assert late.item("a", lambda: 2) == 1
    with pytest.raises(OutOfTimeError, match="before 'b'; run the part again"):
        late.item("b", lambda: 2)


@pytest.mark.parametrize(("machine", "tiny"), [({"device": "A100"}, False), (MACHINE, True)])
def test_results_of_another_machine_or_size_are_not_added_to(results, machine, tiny):
    results.save()
    with pytest.raises(BenchmarkError, match="do not mix: give another --output"):
        Results.open(results.path, machine, tiny=tiny)


def test_results_of_other_code_are_refused_by_what_differs(results):
    results.save()
    with pytest.raises(BenchmarkError, match=r"with other commit: None, now abc\. "):
        Results.open(results.path, {**MACHINE, "commit": "abc"}, tiny=False)


def test_a_part_goes_on_with_the_configuration_it_was_begun_with_only(results):
    section = results.section(2, "gpt")
    section.configure({"rounds": 5})
    section.configure({"rounds": 7, "shape": (1, 2)})
    section.items["a"] = 1
    section.configure({"rounds": 7, "shape": (1, 2)})
    with pytest.raises(BenchmarkError, match=r"begun with .*7.*; asked is .*9.*another --output"):
        section.configure({"rounds": 9, "shape": (1, 2)})


def results_of_no_section(*arguments):
    """The file of a run that has no time for a section."""
    assert run.main(["--only", "2", "--minutes", "0", *arguments]) == OutOfTimeError.exit_code
    (path,) = Path.cwd().rglob("results.json")
    return path.relative_to(Path.cwd())


def test_what_a_figure_depends_on_names_this_code_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    machine = Results.load(results_of_no_section("--tiny")).machine
    assert set(run.ENVIRONMENT) < set(machine)
    committed = subprocess.run(
        ["git", "log", "-1", "--format=%H", "--", "megatron_autorecompute", "benchmarks/gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if committed.returncode:
        assert machine["commit"] == "not known: no git checkout"
    else:
        assert len(machine["commit"].split()[0]) == 40
    assert len(machine["sources sha256"]) == 16


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 1}', '{"schema_version": 9}'])
def test_a_damaged_or_newer_file_is_refused(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(BenchmarkError, match=str(path)):
        Results.load(path)


# --- torch's memory history -----------------------------------------------------------------------


class Recorded:
    """A job on CUDA, as far as recording asks; its history is what the plan says."""

    on_cuda = True
    policy = None
    steps = 0

    @contextlib.contextmanager
    def strategy(self, text):
        self.policy = text
        yield

    def step(self):
        self.steps += 1


def test_the_memory_history_of_our_plan_lies_beside_it_and_agrees(tmp_path, monkeypatch):
    profile, asked = Profile.load(ROOT / "examples/profiles/gpt-760m-48l.json"), []
    kinds = tuple(replace(kind, static=StaticBytes()) for kind in profile.kinds)
    outside = {"embedding_static": StaticBytes(), "head_static": StaticBytes()}
    profile = replace(profile, kinds=kinds, stages=(), **outside)
    layout, schedule = Layout.from_flags(48, 1), Schedule(1, 1, 4)

    def dump(path):
        dumped(as_planned(Plan.load(tmp_path / "gpt.plan.json"), 0).snapshot(), Path(path))

    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **settings: asked.append(settings)
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    job = Recorded()
    contest = Namespace(job=job, case=Namespace(name="gpt"), layout=layout, schedule=schedule)
    found = Contest.record_memory(contest, profile, tmp_path)
    assert job.policy == found["policy"]
    assert job.steps == 3
    assert (asked[0]["stacks"], asked[-1]["enabled"]) == ("python", None)
    assert {found["plan"], found["history"]} == {path.name for path in tmp_path.iterdir()}
    assert len(found["moments"]) == 9
    for part in found["moments"]:
        assert part["recorded_bytes"] == pytest.approx(part["predicted_bytes"], abs=1 << 12)
    job.on_cuda = False
    assert Contest.record_memory(contest, profile, tmp_path) is None


# --- budgets and figures --------------------------------------------------------------------------


def test_the_budget_stands_where_the_documents_16_gb_stood():
    assert pytest.approx(0.88, abs=0.001) == published.BUDGET_FRACTION
    low, high = round(7.09 * GIB), round(17.22 * GIB)
    budget = between(low, high, published.BUDGET_FRACTION)
    assert budget / GIB == pytest.approx(16, abs=1e-6)
    assert [row.name for row in published.ROWS if row.over] == ["Megatron selective", "Alpa"]


def test_a_budget_at_the_ends_is_the_end():
    assert [between(10, 90, f) for f in (0, 0.5, 1)] == [10, 50, 90]


def test_ratios_are_of_steps_that_ran_next_to_each_other():
    assert ratios([90, 200], [100, 100]) == [0.9, 2.0]
    assert spread([1.0]) == 0
    assert spread([1, 2, 3, 4, 5]) == 2


def test_forty_random_policies_are_different_cover_the_model_and_hold_groups():
    profile = Profile.load(ROOT / "examples" / "profiles" / "gpt-760m-48l.json")
    policies = random_policies(profile, 40)
    assert len(set(policies)) == 40
    assert policies == random_policies(profile, 40)
    assert {len(policy.layers) for policy in policies} == {48}
    for policy in policies:
        assert RecomputePolicy.parse(policy.format(), num_layers=48) == policy
        policy.chunk_runs(range(48))
    assert any("/" in policy.format() for policy in policies)
    assert sum(len(set(policy.layers)) > 1 for policy in policies) > 20


# --- pages ----------------------------------------------------------------------------------------


def peak(policy, gib, out_of_memory=False):
    return {
        "policy": policy,
        "allocated_bytes": round(gib * GIB),
        "reserved_bytes": round((gib + 1) * GIB),
        "retries": 0,
        "out_of_memory": out_of_memory,
        "seconds": 1.0,
    }


def autodist_items():
    rows = {"full": FULL, "manual": "megatron:block/31", "ours": "full*6,none*42"}
    return {
        "budget_bytes": 60 * GIB,
        f"limited/{SELECTIVE}": peak(SELECTIVE, 59, out_of_memory=True),
        f"limited/{FULL}": peak(FULL, 20),
        "manual/megatron:block/31": peak("megatron:block/31", 58),
        "ours": {"value": peak("full*6,none*42", 59.5), "seconds": 7},
        "search_s": {"manual": 120.5, "ours": 9.25},
        "rows": rows,
        "round/0": {"full": 130.0, "manual": 110.0, "ours": 100.0},
        "round/1": {"full": 131.0, "manual": 112.0, "ours": 100.0},
    }


def test_the_autodist_page_has_our_rows_and_the_documents_marked_as_published(results):
    section = results.section(1, "gpt3")
    section.items, section.configuration = autodist_items(), {"num_layers": 48}
    text = page.render(results, "gpt3")
    assert "Time saved 9.90% (median of 2 rounds), aim 8%: **yes**" in text
    assert "its rows give 5.4%" in text  # 145.90 s against 154.22 s
    assert "- Ours within the budget: **yes**" in text
    assert "- Search 9.25 s, aim 30 s: **yes**" in text
    assert "| ours: `full*6,none*42` | 100.0 ± 0.0 | 59.500 | 60.500 | 9.25 | yes |" in text
    assert f"| selective: `{SELECTIVE}` | - | 59.000 | 60.000 | - | OOM |" in text
    assert "| Alpa (published) | 149530 | 16.15 GB | - | 130 | OOM |" in text
    assert "| num_layers | 48 | 1 |" in text
    assert "| torch | 2.11.0 | all |" in text


@pytest.mark.parametrize("part", page.TITLES)
def test_a_part_without_figures_says_not_yet_measured(results, part):
    results.section(part, "gpt")
    assert page.NOT_YET in page.render(results, "gpt")


def test_the_fidelity_page_gives_median_and_worst_and_the_worst_policy_first(results):
    def seen(policy, predicted_gib, ms):
        predicted = {"predicted_bytes": round(predicted_gib * GIB), "predicted_ms": ms}
        return {**peak(policy, 10), **predicted, "step_ms": [100.0]}

    results.section(3, "gpt").items = {
        "policy/0": seen("none*4", 10.05, 101.0),
        "policy/1": seen("full*4", 9.6, 97.0),
        "policy/2": seen("full/2*4", 10.02, 100.0),
    }
    out_of_memory = {**seen("none*4", 12, 90.0), "out_of_memory": True, "step_ms": []}
    results.section(3, "gpt").items["policy/3"] = out_of_memory
    lines = page.render(results, "gpt").splitlines()
    assert any(line.startswith("3 policies; 1 more ran out of memory") for line in lines)
    assert "| peak allocated | 0.50% | 4.00% | 1%, 3% | no |" in lines
    assert "| step time | 1.00% | 3.00% | 2%, 5% | yes |" in lines
    first = next(line for line in lines if line.startswith("| `"))
    assert first.startswith("| `full*4` | -4.00% | -3.00% |")


def test_the_curve_page_says_where_no_plan_was_found(results):
    duel = {
        "budget_bytes": 30 * GIB,
        "manual": FULL,
        "manual_ms": [100.0, 102.0],
        "ours": {**peak("full*4", 29), "fits": True},
        "ours_ms": [90.0, 91.8],
    }
    impossible = {"budget_bytes": GIB, "manual": FULL, "infeasible": "Stage 0 needs 2 GiB."}
    results.section(2, "gpt").items = {"budget/0": impossible, "budget/1": duel}
    text = page.render(results, "gpt")
    assert "Stage 0 needs 2 GiB." in text
    assert "| 0.9000 ± 0.0000 | 29.000 | yes | `full*4` |" in text
    assert "within its spread), 2 budgets: **no**" in text
    assert "Always within the budget: **yes**" in text


@pytest.mark.parametrize(
    ("ours_ms", "verdict"),
    [([99.0, 99.5, 100.0], "yes"), ([99.0, 101.0, 102.0], "yes"), ([101.0, 101.1, 101.2], "no")],
)
def test_slower_is_what_is_slower_by_more_than_the_spread(results, ours_ms, verdict):
    results.section(2, "gpt").items["budget/0"] = {
        "budget_bytes": 30 * GIB,
        "manual": FULL,
        "manual_ms": [100.0] * 3,
        "ours": {**peak("full*4", 29), "fits": True},
        "ours_ms": ours_ms,
    }
    assert f"1 budgets: **{verdict}**" in page.render(results, "gpt")


@pytest.mark.parametrize(("ours_ms", "verdict"), [(100.4, "yes"), (100.6, "no"), (99.4, "no")])
def test_overhead_is_within_half_a_percent_either_way(results, ours_ms, verdict):
    same = {"policy": "full*4", "megatron_ms": [100.0], "ours_ms": [100.0]}
    results.section(5, "gpt").items = {
        f"strategy/{FULL}": same,
        "strategy/megatron:none": {**same, "ours_ms": [ours_ms]},
    }
    text = page.render(results, "gpt")
    assert f"within 1.00 ± 0.005, 2 strategies: **{verdict}**" in text


def test_tests_are_counted_and_a_skipped_one_is_not_yet_measured(results):
    items = {"tests": ["a", "b", "c", "d"], "test/a": "passed", "test/b": "failed"}
    section = results.section(4, "plugin")
    section.items = {**items, "test/c": "skipped: flash-attn is not installed"}
    text = page.render(results, "plugin")
    assert "1 passed, 1 failed, 1 skipped, 1 not yet measured." in text
    assert "| c | not yet measured (skipped: flash-attn is not installed) |" in text
    assert "| d | not yet measured |" in text


def test_every_setting_of_every_part_is_on_the_page_once(results):
    for part, rounds in ((2, 7), (3, 7), (5, 28)):
        results.section(part, "gpt").configure({"num_layers": 24, "rounds": rounds})
    text = page.render(results, "gpt")
    assert text.count("| num_layers | 24 | 2, 3, 5 |") == text.count("num_layers") == 1
    assert "| rounds | 7 | 2, 3 |" in text
    assert "| rounds | 28 | 5 |" in text


def test_notes_beside_the_results_stay_when_pages_are_made_again(results, tmp_path):
    results.section(3, "gpt")
    (tmp_path / "gpt.notes.md").write_text("Policy 7 is off because of X.\n")
    for path in page.write(results, tmp_path) + page.write(results, tmp_path):
        assert "## Notes\n\nPolicy 7 is off because of X.\n" in path.read_text()


def test_pages_are_named_model_hardware_date_and_a_dry_run_says_so(results, tmp_path):
    results.section(2, "gpt")
    results.section(4, "plugin")
    assert [path.name for path in page.write(results, tmp_path)] == [
        "gpt_nvidia-h200_2026-11-21.md",
        "plugin_nvidia-h200_2026-11-21.md",
    ]
    results.tiny = True
    assert page.name_of("gpt", results) == "gpt_tiny-nvidia-h200_2026-11-21.md"
    assert "nothing else" in page.render(results, "gpt")


def test_an_incomplete_part_says_why(results):
    results.section(2, "gpt").stopped = "killed after 480 s"
    assert "Not complete (killed after 480 s)." in page.render(results, "gpt")


def test_pages_are_made_without_torch(results):
    results.section(1, "gpt3").items = autodist_items()
    results.save()
    made = "import sys; from benchmarks.gpu import page; list(page.main()); "
    code = made + "assert not {'torch', 'megatron.core'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(results.path)], cwd=ROOT, check=True)
    assert (results.path.parent / "gpt3_nvidia-h200_2026-11-21.md").exists()


def test_making_pages_asks_for_a_file(capsys):
    with pytest.raises(SystemExit, match="2"):
        list(page.main([]))
    assert "results" in capsys.readouterr().err


NO_EXPERTS = ["full+keep[dispatch]", "selective[experts]", "selective[moe]+keep[dispatch]"]
NO_TE = ["selective[ln_out]"]
"""Off CUDA the cases are of local layers, whose norms are modules."""


@pytest.mark.parametrize(
    ("case", "lacks"),
    [
        (cases.DENSE, NO_EXPERTS + NO_TE),
        (cases.MOE, NO_TE),
        (cases.MLA, NO_EXPERTS + NO_TE),
    ],
)
def test_every_part_and_module_that_megatron_lacks_is_measured_where_layers_have_it(case, lacks):
    with cases.started():
        measured = {*map(str, Contest(case.sized(True)).choices())}
    assert {*OWN} - measured == {*lacks}


def test_stages_of_a_pipeline_run_alone_and_make_a_step(results):
    section = results.section(11, "plugin")
    stages.stages(Ledger(results, section, 600), Namespace(tiny=True))
    section.complete = True
    ran = [section.items[f"stage/{number}"] for number in range(2)]
    for name, step_ms in section.items["steps"].items():
        busy = [stage[name]["busy_ms"] for stage in ran]
        assert (1 - 1e-9) * max(busy) <= step_ms <= (1 + 1e-9) * sum(busy)
    text = page.render(results, "plugin")
    assert "| 1 | ours |" in text
    assert text.count("+0.00% |") == 2  # Megatron's best setting over itself


# --- what is run ----------------------------------------------------------------------------------


def test_parts_and_sections_are_selected_in_the_order_they_run():
    assert {part for part, _ in run.SECTIONS.values()} == set(range(1, 12))
    assert run.selected([]) == list(run.SECTIONS)
    assert run.selected(["4", "1-gpt3-760m-48l"]) == ["1-gpt3-760m-48l", "4-plugin"]


def test_an_unknown_part_is_refused_with_the_known_ones():
    with pytest.raises(OptionError, match=r"--only 12: there are parts 1 to 11 .*1-gpt3-760m-48l"):
        run.selected(["12"])


def test_a_wrong_part_leaves_no_file_behind(tmp_path, capsys):
    assert run.main(["--tiny", "--only", "12", "--output", str(tmp_path)]) == OptionError.exit_code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_off_cuda_there_is_a_dry_run_only(tmp_path, capsys):
    assert run.main(["--output", str(tmp_path)]) == MachineError.exit_code
    assert "give --tiny for a dry run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], "benchmarks/results/gpu"),
        (["--tiny"], "build/gpu-dry"),
        (["--output", "x"], "x"),
        (["--tiny", "--output", "x"], "x"),
    ],
)
def test_a_dry_run_writes_elsewhere_than_the_evidence_unless_told(
    arguments, folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cases, "machine", lambda: MACHINE)
    assert results_of_no_section(*arguments) == Path(folder, "results.json")


STARTS_ANOTHER = ["sh", "-c", "sleep 300 & echo $!; wait"]


def is_running(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_what_a_process_started_ends_with_it_when_its_time_is_over():
    lines = children.lines(STARTS_ANOTHER, 3)
    pid = int(next(lines))
    assert is_running(pid)
    with pytest.raises(OutOfTimeError, match="had 3 s and was ended; run the part again"):
        next(lines)
    wait_until(lambda: not is_running(pid))


def test_what_a_section_started_ends_with_it():
    section = f"""
import signal, sys
from benchmarks.gpu import children
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
for line in children.lines({STARTS_ANOTHER}, 300):
    print(line, flush=True)
"""
    with children.group([sys.executable, "-c", section], stdout=subprocess.PIPE) as process:
        pid = int(process.stdout.readline())
        assert is_running(pid)
    wait_until(lambda: not is_running(pid))
    assert process.returncode == 143


def wait_until(happened):
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tests/a.py::test_x[TE dense] PASSED   [ 5%]", ("tests/a.py::test_x[TE dense]", "passed")),
        ("tests/a.py::test_x ERROR   [ 5%]", ("tests/a.py::test_x", "failed")),
        ("tests/a.py::test_x SKIPPED (no (real) CUDA)  [1%]", "skipped: no (real) CUDA"),
        ("tests/a.py::test_x Fatal Python error: Segmentation fault", None),
        ("FAILED tests/a.py::test_x - AssertionError: PASSED", None),
    ],
)
def test_an_outcome_is_read_from_its_line(line, found):
    found = ("tests/a.py::test_x", found) if isinstance(found, str) else found
    assert processes.outcome(line) == found


DYING = """
import os, pytest

@pytest.mark.parametrize("what", ["passes", "fails", "dies", "skips", "passes, with a name"])
def test_it(what):
    if what == "skips":
        pytest.skip("for a reason")
    if what == "dies":
        os._exit(9)
    assert what != "fails"
"""


def test_every_test_is_an_item_and_one_that_kills_pytest_takes_none_along(
    results, tmp_path, monkeypatch
):
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (folder / "test_dying.py").write_text(DYING)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    monkeypatch.setattr(processes, "ROOT", tmp_path)
    ledger = Ledger(results, results.section(4, "plugin"), 600)
    for _ in range(2):  # the second time everything is known
        with pytest.raises(BenchmarkError, match="2 passed, 2 failed, 1 skipped"):
            processes.equality(ledger, Namespace(tiny=True))
    outcomes = [v for k, v in ledger.section.items.items() if k.startswith("test/")]
    assert outcomes[:2] == ["passed", "failed"]
    assert outcomes[2].startswith("failed: pytest died")
    assert outcomes[3:] == ["skipped: for a reason", "passed"]


LOG = """\
recompute auto: measuring in the first steps
 iteration 1/ 6 | elapsed time per iteration (ms): 900.0 | lm loss: 5.5E+00 | grad norm: 1.5 |
 iteration 2/ 6 | elapsed time per iteration (ms): 160.0 | lm loss: 5.4E+00 | grad norm: 1.4 |
 iteration 3/ 6 | elapsed time per iteration (ms): 130.0 | lm loss: 5.3E+00 | grad norm: 1.3 |
 iteration 4/ 6 | elapsed time per iteration (ms): 100.0 | lm loss: 5.2E+00 | grad norm: 1.2 |
 iteration 5/ 6 | elapsed time per iteration (ms): 110.0 | lm loss: 5.1E+00 | grad norm: 1.1 |
 iteration 6/ 6 | elapsed time per iteration (ms): 90.0 | lm loss: 5.0E+00 | grad norm: 1.0 |
peak allocated bytes: 4096
"""


def test_time_lost_is_what_early_steps_took_beyond_the_settled_ones():
    read = processes.read_log(LOG)
    assert read["lost_s"] == pytest.approx(0.060 + 0.030)
    assert read["losses"][0] == "lm loss: 5.5E+00 grad norm: 1.5"
    assert len(read["losses"]) == 6
    assert read["peak_bytes"] == 4096
    assert read["said"] == ["recompute auto: measuring in the first steps"]
    assert not read["out_of_memory"]


def test_junit_outcomes_are_told_apart():
    report = """<testsuites><testsuite>
      <testcase classname="a" name="passes"/>
      <testcase classname="a" name="skips"><skipped/></testcase>
      <testcase classname="a" name="fails"><failure/></testcase>
      <testcase classname="a" name="breaks"><error/></testcase>
    </testsuite></testsuites>"""
    assert processes.outcomes(report) == {
        "a::passes": "passed",
        "a::skips": "skipped",
        "a::fails": "failed",
        "a::breaks": "failed",
    }


UPSTREAM_TEST = """
import torch
from megatron_autorecompute.meta import without_cuda
from megatron_autorecompute.meta.without_cuda import activate

def test_checkpointed_block_keeps_its_config_and_gives_gradients():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    with activate():
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_block import TransformerBlock
        from megatron.core.transformer.transformer_config import TransformerConfig
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=2, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True)
        block = TransformerBlock(config, get_gpt_layer_local_spec())
        config.recompute_granularity = "full"
        config.recompute_method, config.recompute_num_layers = "block", 1
        hidden = torch.ones(8, 1, 16, requires_grad=True)
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
        block(hidden_states=hidden, attention_mask=mask).sum().backward()
        assert hidden.grad is not None
        assert block.config.recompute_granularity == "full"
        assert block.config.recompute_num_layers == 1
"""


def test_upstreams_tests_run_without_us_with_us_idle_and_through_ours(results, tmp_path):
    name = next(iter(processes.UPSTREAM))
    test = tmp_path / "tests" / "unit_tests" / name
    test.parent.mkdir(parents=True)
    test.write_text(UPSTREAM_TEST)
    ledger = Ledger(results, results.section(7, "plugin"), 600)
    processes.upstream(ledger, Namespace(megatron_lm=tmp_path))
    ways = [ledger.section.items[way] for way in ("without us", "idle", "through ours")]
    assert [list(way.values()) for way in ways] == [["passed"]] * 3
    assert ledger.section.items["forwards, through ours"] == 1
    assert ledger.section.items["forwards, idle"] == 0
    assert "Every test has the same outcome in all ways." in page.render(results, "plugin")


def test_part_7_asks_for_a_checkout(results):
    ledger = Ledger(results, results.section(7, "plugin"), 60)
    with pytest.raises(OptionError, match="--megatron-lm PATH"):
        processes.upstream(ledger, Namespace(megatron_lm=None))


def test_a_dry_run_of_a_part_is_complete(tmp_path):
    name = "1-gpt3-760m-48l"
    command = [sys.executable, "-m", "benchmarks.gpu.run", "--tiny", "--only", name]
    command += ["--output", str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = Results.load(tmp_path / "results.json")
    assert results.sections[name].complete
    assert sum(item.startswith("round/") for item in results.sections[name].items) == 2
    (path,) = tmp_path.glob("*_tiny-cpu_*.md")
    assert page.NOT_YET not in path.read_text()


@pytest.mark.usefixtures("one_rank")
def test_what_trains_in_one_process_fills_its_page(results, monkeypatch):
    monkeypatch.setattr(parts, "BUDGETS", 2)
    monkeypatch.setattr(parts, "POLICIES", 3)
    contest = Contest(cases.DENSE.sized(tiny=True))
    trainings = {2: parts.curve, 3: parts.fidelity, 5: parts.overhead}
    for number, train in trainings.items():
        section = results.section(number, contest.case.name)
        train(contest, Ledger(results, section, 600), 1)
        section.complete = True
    assert [
        sum(item.startswith(f"{what}/") for item in results.sections[name].items)
        for name, what in zip(results.sections, ("budget", "policy", "strategy"), strict=True)
    ] == [2, 3, 5]
    assert page.NOT_YET not in page.render(results, contest.case.name)


def test_the_file_is_json_with_a_schema_version(results):
    results.save()
    assert json.loads(results.path.read_text())["schema_version"] == 1
