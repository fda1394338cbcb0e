"""What goes wrong in loops of others, with real processes."""

import random
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import pytest
import torch

from examples.loops.small_gpt import (
    MAX_TOKENS,
    Attention,
    forward_step,
    get_forward_backward_func,
)
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.runtime.calls import Calls
from megatron_autorecompute.runtime.job_facts import FixedCalls
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from megatron_autorecompute.runtime.step_memory import static_bytes, tensors
from testing.predicted import predicted_peaks
from testing.ranks import run_ranks
from tests.fake_cuda import fake_cuda
from tests.hybrid_models import make_runnable, runnable, small_model

pytestmark = pytest.mark.newest_version
BUDGET_GIB = 13_000 / 2**20


@pytest.fixture(autouse=True)
def _runnable():
    with runnable():
        yield


def attached(gpt, said, **named):
    from megatron_autorecompute import attach

    given = {"max_tokens": MAX_TOKENS, "budget_gib": BUDGET_GIB, "say": said.append, **named}
    return attach(gpt.chunks, gpt.optimizer, **given)


def call(gpt, lengths, forward_backward, seed=0, **named):
    gpt.zero_grad()
    return gpt.call(gpt.microbatches(lengths, seed), forward_backward, **named)


# --- two ranks, with every fault one after the other ----------------------------------------------


@dataclass
class Output:
    """What a fused log-prob head returns in place of a tensor."""

    logits: torch.Tensor
    extra: str = "anything"


def returning_objects(model):
    forward = model.module.forward
    model.module.forward = lambda *args, **named: Output(forward(*args, **named))


def step(iterator, model):
    return forward_step(iterator, lambda **named: model(**named).logits)


def breaks(iterator, model):
    raise RuntimeError("no batch")


def runs_out(iterator, model):
    step(iterator, model)
    raise torch.OutOfMemoryError("out of memory, as a device says it")


def failing(step):
    raise ZeroDivisionError("division by zero")


def new_world(store):
    """End this process's world and begin another, as loops do that give its memory away."""
    from megatron.core import parallel_state

    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
    )
    parallel_state.initialize_model_parallel()


def refused_on_both(gpt, rank):
    from megatron_autorecompute.errors import OptionError

    for other, named in (
        (MAX_TOKENS + rank, "rank 0 max_tokens=256 .* rank 1 max_tokens=257"),
        ("16k" if rank else MAX_TOKENS, "max_tokens='16k': give a whole number"),
    ):
        with pytest.raises(OptionError, match=named):
            attached(gpt, [], max_tokens=other)


def ended_by_an_error(gpt):
    from megatron_autorecompute.errors import ApplyError

    auto = attached(gpt, [])
    forward_backward = auto.schedule(get_forward_backward_func())
    call(gpt, [64], forward_backward, forward_step=step)
    call(small_model(), [64], forward_backward)  # of another model: passes through
    assert auto.steps == 1
    auto.decisions.too_lean = failing
    with pytest.raises(ZeroDivisionError):
        call(gpt, [64], forward_backward, forward_step=step)
    with pytest.raises(ApplyError, match=r"An error ended this auto .*division.* close"):
        call(gpt, [64], forward_backward, forward_step=step)
    auto.close()


