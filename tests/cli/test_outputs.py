"""No command replaces a file that it reads."""

import os
import shutil
from argparse import ArgumentParser
from pathlib import Path

import pytest

from megatron_autorecompute.cli import main
from megatron_autorecompute.cli.arguments import file, picture
from megatron_autorecompute.cli.program import COMMANDS, command_of

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "examples" / "profiles" / "gpt-760m-48l.json"
JOB = ROOT / "megatron_autorecompute" / "examples" / "llama3-70b.yaml"
GPU = ("--gpu", "h100-80gb")
SHAPE = ("--pp", "4", "--num-microbatches", "8")
BUDGET = ("--budget-gib", "20")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    shutil.copy(PROFILE, folder / "profile.json")
    shutil.copy(JOB, folder / "job.yaml")
    shutil.copy(folder / "profile.json", folder / "profile.png")
    profile = ("--profile", str(folder / "profile.json"))
    assert main(["plan", *profile, *SHAPE, *BUDGET, "-o", str(folder / "plan.json")]) == 0
    shutil.copy(folder / "plan.json", folder / "plan.html")
    packed = (folder / "job.yaml").read_text()
    packed = packed.replace("config:", f"sample_lengths: {folder}/lengths.jsonl\nconfig:")
    packed = packed.replace("config:", "max_tokens_per_microbatch: 8192\nconfig:")
    (folder / "packed.yaml").write_text(packed)
    (folder / "lengths.jsonl").write_text("4096\n")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("estimate", *GPU, "job.yaml", "-o", "job.yaml"),
        ("estimate", *GPU, "job.yaml", "--measured", "profile.json", "-o", "profile.json"),
        ("estimate", *GPU, "packed.yaml", "-o", "lengths.jsonl"),
        ("profile", "--device", "cpu", *GPU, "job.yaml", "-o", "./job.yaml"),
        ("plan", "--profile", "profile.json", *SHAPE, *BUDGET, "-o", "profile.json"),
        ("plan", "--profile", "plan.json", "profile.json", *BUDGET, "-o", "profile.json"),
        ("pareto", "--profile", "profile.png", *SHAPE, "--plot", "profile.png"),
        ("show", "plan.json", "--svg", "plan.json"),
        ("report", "plan.json", "-o", "plan.json"),
        ("report", "plan.html"),
        ("report", "plan.json", "--snapshot", "profile.json", "-o", "profile.json"),
        ("trace", "plan.json", "-o", "plan.json"),
        ("trace", "plan.json", "-o", "link.json"),
        ("trace", "link.json", "-o", "plan.json"),
        ("compare", "--text", "build/comparison.json", "--output", "build"),
    ],
    ids=" ".join,
)
def test_no_output_replaces_what_is_read(words, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    link, text = files / "link.json", files / "build" / "comparison.json"
    if not link.exists():
        os.link("plan.json", link)
        text.parent.mkdir()
        text.write_bytes(os.urandom(1 << 12))
    before = {path: path.read_bytes() for path in files.rglob("*.*")}
    assert main(list(words)) == 9
    said = capsys.readouterr().err
    assert "and would replace it" in said
    assert said.count("\n") == 1
    assert {path: path.read_bytes() for path in files.rglob("*.*")} == before


class Arguments(ArgumentParser):
    """Keeps what is added to it."""

    def __init__(self):
        self.added = []
        super().__init__()

    def add_argument(self, *names, **settings):
        self.added.append(super().add_argument(*names, **settings))
        return self.added[-1]


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"compare"}))
def test_every_file_of_a_command_is_one_that_it_reads_or_one_that_it_writes(name):
    command, arguments = command_of(name), Arguments()
    command.add_arguments(arguments)
    files = {a.dest for a in arguments.added if "." in str(a.metavar).replace("...", "")}
    written = {a.dest for a in arguments.added if a.type in (file, picture)}
    assert files - written == set(getattr(command, "READS", ()))
