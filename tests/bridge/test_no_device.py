"""`estimate --recipe`: Bridge's own recipes, whole, with the real dimensions."""

import importlib
import types
from pathlib import Path

import pytest

from megatron_autorecompute.cli import main
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta.job import load_job
from megatron_autorecompute.meta.recipe import job_from_recipe
from megatron_autorecompute.profile import Profile
from scripts import nvidia_recipes
from scripts.public_models import hub_config
from tests.bridge import recipes

EXAMPLES = Path(__file__).parents[2] / "megatron_autorecompute" / "examples"


@pytest.fixture
def hub(bridge, monkeypatch):
    """The published dimensions, which Bridge reads from the hub."""
    from megatron.bridge import AutoBridge

    monkeypatch.setattr(
        AutoBridge,
        "from_hf_pretrained",
        classmethod(lambda cls, path, **_: cls.from_hf_config(hub_config(path))),
    )


def test_a_recipe_is_profiled_and_its_plan_is_printed_as_lines_for_it(
    hub, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where the printed command writes plan.json
    path = tmp_path / "profile.json"
    words = ["estimate", "--gpu", "h100-80gb", "-o", str(path)]
    assert main([*words, "--recipe", "llama3_8b_pretrain_config", "--num-gpus", "8"]) == 0
    found = Profile.load(path)
    assert (found.num_layers, found.parallelism.seq_length) == (32, 8192)
    assert found.parallelism.context_parallel == 2
    # 8.03e9 parameters in 16 bit on every rank: the public model's size.
    assert found.stages[0].static.parameter_bytes == pytest.approx(2 * 8.03e9, rel=0.001)
    planning = capsys.readouterr().out.splitlines()[-1].split()[1:]
    assert main(planning) == 0
    assert "cfg.model.recompute_" in capsys.readouterr().out.splitlines()[-1]


def test_a_recipe_names_no_world_so_the_smallest_is_taken(hub):
    asked = job_from_recipe("llama3_70b_pretrain_config")
    config = asked.config
    assert asked.num_gpus == (
        config["tensor_model_parallel_size"]
        * config["pipeline_model_parallel_size"]
        * config["context_parallel_size"]
    )
    assert asked.accumulate_allreduce_grads_in_fp32  # bf16_mixed


SOURCES = {
    "llama3_8b": ("llama", "Llama3ModelProvider8B"),
    "llama3_70b": ("llama", "Llama3ModelProvider70B"),
    "deepseek_v3": ("deepseek", "DeepSeekV3ModelProvider"),
    "gpt_oss_120b": ("gpt_oss", "GPTOSSProvider120B"),
    "moonlight_16b": ("deepseek", "MoonlightModelProvider16B"),
    "qwen3_30b_a3b": ("qwen", "Qwen3MoEModelProvider30B_A3B"),
    "llama31-405b": ("llama", "Llama31ModelProvider405B"),
    "llama3-70b": ("llama", "Llama3ModelProvider70B"),
    "deepseek-v3": ("deepseek", "DeepSeekV3ModelProvider"),
}
"""By model of scripts/nvidia_recipes.py or example of the package."""
LLAMAS = (("Llama3", "8B"), ("Llama3", "70B"), ("Llama31", "405B"))
OTHERWISE = {
    # Left out by Bridge's class; DeepseekV3Config of transformers has them.
    ("DeepSeekV3ModelProvider", "num_attention_heads"): 128,
    ("DeepSeekV3ModelProvider", "q_lora_rank"): 1536,
    ("DeepSeekV3ModelProvider", "qk_head_dim"): 128,
    ("DeepSeekV3ModelProvider", "qk_pos_emb_head_dim"): 64,
    ("DeepSeekV3ModelProvider", "v_head_dim"): 128,
    # None there; tokenizer.vocab_size in its perf_recipes/llama/b200/llama3.py of August 2026.
    **{(f"{name}ModelProvider{size}", "vocab_size"): 128256 for name, size in LLAMAS},
    # The vocabulary of the public config; the class adds tokens of fine-tuning.
    ("MoonlightModelProvider16B", "vocab_size"): 163840,
}
DIMENSIONS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq"),
    *("moe_shared_expert_intermediate_size", "vocab_size"),
)


def dimensions_here(name):
    if "-" in name:
        example = load_job(EXAMPLES / f"{name}.yaml")
        return example.config | {"vocab_size": example.vocab_size}
    known = nvidia_recipes.MODELS[name]
    return known.config | {"vocab_size": known.vocab_size}


@pytest.mark.parametrize("name", SOURCES)
def test_dimensions_of_public_models_are_those_of_bridges_providers(bridge, name):
    family, provider = SOURCES[name]
    module = importlib.import_module(f"megatron.bridge.models.{family}.{family}_provider")
    theirs, ours = getattr(module, provider)(), dimensions_here(name)
    compared = {field: ours[field] for field in DIMENSIONS if field in ours}
    assert len(compared) >= 6
    expected = {f: OTHERWISE.get((provider, f), getattr(theirs, f)) for f in compared}
    assert compared == expected


