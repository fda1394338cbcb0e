"""`attach` in training loops of others: calls of the schedule, and what goes on between them."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch

from examples.loops.small_gpt import (
    MAX_TOKENS,
    SmallGPT,
    get_forward_backward_func,
    lengths_of_calls,
)
from tests.support import run_ranks

KIB = 1024
CALLS = 24
BUDGETS = {(1, None): 13_000 * KIB, (2, None): 7_900 * KIB, (2, 3): 8_600 * KIB}
"""Bytes by (stages, chunks of a stage): between what the leanest policy and none need."""


@contextmanager
def reads_every_call(job):
    """On CPU calls under a plan are not read by default; a device reads them all."""
    from megatron_autorecompute.runtime.job_facts import JobFacts
    from megatron_autorecompute.runtime.live_bytes import LiveBytes
    from megatron_autorecompute.runtime.static_bytes import tensors

    facts = partial(JobFacts, memory=lambda: LiveBytes(tensors(job.chunks, job.optimizer)))
    with mock.patch("megatron_autorecompute.runtime.attach.JobFacts", facts):
        yield


def attached(job, budget_bytes, **named):
    from megatron_autorecompute import attach

    with reads_every_call(job):
        return attach(job.chunks, job.optimizer, budget_gib=budget_bytes / 2**30, **named)


def gradients(job):
    return [p.main_grad.clone() for chunk in job.chunks for p in chunk.parameters()]


def run(job, lengths, forward_backward, seed=0):
    """One call on gradients of zero; the losses."""
    job.zero_grad()
    return [
        float(each["loss"]) for each in job.call(job.microbatches(lengths, seed), forward_backward)
    ]


def trained(pp, vpp, with_auto, calls=CALLS):
    """What a rank saw, call by call: losses, gradients, peaks, policies."""
    job, said = SmallGPT(pp, vpp), []
    lengths = lengths_of_calls(calls) if vpp is None else [[96, 256, 64, 128]] * calls
    forward_backward, auto = get_forward_backward_func(), None
    if with_auto:
        auto = attached(job, BUDGETS[pp, vpp], max_tokens=MAX_TOKENS, say=said.append)
        forward_backward = auto.schedule(forward_backward)
    seen = {"losses": [], "gradients": [], "peaks": [], "policies": [], "said": said}
    for number, tokens in enumerate(lengths):
        with torch.no_grad():  # old log-probs
            job.call(job.microbatches(tokens, number), forward_backward, forward_only=True)
        for part in range(1 + (number % 3 == 2)):  # sometimes two calls to an update
            seen["losses"] += run(job, tokens, forward_backward, 2 * number + part)
            seen["gradients"].append(sum(float(g.double().sum()) for g in gradients(job)))
            if auto:
                seen["peaks"].append(auto.peak_bytes)
                seen["policies"].append(auto.policy.format())
        if number % 7 != 6:  # sometimes the update is left out
            job.optimizer.step()
    if auto:
        seen["calls"], seen["report"] = auto.steps, auto.report()
        seen["plan"] = auto.plan is not None
        auto.close()
        auto.close()
        seen["given_back"] = not any(
            "_autorecompute_holder" in vars(module)
            for chunk in job.chunks
            for module in chunk.modules()
        )
    return seen


@pytest.mark.any_version
@pytest.mark.parametrize(("pp", "vpp"), [(1, None), (2, None)])
def test_losses_and_gradients_of_every_call_are_those_of_a_loop_without_us(pp, vpp):
    ours, theirs = (run_ranks(trained, pp, pp, vpp, with_auto) for with_auto in (True, False))
    for rank, plain in zip(ours, theirs, strict=True):
        assert rank["losses"] == plain["losses"]
        assert rank["gradients"] == plain["gradients"]
        assert rank["calls"] == len(rank["policies"])  # log-prob passes are not counted
        assert rank["policies"] == ours[0]["policies"]
        assert rank["plan"]
        assert "predicted step" in rank["report"]
        assert rank["given_back"]
    assert len(set(ours[0]["policies"])) > 2
    # Only the first rank speaks.
    assert [bool(rank["said"]) for rank in ours] == [True] + [False] * (pp - 1)


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


@pytest.mark.any_version
def test_attaching_twice_is_refused_and_attaching_after_close_works(one_rank):
    from megatron_autorecompute import attach
    from megatron_autorecompute.errors import ApplyError

    job = SmallGPT()
    auto = attach(job.chunks, job.optimizer, budget_gib=1)
    with pytest.raises(ApplyError, match="already in force"):
        attach(job.chunks, job.optimizer, budget_gib=1)
    schedule = auto.schedule(get_forward_backward_func())
    assert auto.schedule(schedule) is schedule
    run(job, [64], schedule)
    auto.close()
    assert run(job, [64], schedule)  # passes through from now on
    with pytest.raises(ApplyError, match="ended"), auto.step():
        pass
    again = attach(job.chunks, job.optimizer, budget_gib=1)
    run(job, [64], again.schedule(get_forward_backward_func()))
    assert (auto.steps, again.steps) == (1, 1)
    again.close()
