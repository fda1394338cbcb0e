"""What goes wrong in loops of others, with real processes."""

import random
from dataclasses import dataclass

import pytest
import torch

from examples.loops.small_gpt import (
    MAX_TOKENS,
    SmallGPT,
    forward_step,
    get_forward_backward_func,
)
from tests.support import run_ranks

pytestmark = pytest.mark.any_version
BUDGET_GIB = 16_000 / 2**20


def attached(gpt, said, **named):
    from megatron_autorecompute import attach

    given = {"max_tokens": MAX_TOKENS, "budget_gib": BUDGET_GIB, "say": said.append, **named}
    return attach(gpt.chunks, gpt.optimizer, **given)


def call(gpt, lengths, forward_backward, seed=0, **named):
    gpt.zero_grad()
    return gpt.call(gpt.microbatches(lengths, seed), forward_backward, **named)


# --- two ranks ------------------------------------------------------------------------------------


def unequal():
    """Data-parallel ranks with other numbers and lengths of microbatches; one says too little."""
    from megatron_autorecompute.errors import OptionError

    gpt, said, policies = SmallGPT(), [], []
    rank = torch.distributed.get_rank()
    auto = attached(gpt, said)
    forward_backward = auto.schedule(get_forward_backward_func())
    draw = random.Random(rank)
    for number in range(14):
        lengths = [8 * draw.randint(3, 16) for _ in range(2 + rank)]
        auto.tokens(lengths)
        call(gpt, lengths, forward_backward, number)
        policies.append(auto.policy.format())
    shapes = [auto.job.calls.shape.tokens]
    # Rank 1 says less than what comes.
    auto.tokens([64] * 2 if rank else [40, 40])
    call(gpt, [200, 64] if rank else [40, 40], forward_backward)
    auto.tokens([40, 40])
    call(gpt, [40, 40], forward_backward)
    shapes.append(auto.job.calls.shape.tokens)
    # Rank 0 names another number of microbatches than it has: an error on both.
    auto.tokens([64] * (2 + (rank == 0)))
    with pytest.raises(OptionError, match="microbatch"):
        call(gpt, [64, 64], forward_backward)
    auto.close()
    return policies, shapes, [line for line in said if "longer than" in line]


def test_ranks_of_other_lengths_agree_and_a_microbatch_longer_than_said_is_noticed():
    (ours, shapes, warned), (theirs, _, silent) = run_ranks(unequal, 2)
    assert ours == theirs
    assert len(set(ours)) > 2
    assert shapes == [128, 256]  # by what is said; from then on the cap
    assert len(warned) == 1
    assert not silent  # the first rank speaks


# --- one rank -------------------------------------------------------------------------------------


def test_an_exception_inside_a_call_leaves_a_loop_that_goes_on(one_rank):
    said = []
    gpt = SmallGPT()
    auto = attached(gpt, said)
    forward_backward = auto.schedule(get_forward_backward_func())

    def breaks(iterator, model):
        raise RuntimeError("no batch")

    call(gpt, [64, 40], forward_backward)
    for number in range(16):
        if number in (1, 4, 14):  # settling, measuring, under a plan
            with pytest.raises(RuntimeError, match="no batch"):
                call(gpt, [64], forward_backward, forward_step=breaks)
        call(gpt, [64, 40 + 8 * number], forward_backward, number)
    assert auto.plan is not None
    auto.close()


@dataclass
class Output:
    logits: torch.Tensor
    extra: str = "anything"


def test_outputs_that_are_no_tensors(one_rank):
    """A fused log-prob head returns an object, the wrapped model does as well."""
    gpt, said = SmallGPT(), []

    def wrapped(model):
        original = model.module.forward

        def forward(*args, **named):
            return Output(original(*args, **named))

        model.module.forward = forward
        return lambda: setattr(model.module, "forward", original)

    undo = wrapped(gpt.chunks[0])

    def step(iterator, model):
        output, loss = forward_step(iterator, lambda **named: model(**named).logits)
        return output, loss

    auto = attached(gpt, said)
    forward_backward = auto.schedule(get_forward_backward_func())
    for number in range(14):
        call(gpt, [64, 40 + 8 * number], forward_backward, number, forward_step=step)
    assert auto.plan is not None
    auto.close()
    undo()


def test_what_others_hold_in_the_process_counts(one_rank):
    """On a device the allocator counts a reference model too; here a source of bytes does."""
    from functools import partial
    from unittest import mock

    from megatron_autorecompute.runtime.job_facts import JobFacts
    from megatron_autorecompute.runtime.live_bytes import LiveBytes
    from megatron_autorecompute.runtime.static_bytes import tensors

    gpt, said, others = SmallGPT(), [], 1_000_000

    class Device(LiveBytes):
        def __enter__(self):
            found = super().__enter__()
            self.current_bytes += others
            self.reset_peak()
            return found

    facts = partial(JobFacts, memory=lambda: Device(tensors(gpt.chunks, gpt.optimizer)))
    with mock.patch("megatron_autorecompute.runtime.attach.JobFacts", facts):
        auto = attached(gpt, said, budget_gib=13_000 / 2**20)
    forward_backward = auto.schedule(get_forward_backward_func())
    peaks = []
    for number in range(15):
        lengths = [8 * random.Random(number).randint(3, 32) for _ in range(3)]
        auto.tokens(lengths)
        call(gpt, lengths, forward_backward, number)
        peaks.append(auto.peak_bytes)
    assert auto.plan is not None
    assert max(peaks) <= 13_000 * 1024
    assert auto.predicted_peaks(lengths)[0] == pytest.approx(peaks[-1], rel=0.002)
    auto.close()


def test_a_device_with_less_memory_runs_a_leaner_plan_until_it_has_it_back(one_rank, monkeypatch):
    """An engine that wakes up and sleeps again."""
    gpt, said, policies = SmallGPT(), [], []
    auto = attached(gpt, said, budget_gib=0.0125)
    forward_backward = auto.schedule(get_forward_backward_func())
    taken = {17: 3_000_000, 18: 3_000_000, 19: 20_000_000}
    for number in range(22):
        short = taken.get(number, 0)
        monkeypatch.setattr(auto.decisions, "short_bytes", lambda profile, short=short: short)
        call(gpt, [200, 150, 256], forward_backward, number)
        policies.append(auto.policy.format())
    before, awake, more, after = (policies[n] for n in (16, 18, 19, 21))
    assert before == after
    assert len({before, awake, more}) == 3
    assert more == "full*6"  # even this needs more: it runs, and this is said
    assert any("OVER BUDGET" in line for line in said)
    auto.close()


def test_lengths_must_be_positive_numbers(one_rank):
    from megatron_autorecompute.errors import OptionError

    gpt = SmallGPT()
    auto = attached(gpt, [])
    for wrong in ([], [0], [64, -1]):
        with pytest.raises(OptionError, match="say how many tokens"):
            auto.tokens(wrong)
    auto.close()
