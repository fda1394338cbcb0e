"""The step that is drawn is the step that was planned."""

import itertools

import pytest

from megatron_autorecompute.report.timeline import timeline
from tests.planner import moments
from tests.report.plans import example_plan, random_plan

SEEDS = range(30)


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_of_every_moment_are_the_planners(seed):
    plan = random_plan(seed)
    for stage in timeline(plan).stages:
        expected = moments.timeline(
            plan.profile, plan.layout, plan.schedule, plan.policy, stage.stage
        )
        assert [stage.at(m) for m in stage.moments()] == [split for _, split in expected]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_binding_moment_is_as_full_as_the_plan_says(seed):
    plan = random_plan(seed)
    for stage, cost in zip(timeline(plan).stages, plan.cost.stages, strict=True):
        if stage.binding is None:
            assert cost.peak.moment.endswith("optimizer step")
        else:
            assert stage.at(stage.binding).total_bytes == cost.peak.bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_the_step_ends_when_the_plan_says_and_stages_do_one_thing_at_a_time(seed):
    plan = random_plan(seed)
    step = timeline(plan)
    assert step.step_ms == pytest.approx(plan.cost.step_ms)
    for stage, cost in zip(step.stages, plan.cost.stages, strict=True):
        assert (stage.start_ms[1:] >= stage.end_ms[:-1] - 1e-9).all()
        assert (stage.end_ms - stage.start_ms).sum() == pytest.approx(cost.busy_ms)


@pytest.mark.parametrize("seed", SEEDS)
def test_moments_of_an_event_fill_it_without_gaps(seed):
    for stage in timeline(random_plan(seed)).stages:
        spans = {}
        for moment in stage.moments():
            spans.setdefault(moment.event, []).append(stage.span_ms(moment))
        for event, found in spans.items():
            assert found[0][0] == pytest.approx(stage.start_ms[event])
            assert found[-1][1] == pytest.approx(stage.end_ms[event])
            for (_, end), (start, _) in itertools.pairwise(found):
                assert start == pytest.approx(end)


def test_recompute_of_units_adds_up_to_the_stages():
    plan = example_plan("gpt-760m-48l", 4, 2, 16, 20)
    for stage, cost in zip(timeline(plan).stages, plan.cost.stages, strict=True):
        recompute_ms = sum(unit.recompute_ms for units in stage.units for unit in units)
        assert recompute_ms * plan.schedule.num_microbatches == pytest.approx(cost.recompute_ms)
        assert cost.recompute_ms > 0
