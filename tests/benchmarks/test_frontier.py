"""The page of what choices buy: it is made of its files, and these of today's cost model."""

import json

import pytest

from benchmarks import frontier
from megatron_autorecompute.compat import versions
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.planner.search.manual import manual_policy
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import MegatronStrategy
from megatron_autorecompute.units import GIB

QUICK = [name for name in frontier.jobs() if name != "deepseek-v3"]
"""Jobs whose profile takes a second or two."""


def stored(name):
    return json.loads((frontier.RESULTS / f"{name}.json").read_text())


def test_the_page_is_made_of_the_results():
    assert frontier.PAGE.read_text() == frontier.page({n: stored(n) for n in frontier.jobs()})


@pytest.mark.skipif(versions.installed().minor < 19, reason="the page is written with 0.19")
@pytest.mark.filterwarnings("ignore:moe_ffn_hidden_size is not set")
@pytest.mark.parametrize("name", QUICK)
def test_stored_steps_and_bytes_of_megatrons_settings_are_those_of_todays_cost_model(name):
    job = frontier.jobs()[name]
    profile = profile_job(job, frontier.gpu_of(name)).as_megatron()
    problem = Problem(profile, job.layout(), job.schedule())
    rows = [row for row in stored(name)["rows"] if row["manual"]]
    policies = [manual_policy(problem, MegatronStrategy.parse(row["manual"])) for row in rows]
    costs = [problem.cost(policy) for policy in policies]
    assert [cost.step_ms for cost in costs] == pytest.approx([row["manual_ms"] for row in rows])
    assert rows[-1]["manual"] == "megatron:none"
    peak = max(stage.peak_high_bytes for stage in costs[-1].stages)
    assert rows[-1]["budget_gib"] * GIB == pytest.approx(peak + 1, abs=1)
