"""The Autodist document's rows, predicted without a device."""

import json

import pytest

from benchmarks import autodist
from benchmarks.gpu.published import ROWS
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.planner.search.problem import Problem


def test_the_page_is_made_of_the_results():
    found = json.loads(autodist.RESULTS.read_text())
    assert autodist.PAGE.read_text() == autodist.text(found)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatrons_own_rows_are_near_the_published_ones(sequence_parallel):
    asked = autodist.job(sequence_parallel)
    profile = profile_job(asked, autodist.gpu(), only=("core_attn",))
    model = Problem(profile, asked.layout(), asked.schedule())
    published = {row.name: row for row in ROWS}
    base = autodist.cost_of(model, autodist.POLICIES[autodist.BASE])
    full = autodist.cost_of(model, autodist.POLICIES[autodist.ANCHOR])
    for name in (autodist.BASE, autodist.ANCHOR, "Megatron manual: first 31 full"):
        peak_gb, step_ms = autodist.cost_of(model, autodist.POLICIES[name])
        time = published[name].step_s / published[autodist.BASE].step_s
        assert step_ms / base[1] == pytest.approx(time, rel=0.03)
        above_full = published[name].peak_gb - published[autodist.ANCHOR].peak_gb
        assert peak_gb - full[0] == pytest.approx(above_full, abs=1.2)
