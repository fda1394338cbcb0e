"""Bridge's hybrid providers, which came after 0.3.1, with a Megatron that has HybridModel.

make bridge-hybrid-checks BRIDGE=PATH MEGATRON_LM=PATH
"""

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from megatron_autorecompute.meta.job import load_job
from megatron_autorecompute.planner.plan import Plan
from tests.bridge.test_train import RECIPE, learned, train

HYBRID = RECIPE + "tiny_hybrid_pretrain_config"
PERFORMANCE = "nemotron_3_nano_pretrain_16gpu_h100_bf16_config"
EXAMPLE = Path(__file__).parents[2] / "megatron_autorecompute" / "examples" / "nemotron-3-nano.yaml"

if not any(
    Path(folder, "models", "hybrid").is_dir()
    for folder in importlib.util.find_spec("megatron.bridge").submodule_search_locations
):
    pytest.skip(
        "no hybrid provider in this Bridge: make bridge-hybrid-checks BRIDGE=PATH MEGATRON_LM=PATH",
        allow_module_level=True,
    )


@pytest.fixture(scope="module")
def without():
    return learned(train(HYBRID))


def test_a_mixed_policy_of_all_families_trains_to_the_same_bits(without):
    policy = "full/2*2,selective[mlp]*1,selective[moe]*1"
    assert learned(train(HYBRID, f"model.recompute_policy={policy}")) == without


def test_auto_plans_every_family_and_learns_the_same_bits(without, tmp_path):
    path = tmp_path / "plan.json"
    auto = ("model.recompute_policy=auto", "--recompute-memory-budget-gib", "0.0066")
    output = train(HYBRID, *auto, "--recompute-plan-path", str(path))
    assert learned(output) == without
    assert "to keep this policy without measuring" in output
    plan = Plan.load(path)
    kinds = {kind.name: kind.layers for kind in plan.profile.kinds}
    assert kinds == {"mamba": (0,), "attention": (1,), "mlp": (2,), "moe": (3,)}
    assert learned(train(HYBRID, f"model.recompute_policy=@{path}")) == without


def test_auto_on_two_stages_by_the_pattern_learns_the_same_bits():
    two = ("model.pipeline_model_parallel_size=2", "model.hybrid_layer_pattern='M*-|E'")
    plain = learned(train(HYBRID, *two, ranks=2))
    auto = ("model.recompute_policy=auto", "--recompute-memory-budget-gib", "0.006")
    assert learned(train(HYBRID, *two, *auto, ranks=2)) == plain


ELSEWHERE = {
    "what the choices are": ("recompute_granularity", "recompute_modules"),
    "CUDA graphs, whose pools are not modelled": ("cuda_graph_impl", "use_te_rng_tracker"),
    "fused attention, which Transformer Engine's stand-in is": (
        "attention_backend",
        "attention_softmax_in_fp32",
        "masked_softmax_fusion",
        "apply_rope_fusion",
    ),
    "follows from another field": ("num_layers", "mtp_num_layers", "is_hybrid_model"),
    "neither bytes nor modelled times": (
        "bf16",
        "deallocate_pipeline_outputs",
        "first_last_layers_bf16",
        "gtp_remat_opt_in_modules",
        "init_method_std",
        "moe_hybridep_num_sms",
        "persist_layer_norm",
    ),
}


def test_the_example_is_nvidias_own_benchmark_of_nemotron_3_nano(bridge):
    """Every field, with each that is left out said to be without effect on bytes."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_autorecompute.meta.recipe import job_from_recipe

    example, recipe = load_job(EXAMPLE), job_from_recipe(PERFORMANCE, 16, 131072)
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    without_effect = {name for names in ELSEWHERE.values() for name in names}
    set_there = {
        name: value
        for name, value in recipe.config.items()
        if value != defaults.get(name) and name not in without_effect
    }
    assert {name: example.config.get(name) for name in set_there} == set_there
    assert {name: recipe.config[name] for name in example.config} == example.config
    same = {"name": "", "config": {}, "described_by": "yaml"}
    assert dataclasses.replace(recipe, **same) == dataclasses.replace(example, **same)
