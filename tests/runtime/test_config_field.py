"""The field `recompute_policy` of Megatron's configs: absent, None, a policy, a contradiction."""

import copy
import dataclasses
import gc
import json
import pickle

import pytest
import torch

from megatron_autorecompute.errors import ApplyError, PolicyError
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from tests.gloo import collectives_on_copies
from tests.support import microbatch, one_step, tiny_config, tiny_gpt

pytestmark = pytest.mark.usefixtures("one_rank")

MIX = "full/2*2,selective[core_attn+layernorm],none"


@pytest.fixture
def field(one_rank):
    """The module that installs the field, installed."""
    from megatron_autorecompute.runtime import config_field

    config_classes()  # a class defined while the field is there has it for good
    config_field.install()
    yield config_field
    config_field.uninstall()


def config_classes():
    from megatron.core.transformer.heterogeneous.heterogeneous_config import (
        HeterogeneousTransformerConfig,
    )
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    heterogeneous = {"heterogeneous_layers_config_encoded_json": json.dumps(FOUR_BLOCKS)}
    return [
        (TransformerConfig, {}),
        (MLATransformerConfig, {}),
        (HeterogeneousTransformerConfig, heterogeneous),
    ]


FOUR_BLOCKS = {
    "block_configs": [
        {
            "attention": {"n_heads_in_group": 1, "no_op": False, "replace_with_linear": False},
            "mlp": {"ffn_mult": 2.0, "no_op": False, "replace_with_linear": False},
        }
    ]
    * 4
}
SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "add_bias_linear": False}


# ------------------------------------------------------------------------------------- the field


@pytest.mark.parametrize("index", range(3), ids=["Transformer", "MLA", "Heterogeneous"])
def test_every_config_class_takes_the_field(field, index):
    config_class, more = config_classes()[index]
    config = config_class(**SIZES, **more, recompute_policy=MIX)
    assert config.recompute_policy == MIX
    assert config.recompute_granularity is None
    assert "recompute_policy" in {f.name for f in dataclasses.fields(config)}
    assert config_class(**SIZES, **more).recompute_policy is None


@pytest.mark.parametrize("index", range(3), ids=["Transformer", "MLA", "Heterogeneous"])
def test_idle_the_field_changes_nothing_else_of_a_config(one_rank, index):
    from megatron_autorecompute.runtime import config_field

    config_class, more = config_classes()[index]
    before = vars(config_class(**SIZES, **more))
    defaults = {f.name: (f.type, f.default) for f in dataclasses.fields(config_class)}
    config_field.install()
    after = dict(vars(config_class(**SIZES, **more)))
    defaults_after = {f.name: (f.type, f.default) for f in dataclasses.fields(config_class)}
    config_field.uninstall()
    assert after.pop("recompute_policy") is None
    assert without_objects(after) == without_objects(before)
    del defaults_after["recompute_policy"]
    assert defaults_after == defaults


def without_objects(values):
    """Functions made anew for every config (init methods) compare by their names."""
    return {name: getattr(value, "__qualname__", repr(value)) for name, value in values.items()}


def test_idle_the_field_changes_no_bit_and_leaves_blocks_untouched(one_rank):
    from megatron_autorecompute.runtime import config_field

    without = one_step(tiny_gpt(tiny_config()))
    config_field.install()
    model = tiny_gpt(tiny_config())[0]
    run = one_step([model])
    config_field.uninstall()
    assert run.same_bits(without)
    assert model.decoder.config is model.config
    assert not [name for name in vars(model.decoder) if "autorecompute" in name]


def test_uninstall_restores_the_identical_objects(one_rank):
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_autorecompute.runtime import config_field

    owners = [TransformerConfig, *TransformerConfig.__subclasses__(), TransformerBlock]
    before = [dict(vars(owner)) for owner in owners]
    config_field.install()
    config_field.install()  # changes nothing more
    assert "recompute_policy" in TransformerConfig.__dataclass_fields__
    config_field.uninstall()
    for owner, attributes in zip(owners, before, strict=True):
        after = dict(vars(owner))
        changed = {
            n for n in attributes.keys() | after.keys() if attributes.get(n) is not after.get(n)
        }
        assert changed - {"__annotations__"} == set(), owner
        assert after.get("__annotations__") == attributes.get("__annotations__")
    with pytest.raises(TypeError, match="recompute_policy"):
        TransformerConfig(**SIZES, recompute_policy=MIX)


