"""`auto` in a job of two pipeline ranks: its course, its plan file, and running out of memory."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_autorecompute.cli import main
from megatron_autorecompute.compare.comparison import Shape
from megatron_autorecompute.planner.plan import Plan
from testing.ranks import RankError, fresh_processes, run_ranks
from tests.default_model import layers
from tests.hybrid_models import HAVE_HYBRID

TEXT = Path(__file__).parents[2].joinpath("LICENSE").read_bytes()
SHAPE = Shape(**layers(4), hidden_size=64, num_attention_heads=8, seq_length=64, num_microbatches=2)
STEPS = 20
FEW = {"measure_steps": 4, "steps": 11}
"""Of a job that is to have a plan, whatever it has measured."""
BUDGET_GIB = 0.0032 if HAVE_HYBRID else 0.0048
"""Between what full recompute and no recompute need on the first stage: of a HybridModel 0.0027 and
0.0037, of a GPTModel 0.0036 and 0.0066."""


def trained(shape, plan_path=None, budget_gib=BUDGET_GIB, fails_in=None, **changes):
    """Train with auto (without it where the budget is None); what each rank saw and holds."""
    from megatron.core import parallel_state

    from megatron_autorecompute.compare.workload import TrainingJob
    from megatron_autorecompute.profile import Parallelism
    from megatron_autorecompute.runtime import step_memory
    from megatron_autorecompute.runtime.apply import HOLDER_KEY
    from megatron_autorecompute.runtime.auto_options import AutoOptions
    from megatron_autorecompute.runtime.controller import Auto, JobFacts

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=shape.pipeline_stages)
    job = TrainingJob(shape, TEXT)
    said = changes.get("said", [])
    losses, peaks, policies, weights = [], [], [], []
    if budget_gib is None:
        for _ in range(STEPS):
            losses.append(job.step())
        return {"losses": losses, "weights": checksum(job)}
    options = AutoOptions(
        recompute_memory_budget_gib=budget_gib,
        recompute_plan_path=plan_path,
        recompute_plan_only=changes.get("plan_only", False),
        recompute_imbalance_percentile=changes.get("percentile", 99.0),
        recompute_measure_steps=changes.get("measure_steps", 12),
    )
    microbatches = changes.get("microbatches", lambda step: shape.num_microbatches)
    enforced = Enforced(job, fails_in, said)
    if changes.get("fails_at_once"):
        enforced.fail_at_once()
    facts = JobFacts(
        Parallelism(shape.micro_batch_size, shape.seq_length, dtype="float32"),
        lambda: microbatches(len(losses)),
        said.append,
        without_cuda=True,
    )
    if fails_in:  # in a process of its own
        step_memory.LiveBytes = lambda _: enforced.reading()
        step_memory.StepMemory.is_cheap = True
    tuner = Auto(job.chunks, job.optimizer, options, facts)
    steps = changes.get("steps", STEPS)
    for _ in range(steps):
        job.shape = replace(job.shape, num_microbatches=microbatches(len(losses)))
        with tuner.step():
            losses.append(job.step())
        policies.append(tuner.applied.policy.format())
        peaks.append(tuner.peak_bytes)
        weights.append(checksum(job))
    tuner.close()
    held = [HOLDER_KEY in chunk.module.decoder.__dict__ for chunk in job.chunks]
    return {
        "said": said,
        "losses": losses,
        "policies": policies,
        "peaks": peaks,
        "weights": weights[-1],
        "unchanged": [step for step in range(1, steps) if weights[step] == weights[step - 1]],
        "held": held,
    }


def checksum(job):
    import hashlib

    parameters = [p for chunk in job.chunks for p in chunk.parameters()]
    data = b"".join(p.detach().numpy().tobytes() for p in parameters)
    return hashlib.sha256(data).hexdigest()


class Enforced:
    """A device that runs out of memory once, on rank 0, while climbing or when the plan stands."""

    def __init__(self, job, fails_in, said):
        self.job, self.fails_in, self.said, self.failed = job, fails_in, said, False
        self.after = "all of the slack" if fails_in == "climb" else "recompute auto: the plan"

    def fail_at_once(self):
        def fail(*_):
            if torch.distributed.get_rank() == 1:
                raise torch.OutOfMemoryError("nothing is left in this step")

        self.job.chunks[0].module.decoder.layers[-1].register_forward_pre_hook(fail)

    @contextmanager
    def reading(self):
        import torch

        from megatron_autorecompute.runtime.live_bytes import LiveBytes
        from megatron_autorecompute.runtime.step_memory import tensors

        owner = self

        class Device(LiveBytes):
            def __torch_dispatch__(self, *operation):
                result = super().__torch_dispatch__(*operation)
                if owner.is_due(self.current_bytes):
                    owner.failed = True
                    raise torch.OutOfMemoryError("the enforced budget is used up")
                return result

        with Device(tensors(self.job.chunks, self.job.optimizer)) as device:
            yield device

    def is_due(self, current_bytes):
        import torch

        in_backward = torch._C._current_graph_task_id() != -1
        return (
            not self.failed
            and torch.distributed.get_rank() == 0
            and any(self.after in line for line in self.said)
            and in_backward == (self.fails_in == "backward")
            and current_bytes > 1_500_000
        )


@pytest.fixture(scope="module")
def auto(tmp_path_factory):
    path = tmp_path_factory.mktemp("auto") / "plan.json"
    return path, run_ranks(trained, 2, SHAPE, str(path))


def test_losses_and_weights_are_those_of_a_run_without_us(auto):
    without = run_ranks(trained, 2, SHAPE, None, None)
    for ours, theirs in zip(auto[1], without, strict=True):
        assert ours["losses"] == theirs["losses"]
        assert ours["weights"] == theirs["weights"]


def test_measuring_starts_lean_and_ends_within_twelve_steps(auto):
    policies = auto[1][0]["policies"]
    assert policies[0] == "full*4"
    # Two settling steps, twelve of measuring, one for half of the slack: then the plan stands.
    assert len(set(policies[15:])) == 1


def measured_in_one(shape):
    return trained(shape, measure_steps=1)


@pytest.mark.newest_version
def test_no_fewer_steps_are_measured_than_it_takes_and_no_fewer_than_none_said_to_be_left():
    ranks = run_ranks(measured_in_one, 2, SHAPE)
    said = [line for line in ranks[0]["said"] if "this step" in line]
    assert [line.split("measuring, ")[1] for line in said] == ["this step is the last"]
    assert ranks[0]["policies"][-1] == ranks[1]["policies"][-1]


def test_ranks_agree_on_every_policy(auto):
    first, second = auto[1]
    assert first["policies"] == second["policies"]


def test_the_plan_in_the_file_is_the_one_that_runs_and_keeps_the_budget(auto):
    path, ranks = auto
    plan = Plan.load(path)
    assert plan.policy.format() == ranks[0]["policies"][-1]
    assert plan.policy.format() != "full*4"
    assert plan.measured_peak_bytes == tuple(rank["peaks"][-1] for rank in ranks)
    for stage, rank in enumerate(ranks):
        assert max(rank["peaks"]) <= plan.budget_bytes[stage]
        assert plan.cost.stages[stage].peak.bytes == pytest.approx(rank["peaks"][-1], rel=0.02)


def test_of_a_job_without_megatrons_timers_no_time_of_a_step_is_made_up(auto, capsys):
    profile = Plan.load(auto[0]).profile
    for stage, rank in enumerate(profile.measured_step.ranks):
        assert (rank.rank, rank.stage) == (stage, stage)
        assert rank.forward_compute_ms is rank.backward_compute_ms is rank.optimizer_ms is None
        assert profile.stages[stage].residual_ms == 0.0
    for verb in ("show", "explain"):
        assert main([verb, str(auto[0])]) == 0
        table = capsys.readouterr().out.split("Measured in iteration")[1]
        assert table.count("running") == 6  # "not running": three timers on each rank


@pytest.mark.newest_version
def test_a_restart_uses_the_plan_at_once_and_measures_nothing(auto):
    path, ranks = auto
    again = run_ranks(restarted, 2, SHAPE, str(path))
    assert set(again[0]["policies"]) == {ranks[0]["policies"][-1]}
    assert not any("measuring" in line for line in again[0]["said"])


@pytest.mark.newest_version
def test_a_restart_with_another_percentile_solves_again_and_measures_nothing(auto, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(auto[0].read_text())
    again = run_ranks(rerouted, 2, SHAPE, str(path))
    assert not any("measuring" in line for line in again[0]["said"])
    # A dense model's plan is the same at every percentile of what its routers did.
    assert set(again[0]["policies"]) == {auto[1][0]["policies"][-1]}
    assert "solved again from its measurements" in again[0]["said"][0]
    assert (Plan.load(auto[0]).imbalance_percentile, Plan.load(path).imbalance_percentile) == (
        99.0,
        50.0,
    )


@pytest.mark.newest_version
def test_a_restart_with_a_plan_changed_by_hand_solves_again_and_measures_nothing(auto, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(auto[0].read_text()), "notes": ["mine"]}))
    again = run_ranks(restarted, 2, SHAPE, str(path))
    assert not any("measuring" in line for line in again[0]["said"])
    assert "was changed, or another version" in again[0]["said"][0]
    assert Plan.load(path).proven


def rerouted(shape, path):
    return trained(shape, path, percentile=50.0, steps=2)


@pytest.mark.newest_version
def test_a_restart_with_more_microbatches_is_planned_before_its_first_step(auto, tmp_path):
    path = tmp_path / "plan.json"
    noted = replace(Plan.load(auto[0]), notes=("step 9: stage 0 short of memory",))
    noted.save(path)
    fewer = run_ranks(restarted, 2, SHAPE, str(path), 1)[0]
    assert Plan.load(path).notes[: len(noted.notes)] == noted.notes
    assert "microbatches 2, now 1" in fewer["said"][0]
    assert fewer["policies"][0] != auto[1][0]["policies"][-1]
    ranks = run_ranks(restarted, 2, SHAPE, str(path))
    assert "microbatches 1, now 2" in ranks[0]["said"][0]
    assert ranks[0]["policies"][0] == auto[1][0]["policies"][-1]
    assert max(peak for rank in ranks for peak in rank["peaks"]) <= BUDGET_GIB * (1 << 30)


def restarted(shape, path, microbatches=SHAPE.num_microbatches):
    return trained(shape, path, microbatches=lambda step: microbatches, steps=2)


@pytest.mark.newest_version
def test_a_plan_of_another_job_is_said_to_be_and_measured_anew(auto, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(auto[0].read_text())
    ranks = run_ranks(with_few, 2, replace(SHAPE, hidden_size=32), str(path))
    assert "Changed: " in ranks[0]["said"][0]
    assert "hidden_size: 64, now 32" in ranks[0]["said"][0]
    assert ranks[0]["policies"][0] == "full*4"
    assert Plan.load(path).profile.fingerprint["hidden_size"] == "32"


def with_few(shape, *args):
    return trained(shape, *args, **FEW)


def _with_first_choice(text, choice):
    plan = json.loads(text)
    plan["recompute_policy"][0] = choice
    return json.dumps(plan)


@pytest.mark.newest_version
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not whole JSON"),
        (lambda text: json.dumps({**json.loads(text), "schema_version": 99}), "schema_version 99"),
        (lambda text: _with_first_choice(text, "selective[magic]"), "no plan that could run"),
    ],
)
def test_a_damaged_plan_file_is_kept_aside_and_all_ranks_measure(auto, tmp_path, content, message):
    path = tmp_path / "plan.json"
    path.write_text(content(auto[0].read_text()))
    damaged = path.read_text()
    ranks = run_ranks(restarted, 2, SHAPE, str(path), timeout_s=60)
    assert message in ranks[0]["said"][0]
    assert path.with_name("plan.json.unreadable").read_text() == damaged
    for rank in ranks:
        assert "measuring in the first steps" in rank["said"][1]
        assert set(rank["policies"]) == {"full*4"}


@pytest.mark.newest_version
def test_an_unwritable_plan_path_is_an_error_before_training():
    with pytest.raises(RankError, match=r"Cannot write /proc/plan\.json"):
        run_ranks(trained, 2, SHAPE, "/proc/plan.json", timeout_s=60)


@pytest.mark.newest_version
@pytest.mark.parametrize("fails_in", ["forward", "backward", "climb"])
def test_out_of_memory_ends_the_job_and_a_restart_begins_with_less(tmp_path, fails_in):
    path = tmp_path / "plan.json"
    with pytest.raises(RankError, match="OutOfMemoryError: the enforced budget is used up"):
        run_ranks(with_few, 2, SHAPE, str(path), BUDGET_GIB, fails_in)
    left = Plan.load(path)
    assert any("stage 0 short of memory, went down" in note for note in left.notes)
    low, high = left.cost.stages[0].peak_high_bytes, left.budget_bytes[0]
    assert low < high
    ranks = run_ranks(restarted, 2, SHAPE, str(path))
    for rank in ranks:
        assert set(rank["policies"]) == {left.policy.format()}
    assert ranks[0]["peaks"][-1] < high


def ending_while_it_measures(shape, path):
    return trained(shape, path, fails_at_once=True)


@pytest.mark.newest_version
def test_a_job_that_runs_out_of_memory_before_it_has_a_plan_tells_the_next_one(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(RankError, match="OutOfMemoryError: nothing is left in this step"):
        run_ranks(ending_while_it_measures, 2, SHAPE, str(path), timeout_s=60)
    (left,) = tmp_path.iterdir()
    ranks = run_ranks(with_few, 2, SHAPE, str(path))
    assert any("1 job(s) before this one ran out of memory" in line for line in ranks[0]["said"])
    assert not left.exists()
    assert Plan.load(path).policy.format() == ranks[0]["policies"][-1]


GROWS_AT = 8


def ramp_up(step):
    return 1 if step < GROWS_AT else 2


@pytest.mark.newest_version
def test_more_microbatches_in_flight_are_planned_for_before_they_come(tmp_path):
    ranks = run_ranks(ramped, 2, SHAPE, str(tmp_path / "plan.json"))
    policies, peaks = ranks[0]["policies"], ranks[0]["peaks"]
    assert policies[GROWS_AT - 1] != policies[GROWS_AT]
    assert any("2 microbatches" in line for line in ranks[0]["said"])
    assert max(peaks) <= BUDGET_GIB * (1 << 30)


def ramped(shape, path):
    return trained(shape, path, microbatches=ramp_up, **FEW)


def plan_only(shape):
    try:
        trained(shape, plan_only=True, **FEW)
    except SystemExit as ended:
        return ended.code
    return "trained on"


@pytest.mark.newest_version
def test_plan_only_ends_the_job_on_all_ranks():
    assert run_ranks(plan_only, 2, SHAPE) == [0, 0]


def killed_at(moment, rank, store, plan_path):
    """A rank of a job in which rank 1 (rank 0 while writing) is killed at a moment."""
    import os
    import signal
    from datetime import timedelta

    from megatron_autorecompute import json_records
    from megatron_autorecompute.meta import without_cuda
    from megatron_autorecompute.runtime.apply import AppliedPolicy
    from megatron_autorecompute.runtime.measurement import Measurement

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    owner, name, calls, victim = {
        "measuring": (Measurement, "watch", 3, 1),
        "switching": (AppliedPolicy, "switch", 4, 1),
        "writing": (json_records.os, "fsync", 1, 0),
    }[moment]
    original, seen = getattr(owner, name), []

    def deadly(*args, **kwargs):
        seen.append(name)
        if rank == victim and len(seen) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    # Past the check that the path can be written, which comes before training.
    setattr(owner, name, deadly)
    with without_cuda.activate():
        trained(SHAPE, plan_path, **FEW)


@pytest.mark.newest_version
@pytest.mark.parametrize("moment", ["measuring", "switching", "writing"])
def test_a_killed_rank_ends_the_job_and_leaves_no_half_plan(auto, tmp_path, moment):
    path = tmp_path / "plan.json"
    if moment == "writing":  # an older plan is there, of a job of another size
        path.write_text(auto[0].read_text().replace('"seq_length": "64"', '"seq_length": "128"'))
    context = fresh_processes()
    arguments = [(moment, rank, str(tmp_path / "store"), str(path)) for rank in (0, 1)]
    processes = [context.Process(target=killed_at, args=given) for given in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    codes = sorted(process.exitcode for process in processes)
    # One was killed, the other ended by itself with an error: nobody waits for ever.
    assert codes == [-9, 1]
    if path.exists():
        assert Plan.load(path).recompute_policy


@pytest.mark.newest_version
def test_ranks_that_start_with_different_plan_files_follow_the_first(auto, tmp_path):
    other = tmp_path / "plan.json"
    other.write_text(json.dumps({**json.loads(auto[0].read_text()), "recompute_policy": ["x"]}))
    first, second = run_ranks(with_own_path, 2, str(auto[0]), str(other))
    assert first["policies"] == second["policies"] == auto[1][0]["policies"][-1:] * 2


def with_own_path(first, second):
    return restarted(SHAPE, (first, second)[torch.distributed.get_rank()])
