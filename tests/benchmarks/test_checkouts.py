"""Pages name the commits that they were read from."""

import subprocess

import pytest

from benchmarks.published import page
from scripts import checkouts

pytestmark = pytest.mark.any_version


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Two packages, in one checkout of one commit."""
    for name in ("one_bridge", "one_core"):
        (tmp_path / "src" / name).mkdir(parents=True)
        (tmp_path / "src" / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "src"))

    def git(*words, day="2026-08-22T07:30:00+00:00"):
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        env = {"GIT_COMMITTER_DATE": day, "GIT_AUTHOR_DATE": day, "PATH": "/usr/bin:/bin"}
        asked = ["git", "-C", str(tmp_path), *who, *words]
        return subprocess.run(asked, capture_output=True, text=True, check=True, env=env).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    return git("rev-parse", "HEAD").strip()


def test_commit_and_day_of_each_checkout_are_said(checkout):
    said = checkouts.read_from({"Bridge": "one_bridge", "Megatron-LM": "one_core"})
    first, second = said.removeprefix("Read from Bridge ").rstrip(".").split(" and Megatron-LM ")
    assert first == second
    short, day = first.split(" of ")
    assert checkout.startswith(short)
    assert day == "2026-08-22"


def test_nothing_is_said_of_what_is_no_checkout_of_its_own(checkout):
    assert not checkouts.read_from({"Bridge": "one_bridge", "none": "no_such_package.at_all"})
    assert not checkouts.read_from({"Bridge": "one_bridge", "numpy": "numpy"})


def test_a_page_of_recipes_says_it():
    said = "Read from Megatron Bridge 0123 of 2026-08-22 and Megatron-LM 4567 of 2026-08-20."
    data = {"points": [], "uncovered": [], "unread": [], "runs": 0, "read_from": said}
    assert said in page.text(data)
