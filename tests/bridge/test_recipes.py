"""The recipes under examples/bridge: whole, with the real dimensions, and small enough to run."""

import importlib.util
import types
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron_autorecompute import megatron_fields
from megatron_autorecompute.compat import stage_layout
from megatron_autorecompute.integrations import megatron_bridge
from scripts.public_models import hub_config
from tests.bridge import recipes
from tests.bridge.test_model import built, gradients, same_bits

EXAMPLES = Path(__file__).parents[2] / "examples" / "bridge"


@pytest.fixture
def example(bridge, monkeypatch):
    def load(name):
        from megatron.bridge import AutoBridge

        monkeypatch.setattr(
            AutoBridge,
            "from_hf_pretrained",
            classmethod(lambda cls, path, **_: cls.from_hf_config(hub_config(path))),
        )
        # Bridge asks the device which expert dispatcher to use.
        h100 = types.SimpleNamespace(major=9, minor=0, name="NVIDIA H100 80GB HBM3")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: h100)
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, f"{name}_pretrain")()

    return load


LAYERS = {"llama3_8b": 32, "llama3_70b": 80, "qwen3_30b_a3b": 48, "deepseek_v3": 62}


@pytest.mark.parametrize("name", LAYERS)
def test_every_example_asks_for_auto_and_for_nothing_of_megatrons_own(example, name):
    cfg = example(name)
    assert cfg.model.recompute_policy == "auto"
    assert {getattr(cfg.model, field) for field in megatron_fields.NO_RECOMPUTE} == {None}
    assert megatron_bridge.resolve(cfg) is None
    assert stage_layout.num_policy_layers(cfg.model) == LAYERS[name]


@pytest.mark.parametrize("name", LAYERS)
def test_every_example_takes_a_policy_by_override_and_keeps_it_in_yaml(
    example, overridden, name, tmp_path
):
    from megatron.bridge.training.config import ConfigContainer

    cfg = overridden(example(name), f"model.recompute_policy=none*{LAYERS[name] - 2},full*2")
    policy = megatron_bridge.resolve(cfg)
    assert policy.to_config() == cfg.model.recompute_policy
    cfg.to_yaml(str(tmp_path / "config.yaml"))
    again = ConfigContainer.from_yaml(str(tmp_path / "config.yaml"))
    assert again.model.recompute_policy == policy.to_config()


def test_the_stages_of_the_deepseek_example_hold_all_of_its_layers(example):
    model = example("deepseek_v3").model
    layout = stage_layout.pipeline_layout(model)
    assert (layout.num_stages, layout.num_chunks) == (8, 4)
    assert layout.chunk_layers()[-1] == (61,)  # the prediction depth is alone on the last chunk


SMALL = {
    "llama3_8b": ("full,selective[core_attn+mlp],none,full", {}),
    "llama3_70b": ("full,selective[core_attn+mlp],none,full", {}),
    "qwen3_30b_a3b": (
        "full,selective[moe],none,selective[core_attn]",
        {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "kv_channels": 16},
    ),
    "deepseek_v3": (
        "full,selective[mla_up_proj+mlp],selective[moe],none,full",
        {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_router_num_groups": None,
            "moe_router_group_topk": None,
            "moe_ffn_hidden_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "moe_shared_expert_overlap": False,
            "moe_router_score_function": "sigmoid",
            "moe_layer_freq": [0, 0, 1, 1],
            "num_query_groups": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_head_dim": 16,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 16,
            "rope_type": "rope",
            "mtp_num_layers": 1,
        },
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_example_made_small_runs_a_mixed_policy_to_the_same_bits(
    one_rank, example, name, monkeypatch
):
    from megatron.core.models.gpt import gpt_layer_specs

    policy, more = SMALL[name]
    # Bridge's provider asks for TE in the prediction depths, whatever the layers are made of.
    original = gpt_layer_specs.get_gpt_mtp_block_spec
    monkeypatch.setattr(
        gpt_layer_specs,
        "get_gpt_mtp_block_spec",
        lambda *args, use_transformer_engine, **named: original(
            *args, use_transformer_engine=False, **named
        ),
    )

    def run(policy):
        cfg = small(example(name), more)
        megatron_bridge.set_policy(cfg.model, policy)
        resolved = megatron_bridge.resolve(cfg)
        hooks = [megatron_bridge.policy_hook(resolved)] if policy else []
        return gradients(built(cfg, *hooks))

    without, with_policy = run(None), run(policy)
    assert without[1].keys() == with_policy[1].keys()
    assert same_bits(without, with_policy)


def small(cfg, more):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    recipes.for_cpu(cfg)
    fields = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 128,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": False,
        "normalization": "LayerNorm",
        "moe_token_dispatcher_type": "alltoall",
        "moe_enable_deepep": False,
        "transformer_layer_spec": partial(get_gpt_decoder_block_spec, use_transformer_engine=False),
        **more,
    }
    for field, value in fields.items():
        setattr(cfg.model, field, value)
    return cfg
