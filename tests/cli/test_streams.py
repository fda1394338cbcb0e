"""Where commands write: files, links, pipes, standard output as it may be; and interrupts."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
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
HOSTILE = "\x1b[31mred\x1b[0m [/] [bold]ä×\u202e:smile:"


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("planned") / "plan.json"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*PLAN, "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def hostile_plan(tmp_path_factory):
    """A plan of a profile whose names have escape codes, markup, and letters outside ASCII."""
    folder = tmp_path_factory.mktemp("hostile")
    data = json.loads(PROFILE.read_text())
    data["model"]["name"] = data["kinds"][0]["name"] = HOSTILE
    data["assumptions"] = [HOSTILE]
    (folder / "profile.json").write_text(json.dumps(data))
    words = ["plan", "--profile", str(folder / "profile.json"), *PLAN[3:]]
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*words, "-o", str(folder / "plan.json")]) == 0
    return folder / "plan.json"


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


def test_a_fifo_is_written_to(tmp_path, capsys):
    fifo, got = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: got.append(fifo.read_text()))
    reader.start()
    assert main([*PLAN, "-o", str(fifo)]) == 0
    reader.join(timeout=60)
    assert fifo.is_fifo()
    assert Plan.from_json(got[0])


def test_a_dash_is_standard_output_and_nothing_else_is_printed_there(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*PLAN, "-o", "-"]) == 0
    assert Plan.from_json(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_standard_output_in_a_file_holds_the_plan_alone(tmp_path, name):
    path = tmp_path / "plan.json"
    with open(path, "w") as out:
        subprocess.run([*COMMAND, *PLAN, "-o", name], stdout=out, check=True)
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


def test_estimate_replaces_no_file_that_was_not_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("profile.json").write_text("mine")
    assert main(["estimate", "--gpu", "h100-80gb", str(JOB)]) == 9
    assert "profile.json is there already" in capsys.readouterr().err
    assert Path("profile.json").read_text() == "mine"


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


@pytest.mark.parametrize("verb", ["show", "explain"])
def test_names_outside_ascii_are_escaped_where_the_locale_has_only_ascii(hostile_plan, verb):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for locale in (ascii_only, {"PYTHONIOENCODING": "ascii"}):
        ran = subprocess.run(
            [*COMMAND, verb, str(hostile_plan)], capture_output=True, env={**os.environ, **locale}
        )
        assert (ran.returncode, ran.stderr) == (0, b"")
        assert ran.stdout.isascii()
        assert verb == "explain" or rb"[/] [bold]\xe4\xd7\u202e:smile:" in ran.stdout


@pytest.mark.parametrize("words", [["show"], ["explain"]])
def test_escape_codes_in_names_are_shown_and_not_obeyed(hostile_plan, words, capsys):
    assert main([words[0], str(hostile_plan), *words[1:]]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    if words == ["show"]:
        assert r"\x1b[31mred\x1b[0m [/] [bold]ä×\u202e:smile:" in out


def test_brackets_in_the_name_of_a_kind_are_no_markup(hostile_plan, capsys):
    assert main(["show", str(hostile_plan.parent / "profile.json")]) == 0
    assert "[/]" in capsys.readouterr().out


def test_escape_codes_in_an_error_are_shown_and_not_obeyed(tmp_path, capsys):
    data = json.loads(PROFILE.read_text())
    data["kinds"][0]["name"], data["kinds"][0]["choices"] = HOSTILE, []
    path = tmp_path / "\x1b[31m.json"
    path.write_text(json.dumps(data))
    assert main(["plan", "--profile", str(path), *PLAN[3:]]) == 4
    assert "\x1b" not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["show", str(path), "\x1b[31m"])
    assert "\x1b" not in capsys.readouterr().err


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