def test_a_subclass_defined_before_install_takes_the_field(one_rank):
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_autorecompute.runtime import config_field

    @dataclasses.dataclass
    class Mine(TransformerConfig):
        names: list[str] = dataclasses.field(default_factory=lambda: ["a"])
        seq_length: int = 32

    config_field.install()
    try:
        mine = Mine(**SIZES, seq_length=64, recompute_policy=MIX)
        assert (mine.recompute_policy, mine.seq_length, mine.names) == (MIX, 64, ["a"])
        assert mine.names is not Mine(**SIZES).names
        with pytest.raises(PolicyError):
            Mine(**SIZES, recompute_policy="full*3")
    finally:
        config_field.uninstall()
    assert Mine(**SIZES).seq_length == 32


@pytest.mark.parametrize(
    "value", [MIX, ["full", "full", "none", "none"], {"recompute_policy": MIX}]
)
def test_configs_with_a_policy_are_copied_and_pickled_as_any_other(field, value):
    ones = torch.nn.init.ones_  # Megatron's default init methods are closures
    init = ("init_method", "output_layer_init_method", "embedding_init_method")
    config = tiny_config(recompute_policy=value, **dict.fromkeys(init, ones))
    twins = [copy.copy(config), copy.deepcopy(config), dataclasses.replace(config)]
    for twin in [*twins, pickle.loads(pickle.dumps(config))]:
        assert twin.recompute_policy == value
        assert field.policy_of(twin) == field.policy_of(config)


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "translation"),
    [
        ({"recompute_granularity": "selective"}, r"megatron:selective\[core_attn\]"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
            r"megatron:selective\[mlp\]",
        ),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 3,
            },
            "megatron:block/3",
        ),
        ({"recompute_method": "uniform", "recompute_num_layers": 1}, "megatron:none"),
    ],
)
def test_megatrons_own_fields_beside_a_policy_are_refused_with_the_translation(
    field, fields, translation
):
    with pytest.raises(PolicyError, match=f"leave one of them out.*'{translation}'"):
        tiny_config(recompute_policy="full", **fields)


@pytest.mark.parametrize(
    ("policy", "fields", "reason"),
    [
        ("selective[moe_act]", {}, "only supported with moe_grouped_gemm"),
        ("none,selective[mla_up_proj],full*2", {}, "only supported with multi_latent_attention"),
        (
            "selective[shared_experts]",
            {
                "kind": "moe",
                "moe_shared_expert_intermediate_size": 64,
                "moe_shared_expert_overlap": True,
            },
            "moe-shared-expert-overlap",
        ),
        (
            "full,none*3",
            {
                "distribute_saved_activations": True,
                "sequence_parallel": True,
                "tensor_model_parallel_size": 2,
            },
            "distribute_saved_activations",
        ),
        ("full,none*3", {"cpu_offloading": True, "cpu_offloading_num_layers": 1}, "CPU offloading"),
    ],
)
def test_a_choice_that_megatron_refuses_is_refused_in_megatrons_words(
    field, policy, fields, reason
):
    tiny_config(**fields)  # without a policy Megatron has nothing against it
    with pytest.raises(PolicyError, match=f"(?i)refuses .* here: .*{reason}"):
        tiny_config(recompute_policy=policy, **fields)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("full*3", "covers 3 layers, the model has 4"),
        (["full", "none"], "covers 2 layers, the model has 4"),
        ("selective[attention]", "Unknown module attention"),
        ("everything", "Cannot read 'everything'"),
        (7, "expected text, a list"),
    ],
)
def test_what_is_no_policy_for_this_model_is_refused_at_construction(field, value, message):
    with pytest.raises(PolicyError, match=message):
        tiny_config(recompute_policy=value)


def test_a_plan_of_another_model_with_as_many_layers_is_refused_naming_the_sizes(field, tmp_path):
    from megatron_autorecompute.compat import model_facts

    plan = {"recompute_policy": ["full"] * 4, "profile": {"model": {"name": "GPTModel"}}}
    facts = {"transformer_config": model_facts.of_config(tiny_config())}
    plan["profile"]["model"]["facts"] = facts
    path = tmp_path / "plan.json"
    for mark in ("", "\ufeff"):  # which editors of Windows write before the text
        path.write_text(mark + json.dumps(plan), encoding="utf-8")
        assert field.policy_of(tiny_config(recompute_policy=f"@{path}")).format() == "full*4"
        with pytest.raises(PolicyError, match=r"another model.*hidden_size 64 \(here 128\)"):
            tiny_config(recompute_policy=f"@{path}", hidden_size=128)


