"""A recorded step lies on the planned one, and differs from it by what was recorded differently."""

import numpy as np
import pytest

from megatron_autorecompute.errors import OptionError, ProfileError
from megatron_autorecompute.report.recorded import recorded_step
from megatron_autorecompute.report.timeline import timeline
from megatron_autorecompute.units import MIB
from tests.report.plans import THREE, example_plan, random_plan
from tests.report.snapshots import ENGINE, as_planned, dumped
from tests.report.test_timeline import bytes_at, moments_of

ROUNDED = 512 * 64
"""Bytes that may be lost to torch's rounding of each of a stage's tensors."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank0.pickle"


def plan_of(name="gpt-760m-48l"):
    return example_plan(*THREE[name])


def recorded(plan, stage, path, **about):
    return recorded_step(plan, dumped(as_planned(plan, stage, **about).snapshot(), path), stage)


@pytest.mark.parametrize("seed", range(12))
def test_the_peak_of_an_event_is_that_of_its_fullest_moment(seed):
    for stage in timeline(random_plan(seed)).stages:
        most = {}
        for event, unit in moments_of(stage):
            total = bytes_at(stage, event, unit).total_bytes
            most[event] = max(most.get(event, 0), total)
        assert stage.peak_bytes.tolist() == list(most.values())


@pytest.mark.parametrize("name", THREE)
def test_a_step_that_ran_as_planned_shows_no_difference(name, path):
    plan = plan_of(name)
    for stage in range(plan.layout.num_stages):
        step = recorded(plan, stage, path)
        assert max(abs(one.more_bytes) for one in step.moments) < ROUNDED


def test_the_curve_is_highest_where_the_plan_is(path):
    plan = plan_of()
    stage = timeline(plan).stages[1]
    step = recorded(plan, 1, path)
    highest = step.at_ms[step.level_bytes.argmax()]
    event = stage.binding.event
    assert stage.start_ms[event] - 1e-3 <= highest <= stage.end_ms[event] + 1e-3
    assert step.level_bytes.max() == pytest.approx(plan.cost.stages[1].peak.bytes, abs=ROUNDED)
    assert (np.diff(step.at_ms) >= 0).all()
    assert step.at_ms[-1] == pytest.approx(timeline(plan).step_ms * 1.012)


def test_what_a_layer_keeps_more_shows_in_the_parts_of_the_step(path):
    step = recorded(plan_of(), 0, path, more={3: 40 * MIB, 28: -4 * MIB})
    assert max(one.more_bytes for one in step.moments) >= 40 * MIB


def test_of_several_steps_the_last_whole_one_is_taken(path):
    plan = plan_of()
    recorder = as_planned(plan, 2, steps=2)
    whole = recorded_step(plan, dumped(recorder.snapshot(), path), 2)
    again = as_planned(plan, 2, steps=3)
    count = len(again.trace) - len(recorder.trace)
    cut = again.snapshot()
    cut["device_traces"][0] = again.trace[: len(recorder.trace) + count // 2]
    del cut["segments"]
    half = recorded_step(plan, dumped(cut, path), 2)
    assert half.level_bytes.tolist() == whole.level_bytes.tolist()
    assert half.at_ms == pytest.approx(whole.at_ms)


def test_a_history_without_stacks_is_refused_with_what_to_call(path):
    recorder = as_planned(plan_of(), 0)
    for entry in recorder.trace:
        entry["frames"] = ENGINE
    with pytest.raises(
        ProfileError, match=r"show no whole step .* Call torch\.cuda\.memory\._record"
    ):
        recorded_step(plan_of(), dumped(recorder.snapshot(), path), 0)


def test_a_snapshot_of_another_stage_is_refused(path):
    plan = plan_of("moe-16b")
    snapshot = dumped(as_planned(plan, 1).snapshot(), path)
    with pytest.raises(ProfileError, match="no whole step as stage 0 has it in the plan"):
        recorded_step(plan, snapshot, 0)


def test_only_folders_of_optimizers_end_a_step(path):
    """A training script may be called anything, and is at the bottom of every stack."""
    plan = plan_of()
    recorder = as_planned(plan, 0)
    script = {"name": "<module>", "filename": "/jobs/optimizer/study/optim.py", "line": 1}
    for entry in recorder.trace:
        entry["frames"] = [*entry["frames"], script] if entry["frames"] else []
    assert recorded_step(plan, dumped(recorder.snapshot(), path), 0).moments


# --- which stage ----------------------------------------------------------------------------------


def stage_for(plan, name, tmp_path, stage=None):
    path = dumped(as_planned(plan, (stage or 0) % 4, steps=1).snapshot(), tmp_path / name)
    return recorded_step(plan, path, stage).stage


def test_of_several_stages_one_is_asked_for(tmp_path):
    with pytest.raises(OptionError, match=r"--stage None: give the .* has stages 0 to 3"):
        stage_for(plan_of(), "rank0.pickle", tmp_path)
    assert stage_for(plan_of(), "rank0.pickle", tmp_path, stage=2) == 2


def test_a_stage_that_the_plan_lacks_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"--stage 4: .* the plan has stages 0 to 3"):
        stage_for(plan_of(), "rank0.pickle", tmp_path, stage=4)
