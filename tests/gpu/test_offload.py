"""What left the device and came back is what it was, bit for bit, on a real device."""

import os

import pytest

from benchmarks.gpu.models import TE, trained

pytestmark = [
    pytest.mark.requires_gpu,
    pytest.mark.requires_te,
    pytest.mark.usefixtures("one_gpu"),
    pytest.mark.skipif(
        os.environ.get("NVTE_CPU_OFFLOAD_V1") != "1", reason="NVTE_CPU_OFFLOAD_V1 is not 1"
    ),
]
ATTENTION = "core_attn+attn_proj"
POLICIES = {
    "TE dense": (
        f"none+offload[{ATTENTION}]",
        f"none+offload[{ATTENTION}+qkv_linear]",
        f"selective[mlp]+offload[{ATTENTION}]",
        "selective[core_attn]+offload[qkv_linear]",
        f"none+offload[core_attn]*1,full*1,selective[mlp]+offload[{ATTENTION}]*1,none*1",
    ),
    "TE grouped experts": (
        "none+offload[expert_fc1]",
        "none+offload[expert_fc1+moe_act]",
        f"selective[moe_act]+offload[expert_fc1+{ATTENTION}]",
        "full*1,none+offload[expert_fc1]*2,selective[shared_experts]+offload[core_attn]*1",
    ),
    "TE multi-latent attention": (
        f"none+offload[{ATTENTION}]",
        "selective[mla_up_proj]+offload[core_attn]",
        f"none+offload[qkv_linear]*2,full*1,selective[mla_up_proj]+offload[{ATTENTION}]*1",
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_offload_changes_no_bit_in_the_warm_up_and_after_it(name):
    case = TE[name](min_offloaded_tensor_size=1)
    reference = trained(case, "megatron:none", steps=3)
    found = {text: trained(case, text, steps=3).differences(reference) for text in POLICIES[name]}
    assert {text: what for text, what in found.items() if what} == {}


def test_megatrons_own_setting_keeps_the_bits_where_queries_share_keys():
    case, own = (
        TE["TE dense"](min_offloaded_tensor_size=1, num_query_groups=2, **fields)
        for fields in (
            {},
            {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
        )
    )
    reference = trained(case, "megatron:none", steps=3)
    assert trained(own, "megatron:none", steps=3).differences(reference) == []
