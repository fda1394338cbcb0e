"""No policy changes a bit of layers that run Transformer Engine's own Python."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.gpu.models import TE, different, policies, trained
from testing import transformer_engine_torch

pytestmark = pytest.mark.usefixtures("one_rank")
CASES = ("TE dense", "TE dense with RMSNorm", "TE grouped experts", "TE multi-latent attention")


def on_cpu(name, **fields):
    """The tiny model of that name, of TE's layers, in bf16: fused attention takes nothing else."""
    case = TE[name]()
    fields = {**case.fields, **fields}
    if "num_moe_experts" in fields:
        fields["moe_grouped_gemm"] = True
    return replace(case, layers="te", shape=replace(case.shape, bf16=True), fields=fields)


@pytest.fixture
def fused_attention(monkeypatch):
    """A list that grows with every call of the fused kernel."""
    calls = []
    original = transformer_engine_torch.fused_attn_fwd

    def noted(*given):
        calls.append(1)
        return original(*given)

    monkeypatch.setattr(transformer_engine_torch, "fused_attn_fwd", noted)
    return calls


@pytest.mark.parametrize("name", CASES)
def test_no_choice_and_no_mix_changes_a_bit(name, fused_attention):
    assert different(on_cpu(name)) == {}
    assert fused_attention


def test_no_choice_changes_a_bit_under_unfused_attention(fused_attention):
    from megatron.core.transformer.enums import AttnBackend

    assert different(on_cpu("TE dense", attention_backend=AttnBackend.unfused)) == {}
    assert not fused_attention


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("TE dense", "full+keep[core_attn]*4"),
        ("TE dense", "selective[mlp_act]*4"),
        ("TE dense", "selective[qkv]*4"),
        ("TE grouped experts", "selective[moe_act]*4"),
        ("TE grouped experts", "selective[experts]*4"),
        ("TE multi-latent attention", "selective[mla_up_proj]*4"),
    ],
)
def test_what_only_transformer_engines_layers_have_is_among_the_policies(name, choice):
    assert choice in policies(on_cpu(name), mixes=0)


def test_attention_that_is_kept_does_not_run_again(fused_attention):
    case = on_cpu("TE dense")
    calls = {}
    for policy in ("none", "full", "full+keep[core_attn]", "selective[qkv]"):
        fused_attention.clear()
        trained(case, policy, steps=1)
        calls[policy] = len(fused_attention)
    assert calls == {
        "none": calls["none"],
        "full": 2 * calls["none"],
        "full+keep[core_attn]": calls["none"],
        "selective[qkv]": calls["none"],
    }


def test_no_choice_changes_a_bit_on_two_tensor_parallel_ranks(tmp_path):
    module = "tests.transformer_engine.two_ranks"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=240)
        assert rank.returncode == 0
        found = json.loads(said.splitlines()[-1])
        assert set(found) > {"full", "selective[qkv]"}
        assert not any(found.values()), found
