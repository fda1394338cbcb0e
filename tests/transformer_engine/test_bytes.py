"""What `estimate` says that layers hold, beside the same layers of TE's own Python.

`estimate` runs in a process without Transformer Engine, on stand-ins and meta tensors. Here the
same job's layers run TE's modules on CPU, and hold what these save.
"""

import os
import subprocess
import sys

import pytest
import torch
import yaml

from megatron_autorecompute.compat import layer_parts
from megatron_autorecompute.meta.job import job_from
from megatron_autorecompute.one_device import build, profiling
from megatron_autorecompute.patched import patched
from megatron_autorecompute.profile import Profile
from testing import transformer_engine_torch

DENSE = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 224,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "gradient_accumulation_fusion": False,
}
GPT = {
    **DENSE,
    "gated_linear_unit": False,
    "activation_func": "gelu",
    "add_bias_linear": True,
    "normalization": "LayerNorm",
    "num_query_groups": 4,
}
EXPERTS = {
    **DENSE,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 96,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
}
MLA = {
    **{name: value for name, value in DENSE.items() if name != "num_query_groups"},
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "qk_layernorm": True,
    "apply_rope_fusion": False,
}
CONFIGS = {
    "GQA, SwiGLU, rope": DENSE,
    "with dropout": {**DENSE, "attention_dropout": 0.1, "hidden_dropout": 0.1},
    "two tensor parallel ranks": {
        **DENSE,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
    },
    "norms of query and key": {**DENSE, "qk_layernorm": True},
    "GELU with biases": GPT,
    "learned positions": {**GPT, "position_embedding_type": "learned_absolute"},
    "experts": EXPERTS,
    "experts beside a shared one": {**EXPERTS, "moe_shared_expert_intermediate_size": 96},
    "two expert parallel ranks": {**EXPERTS, "expert_model_parallel_size": 2},
    "multi-latent attention": MLA,
}
SMALL_BYTES = 80
"""The seed and offset of attention's dropout (16), and numbers of tokens of 8 experts."""


def job(config):
    positions = config.get("position_embedding_type", "rope")
    return {
        "name": "a small job",
        "config": {n: value for n, value in config.items() if n != "position_embedding_type"},
        "num_gpus": 8,
        "seq_length": 64,
        "micro_batch_size": 2,
        "global_batch_size": 64,
        "vocab_size": 256,
        "transformer_impl": "transformer_engine",
        "position_embedding_type": positions,
    }


PROGRAM = """
import sys
from megatron_autorecompute.cli import main
from megatron_autorecompute.compat import layer_parts
usual = layer_parts.worth_recomputing
for given in sys.argv[1:]:
    modules, _, path = given.partition(":")
    alone = lambda layer: modules.split("+")
    layer_parts.worth_recomputing = alone if modules else usual
    if main(["estimate", path, "--gpu", "h100-80gb", "-o", path + ".profile.json"]):
        raise SystemExit(path)
"""
NORMS = "ln_out+qkv"


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """Of all jobs by name, and of some with these modules alone; in one process, whose start takes
    longer than an estimate."""
    folder = tmp_path_factory.mktemp("jobs")
    asked = [("", name) for name in CONFIGS] + [(NORMS, name) for name in FUSED]
    paths = [folder / f"{number}.yaml" for number in range(len(asked))]
    for path, (_, name) in zip(paths, asked, strict=True):
        path.write_text(yaml.safe_dump(job(CONFIGS[name])))
    searched = [p for p in sys.path if "transformer-engine" not in p]
    given = [f"{modules}:{path}" for path, (modules, _) in zip(paths, asked, strict=True)]
    subprocess.run(
        [sys.executable, "-c", PROGRAM, *given],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(searched)},
    )
    found = [Profile.load(f"{path}.profile.json") for path in paths]
    return dict(zip(asked, found, strict=True))


def run(description):
    """A profile of these layers, as they run here."""
    with patched(build, "refuse", lambda *_: None), transformer_engine_torch.on_cpu():
        job_ = job_from(description, "the test")
        return profiling.measure(job_, torch.device("cpu"), 1, lambda _: None)


def differences(found, predicted):
    """Bytes that layers hold more than was predicted, by choice."""
    different = {}
    for kind, other in zip(found.kinds, predicted.kinds, strict=True):
        for record in kind.choices:
            expected = other.record(record.choice)
            # What a dispatcher keeps of its last microbatch is there before a layer's forward too.
            more = record.held_bytes - (expected.held_bytes - expected.also_static_bytes)
            if abs(more) > SMALL_BYTES:
                different[str(record.choice)] = more
    return different


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_hold_what_transformer_engines_python_saves(name, profiles):
    assert differences(run(job(CONFIGS[name])), profiles["", name]) == {}


ROW = 64 * 2 * 2
"""Bytes of one number for each token, in bf16."""
FUSED = {
    "GQA, SwiGLU, rope": (ROW * 64, ROW * 64),
    "two tensor parallel ranks": (ROW // 2 * 64, ROW // 2 * 64),
    "GELU with biases": (ROW * 64, ROW * 64),
}
"""The outputs of norms in the linears of attention, and in the MLP's."""


@pytest.mark.parametrize("name", FUSED)
def test_outputs_of_fused_norms_are_not_held(name, profiles, monkeypatch):
    attention, mlp = FUSED[name]
    monkeypatch.setattr(layer_parts, "worth_recomputing", lambda layer: NORMS.split("+"))
    found = run(job(CONFIGS[name]))
    assert differences(found, profiles[NORMS, name]) == {}
    held = {str(r.choice): r.held_bytes for r in found.kinds[0].choices}
    assert held["none"] - held["selective[ln_out]"] == attention + mlp
    # What lies inside another module runs again with it.
    assert held["selective[qkv]"] - held["selective[ln_out+qkv]"] == mlp
