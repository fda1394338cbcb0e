"""The step that is drawn is the step that was planned."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_autorecompute.planner.cost.peak_memory import Breakdown
from megatron_autorecompute.planner.cost.unit_costs import OUTSIDE, PS_PER_MS
from megatron_autorecompute.report.timeline import timeline
from tests.planner import moments
from tests.report.plans import copying_plan, early_plan, example_plan, random_plan

SEEDS = range(18)


def moments_of(stage):
    """Event and unit, in the order of time: a forward passes the units from first to last."""
    for event, (backward, chunk) in enumerate(zip(stage.backward, stage.chunk, strict=True)):
        units = range(len(stage.units[chunk]))
        yield from ((event, unit) for unit in (reversed(units) if backward else units))


def bytes_at(stage, event, unit):
    """By what they are, as the page's script adds them up."""
    units = stage.units[stage.chunk[event]]
    begun, running = units[: unit + 1], units[unit]
    transients = running.forward_transient_bytes, running.backward_transient_bytes
    return Breakdown(
        static_bytes=stage.static_bytes,
        in_flight_bytes=stage.in_flight_bytes[event],
        running_bytes=sum(u.held_bytes for u in begun if u.name not in OUTSIDE),
        transient_bytes=transients[int(stage.backward[event])],
        embedding_head_bytes=stage.outside_bytes[event]
        + sum(u.held_bytes for u in begun if u.name in OUTSIDE),
        overhead_bytes=stage.overhead_bytes[event],
        copy_bytes=0 if stage.copies is None else stage.copy_bytes[event][unit],
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_of_every_moment_are_the_planners(seed):
    plan = random_plan(seed)
    for stage in timeline(plan).stages:
        expected = moments.timeline(
            plan.profile, plan.layout, plan.schedule, plan.policy, stage.stage
        )
        found = [bytes_at(stage, *moment) for moment in moments_of(stage)]
        assert found == [split for _, split in expected]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_binding_moment_is_as_full_as_the_plan_says(seed):
    plan = (copying_plan if seed % 3 == 0 else random_plan)(seed)
    for stage, cost in zip(timeline(plan).stages, plan.cost.stages, strict=True):
        if stage.binding is None:
            assert cost.peak.moment.endswith("optimizer step")
        else:
            moment = stage.binding.event, stage.binding.unit
            assert bytes_at(stage, *moment) == cost.peak.breakdown
            assert stage.peak_bytes.max() == cost.peak.bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_the_step_ends_when_the_plan_says_and_stages_do_one_thing_at_a_time(seed):
    plan = random_plan(seed)
    step = timeline(plan)
    assert step.step_ms == pytest.approx(plan.cost.step_ms)
    for stage, cost in zip(step.stages, plan.cost.stages, strict=True):
        assert (stage.start_ms[1:] >= stage.end_ms[:-1] - 1e-9).all()
        assert (stage.end_ms - stage.start_ms).sum() == pytest.approx(cost.busy_ms)


def test_what_begins_early_runs_after_the_event_before_and_is_the_rest_of_its_backward():
    plan = early_plan()
    assert plan.policy.is_ahead
    step = timeline(plan)
    assert step.step_ms == pytest.approx(plan.cost.step_ms)
    for stage, cost in zip(step.stages, plan.cost.stages, strict=True):
        early = np.array([0.0, *stage.end_ms[:-1]]) + stage.ahead_ms
        assert (early <= stage.start_ms + 1e-9).all()
        assert not stage.ahead_ms[~stage.backward].any()
        begun_ms = sum(cost.ahead_ms) * plan.schedule.num_microbatches
        assert stage.ahead_ms.sum() == pytest.approx(begun_ms)
        later_ms = (stage.end_ms - stage.start_ms).sum()
        assert later_ms + stage.ahead_ms.sum() == pytest.approx(cost.busy_ms)
        units = sum(u.backward_ps - u.ahead_ps for own in stage.units for u in own) / PS_PER_MS
        rest_ms = sum(cost.backward_ms) - sum(cost.ahead_ms)
        assert units == pytest.approx(rest_ms)


def test_recompute_of_units_adds_up_to_the_stages():
    plan = example_plan("gpt-760m-48l", 4, 2, 16, 20)
    for stage, cost in zip(timeline(plan).stages, plan.cost.stages, strict=True):
        recompute_ms = sum(map(sum, stage.recompute_ps)) / PS_PER_MS
        assert recompute_ms * plan.schedule.num_microbatches == pytest.approx(cost.recompute_ms)
        assert cost.recompute_ms > 0


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_step_of_a_thousand_million_microbatches_is_drawn_with_its_moments(num_chunks):
    short = example_plan("gpt-760m-48l", 4, num_chunks, 64, 20)
    long = replace(short, schedule=replace(short.schedule, num_microbatches=10**9))
    drawn, whole = timeline(long), timeline(short)
    assert whole.num_microbatches == 64
    assert drawn.num_microbatches < 64
    for stage, same in zip(drawn.stages, whole.stages, strict=True):
        assert stage.binding == same.binding
        totals = [s.in_flight_bytes + s.outside_bytes + s.overhead_bytes for s in (stage, same)]
        assert totals[0].max() == totals[1].max()
