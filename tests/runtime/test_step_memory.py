"""Auto on a device whose memory counters are known: budgets, fragmentation, retries, peaks."""

from types import SimpleNamespace

import pytest
import torch

from megatron_autorecompute.errors import InfeasibleError
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.profile import Parallelism
from megatron_autorecompute.report.terminal import sums_of_layers
from megatron_autorecompute.runtime.auto_options import GIB, AutoOptions
from tests.fake_cuda import fake_cuda
from tests.support import (
    MICRO_BATCH_SIZE,
    SEQ_LENGTH,
    forward_step,
    microbatch,
    tiny_config,
    tiny_gpt,
)

pytestmark = pytest.mark.any_version
MIB = 1 << 20
TIGHT_GIB = 7.6 / 1024
"""Between what full recompute and no recompute need of the model below."""
STEPS = 18


class Job:
    """A small GPT that trains under auto on one device."""

    def __init__(self, options, num_microbatches=1):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.timers import Timers

        from megatron_autorecompute.runtime.controller import Auto, JobFacts

        config = tiny_config(num_layers=8)
        ddp = DistributedDataParallelConfig()
        self.models = [DistributedDataParallel(config, ddp, chunk) for chunk in tiny_gpt(config)]
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), self.models)
        config.finalize_model_grads_func = finalize_model_grads
        self.num_microbatches, self.said = num_microbatches, []
        facts = JobFacts(
            Parallelism(MICRO_BATCH_SIZE, SEQ_LENGTH, dtype="float32"),
            lambda: self.num_microbatches,
            self.said.append,
            timers=Timers(0, "minmax"),  # which this loop never starts
        )
        self.tuner = Auto(self.models, self.optimizer, options, facts)
        self.policies, self.peaks = [], []

    def train(self, steps, after=lambda step: None):
        for step in range(steps):
            with self.tuner.step():
                self._step()
            self.policies.append(self.tuner.applied.policy.format())
            self.peaks.append(torch.cuda.max_memory_allocated())
            after(step)
        self.tuner.close()
        return self

    def _step(self):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        (model,) = self.models
        model.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([microbatch(i) for i in range(self.num_microbatches)]),
            model=model,
            num_microbatches=self.num_microbatches,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )
        self.optimizer.step()


def tight(path=None):
    return AutoOptions(recompute_memory_budget_gib=TIGHT_GIB, recompute_plan_path=path)


def free(path=None, **options):
    return AutoOptions(recompute_plan_path=path, **options)


@pytest.fixture(scope="module")
def planned(one_rank, tmp_path_factory):
    """A plan file made under a tight budget on a large device, and the job that made it."""
    path = tmp_path_factory.mktemp("planned") / "plan.json"
    with fake_cuda(64 * MIB):
        return path, Job(tight(str(path))).train(STEPS)


@pytest.fixture
def path(planned, tmp_path):
    copy = tmp_path / "plan.json"
    copy.write_text(planned[0].read_text())
    return str(copy)


@pytest.mark.parametrize("lost_bytes", [0, 3 * MIB])
def test_a_budget_is_the_device_less_what_others_and_fragmentation_take(
    one_rank, tmp_path, lost_bytes
):
    path, most = str(tmp_path / "plan.json"), []
    with fake_cuda(16 * MIB, lost_bytes) as device:

        def note(step):
            most.append((device.most_bytes(), device.reserved_bytes()))

        torch.empty(14 * MIB, dtype=torch.uint8)  # what loading a checkpoint may leave reserved
        device.outside_bytes = 5 * MIB
        Job(free(path)).train(STEPS, note)
    plan = Plan.load(path)
    assert plan.budget_bytes == (11 * MIB - lost_bytes,)
    # Beside the sum of layers stands what the allocator counted, whoever reset its peak meanwhile.
    step, (layers,) = plan.profile.measured_step, sums_of_layers(plan)
    (rank,) = step.ranks
    seen = rank.max_memory_allocated_bytes, rank.max_memory_reserved_bytes
    assert seen == most[step.iteration - 1]
    assert layers.peak.bytes == pytest.approx(rank.max_memory_allocated_bytes, rel=0.02)
    # A timer that nobody starts took no time that layers could be short of.
    assert (rank.forward_compute_ms, rank.backward_compute_ms, rank.optimizer_ms) == (None,) * 3
    assert plan.profile.stages[0].residual_ms == 0.0


