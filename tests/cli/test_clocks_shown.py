"""Whether host or device decides, in everything that shows a profile or a plan."""

from dataclasses import replace

import pytest

from megatron_autorecompute.cli import main
from megatron_autorecompute.profile import HostTimes
from tests.planner.uniform_profiles import FULL, NONE, uniform_profile

LAUNCHES = {"host": 3.0, "device": 0.3}
"""What launches take, in what kernels take."""


def files(folder, launches):
    def both(record):
        times = [launches * ms for ms in (record.forward_ms, record.backward_ms)]
        return replace(record, host=HostTimes(*times) if launches else None)

    profile, plan, page = (str(folder / name) for name in ("profile.json", "plan.json", "p.html"))
    uniform_profile(4, *map(both, (NONE, FULL))).save(profile)
    flags = ["--pp", "1", "--num-microbatches", "8", "--budget-gib", "8"]
    assert main(["plan", "--profile", profile, *flags, "-o", plan]) == 0
    return profile, plan, page


def shown(folder, launches, capsys):
    """What each command says."""
    profile, plan, page = files(folder, launches)
    found = {"plan": capsys.readouterr().out}
    commands = {
        "profile": ["show", profile],
        "show": ["show", plan],
        "explain": ["explain", plan],
        "report": ["report", plan, "-o", page],
    }
    for name, words in commands.items():
        assert main(words) == 0
        found[name] = capsys.readouterr().out
    found["report"] = (folder / "p.html").read_text()
    return {name: " ".join(text.split()) for name, text in found.items()}


@pytest.mark.parametrize("binds", LAUNCHES)
def test_everything_says_which_clock_decides_and_what_helps(binds, tmp_path, capsys):
    (other,) = set(LAUNCHES) - {binds}
    for name, text in shown(tmp_path, LAUNCHES[binds], capsys).items():
        assert f"{binds}-bound" in text.lower(), name
        assert f"{other}-bound" not in text.lower(), name
        assert ("CUDA graphs or a larger micro-batch help" in text) == (binds == "host"), name


def test_nothing_is_said_of_clocks_where_the_host_is_not_known(tmp_path, capsys):
    for text in shown(tmp_path, 0.0, capsys).values():
        assert "-bound" not in text.lower()