def faulty(folder):
    """Data-parallel ranks with other numbers and lengths of microbatches than each other."""
    from megatron_autorecompute.errors import ApplyError, OptionError

    make_runnable()
    gpt, said, policies = small_model(), [], []
    returning_objects(gpt.chunks[0])
    rank = torch.distributed.get_rank()
    refused_on_both(gpt, rank)
    auto = attached(gpt, said, plan_path=f"{folder}/plan.json")
    with pytest.raises(ApplyError, match=r"already in force .* by attach\(\)"):
        attached(gpt, said)
    plain = get_forward_backward_func()
    forward_backward = auto.schedule(plain)
    assert auto.schedule(forward_backward) is forward_backward
    assert auto.report() == "recompute auto: measuring, 0 steps done"

    def train(lengths, says=None, by=step):
        auto.tokens(says or lengths)
        if len(policies) % 2 and says is None:
            with auto.step():
                call(gpt, lengths, plain, len(policies), forward_step=by)
        else:
            call(gpt, lengths, forward_backward, len(policies), forward_step=by)
        policies.append(auto.policy.format())

    def inside(iterator, model):
        for wrong in (auto.close, lambda: call(gpt, [64], forward_backward)):
            with pytest.raises(ApplyError, match="inside"):
                wrong()
        return step(iterator, model)

    draw = random.Random(rank)
    for number in range(17):
        if number in (1, 4, 16):  # settling, measuring, under a plan
            with pytest.raises(RuntimeError, match="no batch"):
                train([64], by=breaks)
            with pytest.raises(torch.OutOfMemoryError, match="as a device says it"):
                train([64], by=runs_out)
            raised = auto.policy.format()
        if number == 8:  # an evaluation with gradients, longer than what is said of the next call
            gpt.call(gpt.microbatches([256], 0), plain, forward_only=True, forward_step=step)
        if number in (6, 16):  # as slime does while it generates
            new_world(f"{folder}/world-{number}")
        train([8 * draw.randint(3, 32) for _ in range(2 + rank)], by=inside)
        assert number != 4 or policies[-1] == raised  # not measured yet, so it is shown again
    assert f"predicted step {auto.plan.cost.step_ms:,.0f} ms" in auto.report()
    assert "this rank's last peak 0.0" in auto.report()
    # An engine beside rank 1 grows, and sleeps again.
    train([256, 64])
    for taken in (20_000_000, 0):
        auto.decisions.short_bytes = lambda profile, taken=taken: rank * taken
        train([256, 64])
    # Rank 1 says less than what comes.
    train([200, 64] if rank else [40, 40], says=[64, 64] if rank else [40, 40])
    assert auto.job.calls.shape.tokens == 64
    train([40, 40])
    # Rank 0 names another number of microbatches than it has: an error on both.
    with pytest.raises(OptionError, match="microbatch"):
        train([64, 64], says=[64] * (2 + (rank == 0)))
    auto.close()
    call(gpt, [64], forward_backward, forward_step=step)  # passes through from now on
    with pytest.raises(ApplyError, match="ended"), auto.step():
        pass
    ended_by_an_error(gpt)
    held = any("_autorecompute_holder" in vars(module) for module in gpt.chunks[0].modules())
    notes = Plan.load(f"{folder}/plan.json").notes
    return {"policies": policies, "said": said, "held": held, "notes": notes}


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return run_ranks(faulty, 2, tmp_path_factory.mktemp("faults"))


def test_ranks_of_other_lengths_agree_whatever_fails_on_them(faults):
    ours, theirs = (rank["policies"] for rank in faults)
    assert ours == theirs
    assert len(set(ours)) > 4
    assert not any(rank["held"] for rank in faults)


def test_running_out_of_memory_is_raised_and_leaves_a_smaller_plan_for_a_restart(faults):
    for rank in faults:
        assert rank["policies"][15] == rank["policies"][16]  # the loop that catches it goes on
        assert any("stage 0 short of memory, went down" in note for note in rank["notes"])


def test_an_engine_that_grows_beside_one_rank_makes_all_leaner_and_ends_nothing(faults):
    before, grown, after = faults[0]["policies"][17:20]
    assert before == after != grown
    assert "none" not in grown  # even this needs more: it runs, and this is said
    assert any("OVER BUDGET" in line for line in faults[0]["said"])


# --- one rank -------------------------------------------------------------------------------------


class PackedAttention(Attention):
    """Unfused: keeps a matrix of length x length for each sample."""

    def forward(self, query, key, value, *_, packed_seq_params, **__):
        ends = packed_seq_params.cu_seqlens_q.tolist()
        outputs = []
        for one in map(slice, ends, ends[1:]):
            scores = torch.einsum("qhd,khd->hqk", query[one], key[one])
            outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[one]))
        return torch.cat(outputs).flatten(1)


def test_packed_samples_count_by_their_own_squares(one_rank):
    from megatron.core.packed_seq_params import PackedSeqParams

    gpt = small_model(attention=PackedAttention)
    auto = attached(gpt, [], budget_gib=1)
    forward_backward = auto.schedule(get_forward_backward_func())
    for number in range(16):
        draw = random.Random(number)
        packs = [[8 * draw.randint(1, 16) for _ in range(draw.randint(1, 2))] for _ in range(3)]
        packs = [[120, 128]] * 2 if number == 15 else packs
        queue = [torch.tensor([0, *accumulate(pack)]) for pack in packs]

        def packed(iterator, model, queue=queue):
            ends = queue.pop(0)
            params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
            return forward_step(iterator, partial(model, packed_seq_params=params))

        with LiveBytes(tensors(gpt.chunks, gpt.optimizer)) as memory:
            static = static_bytes(gpt.chunks, gpt.optimizer).total_bytes
            call(gpt, list(map(sum, packs)), forward_backward, number, forward_step=packed)
    kind = auto.plan.profile.kinds[0]
    assert kind.choices[0].lines.held_bytes.per_square == pytest.approx(16)  # 4 heads, fp32
    (found,) = predicted_peaks(auto, packs)
    assert found == pytest.approx(static + memory.peak_bytes, rel=0.003)
    assert predicted_peaks(auto, list(map(sum, packs)))[0] > found
    auto.close()


