"""`attach` in training loops of others: calls of the schedule, and what goes on between them."""

from dataclasses import replace

import pytest

from benchmarks import any_loop
from benchmarks.any_loop import JOBS
from examples.loops.small_gpt import SmallGPT, get_forward_backward_func

CALLS = 18
WITH_CHUNKS, WITH_EXPERTS = (replace(job, microbatches=4) for job in JOBS[3:])
SMALL = replace(WITH_EXPERTS, layers=3, budget_kib=9_500, microbatches=3)


@pytest.mark.any_version
@pytest.mark.parametrize("job", [WITH_CHUNKS, SMALL], ids=lambda job: job.name)
def test_every_call_has_the_results_of_a_loop_without_us_and_the_bytes_predicted(job):
    found = any_loop.judged(job, CALLS)
    assert found.different == 0
    assert found.planned >= 4 * job.ranks
    assert found.policies > 3
    assert found.over_budget == 0
    assert found.above_bound == 0
    assert -0.015 < found.lowest < found.highest < 0.015


def run(job, lengths, forward_backward, seed=0):
    """One call on gradients of zero; the losses."""
    job.zero_grad()
    return [
        float(each["loss"]) for each in job.call(job.microbatches(lengths, seed), forward_backward)
    ]


# --- one rank -------------------------------------------------------------------------------------

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.any_version
def test_recompute_of_the_config_is_refused_with_the_line_to_remove(one_rank):
    from megatron_autorecompute import attach
    from megatron_autorecompute.errors import OptionError

    job = SmallGPT(fields=FULL)
    with pytest.raises(OptionError, match="Remove recompute_granularity='full', recompute_method"):
        attach(job.chunks, job.optimizer, budget_gib=1)
    assert job.config.recompute_granularity == "full"


@pytest.mark.any_version
def test_megatrons_choices_alone_are_measured_on_demand(one_rank):
    from megatron_autorecompute import attach
    from megatron_autorecompute.errors import OptionError

    job = SmallGPT()
    with pytest.raises(OptionError, match="recompute_choices 'none': give ahead, all or megatron"):
        attach(job.chunks, job.optimizer, budget_gib=1, recompute_choices="none")
    for given, theirs in (("megatron", True), ("all", False)):
        auto = attach(job.chunks, job.optimizer, budget_gib=1, recompute_choices=given)
        choices = [choice for kind in auto.shard.kinds for choice in kind.choices]
        assert len(choices) > 1
        assert all(choice.is_megatrons for choice in choices) == theirs
        auto.close()


@pytest.mark.any_version
@pytest.mark.parametrize(
    "own", [FULL, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}]
)
def test_recompute_of_the_config_is_replaced_on_demand_and_given_back(one_rank, own):
    from megatron_autorecompute import attach

    job = SmallGPT(fields=own)
    model_parallel_seed()
    plain = run(job, [64, 32], get_forward_backward_func())
    auto = attach(job.chunks, job.optimizer, budget_gib=1, replace_recompute=True, say=print)
    schedule = auto.schedule(get_forward_backward_func())
    model_parallel_seed()
    policies = []
    for _ in range(20):
        run(job, [64, 32], schedule)
        policies.append(auto.policy.format())
    assert policies[-1] == "none*6"  # all of it fits
    auto.close()
    assert {name: getattr(job.config, name) for name in own} == own
    assert job.chunks[0].module.decoder.layers[0].recompute_mlp == ("recompute_modules" in own)
    model_parallel_seed()
    assert run(job, [64, 32], get_forward_backward_func()) == plain


def model_parallel_seed():
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
