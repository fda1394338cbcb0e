"""The comparison as a user runs it, in a small size, and as it ends when something goes wrong."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_autorecompute.cli import main as verify
from megatron_autorecompute.compare import main
from megatron_autorecompute.comparison import Comparison
from megatron_autorecompute.plan import Plan

ROOT = Path(__file__).parents[2]
SMALL = [
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--num-microbatches", "2", "--rounds", "2", "--tries", "1"),
]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    command = [sys.executable, "scripts/compare_policies.py", *SMALL, "--output", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


def test_every_row_of_the_table_is_there_and_timed(finished):
    folder, printed = finished
    comparison = Comparison.load(folder / "comparison.json")
    families = [row.family for row in comparison.rows()]
    assert families == ["none", "selective", "full", "manual", "ours"]
    assert all(len(row.step_ms) == 2 for row in comparison.rows())
    assert comparison.complete
    assert all(row.name in printed for row in comparison.rows())


def test_none_exceeds_the_budget_and_full_wastes_it(finished):
    comparison = Comparison.load(finished[0] / "comparison.json")
    none, _, full, manual, ours = comparison.rows()
    assert comparison.exceeds(none)
    assert max(full.peak_bytes) < comparison.budget_bytes
    assert not comparison.exceeds(manual)
    assert not comparison.exceeds(ours)


def test_our_peak_is_what_the_plan_said(finished):
    ours = Comparison.load(finished[0] / "comparison.json").rows()[-1]
    for measured, predicted in zip(ours.peak_bytes, ours.predicted_peak_bytes, strict=True):
        assert predicted == pytest.approx(measured, rel=0.02)


def test_the_manual_search_tried_every_block_and_uniform(finished):
    comparison = Comparison.load(finished[0] / "comparison.json")
    tried = {row.name for row in comparison.strategies if row.family == "tried"}
    assert tried == {"block/1", "uniform/1", "uniform/2"}


def test_the_files_around_the_record_are_written(finished):
    folder, _ = finished
    assert (folder / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    assert (folder / "comparison.md").read_text().count("\n| ") == 7
    plan = Plan.load(folder / "plan.json")
    ours = Comparison.load(folder / "comparison.json").rows()[-1]
    assert plan.policy.format() == ours.policy


def test_the_plan_is_what_megatrons_schedule_does(finished, capsys):
    code = verify(["verify", str(finished[0] / "plan.json")])
    assert (code, capsys.readouterr().err.strip()) == (0, "")


def test_strategies_of_the_parent_need_no_megatron():
    code = "import sys, megatron_autorecompute.compare; print('megatron.core' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--budget-gib", "0.001"], 3, "is below what full recompute of every layer needs"),
        (["--text", "nowhere.txt"], 7, "Cannot read the text nowhere.txt: No such file"),
        (["--seq-length", "40000"], 7, "bytes; a microbatch of 2 sequences of 40000 tokens needs"),
        (["--rounds", "0"], 7, "--rounds 0 and --tries 1: both must be at least 1"),
        (["--output", "LICENSE/x"], 7, "Cannot make the output folder LICENSE/x"),
    ],
)
def test_bad_input_says_what_to_do(arguments, code, message, tmp_path, capsys):
    assert main([*SMALL, "--output", str(tmp_path), *arguments]) == code
    assert message in " ".join(capsys.readouterr().err.split())


def test_ranks_that_cannot_reach_each_other_say_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert main([*SMALL, "--output", str(tmp_path)]) == 7
    assert "The ranks cannot reach each other" in capsys.readouterr().err


def _started(folder):
    command = [sys.executable, "scripts/compare_policies.py", *SMALL, "--rounds", "500"]
    process = subprocess.Popen(
        [*command, "--output", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        path = folder / "comparison.json"
        if path.exists() and Comparison.load(path).rows()[-1].family == "ours":
            return process
        time.sleep(0.3)
    process.kill()
    raise AssertionError("the comparison never got to its rounds")


def _ranks_of(process):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    commands = {child: Path(f"/proc/{child}/cmdline").read_text() for child in children}
    return [int(child) for child, command in commands.items() if "spawn_main" in command]


def test_interrupting_keeps_what_was_finished(tmp_path):
    process = _started(tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "what was finished is in the output folder" in errors
    assert not Comparison.load(tmp_path / "comparison.json").complete


def test_a_killed_rank_keeps_what_was_finished(tmp_path):
    process = _started(tmp_path)
    os.kill(_ranks_of(process)[-1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "died without a word" in " ".join(errors.split())
    assert len(Comparison.load(tmp_path / "comparison.json").rows()) == 5
