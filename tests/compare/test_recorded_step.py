"""The stacks of Megatron's own steps are read: a job that runs as planned shows no difference."""

from dataclasses import replace

import pytest

from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.planner import Planner
from megatron_autorecompute.report.recorded import recorded_step
from tests.report.snapshots import Recorder, dumped

ROUNDING = 0.025
"""Share by which torch's rounding to 512 bytes changes what layers this small hold."""


@pytest.fixture(scope="module")
def measured(one_rank):
    """A tiny job, and the planner of its measured profile."""
    from benchmarks.gpu import cases
    from benchmarks.gpu.contest import Contest

    contest = Contest(cases.DENSE.sized(tiny=True))
    return contest, Planner(contest.profile(), contest.layout, contest.schedule)


def recorded(measured, ran, planned, path):
    """Three steps under a policy, beside a plan with a policy."""
    from megatron_autorecompute.runtime.static_bytes import tensors
    from tests.compare.recording import recording

    contest, planner = measured
    plan = make_plan(planner, 1 << 40)
    policy = contest.policy(planned)
    choices = tuple(policy.to_config())
    plan = replace(plan, recompute_policy=choices, cost=planner.evaluate(policy))
    recorder = Recorder()
    recorder.alloc(plan.profile.stages[0].static.total_bytes)
    job = contest.job
    with job.strategy(ran), recording(recorder, tensors(job.chunks, job.optimizer)):
        for _ in range(3):
            job.step()
    return recorded_step(plan, dumped(recorder.snapshot(), path))


@pytest.mark.parametrize(
    "policy",
    [
        "none",
        "full",
        "full/2*2,selective[core_attn]*1,none*1",
        "full*1,selective[layernorm+mlp]*2,selective[core_attn+mlp]*1",
    ],
)
def test_a_step_of_megatron_is_found_and_agrees_with_the_plan(measured, tmp_path, policy):
    step = recorded(measured, policy, policy, tmp_path / "rank0.pickle")
    assert step.found.startswith("The last whole step of the history, found by Megatron's calls")
    names = [f"{kind} of microbatch {m}" for m in (0, 1) for kind in ("forward", "backward")]
    assert [one.what for one in step.moments] == [*names, "optimizer step"]
    assert len(step.layers) == (3 if "full/2" in policy else 4)
    for one in (*step.moments, *step.layers):
        assert one.recorded_bytes == pytest.approx(one.predicted_bytes, rel=ROUNDING), one.what


def test_a_layer_that_runs_another_choice_than_planned_is_shown(measured, tmp_path):
    ran, planned = "full*2,none*2", "full*3,none*1"
    step = recorded(measured, ran, planned, tmp_path / "rank0.pickle")
    [other] = [one for one in step.layers if abs(one.more_bytes) > ROUNDING * one.recorded_bytes]
    none, full = (measured[1].profile.kinds[0].record(choice) for choice in ("none", "full"))
    assert other.what == "layer 2"
    assert other.more_bytes == pytest.approx(none.held_bytes - full.held_bytes, rel=ROUNDING)