@pytest.mark.parametrize(
    ("content", "value", "kept"),
    [
        ('{"recompute_policy": ["full", "none", "none", "none"]}', "@{}", ["full"] + ["none"] * 3),
        ("full*1,none*3", "@{}", "full*1,none*3"),
        ("full*1,none*3", "megatron:@{}", "megatron:full*1,none*3"),
    ],
)
def test_a_file_is_read_when_the_config_is_made_and_blocks_need_it_no_more(
    field, tmp_path, content, value, kept
):
    from megatron_autorecompute.apply import in_force

    path = tmp_path / "policy"
    path.write_text(content)
    config = tiny_config(recompute_policy=value.format(path))
    path.unlink()
    assert config.recompute_policy == kept
    (model,) = tiny_gpt(config)
    assert in_force(model).policy.layers[0].granularity == "full"


def test_prediction_depths_count_as_layers(field):
    assert tiny_config(mtp_num_layers=2, recompute_policy="full*6").recompute_policy == "full*6"
    with pytest.raises(PolicyError, match="covers 4 layers, the model has 6"):
        tiny_config(mtp_num_layers=2, recompute_policy="full*4")


def test_auto_with_nobody_to_resolve_it_is_an_error(field):
    config = tiny_config(recompute_policy="auto")
    with pytest.raises(ApplyError, match="nothing in this program measures and decides"):
        tiny_gpt(config)


def test_auto_that_somebody_claims_builds_a_model_without_recompute(field):
    field.claim_auto("this test")
    try:
        model = tiny_gpt(tiny_config(recompute_policy="auto"))[0]
    finally:
        field.release_auto("this test")
    assert model.decoder.config is model.config


# ----------------------------------------------------------------------------- what it makes run


@pytest.mark.parametrize("kind", ["dense", "moe", "mla"])
@pytest.mark.parametrize("policy", [MIX, "megatron:block/2", "full", "none"])
def test_a_policy_given_at_construction_equals_one_applied_to_a_built_model(field, kind, policy):
    from megatron_autorecompute.runtime.apply import apply

    built = tiny_gpt(tiny_config(kind, recompute_policy=policy))[0]
    run = one_step([built])
    plain = tiny_gpt(tiny_config(kind))[0]
    without = one_step([plain])
    with apply(RecomputePolicy.parse(policy, num_layers=4), plain):
        assert held_bytes(plain) == held_bytes(built)
        assert one_step([plain]).same_bits(run)
    if kind != "mla":  # whose default RMSNorm is the known exception
        assert run.same_bits(without)


def held_bytes(model):
    """Bytes alive between forward and backward."""
    gc.collect()
    counted = LiveBytes([*model.parameters(), *model.buffers()])
    with collectives_on_copies(), counted as live:
        loss = model(**microbatch()).mean()
        gc.collect()  # what only a circle of references holds goes at any moment
        held = live.current_bytes
    loss.backward()
    return held


def test_prediction_depths_get_their_choice_at_construction(field):
    with_depths = {"mtp_num_layers": 2}
    without = one_step(tiny_gpt(tiny_config(**with_depths)))
    policy = "none*3,full,selective[mlp],full"
    model = tiny_gpt(tiny_config(**with_depths, recompute_policy=policy))[0]
    first, second = model.mtp.layers
    assert (first.config.recompute_granularity, second.config.recompute_granularity) == (
        None,
        "full",
    )
    assert one_step([model]).same_bits(without)


def test_a_model_built_with_the_field_names_the_field_as_holder(field):
    from megatron_autorecompute.runtime.apply import apply

    model = tiny_gpt(tiny_config(recompute_policy="full"))[0]
    with pytest.raises(ApplyError, match="applied by the config field recompute_policy"):
        apply(RecomputePolicy.parse("none", num_layers=4), model)


def test_a_policy_by_names_is_the_decoders_own_or_waits_for_the_whole_model(field):
    from megatron_autorecompute.apply import apply, blocks, in_force

    model = tiny_gpt(tiny_config(recompute_policy=f"decoder:{MIX}"))[0]
    assert in_force(model).policy == RecomputePolicy.parse(MIX, num_layers=4)
    with pytest.raises(PolicyError, match="covers 3 layers, the model has 4"):
        tiny_config(recompute_policy={"decoder": "full*3"})
    with pytest.raises(PolicyError, match="write NAME:POLICY for every block"):
        tiny_config(recompute_policy="vision:full;none")
    for value in ("vision:full*2;decoder:none", {"vision": ["full"] * 2, "decoder": "none"}):
        model = tiny_gpt(tiny_config(recompute_policy=value))[0]
        with pytest.raises(ApplyError, match="names several blocks, and nothing has put it in fo"):
            one_step([model])
        with pytest.raises(PolicyError, match="names vision; this model's blocks are decoder"):
            RecomputePolicy.from_config(value, num_layers=4, blocks=blocks(model))
        with apply(RecomputePolicy.parse("full", num_layers=4), model):
            one_step([model])
