"""A policy said in Megatron's own fields where these can, and Bridge's rules asked about it."""

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_autorecompute import megatron_fields
from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.integrations import megatron_bridge
from megatron_autorecompute.policy import FULL, NONE, LayerPolicy, RecomputePolicy
from tests.bridge import recipes

CORE_ATTN = LayerPolicy("selective", ("core_attn",))

pytestmark = pytest.mark.usefixtures("bridge")


@dataclasses.dataclass
class Model:
    """What Megatron's layout functions read of a config."""

    num_layers: int = 24
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    mtp_num_layers: int | None = None
    add_bias_linear: bool = False
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None


LAYOUTS = [(1, None), (2, None), (4, None), (2, 2), (4, 3), (3, 2)]


def strategy_of(fields):
    """Megatron's own fields as a named strategy."""
    if fields["recompute_granularity"] is None:
        return "megatron:none"
    if fields["recompute_granularity"] == "selective":
        return f"megatron:selective[{'+'.join(fields['recompute_modules'])}]"
    return f"megatron:{fields['recompute_method']}/{fields['recompute_num_layers']}"


def chunk_size(model):
    stages = model.pipeline_model_parallel_size * (model.virtual_pipeline_model_parallel_size or 1)
    return model.num_layers // stages


def blocks(model):
    size = chunk_size(model)
    return [range(first, first + size) for first in range(0, model.num_layers, size)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_strategy_of_megatron_is_written_in_megatrons_fields(layout):
    model = Model(12, *layout)
    size = chunk_size(model)
    names = ["megatron:none", "megatron:selective[core_attn]", "megatron:selective[mlp+moe_act]"]
    names += [f"megatron:block/{n}" for n in range(size + 1)]
    names += [f"megatron:uniform/{n}" for n in range(1, size + 1) if size % n == 0]
    for name in names:
        policy = RecomputePolicy.parse(name, num_layers=12, layout=blocks(model))
        fields = megatron_bridge.fields_of_policy(policy, model)
        assert fields is not None, name
        again = RecomputePolicy.parse(strategy_of(fields), num_layers=12, layout=blocks(model))
        assert again == policy


CHOICES = st.sampled_from([NONE, FULL, CORE_ATTN])


@settings(max_examples=80)
@given(
    st.sampled_from(LAYOUTS),
    st.tuples(CHOICES, CHOICES),
    st.integers(0, 24),
    st.dictionaries(st.integers(0, 23), CHOICES, max_size=1),
)
def test_native_fields_never_say_another_policy(layout, chunk, first, changed):
    """The first layers of every chunk have one choice, the rest another, and one layer any."""
    model = Model(24, *layout)
    alike = [chunk[layer % chunk_size(model) >= first] for layer in range(24)]
    policy = RecomputePolicy(tuple(changed.get(*each) for each in enumerate(alike)))
    fields = megatron_bridge.fields_of_policy(policy, model)
    if fields is not None:
        again = RecomputePolicy.parse(strategy_of(fields), num_layers=24, layout=blocks(model))
        assert again == policy


@pytest.mark.parametrize(
    ("policy", "model"),
    [
        ("none*12,full*12", Model()),  # the last layers: block means the first
        ("full*6,none*18", Model(24, 2)),  # one stage only: block means every stage
        ("selective[core_attn]*23,none*1", Model()),
        ("selective[mlp]", Model(add_bias_linear=True)),  # never returns from Megatron's backward
        ("full/5*20,full/4*4", Model()),  # uniform/5 of 0.16 reads past the last layer
        (
            "full+all*24,none*1",
            Model(mtp_num_layers=1, num_layers=24, pipeline_model_parallel_size=2),
        ),
    ],
)
def test_what_megatrons_fields_cannot_say_or_run_stays_a_policy(policy, model):
    layers = model.num_layers + (model.mtp_num_layers or 0)
    policy = RecomputePolicy.parse(policy, num_layers=layers)
    fields = megatron_bridge.fields_of_policy(policy, model)
    if model.mtp_num_layers:  # block/12 on both stages, the depth not recomputed: can be said
        assert strategy_of(fields) == "megatron:block/12"
    else:
        assert fields is None


# --- in a recipe ----------------------------------------------------------------------------------


@pytest.fixture
def cfg(bridge):
    return recipes.tiny_llama_pretrain_config()


def test_a_plan_file_becomes_native_fields_or_a_list(cfg, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text('{"recompute_policy": ["full+all", "none", "none", "none"]}')
    megatron_bridge.set_policy(cfg.model, f"@{plan}")
    megatron_bridge.resolve(cfg)
    assert cfg.model.recompute_policy is None
    assert (cfg.model.recompute_method, cfg.model.recompute_num_layers) == ("block", 1)
    plan.write_text('{"recompute_policy": ["none", "full", "none", "none"]}')
    megatron_bridge.set_policy(cfg.model, f"@{plan}")
    megatron_bridge.resolve(cfg)
    plan.unlink()
    assert cfg.model.recompute_policy == ["none", "full", "none", "none"]
    assert cfg.model.recompute_granularity is None


def test_with_peft_a_policy_stays_a_policy(cfg):
    from megatron.bridge.peft.lora import LoRA

    cfg.peft = LoRA()
    megatron_bridge.set_policy(cfg.model, "full")
    megatron_bridge.resolve(cfg)
    assert cfg.model.recompute_policy == ["full"] * 4
    lines = megatron_bridge.recipe_lines(RecomputePolicy.parse("full", num_layers=4), cfg)
    assert "cfg.model.recompute_policy = 'full*4'" in lines
    assert "cfg.model.recompute_granularity = None" in lines


def test_full_under_bridges_expert_overlap_is_refused(bridge):
    from megatron.bridge.training.comm_overlap import CommOverlapConfig

    cfg = recipes.tiny_moe_pretrain_config()
    cfg.model.bf16 = True
    cfg.model.expert_model_parallel_size = 2
    cfg.model.moe_token_dispatcher_type = "alltoall"
    cfg.comm_overlap = CommOverlapConfig(
        tp_comm_overlap=False, overlap_moe_expert_parallel_comm=True
    )
    before = repr(vars(cfg.model)), repr(cfg.ddp), repr(cfg.comm_overlap)
    megatron_bridge.set_policy(cfg.model, "none,full,none*2")
    with pytest.raises(PolicyError, match=r"refuses full .*disable full recomputation"):
        megatron_bridge.resolve(cfg)
    megatron_bridge.set_policy(cfg.model, "none,selective[core_attn],none*2")
    megatron_bridge.resolve(cfg)
    megatron_bridge.set_policy(cfg.model, None)
    assert (repr(vars(cfg.model)), repr(cfg.ddp), repr(cfg.comm_overlap)) == before


def test_recipe_lines_set_what_they_were_made_from(cfg):
    for text in ("full*2,none*2", "none,full,none*2", "selective[core_attn]*4", "none*4"):
        policy = RecomputePolicy.parse(text, num_layers=4)
        exec("\n".join(megatron_bridge.recipe_lines(policy, cfg)), {"cfg": cfg})
        fields = {name: getattr(cfg.model, name) for name in megatron_fields.NO_RECOMPUTE}
        said = cfg.model.recompute_policy or strategy_of(fields)
        assert RecomputePolicy.parse(said, num_layers=4) == policy
        cfg.model.recompute_policy = None


def test_the_hook_is_given_to_a_model_config_as_to_a_provider():
    given = SimpleNamespace(pre_wrap_hooks=[print])  # ModelConfig of Bridge 0.4 and later
    megatron_bridge.register(given, len)
    assert given.pre_wrap_hooks == [print, len]
    registered = []
    megatron_bridge.register(SimpleNamespace(register_pre_wrap_hook=registered.append), len)
    assert registered == [len]


def test_a_model_config_that_holds_its_transformer_is_resolved_as_a_provider(cfg):
    provider = cfg.model
    cfg.model = SimpleNamespace(transformer=provider)
    megatron_bridge.set_policy(cfg.model, "none,full,none*2")
    assert megatron_bridge.resolve(cfg).format() == "none*1,full*1,none*2"
    assert provider.recompute_policy == ["none", "full", "none", "none"]
    megatron_bridge.set_policy(cfg.model, "full+all")
    megatron_bridge.resolve(cfg)
    assert (provider.recompute_policy, provider.recompute_granularity) == (None, "full")
