"""Where commands write: files, links, pipes, standard output as it may be; and interrupts."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_autorecompute.cli import main
from megatron_autorecompute.cli import plan as plan_command
from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.planner.plan import Plan

pytestmark = pytest.mark.any_version

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "examples" / "profiles" / "llama3-70b.json"
JOB = ROOT / "megatron_autorecompute" / "examples" / "llama3-70b.yaml"
PLAN = ["plan", "--profile", str(PROFILE), "--pp", "4", "--num-microbatches", "8"]
PLAN += ["--budget-gib", "30"]
COMMAND = [sys.executable, "-m", "megatron_autorecompute"]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("planned") / "plan.json"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*PLAN, "-o", str(path)]) == 0
    return path


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_file_is_written(tmp_path, capsys, there):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    if there:
        real.write_text("old")
    link.symlink_to(real.name)
    assert main([*PLAN, "-o", str(link)]) == 0
    assert link.is_symlink()
    assert Plan.load(real)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "real.json"]


def test_a_device_is_not_replaced(capsys):
    assert main([*PLAN, "-o", os.devnull]) == 4
    assert "Cannot write /dev/null: it is no regular file" in capsys.readouterr().err


def test_a_dash_is_standard_output_and_nothing_else_is_printed_there(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*PLAN, "-o", "-"]) == 0
    assert Plan.from_json(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []


def test_standard_output_in_a_file_holds_the_plan_alone(tmp_path):
    path = tmp_path / "plan.json"
    with open(path, "w") as out:
        subprocess.run([*COMMAND, *PLAN, "-o", "-"], stdout=out, check=True)
    assert Plan.load(path)


def test_a_page_is_printed_too(plan_file):
    ran = subprocess.run([*COMMAND, "report", str(plan_file), "-o", "-"], capture_output=True)
    assert ran.returncode == 0
    assert ran.stdout.decode().rstrip().endswith("</html>")
    assert ran.stdout.count(b"<html") == 1


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("absent/p.json", "Cannot write absent/p.json: No such file or directory"),
        ("file/p.json", "Cannot write file/p.json: Not a directory"),
        ("loop", "Cannot write loop: Too many levels"),
        ("x" * 300, "File name too long"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_work(
    tmp_path, capsys, monkeypatch, path, said
):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("loop").symlink_to("loop")
    monkeypatch.setattr(plan_command, "problems", None)  # would be the work
    assert main([*PLAN, "-o", path]) == 4
    assert said in capsys.readouterr().err


def test_a_plan_that_cannot_be_written_after_all_is_printed(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise ProfileError("Cannot write it: No space left on device.")

    monkeypatch.setattr(Plan, "save", full)
    assert main([*PLAN, "-o", str(tmp_path / "plan.json")]) == 4
    captured = capsys.readouterr()
    assert "4 stages of 1 chunks, 8 microbatches" in captured.out
    assert captured.err.count("\n") == 1


def test_a_page_does_not_replace_its_plan(tmp_path, plan_file, capsys):
    path = tmp_path / "plan.html"
    path.write_bytes(plan_file.read_bytes())
    assert main(["report", str(path)]) == 9
    assert path.read_bytes() == plan_file.read_bytes()


def test_a_file_without_an_end_is_not_read(capsys, monkeypatch):
    monkeypatch.setattr("megatron_autorecompute.json_records.MOST_BYTES", 1 << 20)
    assert main(["show", "/dev/zero"]) == 4
    assert "larger than 1 MiB" in capsys.readouterr().err


# --- streams --------------------------------------------------------------------------------------


def test_closed_streams_are_no_news(plan_file):
    ran = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *COMMAND, "show", str(plan_file)])
    assert ran.returncode == 0
    ran = subprocess.run(["sh", "-c", '"$@" >&- 2>&-', "sh", *COMMAND, "show", "absent.json"])
    assert ran.returncode == 4


def test_a_reader_of_the_help_that_goes_away_is_no_news():
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run([*COMMAND, "--help"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert ran.stderr == b""


def test_an_interrupt_while_the_program_loads_is_one_line():
    # It says which modules it loads, so that the interrupt comes while it does.
    words = [sys.executable, "-X", "importtime", *COMMAND[1:], "show", "absent.json"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as ran:
        for line in ran.stderr:
            if line.endswith(" numpy.version\n"):
                ran.send_signal(signal.SIGINT)
                break
        rest = [line for line in ran.stderr if not line.startswith("import time:")]
    assert ran.returncode == 130
    assert rest == ["megatron-autorecompute: interrupted\n"]
