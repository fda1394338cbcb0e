"""Blocks of torch's allocator: a recording of one on an H100, and a stage that rounds up."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.measured.caching_allocator import SMALLEST, CachingAllocator
from benchmarks.measured.evaluation import flushed_bytes
from benchmarks.measured.grad_buffers import laid_out
from benchmarks.measured.live_blocks import FirstUse, LiveBlocks
from benchmarks.measured.rounding import StaticBlocks, rounding
from megatron_autorecompute.meta import kept_bytes, ops
from megatron_autorecompute.meta.devices import device
from megatron_autorecompute.meta.model import shard
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.patched import patched
from megatron_autorecompute.policy import RecomputePolicy
from tests.meta.test_no_device import MOE, job

RECORDING = Path(__file__).with_name("allocator_h100.json")


class Placed(CachingAllocator):
    """With its segments where CUDA put them."""

    def __init__(self, addresses):
        super().__init__()
        self._addresses = iter(addresses)

    def _address(self, size):
        return SMALLEST * next(self._addresses)


def drawn(rng, allocator, live):
    """One tensor more or less, as in the recording: of 512 bytes to 64 MiB, in two streams."""
    if live and rng.random() < 0.3 + 0.4 * (len(live) / 120):
        allocator.free(live.pop(int(rng.random() * len(live))))
        return
    size, stream = int(2 ** (9 + 17 * rng.random())), int(rng.random() < 0.1)
    if rng.random() < 0.3:
        size = int(1 + rng.random() * 24) * (1 << 19)
    live.append(allocator.allocate(size, stream))


def test_after_each_of_1500_operations_as_much_is_allocated_as_on_an_h100():
    # There `torch.empty(size, dtype=torch.uint8)` and `memory_stats()["allocated_bytes..."]`.
    recorded = json.loads(RECORDING.read_text())
    rng, live, allocator = random.Random(7), [], Placed(recorded["segments"])
    found = []
    for _ in recorded["allocated"]:
        drawn(rng, allocator, live)
        found.append(allocator.allocated_bytes // SMALLEST)
    assert found == recorded["allocated"]
    assert allocator.peak_bytes == SMALLEST * recorded["peak"]
    assert allocator.allocated_bytes > 1.01 * allocator.requested_bytes
    while live:
        allocator.free(live.pop())
    assert allocator.allocated_bytes == allocator.requested_bytes == 0


def test_with_expandable_segments_nothing_but_512_bytes_is_rounded_up():
    rng, live, allocator = random.Random(7), [], CachingAllocator(expandable=True)
    for _ in range(500):
        drawn(rng, allocator, live)
        more_bytes = allocator.allocated_bytes - allocator.requested_bytes
        assert 0 <= more_bytes < SMALLEST * max(1, len(live))


def test_a_stage_takes_more_in_blocks_and_without_them_hardly_more():
    # Masters and moments of 1.5 MiB, of which a segment of 20 MiB holds 13; the last gets 2.
    sizes = {"num_layers": 4, "hidden_size": 512, "ffn_hidden_size": 768}
    small = job(sizes, use_distributed_optimizer=False, num_gpus=1, global_batch_size=2)
    nothing = RecomputePolicy.parse("none*4", num_layers=4)
    whole, split = (
        rounding(small, device("h100-80gb"), nothing, 0, expandable=each) for each in (False, True)
    )
    assert 0 <= split.static_bytes <= split.peak_bytes < 1 << 20
    assert split.peak_bytes + (1 << 20) < whole.peak_bytes < 64 << 20
    assert whole.static_bytes > split.static_bytes


def test_a_workspace_is_made_where_the_first_product_finds_a_hole():
    allocator, four = CachingAllocator(), 4 << 20
    buffers = FirstUse(allocator, {kept_bytes.OF_LINEAR: four, kept_bytes.OF_TORCH: 2 * four})
    with LiveBlocks(allocator, [], buffers), torch.device("meta"):
        mask = torch.empty(four, dtype=torch.uint8)
        x, weight = (torch.empty(256, 256, dtype=torch.bfloat16) for _ in "xw")
        del mask
        assert allocator.allocated_bytes == 2 * 2 * 256**2
        x = ops.gemm(x, weight, "bf16")
        before = allocator.allocated_bytes - four
        with patched(ops, "current_stream", ops.CONTEXT_PARALLEL_STREAM):
            beside = torch.empty(four, dtype=torch.uint8)
    assert before == 2 * 2 * 256**2
    assert allocator.reserved_bytes == (20 + 2 + 20) << 20  # a segment of its own for the stream
    buffers.rest()
    assert allocator.allocated_bytes == before + 4 * beside.numel()


def test_a_kept_buffer_that_a_larger_one_replaces_gives_its_block_back():
    allocator = CachingAllocator()
    with LiveBlocks(allocator, [], FirstUse(allocator, {})) as live:
        kept = torch.empty(4 << 20, dtype=torch.uint8, device="meta")
        live.exclude(kept)
        kept = torch.empty(16 << 20, dtype=torch.uint8, device="meta")
        live.exclude(kept)
        torch.empty(512, dtype=torch.uint8, device="meta")
        assert (live.current_bytes, allocator.requested_bytes) == (0, 16 << 20)


@pytest.mark.parametrize("layer_wise", [True, False])
def test_what_muon_divides_is_counted_as_static_bytes_count_it(layer_wise):
    sizes = {"expert_model_parallel_size": 4}
    asked = job({**MOE, **sizes}, optimizer="muon", use_layer_wise_param_layout=layer_wise)
    with shard(asked, [1, 1]) as built:
        blocks = StaticBlocks(asked, device("h100-80gb"), [built.model], first_stage=True)
        blocks.allocate_moments()
        blocks.buffers.rest()
        counted = blocks.counted_bytes()
        assert blocks.allocator.requested_bytes == pytest.approx(counted, abs=8192)


@pytest.mark.parametrize(("high_busbw", "end"), [(False, 128 * 3), (True, 3 << 16)])
def test_shards_of_all_ranks_are_the_parameters(high_busbw, end):
    counts, tied = [100, 7, 6000, 64, 9], [True, False, False, False, False]
    found = [laid_out(counts, 3, 5000, tied, rank=r, high_busbw=high_busbw) for r in range(3)]
    assert [sum(own) for own in zip(*(one.shards for one in found), strict=True)] == counts
    # Buckets, from the last parameter on: 9 + 64 + 6000, 7, and the tied 100.
    assert {one.numel for one in found} == {sum(-(-n // end) * end for n in (6128, 7, 100))}


def test_inductors_flush_of_the_l2_cache_is_what_first_steps_on_gb200_and_h100_differ_by():
    # Megatron-LM 6e091e1b6, tests gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion (GB200) and its
    # _resume_torch_dist_ (H100): as much is allocated between steps, 514,359,808 bytes.
    measured = 1_754_001_408 - 1_670_115_328
    blocks = [
        CachingAllocator().allocate(flushed_bytes(job(), device(name))).size_bytes
        for name in ("gb200-186gb", "h100-80gb")
    ]
    assert blocks[0] - blocks[1] == measured


def test_an_evaluation_holds_the_flush_beside_what_stays_and_nothing_of_its_layers():
    gb200, policy = device("gb200-186gb"), RecomputePolicy.parse("none", num_layers=4)
    asked = job({"bias_dropout_fusion": True})
    found = rounding(asked, gb200, policy, 0, evaluates=True)
    kept = profile_job(asked, gb200, only=()).stages[0].static.total_bytes + found.static_bytes
    assert 0 < found.evaluation_bytes - kept - (130 << 20) < 4 << 20
    deterministic = job({"deterministic_mode": True})
    assert flushed_bytes(deterministic, gb200) == 129 << 20
    assert not flushed_bytes(replace(deterministic, torch_version="2.10"), gb200)