def test_a_restart_plans_for_the_lengths_of_its_own_first_call(one_rank, tmp_path):
    gpt, peaks, path = small_model(), [], tmp_path / "plan.json"
    for lengths in ([40, 40], [256, 256]):
        auto = attached(gpt, [], plan_path=str(path))
        forward_backward = auto.schedule(get_forward_backward_func())
        while auto.plan is None or not path.exists():
            auto.tokens(lengths)
            with LiveBytes(tensors(gpt.chunks, gpt.optimizer)) as memory:
                static = static_bytes(gpt.chunks, gpt.optimizer).total_bytes
                call(gpt, lengths, forward_backward)
            peaks.append(static + memory.peak_bytes)
        auto.close()
    assert auto.steps == 1
    assert max(peaks) == peaks[-1] <= 13_000 * 1024
    # One call needs more than the budget whatever it recomputes; the next ones keep it again.
    said, kept = [], 5_600 * 1024
    auto = attached(gpt, said, plan_path=str(path), budget_gib=kept / 2**30)
    budgets = []
    for lengths in ([256, 256], [40, 40]):
        auto.tokens(lengths)
        call(gpt, lengths, auto.schedule(get_forward_backward_func()))
        budgets += auto.plan.budget_bytes
    auto.close()
    assert sum("OVER BUDGET" in line for line in said) == 1
    assert budgets[0] > budgets[1] == kept


def test_without_lengths_or_cap_plans_are_for_five_quarters_of_the_longest_seen():
    calls, planned = Calls(None, 4), []
    for seen in (0, 100, 120, 125, 130, 90):  # of the call before
        calls.agree(3, 0, seen)
        planned.append(calls.shape.tokens)
    assert planned == [0, 125, 125, 125, 163, 163]


def test_what_others_hold_in_the_process_counts(one_rank):
    """On a device the allocator counts a reference model too; here what counts bytes does."""
    from unittest import mock

    from megatron_autorecompute.runtime import step_memory

    gpt, said, others = small_model(), [], 1_000_000

    class Device(LiveBytes):
        def __enter__(self):
            found = super().__enter__()
            self.current_bytes += others
            self.reset_peak()
            return found

    auto = attached(gpt, said, budget_gib=BUDGET_GIB)
    forward_backward = auto.schedule(get_forward_backward_func())
    peaks = []
    with (
        mock.patch.object(step_memory, "LiveBytes", Device),
        mock.patch.object(step_memory.StepMemory, "is_cheap", True),
    ):
        for number in range(17):
            lengths = [8 * random.Random(number).randint(3, 32) for _ in range(3)]
            auto.tokens(lengths)
            call(gpt, lengths, forward_backward, number)
            peaks.append(auto.peak_bytes)
    assert auto.plan is not None
    assert max(peaks) <= 13_000 * 1024
    assert predicted_peaks(auto, lengths)[0] == pytest.approx(peaks[-1], rel=0.002)
    auto.close()


@pytest.mark.parametrize("lost_mib", [2, 8])
def test_holes_in_what_the_allocator_reserved_are_no_part_of_the_budget(one_rank, lost_mib):
    from unittest import mock

    from megatron_autorecompute.runtime.job_facts import JobFacts

    def on_a_device(**named):
        return JobFacts(**{**named, "without_cuda": False})

    gpt = small_model()
    with (
        fake_cuda(64 << 20, lost_mib << 20),
        mock.patch("megatron_autorecompute.runtime.attach.JobFacts", on_a_device),
    ):
        auto = attached(gpt, [], budget_gib=None)
        forward_backward = auto.schedule(get_forward_backward_func())
        while auto.plan is None:
            call(gpt, [64, 128], forward_backward)
        call(gpt, [256], forward_backward)
    assert auto.plan.budget_bytes == ((64 - lost_mib) << 20,)
    auto.close()


@pytest.mark.parametrize("given", [True, False, 8, {"num_microbatches": 8}])
def test_leave_to_offload_is_given_with_what_every_call_has(one_rank, given):
    with pytest.raises(OptionError, match=r"allow_offload=.*FixedCalls\(num_microbatches=8, "):
        attached(small_model(), [], max_tokens=None, allow_offload=given)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "eight", None])
def test_numbers_of_fixed_calls_are_whole_and_positive(wrong):
    with pytest.raises(OptionError, match=r"seq_length=.*: give a number of 1 or more"):
        FixedCalls(num_microbatches=8, micro_batch_size=1, seq_length=wrong)


def test_lengths_must_be_positive_numbers(one_rank):
    from megatron_autorecompute.errors import OptionError

    gpt = small_model()
    auto = attached(gpt, [])
    for wrong in ([], [0], [64, -1]):
        with pytest.raises(OptionError, match="say how many tokens"):
            auto.tokens(wrong)
    auto.close()