def test_what_bridges_class_of_deepseek_leaves_out_is_in_the_public_config(bridge):
    public = hub_config("deepseek-ai/DeepSeek-V3")
    assert (public.num_attention_heads, public.q_lora_rank) == (128, 1536)
    assert (public.qk_nope_head_dim, public.qk_rope_head_dim, public.v_head_dim) == (128, 64, 128)


def test_an_unknown_recipe_is_named(bridge):
    with pytest.raises(OptionError, match="no recipe function 'llama9_config'"):
        job_from_recipe("llama9_config")


def test_what_would_be_counted_without_its_tower_or_with_other_adapters_is_refused(
    bridge, monkeypatch
):
    from megatron.bridge import recipes as bridges
    from megatron.bridge.peft.lora import LoRA

    cfg = recipes.tiny_llama_pretrain_config()
    monkeypatch.setattr(bridges, "given_config", lambda: cfg, raising=False)
    cfg.peft = LoRA(target_modules=["*.layers.3.*.linear_qkv"])
    with pytest.raises(OptionError, match="adapters are modelled on every layer"):
        job_from_recipe("given_config")
    cfg.peft, cfg.ddp.use_megatron_fsdp = None, True
    with pytest.raises(OptionError, match="FSDP shards weights and gradients"):
        job_from_recipe("given_config")
    cfg.ddp.use_megatron_fsdp, cfg.optimizer.optimizer_cpu_offload = False, True
    with pytest.raises(OptionError, match="optimizer_cpu_offload: an optimizer in host memory"):
        job_from_recipe("given_config")
    cfg.optimizer.optimizer_cpu_offload = False
    cfg.model = recipes.tiny_vision_provider()
    with pytest.raises(OptionError, match=r"has a tower before its decoder \(model.vision_config"):
        job_from_recipe("given_config")


def test_what_bridge_sets_from_comm_overlap_when_a_job_starts_is_read(hub, monkeypatch):
    from megatron.bridge import recipes as bridges
    from megatron.bridge.training.comm_overlap import CommOverlapConfig

    def given():
        cfg = bridges.qwen3_30b_a3b_pretrain_config()
        for name in ("granularity", "method", "num_layers"):
            setattr(cfg.model, f"recompute_{name}", None)
        cfg.model.expert_model_parallel_size = 8
        cfg.model.virtual_pipeline_model_parallel_size = 4
        cfg.model.tensor_model_parallel_size = cfg.model.pipeline_model_parallel_size = 2
        cfg.model.sequence_parallel = True
        cfg.comm_overlap = CommOverlapConfig(
            tp_comm_overlap=True, overlap_moe_expert_parallel_comm=True, overlap_grad_reduce=False
        )
        return cfg

    monkeypatch.setattr(bridges, "given_config", given, raising=False)
    found = job_from_recipe("given_config", 32)
    assert found.config["overlap_moe_expert_parallel_comm"]
    assert found.config["tp_comm_overlap"]
    assert (found.overlap_grad_reduce, found.overlap_param_gather) == (False, True)


@pytest.mark.parametrize("fused", [True, False])
def test_weight_gradients_are_added_in_the_product_if_the_recipe_says_so(
    bridge, monkeypatch, fused
):
    from megatron.bridge import recipes as bridges

    def given():
        cfg = bridges.nemotronh_56b_pretrain_config()
        cfg.model.gradient_accumulation_fusion = fused
        return cfg

    monkeypatch.setattr(bridges, "given_config", given, raising=False)
    assert job_from_recipe("given_config").fuses_weight_gradients == fused


def test_a_name_that_two_recipes_have_is_asked_for_by_package(bridge, monkeypatch):
    from megatron.bridge import recipes as bridges

    from megatron_autorecompute.meta import recipe

    other = types.SimpleNamespace(__path__=[], __name__="perf", tiny_config=None)
    other.tiny_config = lambda: recipes.tiny_llama_pretrain_config()
    found = importlib.import_module
    monkeypatch.setattr(bridges, "tiny_config", lambda: 1 / 0, raising=False)
    monkeypatch.setattr(recipe, "PERF_RECIPES", "json")  # any module that exists
    monkeypatch.setattr(
        recipe.importlib, "import_module", lambda n: other if n == "json" else found(n)
    )
    with pytest.raises(OptionError, match=r"give recipes\.tiny_config or perf_recipes\.tiny_conf"):
        job_from_recipe("tiny_config")
    assert job_from_recipe("perf_recipes.tiny_config").name == "perf_recipes.tiny_config"


def test_a_hybrid_recipe_has_its_pattern_and_needs_a_core_with_hybrid_models(bridge, capsys):
    asked = job_from_recipe("nemotronh_56b_pretrain_config")
    assert (asked.num_layers, asked.pattern.symbols.count("*")) == (118, 10)
    assert asked.vocab_size == 32000  # the NullTokenizer's
    with pytest.raises(OptionError, match="Give --vocab-size N"):
        job_from_recipe("nemotron_3_nano_pretrain_config")
    assert main(["estimate", "--recipe", asked.name, "--gpu", "h100-80gb", "--json"]) != 0
    assert "which megatron-core has from 0.18 on" in capsys.readouterr().err
