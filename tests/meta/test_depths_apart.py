"""MTP depths on another stage than the loss, against Megatron's own schedule on meta tensors."""

import pytest

from megatron_autorecompute.meta.model import run_stage
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.planner.cost.policy_cost import evaluate
from megatron_autorecompute.policy import RecomputePolicy
from tests.meta.test_no_device import H100, job


@pytest.fixture(scope="module")
def modelled():
    fields = {
        "pipeline_model_parallel_size": 3,
        "pipeline_model_parallel_layout": "Etttt|m|L",
        "mtp_num_layers": 1,
        "deallocate_pipeline_outputs": True,
        "overlap_p2p_comm": False,
        "batch_p2p_comm": False,
    }
    asked = job(fields, global_batch_size=5, num_gpus=3)
    return asked, profile_job(asked, H100, only=[])


@pytest.mark.parametrize(("stage", "text"), [(1, "full"), (2, "none")])
def test_the_stage_of_the_loss_gets_the_hidden_states_of_every_depth(modelled, stage, text):
    asked, profile = modelled
    policy = RecomputePolicy.parse(text, num_layers=profile.num_layers)
    peak = evaluate(profile, asked.layout(), asked.schedule(), policy).stages[stage].peak
    found = run_stage(asked, asked.num_microbatches, policy, stage).peak_bytes
    more = peak.bytes - peak.breakdown.static_bytes - found
    # The depth's own stage counts a tensor twice, as `StageCheck.boundary_bytes` says of others.
    assert -0.001 * found <= more <= 1.02 * profile.boundary_bytes * (stage == 1)
