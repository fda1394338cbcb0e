"""The page of what choices buy: it is made of its files, and these of today's cost model."""

import functools
import json

import pytest

from benchmarks import frontier
from megatron_autorecompute.compat import versions
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.planner.search.manual import manual_policy
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import MegatronStrategy, RecomputePolicy
from megatron_autorecompute.units import GIB

QUICK = [name for name in frontier.jobs() if name != "deepseek-v3"]
"""Jobs whose profile takes a second or two."""


def stored(name):
    return json.loads((frontier.RESULTS / f"{name}.json").read_text())


def test_the_page_is_made_of_the_results():
    assert frontier.PAGE.read_text() == frontier.page({n: stored(n) for n in frontier.jobs()})


@functools.cache
def profile_of(name):
    return profile_job(frontier.jobs()[name], frontier.gpu_of(name))


def problem_of(name, *, as_megatron):
    job, profile = frontier.jobs()[name], profile_of(name)
    return Problem(profile.as_megatron() if as_megatron else profile, job.layout(), job.schedule())


@pytest.mark.skipif(versions.installed().minor < 19, reason="the page is written with 0.19")
@pytest.mark.filterwarnings("ignore:moe_ffn_hidden_size is not set")
@pytest.mark.parametrize("name", QUICK)
def test_stored_steps_and_bytes_of_megatrons_settings_are_those_of_todays_cost_model(name):
    problem = problem_of(name, as_megatron=True)
    rows = [row for row in stored(name)["rows"] if row["manual"]]
    policies = [manual_policy(problem, MegatronStrategy.parse(row["manual"])) for row in rows]
    costs = [problem.cost(policy) for policy in policies]
    assert [cost.step_ms for cost in costs] == pytest.approx([row["manual_ms"] for row in rows])
    assert rows[-1]["manual"] == "megatron:none"
    peak = max(stage.peak_high_bytes for stage in costs[-1].stages)
    assert rows[-1]["budget_gib"] * GIB == pytest.approx(peak + 1, abs=1)


@pytest.mark.skipif(versions.installed().minor < 19, reason="the page is written with 0.19")
@pytest.mark.filterwarnings("ignore:moe_ffn_hidden_size is not set")
@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("plan", ["megatrons", "all"])
def test_stored_plans_take_the_stored_time_and_fit(name, plan):
    problem = problem_of(name, as_megatron=plan == "megatrons")
    rows = [row for row in stored(name)["rows"] if row[plan]]
    texts = [row[plan] for row in rows]
    layers = problem.profile.num_layers
    costs = [problem.cost(RecomputePolicy.parse(text, num_layers=layers)) for text in texts]
    assert [cost.step_ms for cost in costs] == pytest.approx([row[f"{plan}_ms"] for row in rows])
    for cost, row in zip(costs, rows, strict=True):
        peak = max(stage.peak_high_bytes for stage in cost.stages)
        assert peak <= round(row["budget_gib"] * GIB)
    assert [len(rows), len(stored(name)["rows"])] == [len(frontier.SHARES)] * 2
