"""How plans depend on the assumed shares of peaks."""

import pytest

from benchmarks.sensitivity import sensitivity
from megatron_autorecompute.meta.devices import SHARES, device
from megatron_autorecompute.meta.job import job_from
from megatron_autorecompute.meta.profiling import problem_of

H100 = device("h100-80gb")
JOB = {
    "name": "small",
    "num_gpus": 2,
    "seq_length": 512,
    "global_batch_size": 8,
    "vocab_size": 512,
    "config": {
        "num_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "pipeline_model_parallel_size": 2,
    },
}


@pytest.mark.any_version
def test_sensitivity_moves_every_share_both_ways():
    asked = job_from(JOB, "job")
    problem = problem_of(asked, H100)
    lean = max(choice.peak_bytes for choice in problem.stages.leanest)
    fast = max(choice.peak_bytes for choice in problem.stages.fastest)
    lines = sensitivity(asked, H100, H100.reaches, (lean + fast) // 2)
    assert len(lines) == 2 * len(SHARES)
    assert lines[0].startswith("gemm share x 0.8: ")
    assert all("keeping the plan costs" in line for line in lines)
