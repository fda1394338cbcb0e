"""Bytes of microbatches that Megatron-LM kept for a rerun."""

from dataclasses import replace

import pytest
import torch

from benchmarks.measured.kept_microbatches import with_kept_microbatches
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.runtime.live_bytes import storage_bytes
from tests.meta.test_no_device import H100, job


@pytest.mark.parametrize("stages", [1, 3])
def test_microbatches_kept_for_a_rerun_are_what_the_data_loader_made_of_them(stages):
    asked = job({"pipeline_model_parallel_size": stages, "num_layers": 3}, num_gpus=stages)
    asked = replace(asked, attention_mask_in_dataloader=True, global_batch_size=4)
    size = (asked.micro_batch_size, asked.seq_length)
    token, position, label = (torch.empty(size, dtype=torch.int64, device="meta") for _ in range(3))
    mask = torch.empty(size[0], 1, size[1], size[1], dtype=torch.bool, device="meta")
    first, last = [mask, token, position], [mask, label, torch.empty(size, device="meta")]
    kept = [first, [], last] if stages == 3 else [[*first, *last[1:]]]
    profile = profile_job(asked, H100, only=())
    more = with_kept_microbatches(profile, asked)
    assert [
        one.static.total_bytes - other.static.total_bytes
        for one, other in zip(more.stages, profile.stages, strict=True)
    ] == [(asked.num_microbatches - 1) * storage_bytes(own) for own in kept]
