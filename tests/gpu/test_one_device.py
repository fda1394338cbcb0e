"""A profile of one device, whose predictions are the allocator's figures of a whole job."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import yaml

from benchmarks.gpu.cases import DENSE, DENSE_TE, MOE
from benchmarks.gpu.contest import Contest
from benchmarks.gpu.models import small
from megatron_autorecompute.profile import MEASURED_ON_ONE_DEVICE, Profile

pytestmark = [
    pytest.mark.usefixtures("one_gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def profiled(case, folder):
    """By the command, in a process of its own: this one has real process groups."""
    path, output = folder / "job.yaml", folder / "p.json"
    path.write_text(yaml.safe_dump(case.job()))
    words = ["-m", "megatron_autorecompute", "profile", "--device", "cuda", str(path)]
    done = subprocess.run(
        [sys.executable, *words, "-o", str(output)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Profile.load(output)


@pytest.mark.parametrize(
    "large",
    [
        pytest.param(DENSE, id="unfused"),
        pytest.param(DENSE_TE, id="TE", marks=pytest.mark.requires_te),
        pytest.param(MOE, id="TE experts", marks=pytest.mark.requires_te),
    ],
)
def test_its_predicted_peaks_are_the_allocators(large, tmp_path):
    case = small(large, seq_length=512)
    if case.fields.get("num_moe_experts"):  # a profile of one device counts experts with even loads
        case = replace(case, fields={**case.fields, "moe_router_force_load_balancing": True})
    profile = profiled(case, tmp_path)
    contest = Contest(case)
    contest.job.optimizer.step = lambda: None  # torch's own has temporaries that others lack
    for record in profile.kinds[0].choices:
        assert record.source == MEASURED_ON_ONE_DEVICE
        cost = contest.cost(profile, contest.policy(record.choice)).stages[0]
        activations = cost.peak.bytes - profile.stages[0].static.total_bytes
        contest.job.step()
        at_rest = torch.cuda.memory_allocated()
        taken = contest.peak(record.choice).allocated_bytes - at_rest
        assert activations == pytest.approx(taken, rel=0.05, abs=1 << 20), record.choice
