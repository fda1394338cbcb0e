"""The choices that are planned are those Megatron's own validator allows, under every rule of it.

Megatron checks recompute against FP8, offloading, CUDA graphs and overlap only when its own
recompute settings are set. Here each choice is set so, and a config constructed from nothing.
"""

import itertools

import pytest
from megatron.core.transformer import transformer_config

from megatron_autorecompute.compat import layer_modules, model_layers, rules
from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.policy import FULL, NONE, OWN_MODULES, LayerPolicy, RecomputePolicy
from megatron_autorecompute.runtime.model_shard import choices
from tests.support import tiny_config, tiny_gpt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of settings tried and refused


@pytest.fixture
def with_transformer_engine(one_rank, monkeypatch):
    """The rules for FP8 ask for a recent Transformer Engine first; here they find one."""
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *_, **__: True)


RULES = {
    "fp8 delayed": ("dense", {"fp8": "e4m3", "fp8_recipe": "delayed"}),
    "fp8 tensorwise": ("dense", {"fp8": "e4m3", "fp8_recipe": "tensorwise"}),
    "fp8 delayed, experts": ("moe", {"fp8": "e4m3", "fp8_recipe": "delayed"}),
    "expert-parallel overlap": (
        "moe",
        {
            "overlap_moe_expert_parallel_comm": True,
            "expert_model_parallel_size": 2,
            "moe_shared_expert_intermediate_size": 64,
        },
    ),
    "shared expert overlap": (
        "moe",
        {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 64},
    ),
    "fine-grained offload": (
        "dense",
        {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
    ),
    "fine-grained offload of experts": (
        "moe",
        {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]},
    ),
    "layer-wise offload": ("dense", {"cpu_offloading": True, "cpu_offloading_num_layers": 1}),
    "experts": ("moe", {}),
    "CUDA graphs": ("dense", {"cuda_graph_impl": "local"}),
    "CUDA graphs of experts": ("moe", {"cuda_graph_impl": "local"}),
    "CUDA graphs by TE": ("moe", {"cuda_graph_impl": "transformer_engine"}),
    "latent attention": ("mla", {}),
    "tensor parallelism": ("dense", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}
"""Kind of tiny model and the setting whose rules are asked for; shapes as Megatron wants them."""

OFFLOADED = [
    ("core_attn",),
    ("attn_proj",),
    ("attn_proj", "core_attn"),
    ("attn_norm", "qkv_linear"),
    ("expert_fc1",),
    ("moe_act",),
    ("fused_group_mlp",),
    ("cpu_offloading",),
]
OFFLOADING = ("experts", "layer-wise offload", "expert-parallel overlap", "CUDA graphs by TE")
STRICTER = {
    # Not refused upstream, and wrong or without effect there: rules._check_own_rules says why.
    ("fine-grained offload", "full"),
    ("fine-grained offload", "full/2"),
    ("fine-grained offload of experts", "full"),
    ("fine-grained offload of experts", "full/2"),
    ("CUDA graphs of experts", "selective[moe]"),
    ("all", "selective[core_attn]+offload[core_attn]"),
    ("all", "selective[moe]+offload[expert_fc1]"),  # 0.16 does not refuse these two
    ("all", "selective[moe]+offload[moe_act]"),
}


def megatrons_refusal(kind, fields, choice):
    """Why Megatron cannot be constructed with a choice as its own setting, or None."""
    own = {"recompute_granularity": None if choice.granularity == "none" else choice.granularity}
    if choice.granularity == "full":
        own |= {"recompute_method": "uniform", "recompute_num_layers": choice.group}
    if choice.granularity == "selective":
        own |= {"recompute_modules": list(choice.modules)}
    if choice.offload == ("cpu_offloading",):
        own |= {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
    elif choice.offload:
        own |= {"fine_grained_activation_offloading": True, "offload_modules": [*choice.offload]}
    own = {**fields, **own}
    try:
        tiny_config(kind, bf16=True, **own)
    except (AssertionError, ValueError) as error:
        return str(error) or type(error).__name__
    return None


@pytest.mark.parametrize("setting", RULES)
def test_allowed_is_exactly_what_megatron_can_be_constructed_with(with_transformer_engine, setting):
    kind, fields = RULES[setting]
    assert megatrons_refusal(kind, fields, NONE) is None, "the setting alone is refused"
    config = tiny_config(kind, bf16=True, **fields)
    modules = [name for name in rules.allowed_modules() if name in layer_modules.MODULE_FLAGS]
    sets = [*((name,) for name in modules), *itertools.combinations(modules, 2)]
    choices = [NONE, FULL, LayerPolicy("full", group=2)]
    choices += [LayerPolicy("selective", names) for names in sets]
    offloaded = [LayerPolicy(offload=names) for names in OFFLOADED]
    offloaded += [
        LayerPolicy("selective", (name,), offload=one.offload)
        for one in offloaded
        for name in ("core_attn", "layernorm", "moe")
        if one.offload != ("cpu_offloading",)
    ]
    choices += offloaded if setting in OFFLOADING else []
    differs = {
        str(choice)
        for choice in choices
        if rules.is_allowed(config, choice) != (megatrons_refusal(kind, fields, choice) is None)
    }
    allowed_differences = {choice for name, choice in STRICTER if name in (setting, "all")}
    if config.cuda_graph_impl != "none":  # graphs have the copies with which they were captured
        allowed_differences |= {str(choice) for choice in offloaded}
    assert differs <= allowed_differences


def test_offload_beside_the_models_own_is_refused_with_the_translation(one_rank):
    config = tiny_config(fine_grained_activation_offloading=True, offload_modules=["core_attn"])
    with pytest.raises(PolicyError, match=r"it is 'megatron:offload\[core_attn\]'"):
        rules.check_allowed(config, RecomputePolicy((LayerPolicy(offload=("mlp_norm",)),)))
    rules.check_allowed(config, RecomputePolicy((LayerPolicy("selective", ("mlp",)),)))


def test_unknown_modules_to_offload_are_refused_with_megatrons_list(one_rank):
    policy = RecomputePolicy((LayerPolicy(offload=("mlp",)),))
    with pytest.raises(PolicyError, match=r"Unknown module mlp to offload.*attn_proj, core_attn, "):
        rules.check_allowed(tiny_config(), policy)


def test_what_is_measured_of_a_layer_is_allowed_and_nothing_allowed_is_left_out(one_rank):
    for setting in ("layer-wise offload", "CUDA graphs", "CUDA graphs of experts"):
        kind, fields = RULES[setting]
        [model] = tiny_gpt(tiny_config(kind))
        for name, value in fields.items():  # set afterwards: built with them, they need a GPU
            setattr(model.config, name, value)
        for layer, _ in model_layers.numbered_layers([model]):
            measured = choices(layer)
            assert all(rules.is_allowed(layer.config, choice) for choice in measured)
            assert (FULL in measured) == rules.is_allowed(layer.config, FULL)
            assert {m for c in measured for m in c.modules} - set(OWN_MODULES) == {
                name
                for name in layer_modules.MODULE_FLAGS
                if name in rules.allowed_modules()
                and layer_modules.flags(layer, name)
                and rules.is_allowed(layer.config, LayerPolicy("selective", (name,)))
            }
