"""NVIDIA's runs of Nemotron 3 Nano on 16 H100s beside the example, which is that recipe.

Megatron Bridge 067f987d, skills/nemo-mbridge-perf-activation-recompute/SKILL.md, "Matched H100
Evidence: Nemotron 3 Nano", of 12 August 2026.
"""

from dataclasses import replace

import pytest

from megatron_autorecompute.compat import versions
from megatron_autorecompute.meta.job import load_job
from megatron_autorecompute.meta.profiling import profile_job
from scripts.settings import FITS, GPU, page, peaks, verdict
from tests.support import EXAMPLES

pytestmark = pytest.mark.skipif(
    versions.installed().minor < 18, reason="HybridModel came with megatron-core 0.18"
)
JOB = EXAMPLES / "nemotron-3-nano.yaml"
RAN = {
    "none": False,
    "selective[core_attn]": False,
    "selective[moe_act]": False,
    "selective[layernorm+moe_act]": False,
    "selective[moe]": True,
    "selective[layernorm+moe]": True,
}
"""The others ran out of memory."""
ALLOCATED_BYTES = {"selective[moe]": 64.653e9, "selective[layernorm+moe]": 63.639e9}
"""The most that torch allocated on rank 0 by the end of iteration 2."""
SAVED_BYTES = 4.194e9
"""What `moe_act` took off the peak of `none` in iteration 1."""
RESULTS = EXAMPLES.parents[1] / "benchmarks" / "results"
TABLE = RESULTS / "no_device" / "nemotron-3-nano-settings.txt"


@pytest.fixture(scope="module")
def with_graphs():
    return profile_job(load_job(JOB), GPU)


@pytest.fixture(scope="module")
def allocated():
    """Peaks of torch's counter, to which a captured graph's pool adds nothing."""
    job = load_job(JOB)
    job = replace(job, config={**job.config, "cuda_graph_impl": "none"})
    return peaks(job, profile_job(job, GPU), RAN)


def test_six_settings_fit_or_run_out_of_memory_as_nvidias_runs_did(with_graphs):
    job = load_job(JOB)
    found = {n: verdict(job, size) == FITS for n, size in peaks(job, with_graphs, RAN).items()}
    assert found == RAN


def test_the_table_is_of_todays_code(with_graphs):
    names = [line.split()[0] for line in TABLE.read_text().splitlines()[1:] if ":" not in line]
    assert page(load_job(JOB), peaks(load_job(JOB), with_graphs, names)) == TABLE.read_text()


@pytest.mark.parametrize("name", ALLOCATED_BYTES)
def test_what_torch_allocated_in_runs_that_fitted_is_the_predicted_peak(name, allocated):
    assert allocated[name] == pytest.approx(ALLOCATED_BYTES[name], rel=1e-4)


def test_moe_act_saves_what_it_saved(allocated):
    saved = allocated["none"] - allocated["selective[moe_act]"]
    assert saved == pytest.approx(SAVED_BYTES, rel=1e-3)
