import pytest

from megatron_autorecompute.cli.show import for_hybrid
from megatron_autorecompute.policy import RecomputePolicy

pytestmark = pytest.mark.any_version


def test_a_gpt_block_is_two_layers_of_a_pattern_and_an_mtp_depth_is_one():
    text = "none*1,full*1,full/2*2,selective[core_attn+layernorm+mlp]*1,selective[moe]*1,full*1"
    policy = RecomputePolicy.parse(text, num_layers=7)
    assert for_hybrid(policy, 6).format() == (
        "none*2,full/2*2,full/4*4,selective[core_attn+layernorm]*1,selective[layernorm+mlp]*1,"
        "none*1,selective[moe]*1,full*1"
    )
