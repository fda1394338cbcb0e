"""Commands that the pages show run as they stand: typed into a shell in a checkout, outside of what
the tests set up."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import free_port

pytest.importorskip("torch")
pytestmark = pytest.mark.any_version
ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^(megatron-autorecompute|torchrun|python|make|pip) ", re.M)
NOT_AS_THEY_STAND = (
    *("…", "<", "job.yaml", "path/to"),  # the reader's own
    *("--device cuda", "--nproc-per-node 8"),
    *("make ", "pip "),  # the environment, and all tests
)


def shown():
    """Each block of commands with its page."""
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text()):
            if language in ("", "sh", "bash") and COMMAND.match(block):
                yield page.name, block


FILE = re.compile(r"[\w-]+\.json")
LOOP = re.compile(r"^torchrun --nproc-per-node 1 -m (examples\.loops\.\w+)\n", re.M)


def run():
    """The blocks that run as they stand, one of those that differ in names of files alone; of loops
    the first."""
    seen = set()
    for page, block in shown():
        same = FILE.sub("FILE.json", block)
        if same not in seen and not any(part in block for part in NOT_AS_THEY_STAND):
            seen.add(same)
            for another in list(LOOP.finditer(block))[1:]:
                block = block.replace(another.group(), "")
            yield page, block


RUN = list(run())
LOOPS = [loop for page in PAGES for loop in LOOP.findall(page.read_text())]


def test_pages_show_commands_that_run_as_they_stand():
    assert {page for page, _ in RUN} >= {"README.md", "any-loop.md", "no-device.md"}


@pytest.mark.parametrize("block", [pytest.param(block, id=page) for page, block in RUN])
def test_a_documented_command_runs_as_it_stands(block, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    ours = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ran = subprocess.run(
        ["bash", "-e", "-c", block], env=ours, cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    loops = block.count("-m examples.loops.")
    assert ran.stdout.count("recompute auto: the plan is ") == loops


@pytest.mark.parametrize("loop", LOOPS[1:])
def test_other_documented_loops_run_as_torchrun_starts_them(loop, tmp_path):
    """In a process that need not import Megatron: which torchrun takes most of its time for."""
    from testing.ranks import fresh_processes

    process = fresh_processes().Process(target=as_by_torchrun, args=(loop, tmp_path / "out"))
    process.start()
    process.join()
    printed = (tmp_path / "out").read_text()
    assert process.exitcode == 0, printed
    assert printed.count("recompute auto: the plan is ") == 1


def as_by_torchrun(loop, out):
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with out.open("w", 1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        runpy.run_module(loop, run_name="__main__", alter_sys=True)
