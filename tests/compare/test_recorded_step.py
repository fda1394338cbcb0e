"""The stacks of Megatron's own steps are read: a job that runs as planned shows no difference."""

from dataclasses import replace

import pytest

from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.report.recorded import recorded_step
from testing.ranks import run_ranks
from tests.report.snapshots import Recorder, dumped

ROUNDING = 0.025
"""Share by which torch's rounding to 512 bytes changes what layers this small hold."""


@pytest.fixture(scope="module")
def measured(one_rank):
    """A tiny job, and the planner of its measured profile."""
    from benchmarks.gpu import cases
    from benchmarks.gpu.contest import Contest

    contest = Contest(cases.DENSE.sized(tiny=True))
    return contest, Problem(contest.profile(), contest.layout, contest.schedule)


def beside(job, problem, stage, policies, path):
    """Three steps under the first policy, beside a plan with the second."""
    from megatron_autorecompute.runtime.step_memory import tensors
    from tests.compare.recording import recording

    ran, planned = policies
    plan, policy = make_plan(problem.at(1 << 40)), job.policy(planned)
    choices = tuple(policy.to_config())
    plan = replace(plan, recompute_policy=choices, cost=problem.cost(policy))
    recorder = Recorder()
    recorder.alloc(plan.profile.stages[stage].static.total_bytes)
    with job.strategy(ran), recording(recorder, tensors(job.chunks, job.optimizer)):
        for _ in range(3):
            job.step()
    return recorded_step(plan, dumped(recorder.snapshot(), path), stage)


def recorded(measured, ran, planned, path):
    contest, problem = measured
    return beside(contest.job, problem, 0, (ran, planned), path)


@pytest.mark.any_version
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
    names = [f"{kind} of microbatch {m}" for m in (0, 1) for kind in ("forward", "backward")]
    assert [one.what for one in step.moments] == [*names, "optimizer step"]
    for one in step.moments:
        assert one.recorded_bytes == pytest.approx(one.predicted_bytes, rel=ROUNDING), one.what


def of_a_pipeline(policy, folder):
    """On each of two ranks: its step beside the plan of its stage."""
    from megatron.core import parallel_state

    from megatron_autorecompute.compare.comparison import Shape
    from megatron_autorecompute.compare.workload import TrainingJob, Variant
    from megatron_autorecompute.profile import Model, Parallelism
    from megatron_autorecompute.runtime.apply import apply
    from megatron_autorecompute.runtime.measurement import Measurement
    from megatron_autorecompute.runtime.model_shard import ModelShard

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    shape = Shape(4, 64, 4, 32, 2, num_microbatches=4, pipeline_stages=2)
    job = TrainingJob(shape, b"what is read as bytes " * 100, Variant({"add_bias_linear": False}))
    for _ in range(2):
        job.step()
    shard = ModelShard(job.chunks)
    with apply(job.policy("full"), job.chunks, holder="a test") as applied:
        measurement = Measurement(shard, applied)
        for _ in measurement.policies():
            with job.memory() as memory, measurement.watch(memory):
                job.step()
        shapes = Parallelism(2, 32, dtype="float32")
        profile = measurement.profile(Model("GPT", 4), shapes, job.static())
    problem = Problem(profile, shard.layout, shard.schedule(4))
    path = folder / f"rank{shard.stage}.pickle"
    return beside(job, problem, shard.stage, (policy, policy), path)


def test_both_stages_of_a_pipeline_agree_with_the_plan(tmp_path):
    steps = run_ranks(of_a_pipeline, 2, "none*1,full*2,selective[mlp]*1", tmp_path)
    first = [one.what for one in steps[0].moments]
    assert first[:2] == ["forward of microbatches 0 to 1", "backward of microbatch 0"]
    assert first[-2:] == ["backward of microbatches 2 to 3", "optimizer step"]
    assert len(steps[1].moments) == 2 * 4 + 1
    for step in steps:
        for one in step.moments:
            assert one.recorded_bytes == pytest.approx(one.predicted_bytes, rel=ROUNDING), one.what
