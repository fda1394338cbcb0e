"""A policy changes no bit of a training run, for what CPU cannot run."""

from dataclasses import replace
from importlib import util

import pytest

from benchmarks.gpu.models import LOCAL, TE, different, gated_delta_net, policies, small, trained

pytestmark = [pytest.mark.requires_gpu, pytest.mark.usefixtures("one_gpu")]
MODELS = [
    *(pytest.param(make, id=name) for name, make in LOCAL.items()),
    *(pytest.param(make, id=name, marks=pytest.mark.requires_te) for name, make in TE.items()),
    pytest.param(gated_delta_net, id="gated delta net", marks=pytest.mark.requires_fla),
]


@pytest.mark.parametrize("make", MODELS)
def test_the_same_run_gives_the_same_bits_twice(make):
    assert trained(make(), "megatron:none").differences(trained(make(), "megatron:none")) == []


@pytest.mark.parametrize("make", MODELS)
def test_no_choice_and_no_mix_changes_a_bit(make):
    assert different(make()) == {}


@pytest.mark.requires_te
@pytest.mark.parametrize("backend", ["flash", "fused", "unfused"])
def test_no_choice_changes_a_bit_under_each_attention_kernel(backend):
    if backend == "flash" and util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    from megatron.core.transformer.enums import AttnBackend

    from benchmarks.gpu.cases import DENSE_TE

    # TE remembers its choice of kernel by shape: another length makes it choose again.
    length = {"flash": 256, "fused": 384, "unfused": 512}[backend]
    assert different(small(DENSE_TE, length, attention_backend=AttnBackend[backend])) == {}


@pytest.mark.requires_te
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("TE grouped experts", "moe_act"),
        ("TE grouped experts", "shared_experts"),
        ("TE multi-latent attention", "mla_up_proj"),
        ("TE fp8 experts", "moe_act"),
        ("TE fp8 experts", "layernorm"),
    ],
)
def test_the_choices_that_cpu_could_not_run_are_among_those_compared(name, module):
    assert any(module in text for text in policies(TE[name](), mixes=0))


@pytest.mark.requires_fla
def test_gdn_norm_out_is_among_those_compared():
    assert any("gdn_norm_out" in text for text in policies(gated_delta_net(), mixes=0))


@pytest.mark.requires_fla
def test_no_choice_changes_a_bit_under_flas_kernels_where_they_give_the_same_bits_twice():
    case = gated_delta_net(deterministic=False)
    try:
        once = trained(case, "megatron:none")
    except RuntimeError as error:  # fla knows compilers whose code for a device is wrong
        if "Please upgrade Triton" not in str(error):
            raise
        pytest.skip(f"fla refuses this Triton: {error}")
    if once.differences(trained(case, "megatron:none")):
        pytest.skip("fla's kernels give other bits in two equal runs without recompute")
    assert different(case) == {}


def test_the_comparison_sees_another_policy_of_dropout():
    case = LOCAL["dense, unfused attention"]()
    without_dropout = replace(case, fields={**case.fields, "hidden_dropout": 0.0})
    assert trained(case, "megatron:none").differences(trained(without_dropout, "megatron:none"))
