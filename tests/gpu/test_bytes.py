"""What torch's allocator says, against the bytes of the tensors that layers hold."""

import pytest
import torch

from benchmarks.gpu.cases import DENSE
from benchmarks.gpu.contest import Contest
from benchmarks.gpu.models import LOCAL, TE, small
from megatron_autorecompute.compat import layer_modules, model_layers
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from megatron_autorecompute.runtime.step_memory import tensors

pytestmark = [pytest.mark.requires_gpu, pytest.mark.usefixtures("one_gpu")]
ROUNDING_BYTES = 512
"""The allocator's blocks are multiples of this; a layer holds fewer than 64 tensors."""


def held_bytes(contest, memory):
    """Held bytes of every choice, as this memory counts them."""
    [kind] = contest.profile(memory).kinds
    return {record.choice: record.held_bytes for record in kind.choices}


def test_the_allocator_holds_what_the_live_tensors_add_up_to():
    contest = Contest(LOCAL["dense, unfused attention"]())
    job = contest.job
    live = held_bytes(contest, lambda: LiveBytes(tensors(job.chunks, job.optimizer)))
    allocated = held_bytes(contest, job.memory)
    assert live.keys() == allocated.keys()
    for choice, count in live.items():
        assert abs(allocated[choice] - count) <= 64 * ROUNDING_BYTES, choice


@pytest.mark.parametrize("policy", ["none", "full", "full/2", "full*2,none*2"])
def test_the_predicted_peak_is_within_three_percent_of_the_allocators(policy):
    contest = Contest(LOCAL["dense, unfused attention"]())
    profile = contest.profile()
    text = contest.policy(policy).format()
    predicted = contest.cost(profile, contest.policy(text)).stages[0].peak.bytes
    assert predicted == pytest.approx(contest.peak(text).allocated_bytes, rel=0.03)


@pytest.mark.requires_te
def test_core_attn_under_fused_attention_without_rope_saves_the_log_sum_exps_alone():
    # q, k and v are views of one tensor, which is kept with either choice.
    contest = Contest(TE["TE dense"]())
    shape = contest.case.shape
    [kind] = contest.profile().kinds
    none, core_attn = map(kind.record, ("none", "selective[core_attn]"))
    lse = 4 * shape.num_attention_heads * shape.seq_length * shape.micro_batch_size
    assert lse <= none.held_bytes - core_attn.held_bytes <= lse + 2 * ROUNDING_BYTES


@pytest.mark.requires_te
def test_layernorm_fused_into_the_linear_has_no_flag():
    contest = Contest(TE["TE dense"]())
    assert [
        layer_modules.flags(layer, "layernorm")
        for layer, _ in model_layers.numbered_layers(contest.job.chunks)
    ] == [[]] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("fails", ["none", "selective[layernorm]"])
def test_a_strategy_over_an_enforced_limit_runs_out_of_memory_and_the_next_one_runs(fails):
    contest = Contest(small(DENSE, 1024))
    full, none = contest.peak("full"), contest.peak("selective[layernorm]")
    limit = (full.reserved_bytes + none.allocated_bytes) // 2
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        assert contest.peak(fails).out_of_memory
        assert not contest.peak("full").out_of_memory
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