def test_a_reserve_that_was_asked_for_stands_for_the_measured_one(one_rank, tmp_path):
    path = str(tmp_path / "plan.json")
    with fake_cuda(16 * MIB, 3 * MIB):
        Job(free(path, recompute_memory_reserve_gib=4 / 1024)).train(STEPS)
    assert Plan.load(path).budget_bytes == (12 * MIB,)


def test_a_restart_without_the_budget_finds_one(path):
    with fake_cuda(64 * MIB):
        job = Job(free(path)).train(2)
    assert "budgets in GiB 0.00742, now 0.0625" in job.said[0]
    assert not any("measuring" in line for line in job.said)
    assert Plan.load(path).budget_bytes == (64 * MIB,)


def test_a_restart_on_a_device_that_others_use_meanwhile_counts_them(path):
    with fake_cuda(64 * MIB) as device:
        device.outside_bytes = 55 * MIB
        Job(free(path)).train(2)
    assert Plan.load(path).budget_bytes == (9 * MIB,)


def test_what_others_hold_on_the_device_is_within_the_budget_from_the_first_plan_on(one_rank):
    budget_gib = TIGHT_GIB + MIB / GIB
    with fake_cuda(64 * MIB):
        reference = torch.zeros(MIB, dtype=torch.uint8)
        job = Job(AutoOptions(recompute_memory_budget_gib=budget_gib)).train(STEPS)
        assert max(job.peaks) <= budget_gib * GIB
    assert reference.numel() == MIB


def test_a_budget_below_the_leanest_policy_is_said_once_and_the_leanest_policy_runs(one_rank):
    with fake_cuda(64 * MIB):
        job = Job(AutoOptions(recompute_memory_budget_gib=4 / 1024)).train(6)
    assert job.policies == ["full*8"] * 6
    (said,) = (line for line in job.said if "OVER BUDGET" in line)
    assert "Stage 0 needed" in said
    assert "in training step 1 even with its leanest choices (full*8)" in said


def test_a_plan_alone_is_not_made_for_a_budget_below_the_leanest_policy(one_rank):
    options = AutoOptions(recompute_memory_budget_gib=4 / 1024, recompute_plan_only=True)
    steps = []
    with fake_cuda(64 * MIB), pytest.raises(InfeasibleError, match="in training step 1"):
        Job(options).train(STEPS, steps.append)
    assert steps == [0]


def test_retries_before_and_between_training_steps_change_no_plan(path, planned):
    before = Plan.load(path)
    with fake_cuda(64 * MIB) as device:

        def evaluate(step):
            device.retries += 1
            torch.empty(20 * MIB, dtype=torch.uint8)

        device.retries = 1  # while the checkpoint was loaded
        job = Job(tight(path)).train(6, evaluate)
    assert set(job.policies) == {before.policy.format()}
    assert Plan.load(path) == before


def test_a_retry_within_a_training_step_is_a_notch_less(path, planned):
    with fake_cuda(64 * MIB) as device:
        job = Job(tight(path))
        model = job.models[0]
        model.register_forward_hook(lambda *_: setattr(device, "retries", len(job.policies) == 3))
        job.train(6)
    assert len(set(job.policies[:4])) == 1
    assert job.policies[4] != job.policies[3]


def test_state_on_another_device_is_no_memory_of_the_one_that_trains():
    from megatron_autorecompute.runtime.step_memory import static_bytes, tensors

    layer = torch.nn.Linear(4, 4, bias=False)
    (weight,) = layer.parameters()
    elsewhere = torch.zeros(1000, device="meta")
    inner = SimpleNamespace(
        state={weight: {"moment": torch.zeros(4, 4), "copy": elsewhere}},
        param_groups=[{"params": [weight]}],
    )
    optimizer = SimpleNamespace(optimizer=inner)
    assert static_bytes([layer], optimizer).optimizer_state_bytes == 64
    assert not any(tensor is elsewhere for tensor in tensors([layer], optimizer))
