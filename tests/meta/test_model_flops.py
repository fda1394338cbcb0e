"""The operations of a model, against Megatron's own count for its log."""

import ast
import importlib.util
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_autorecompute.cli.throughput import flops_per_token

DENSE = {
    "num_layers": 8,
    "hidden_size": 1024,
    "ffn_hidden_size": 2816,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "kv_channels": 80,
    "gated_linear_unit": True,
}
MOE = {
    **DENSE,
    "num_moe_experts": 16,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 512,
    "moe_shared_expert_intermediate_size": 768,
    "moe_layer_freq": [0, 0, 1, 1, 1, 1, 1, 1],
}
LATENT = {
    **MOE,
    "multi_latent_attention": True,
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
    "num_query_groups": None,
}
HYBRID = {
    **MOE,
    "hybrid_layer_pattern": "M*-E|M",
    "mamba_state_dim": 64,
    "mamba_head_dim": 32,
    "mamba_num_groups": 4,
    "mamba_num_heads": 48,
}
GATED_DELTA_NET = (
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_conv_kernel_dim",
)
CASES = {
    "hybrid": HYBRID,
    "hybrid, prediction depths": {
        **{name: v for name, v in HYBRID.items() if name != "gated_linear_unit"},
        "hybrid_layer_pattern": "M*/ME/ME",
        "mtp_num_layers": 2,
        "mamba_num_heads": None,
        "moe_latent_size": 256,
    },
    "dense": DENSE,
    "without gate and groups": {
        "num_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
    },
    "moe": MOE,
    "every second layer moe": {**MOE, "moe_layer_freq": 2},
    "latent experts": {**MOE, "moe_latent_size": 256},
    "gated attention": {**DENSE, "attention_output_gate": True},
    "multi-latent": LATENT,
    "multi-latent, full-rank queries": {**LATENT, "q_lora_rank": None},
    "prediction depths": {**LATENT, "mtp_num_layers": 2},
}
SEQUENCE, VOCABULARY = 2048, 50304


@pytest.fixture(scope="module")
def megatrons_own():
    """The function of that name, out of its file: importing the file needs Python 3.12."""
    found = importlib.util.find_spec("megatron.training")
    if found is None:
        pytest.skip("this megatron-core comes without megatron.training")
    (folder,) = found.submodule_search_locations
    tree = ast.parse(Path(folder, "training.py").read_text())
    (function,) = (
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "num_floating_point_operations"
    )
    names = {
        "is_hybrid_model": lambda args: args.hybrid_layer_pattern is not None,
        "is_linear_attention_variant": lambda variant: variant is not None,
    }
    exec(compile(ast.Module([function], []), "training.py", "exec"), names)
    return names[function.name]


@pytest.mark.parametrize("case", CASES)
def test_operations_are_those_that_megatron_logs(megatrons_own, case):
    config = CASES[case]
    if "hybrid_layer_pattern" in config:
        pytest.importorskip("megatron.core.models.hybrid")
    args = Namespace(
        **{
            "ffn_hidden_size": 4 * config["hidden_size"],
            "kv_channels": config["hidden_size"] // config["num_attention_heads"],
            "num_query_groups": None,
            "moe_router_topk": None,
            "moe_ffn_hidden_size": None,
            "moe_shared_expert_intermediate_size": None,
            "moe_latent_size": None,
            "moe_layer_freq": 1,
            "mtp_num_layers": None,
            "multi_latent_attention": False,
            "attention_output_gate": False,
            "experimental_attention_variant": None,
            "hybrid_layer_pattern": None,
            "hybrid_override_pattern": None,
            "is_hybrid_model": False,
            **dict.fromkeys(GATED_DELTA_NET),
            **config,
        },
        seq_length=SEQUENCE,
        padded_vocab_size=VOCABULARY,
        swiglu=config.get("gated_linear_unit", False),
        num_experts=config.get("num_moe_experts"),
        group_query_attention=config.get("num_query_groups") is not None,
    )
    counted = megatrons_own(args, batch_size=3)
    assert flops_per_token(config, SEQUENCE, VOCABULARY) * 3 * SEQUENCE == pytest.approx(counted)


def test_six_operations_per_weight_and_token_and_causal_attention():
    config = {"num_layers": 1, "hidden_size": 10, "num_attention_heads": 2}
    weights = 4 * 10 * 10 + 2 * 10 * 40 + 10 * 7
    assert flops_per_token(config, 30, 7) == 6 * (weights + 10 * 30)


@pytest.mark.parametrize(
    "config",
    [
        {"num_layers": 1, "hidden_size": 8},
        {**DENSE, "experimental_attention_variant": "gated_delta_net"},
        {**HYBRID, "hybrid_layer_pattern": "M+-"},
        {**DENSE, "is_hybrid_model": True},
    ],
)
def test_layers_that_are_not_counted_are_refused(config):
    with pytest.raises(KeyError):
        flops_per_token(config, 128, 1024)
