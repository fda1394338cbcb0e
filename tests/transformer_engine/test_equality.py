"""No policy changes a bit of layers that run Transformer Engine's own Python."""

import copy
import json
import os
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.models import TE, built, different, policies, trained
from testing import transformer_engine_torch
from tests.forks import Forks

pytestmark = pytest.mark.usefixtures("one_rank")
CASES = ("TE dense", "TE grouped experts", "TE multi-latent attention")


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
        ("TE dense", "selective[ln_out]*4"),
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


@pytest.fixture
def kernels(monkeypatch):
    """Counts calls of products, of norms fused into linears, and of fused attention."""
    from transformer_engine.pytorch.module import _common

    calls = Counter()

    def counted(name, function):
        def noted(*given, **options):
            calls[name] += 1
            return function(*given, **options)

        return noted

    for name in ("generic_gemm", "te_general_grouped_gemm", "fused_attn_fwd"):
        original = getattr(transformer_engine_torch, name)
        monkeypatch.setattr(transformer_engine_torch, name, counted(name, original))
    original = _common._get_normalization_func
    norms = lambda *given: counted("norm", original(*given))  # noqa: E731
    monkeypatch.setattr(_common, "_get_normalization_func", norms)
    return calls


MIXES = {
    "TE dense": ["core_attn+ln_out", "ln_out+mlp", "ln_out+mlp_act", "ln_out+mlp_act+qkv"],
    "TE dense with RMSNorm": ["ln_out+mlp_act", "ln_out+qkv"],
    "TE grouped experts": ["experts+ln_out", "ln_out+moe"],
    "TE multi-latent attention": ["ln_out+mla_up_proj"],
}


@pytest.mark.parametrize("name", MIXES)
def test_norms_of_linears_run_twice_and_nothing_else_does(name, kernels):
    case = on_cpu(name, **({"qk_layernorm": True} if "latent" in name else {}))
    found = {}
    for policy in ("none", "selective[ln_out]", *(f"selective[{mix}]" for mix in MIXES[name])):
        kernels.clear()
        found[policy] = trained(case, policy, steps=1), dict(kernels)
    reference, calls = found["none"]
    assert found["selective[ln_out]"][1] == {**calls, "norm": 2 * calls["norm"]}
    for policy, (trained_, again) in found.items():
        assert trained_.differences(reference) == [], policy
        assert policy == "none" or again["norm"] == 2 * calls["norm"], policy


def test_an_output_that_an_adapter_gets_is_not_run_again(one_rank):
    from megatron_autorecompute.compat import layer_parts, model_layers

    layer = next(iter(model_layers.numbered_layers(built(on_cpu("TE dense")).chunks)))[0]
    fused = list(layer_parts.fused_norms(layer))
    fused[0].return_layernorm_output = True
    assert list(layer_parts.fused_norms(layer)) == fused[1:]


def test_saved_tensors_that_cannot_be_told_apart_are_refused():
    from torch.nn.functional import linear, rms_norm

    from megatron_autorecompute.errors import ApplyError
    from megatron_autorecompute.runtime.norm_again import NormAgain

    class Fused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(4))
            self.weight = torch.nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return linear(rms_norm(x, (4,)).exp(), self.weight).exp()

    fused = Fused()
    ours = NormAgain(fused)
    with pytest.raises(ApplyError, match="ln_out: Fused saved 3 tensors"):
        fused(torch.ones(2, 4, requires_grad=True))
    other = copy.deepcopy(fused)
    with pytest.raises(ApplyError):
        other(torch.ones(2, 4, requires_grad=True))
    with torch.no_grad():
        other(torch.ones(2, 4))
    ours.undo()
    fused(torch.ones(2, 4, requires_grad=True))


def test_no_choice_changes_a_bit_on_two_tensor_parallel_ranks():
    with Forks("tests.transformer_engine.two_ranks", os.environ) as forks:
        (ended,) = forks.run({"ranks": 2})
    assert ended.codes == [0, 0], ended.text
    every = [json.loads(each) for each in re.findall(r"^found (.*)$", ended.text, re.M)]
    assert len(every) == 2
    for found in every:
        assert set(found) > {"full", "selective[qkv]"}
        assert not any(found.values()), found
