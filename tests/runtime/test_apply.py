"""Applying, switching and undoing a policy: what runs, what is held, what comes back."""

import copy
import functools
import gc
import re
import types
from dataclasses import dataclass

import pytest
import torch
from megatron.core.transformer import transformer_block
from torch.utils.flop_counter import FlopCounterMode

from megatron_autorecompute.compat.seam import is_method
from megatron_autorecompute.errors import ApplyError, PolicyError, UnsupportedVersionError
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from testing.ranks import RankError, run_ranks
from tests.support import (
    build_gpt,
    microbatch,
    one_step,
    seen_twice,
    set_weights,
    start_parallel,
    tiny_config,
    tiny_gpt,
)

pytestmark = pytest.mark.usefixtures("one_rank")

SHARED_EXPERTS = {"moe_shared_expert_intermediate_size": 64}


def policy_of(text, num_layers=4):
    return RecomputePolicy.parse(text, num_layers=num_layers)


def apply(text, model, num_layers=4):
    from megatron_autorecompute.runtime.apply import apply as apply_policy

    return apply_policy(policy_of(text, num_layers), model)


def is_core(minor):
    """Whether the installed megatron-core is 0.`minor` or newer."""
    import megatron.core

    return tuple(map(int, megatron.core.__version__.split(".")[:2])) >= (0, minor)


# --------------------------------------------------- the same operations as Megatron's own path


@dataclass(frozen=True)
class Counts:
    """What one microbatch costs: operations counted, and bytes of live tensors."""

    forward_flops: int
    total_flops: int
    held_bytes: int
    peak_bytes: int


def counts(model):
    """One forward and backward of a model, counted from its second step on."""
    one_step([model], num_microbatches=1)
    return seen_twice(lambda: counts_once(model))


def counts_once(model):
    flops = FlopCounterMode(display=False)
    static = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    gc.collect()
    gc.disable()  # tensors in reference cycles would go at different moments
    with flops, LiveBytes(static) as live:
        loss = model(**microbatch()).mean()
        forward_flops, held_bytes = flops.get_total_flops(), live.current_bytes
        loss.backward()
    gc.enable()
    return Counts(forward_flops, flops.get_total_flops(), held_bytes, live.peak_bytes)


def megatron_counts(kind="dense", **fields):
    return counts(tiny_gpt(tiny_config(kind, **fields))[0])


def our_counts(text, kind="dense", **fields):
    config = tiny_config(kind, **fields)
    models = tiny_gpt(config)
    with apply(text, models, config.num_layers):
        return counts(models[0])


def uniform(count):
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": count,
    }


def block(count):
    return {**uniform(count), "recompute_method": "block"}


def selective(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


STRATEGIES = {
    "megatron:uniform/1": ("dense", uniform(1)),
    "megatron:uniform/2": ("dense", uniform(2)),
    "megatron:uniform/4": ("dense", uniform(4)),
    "megatron:uniform/3": ("dense", uniform(3)),
    "megatron:block/1": ("dense", block(1)),
    "megatron:block/3": ("dense", block(3)),
    "megatron:block/4": ("dense", block(4)),
    "megatron:selective": ("dense", selective("core_attn")),
    "megatron:selective[layernorm]": ("dense", selective("layernorm")),
    "megatron:selective[mlp]": ("dense", selective("mlp")),
    "megatron:selective[core_attn+layernorm+mlp]": (
        "dense",
        selective("core_attn", "layernorm", "mlp"),
    ),
    "megatron:selective[moe]": ("moe", selective("moe")),
    "megatron:uniform/1 of MoE": ("moe", uniform(1)),
    "megatron:uniform/2 of MoE": ("moe", uniform(2)),
    "megatron:selective[shared_experts]": ("moe", selective("shared_experts")),
    "megatron:selective[layernorm+shared_experts]": (
        "moe",
        selective("layernorm", "shared_experts"),
    ),
    "megatron:selective[mla_up_proj]": ("mla", selective("mla_up_proj")),
}


ONE_VERSION = (
    *("megatron:uniform/4", "megatron:block/1", "megatron:block/3", "megatron:block/4"),
    *("megatron:selective[layernorm]", "megatron:selective[mlp]", "megatron:uniform/1 of MoE"),
    "megatron:selective[layernorm+shared_experts]",
)
"""What these do is in others, in parts: once is enough."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.any_version] * (name in ONE_VERSION))
        for name in STRATEGIES
    ],
)
def test_a_megatron_strategy_runs_the_same_operations_and_holds_the_same_bytes(name, monkeypatch):
    if name == "megatron:uniform/3" and not is_core(17):
        pytest.skip("before 0.17 Megatron's own uniform/3 of 4 layers is an IndexError")
    # Without what we mend: docs/decisions/bytes.md.
    monkeypatch.setattr("megatron_autorecompute.compat.defects.graph_keepers", lambda layer: [])
    kind, fields = STRATEGIES[name]
    model = SHARED_EXPERTS if kind == "moe" else {}
    text = name.removesuffix(" of MoE")
    assert our_counts(text, kind, **model) == megatron_counts(kind, **model, **fields)


@pytest.mark.parametrize("kind", ["dense", "moe", "mla"])
def test_no_recompute_as_a_policy_costs_what_it_costs_without_us(kind):
    assert our_counts("none", kind) == megatron_counts(kind)


def test_full_recompute_runs_every_layers_forward_once_more():
    none, full = our_counts("none", num_layers=4), our_counts("full+all", num_layers=4)
    head_flops = 2 * 64 * 64 * 128  # 2 tokens x hidden x vocabulary of the output layer
    assert none.total_flops == 3 * none.forward_flops
    assert full.total_flops == none.total_flops + none.forward_flops - head_flops
    assert full.held_bytes < none.held_bytes


def test_a_mix_costs_the_sum_of_what_its_layers_cost():
    none, full = our_counts("none"), our_counts("full+all")
    mixed = our_counts("full+all,none,full/2+all*2")
    one_layer_flops = (full.total_flops - none.total_flops) // 4
    assert mixed.total_flops == none.total_flops + 3 * one_layer_flops


# ------------------------------------------------------------------ what MoE layers do not let go

BOUNDARY_BYTES = 32 * 2 * 64 * 4  # tokens x batch x hidden x fp32


def live_bytes_of_a_step(model):
    """One step, its backward done and its output gone; from the model's second step on.

    Nothing counts operations here: FlopCounterMode's own hooks keep layers' inputs alive.
    """
    one_step([model], num_microbatches=1)
    static = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    with LiveBytes(static) as live:
        model(**microbatch()).mean().backward()
        gc.collect()
        return live


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("text", ["full", "full/2", "selective[moe]", "full*2,selective[moe]*2"])
def test_a_recomputed_moe_layer_lets_its_input_and_its_gradient_go(text, dispatcher, monkeypatch):
    def kept_bytes():
        model = tiny_gpt(tiny_config("moe", moe_token_dispatcher_type=dispatcher))[0]
        with apply(text, model):
            return live_bytes_of_a_step(model).current_bytes

    mended = kept_bytes()
    monkeypatch.setattr("megatron_autorecompute.compat.defects.graph_keepers", lambda layer: [])
    checkpoints = 2 if text == "full/2" else 4
    assert kept_bytes() - mended == checkpoints * 2 * BOUNDARY_BYTES


def test_recomputed_moe_layers_have_a_lower_peak_than_on_megatrons_own_path():
    megatrons = tiny_gpt(tiny_config("moe", num_layers=12, **uniform(1)))[0]
    model = tiny_gpt(tiny_config("moe", num_layers=12))[0]
    with apply("full", model, 12):
        ours = live_bytes_of_a_step(model)
    assert ours.peak_bytes < live_bytes_of_a_step(megatrons).peak_bytes


def test_no_graph_is_let_go_where_other_microbatches_run_in_between():
    from megatron_autorecompute.compat import defects

    layer = tiny_gpt(tiny_config("moe"))[0].decoder.layers[0]
    assert defects.graph_keepers(layer) == [layer.mlp.token_dispatcher]
    layer.config.overlap_moe_expert_parallel_comm = True
    assert defects.graph_keepers(layer) == []


# -------------------------------------------------------- the flags Megatron's constructors set


def plain_attributes(layer):
    """Every flag and number of every module in a layer."""
    return {
        (path, name): value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | str | None)
    }


def assert_flags_as_megatron_sets_them(build, modules):
    from megatron_autorecompute.compat import layer_modules

    switched = build()
    for module in modules:
        built = build(**selective(module))
        for ours, theirs in zip(switched.decoder.layers, built.decoder.layers, strict=True):
            layer_modules.set_modules(ours, (module,))
            assert plain_attributes(ours) == plain_attributes(theirs), module
            layer_modules.set_modules(ours, ())
    for ours, plain in zip(switched.decoder.layers, build().decoder.layers, strict=True):
        assert plain_attributes(ours) == plain_attributes(plain)


LAYER_TYPES = {
    "dense": ("dense", {}, ["core_attn", "layernorm", "mlp"]),
    "MoE with shared experts": (
        "moe",
        SHARED_EXPERTS,
        ["core_attn", "layernorm", "mlp", "moe", "shared_experts"],
    ),
    "MoE without shared experts": ("moe", {}, ["core_attn", "layernorm", "mlp", "moe"]),
    "MLA": ("mla", {}, ["core_attn", "layernorm", "mlp", "mla_up_proj"]),
}


@pytest.mark.parametrize("name", LAYER_TYPES)
def test_flags_equal_those_of_megatrons_constructors(name):
    kind, fields, modules = LAYER_TYPES[name]

    def build(**more):
        return tiny_gpt(tiny_config(kind, **fields, **more))[0]

    assert_flags_as_megatron_sets_them(build, modules)


def test_every_module_that_megatron_allows_has_a_flag():
    from megatron_autorecompute.compat import layer_modules, rules

    assert set(rules.allowed_modules()) <= set(layer_modules.MODULE_FLAGS)


@pytest.fixture
def grouped_gemm(monkeypatch):
    """GroupedMLP of 0.16 with a loop in place of the grouped GEMM kernel, which needs CUDA."""
    if is_core(17):
        pytest.skip("since 0.17 grouped experts are Transformer Engine's: needs a GPU")
    from megatron.core.transformer.moe import grouped_gemm_util

    def gmm(rows, weights, rows_per_expert, trans_b=False):
        parts = rows.split(rows_per_expert.tolist())
        return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])

    monkeypatch.setattr(grouped_gemm_util, "grouped_gemm", types.SimpleNamespace())
    monkeypatch.setattr(grouped_gemm_util, "ops", types.SimpleNamespace(gmm=gmm))


GROUPED = {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True, "bf16": True}


def test_moe_act_of_grouped_experts_has_megatrons_flag_and_changes_no_bit(grouped_gemm):
    def build(**more):
        return tiny_gpt(tiny_config("moe", **GROUPED, **more))[0]

    assert_flags_as_megatron_sets_them(build, ["moe_act"])
    model = build()
    without = one_step([model])
    with apply("selective[moe_act],full,selective[layernorm+moe_act],none", model):
        assert one_step([model]).same_bits(without)


@pytest.fixture
def gated_delta_net(monkeypatch):
    """Build GPTs with GatedDeltaNet attention, whose kernels have torch equivalents in Megatron."""
    if not is_core(19):
        pytest.skip("gdn_norm_out came with 0.19")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    monkeypatch.setattr(common, "HAVE_FLA", True)
    monkeypatch.setattr(common, "l2norm", lambda x: torch.nn.functional.normalize(x, dim=-1))
    attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )

    def layer_spec(**options):
        spec = copy.deepcopy(get_gpt_layer_local_spec(**options))
        spec.submodules.self_attention = attention
        return spec

    def build(**more):
        config = tiny_config(**GATED_DELTA_NET, **more)
        with monkeypatch.context() as patch:
            patch.setattr(
                "megatron.core.models.gpt.gpt_layer_specs.get_gpt_layer_local_spec", layer_spec
            )
            model = build_gpt(config, 0, seq_length=32, vocab_size=128)
        set_weights(model)
        return model

    return build


GATED_DELTA_NET = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": [1, 1, 1, 1],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "deterministic_mode": True,
    "activation_func": torch.nn.functional.silu,
}


def test_gated_delta_net_has_megatrons_flag_and_changes_no_bit(gated_delta_net):
    assert_flags_as_megatron_sets_them(gated_delta_net, ["gdn_norm_out", "layernorm", "mlp"])
    model = gated_delta_net()
    without = one_step([model])
    with apply("selective[gdn_norm_out],full/2*2,selective[gdn_norm_out+layernorm+mlp]", model):
        assert one_step([model]).same_bits(without)


# ------------------------------------------------------------------------------- frozen inputs


def freeze_embedding(model):
    model.embedding.requires_grad_(False)


def train_only(*names):
    """As LoRA does: everything is frozen but what stands in for the adapters."""

    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in names))

    return freeze


FROZEN = {
    "embedding": freeze_embedding,
    "all but linear_qkv and linear_proj": train_only("linear_qkv", "linear_proj"),
    "all but the MLP": train_only("mlp."),
    "all but the norms": train_only("layernorm"),
    "all but layers 2 and 3": train_only("layers.2", "layers.3"),
}
FROZEN_POLICIES = {
    "dense": [
        "full",
        "full/2",
        "full/4",
        "full,none*3",
        "none,full*3",
        "selective[core_attn]",
        "selective[layernorm]",
        "selective[mlp]",
        "selective[core_attn+layernorm+mlp]",
        "selective[mlp]*2,full/2*2",
        "full+keep[core_attn]",
        "selective[mlp_act+qkv]",
    ],
    "moe": [
        *("full", "selective[moe]", "selective[shared_experts]", "selective[layernorm]"),
        *("full+keep[core_attn+dispatch]", "selective[moe]+keep[dispatch]"),
        "selective[experts+qkv]",
    ],
    "mla": [
        *("full", "selective[mla_up_proj]", "selective[core_attn+mla_up_proj]"),
        *("full+keep[core_attn]", "selective[mlp_act+qkv]"),
    ],
}


def frozen_model(kind, freeze, **more):
    fields = {"dense": {}, "moe": SHARED_EXPERTS, "mla": {"normalization": "LayerNorm"}}
    model = tiny_gpt(tiny_config(kind, **fields[kind], **more))[0]
    freeze(model)
    return model


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("kind", FROZEN_POLICIES)
def test_every_trainable_parameter_gets_its_gradient_behind_frozen_ones(kind, frozen):
    model = frozen_model(kind, FROZEN[frozen])
    without = one_step([model], num_microbatches=1)
    assert without.gradients
    for text in FROZEN_POLICIES[kind]:
        with apply(text, model):
            run = one_step([model], num_microbatches=1)
        assert sorted(run.gradients) == sorted(without.gradients), text
        assert run.same_bits(without), text


@pytest.mark.parametrize(
    ("trained", "fields"),
    [
        ("layernorm", uniform(1)),
        ("mlp.", uniform(2)),
        ("layernorm", selective("layernorm")),
        ("mlp.", selective("mlp")),
    ],
)
def test_behind_frozen_ones_parameters_lose_gradients_on_megatrons_own_path(trained, fields):
    without = one_step([frozen_model("dense", train_only(trained))])
    megatrons = one_step([frozen_model("dense", train_only(trained), **fields)])
    assert len(megatrons.gradients) < len(without.gradients)


# --------------------------------------------------------------------- Megatron's own weak spots


def step_with_mlp_recompute():
    start_parallel()
    models = tiny_gpt(tiny_config(add_bias_linear=True))
    without = one_step(models)
    with apply("selective[mlp]", models):
        return one_step(models).same_bits(without)


def step_with_megatrons_own_mlp_recompute():
    start_parallel()
    models = tiny_gpt(tiny_config(add_bias_linear=True, **selective("mlp")))
    return one_step(models, num_microbatches=1).losses


def test_mlp_recompute_with_linear_biases_returns_and_is_exact():
    assert run_ranks(step_with_mlp_recompute, 1, timeout_s=60, memory_bytes=8 << 30) == [True]


@pytest.mark.any_version
def test_mlp_recompute_with_linear_biases_never_returns_in_megatrons_own_form():
    with pytest.raises(RankError):
        run_ranks(step_with_megatrons_own_mlp_recompute, 1, timeout_s=4, memory_bytes=5 << 30)


@pytest.mark.parametrize("text", ["full,none*3", "none,full/2*2,none", "selective[moe]*2,full*2"])
def test_the_padding_mask_reaches_every_layer_of_a_mix(text):
    fields = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
    model = tiny_gpt(tiny_config("moe", **fields, dropout=0.0))[0]
    batch = microbatch()
    padding_mask = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    padding_mask[:, 20:] = True

    def gradients(**masks):
        model.zero_grad(set_to_none=True)
        model(**batch, **masks).mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    without_us, unmasked = gradients(padding_mask=padding_mask), gradients()
    router = "decoder.layers.1.mlp.router.weight"
    assert not torch.equal(without_us[router], unmasked[router])  # the mask has an effect
    with apply(text, model):
        with_policy = gradients(padding_mask=padding_mask)
    assert [n for n, g in with_policy.items() if not torch.equal(g, without_us[n])] == []


@pytest.mark.parametrize("text", ["none", "full", "full,none*2,full", "none,full,selective[mlp]*2"])
def test_features_of_asked_layers_equal_those_without_recompute(text):
    if not is_core(17):
        pytest.skip("extract_layer_indices came with 0.17")
    model = tiny_gpt(tiny_config(dropout=0.0))[0]
    mask = microbatch()["attention_mask"]
    torch.manual_seed(0)
    hidden_states = torch.randn(32, 2, 64, requires_grad=True)

    def run():
        return model.decoder(hidden_states, mask, extract_layer_indices={0, 2, 3})

    output, features = run()
    with apply(text, model):
        output_again, features_again = run()
    assert torch.equal(output, output_again)
    assert len(features) == len(features_again) == 3
    assert all(torch.equal(a, b) for a, b in zip(features, features_again, strict=True))


@pytest.mark.parametrize("text", ["full", "full/2", "none,full,selective[core_attn+layernorm]*2"])
def test_evaluation_under_a_policy_equals_evaluation_without(text):
    model = tiny_gpt(tiny_config())[0]

    def evaluate():
        model.eval()
        with torch.no_grad():
            output = model(**microbatch())
        model.train()
        return output

    output, without = evaluate(), one_step([model])
    with apply(text, model):
        assert torch.equal(evaluate(), output)
        assert one_step([model]).same_bits(without)
        assert torch.equal(evaluate(), output)


# ------------------------------------------------------------------------------ apply and undo


# What Megatron's own layers leave on themselves in every forward.
LEFT_BY_FORWARD = ("current_microbatch", "input_layernorm_checkpoint", "pre_mlp_norm_checkpoint")


def everything(model):
    """Every attribute of every module, hooks included."""
    return {
        (path, name): dict(value) if isinstance(value, dict) else value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in LEFT_BY_FORWARD
    }


def assert_identical(before, after):
    assert before.keys() == after.keys()
    for key, value in before.items():
        if isinstance(value, dict):
            assert [id(v) for v in value.values()] == [id(v) for v in after[key].values()], key
        else:
            assert value is after[key], key


MIX = "full/2*2,selective[core_attn+layernorm+mlp],none"


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_undo_restores_the_identical_objects(kind):
    model = tiny_gpt(tiny_config(kind, add_bias_linear=kind == "dense"))[0]
    model.requires_grad_(True)
    before, config = everything(model), vars(model.config).copy()
    applied = apply(MIX, model)
    one_step([model])
    applied.switch(policy_of("full"))
    applied.undo()
    assert_identical(before, everything(model))
    assert vars(model.config) == config
    applied.undo()
    assert_identical(before, everything(model))


def test_the_policy_ends_with_the_block_even_when_a_step_fails():
    model = tiny_gpt(tiny_config())[0]
    before = everything(model)
    with pytest.raises(ZeroDivisionError), apply(MIX, model):
        raise ZeroDivisionError
    assert_identical(before, everything(model))


def test_one_models_policy_leaves_another_model_alone():
    first, second = tiny_gpt(tiny_config())[0], tiny_gpt(tiny_config())[0]
    before, without = everything(second), counts(second)
    with apply("full", first), apply("none,full*3", second):
        pass
    with apply("full", first):
        assert counts(second) == without
    assert_identical(before, everything(second))


def test_later_changes_of_the_shared_config_are_seen_under_a_policy():
    model, seen = tiny_gpt(tiny_config(mtp_num_layers=1))[0], []
    (depth,) = model.mtp.layers
    for owner, inside in ((model.decoder, model.decoder.layers[0]), (depth, depth.enorm)):
        inside.register_forward_pre_hook(lambda *_, owner=owner: seen.append(owner.config))
    with apply("full", model, 5):
        model.config.hidden_dropout = 0.75
        model(**microbatch())
        assert model.decoder.config is model.config
    for within in seen:
        assert (within.recompute_granularity, within.hidden_dropout) == ("full", 0.75)
    assert len(seen) == 2


def test_applying_twice_is_refused_and_names_the_holder():
    from megatron_autorecompute.runtime.apply import apply as apply_policy

    model = tiny_gpt(tiny_config())[0]
    with (
        apply_policy(policy_of("full"), model, holder="my trainer"),
        pytest.raises(ApplyError, match=r"applied by my trainer: undo\(\) it or switch\(\)"),
    ):
        apply("none", model)


def test_text_and_lists_are_read_as_by_a_config_field(tmp_path):
    from megatron_autorecompute.apply import apply

    (model,) = tiny_gpt(tiny_config(mtp_num_layers=1))
    (tmp_path / "policy.txt").write_text("full*2,none*3")
    given = {
        "full*2,none*3": "full*2,none*3",
        "decoder:full": "full*5",
        "megatron:block/2": "full+all*2,none*3",
        f"@{tmp_path / 'policy.txt'}": "full*2,none*3",
    }
    with apply(["none"] * 5, model) as applied:
        for text, means in given.items():
            applied.switch(text)
            assert applied.policy.format() == means
    wrongs = {"full*4": "covers 4 layers", 3: "is 3: expected text", None: "is None: expected text"}
    for wrong, message in wrongs.items():
        with pytest.raises(PolicyError, match=message):
            apply(wrong, model)


def test_an_undone_policy_cannot_be_switched():
    applied = apply("full", tiny_gpt(tiny_config())[0])
    applied.undo()
    with pytest.raises(ApplyError, match="was undone"):
        applied.switch(policy_of("none"))


def test_a_refused_switch_leaves_the_policy_in_force():
    model = tiny_gpt(tiny_config())[0]
    with apply("full", model) as applied:
        with pytest.raises(PolicyError, match="covers 3 layers, the model has 4"):
            applied.switch(policy_of("none", 3))
        assert applied.policy == policy_of("full")
        assert counts(model) == our_counts("full")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("selective[attention]", "Unknown module attention.*core_attn"),
        ("selective[mla_up_proj]", "mla_up_proj.*only supported with.*multi_latent_attention"),
        ("selective[moe_act]", "moe_act.*only supported with moe_grouped_gemm"),
    ],
)
def test_a_choice_that_megatron_refuses_is_refused_with_its_reason(text, message):
    with pytest.raises(PolicyError, match=message):
        apply(text, tiny_gpt(tiny_config())[0])


def test_a_model_with_megatrons_own_recompute_is_refused_with_the_translation():
    model = tiny_gpt(tiny_config(**block(3)))[0]
    with pytest.raises(PolicyError, match="'megatron:block/3'"):
        apply("full", model)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(PolicyError, match="No TransformerBlock"):
        apply("full", torch.nn.Linear(2, 2))


@pytest.mark.parametrize("model", [None, "model", [3]])
def test_what_is_no_module_is_refused(model):
    found = re.escape(repr(model).strip("[]"))
    with pytest.raises(PolicyError, match=rf"^{found} is no torch\.nn\.Module: give the model"):
        apply("full", model)


def test_a_layer_that_stands_twice_is_refused_with_both_places():
    model = tiny_gpt(tiny_config())[0]
    model.decoder.layers[2] = model.decoder.layers[0]
    with pytest.raises(PolicyError, match="Layers 0 and 2 of a block are one module"):
        apply("full", model)


def test_three_blocks_that_number_alike_are_refused_with_the_way_out():
    names = ("vision", "encoder", "decoder")
    model = torch.nn.ModuleDict({name: tiny_gpt(tiny_config())[0].decoder for name in names})
    with pytest.raises(PolicyError, match=r"numbers: vision, encoder, decoder\. .*model.decoder\)"):
        apply("full", model)
    with apply("full", model["decoder"]):
        pass


# --------------------------------------------- classes that bring their own checkpointed forward


def bring_their_own(block):
    """Make a block of a class like those of Qwen3-VL in Megatron Bridge, which return features."""
    from megatron.core import tensor_parallel

    def forward(self, hidden_states, attention_mask, **_):
        if self.config.recompute_granularity == "full":
            output = self._checkpointed_forward(
                hidden_states=hidden_states, attention_mask=attention_mask
            )
        else:
            output = through(self, hidden_states, attention_mask, plain)
        hidden_states, self.features = output
        return self.final_layernorm(hidden_states)

    def plain(layer, hidden_states, attention_mask):
        return layer(hidden_states=hidden_states, attention_mask=attention_mask)

    def through(self, hidden_states, attention_mask, run):
        features = []
        for layer in self.layers:
            hidden_states, _ = run(layer, hidden_states, attention_mask)
            features.append(layer.layer_number)
        return hidden_states, features

    def checkpointed(self, hidden_states, attention_mask):
        kept = self.config.recompute_method == "block"

        def run(layer, *x):
            one = functools.partial(plain, layer)
            return one(*x) if kept else tensor_parallel.checkpoint(one, False, *x)

        return through(self, hidden_states, attention_mask, run)

    body = {"forward": forward, "_checkpointed_forward": checkpointed}
    block.__class__ = type("OwnBlock", (type(block),), body)


def test_a_class_with_its_own_checkpointed_forward_runs_the_policy_too():
    model = tiny_gpt(tiny_config(dropout=0.0))[0]
    bring_their_own(model.decoder)
    runs = [0] * 4
    for index, layer in enumerate(model.decoder.layers):

        def count(*_, index=index):
            runs[index] += 1

        layer.register_forward_pre_hook(count)
    plain = one_step([model], num_microbatches=1)
    runs[:] = [0] * 4
    with apply("full*1,none*2,full*1", model):
        assert one_step([model], num_microbatches=1).same_bits(plain)
    assert runs == [2, 1, 1, 2]
    assert model.decoder.features == [1, 2, 3, 4]
    assert "_checkpointed_forward" not in vars(model.decoder)

    from megatron_autorecompute.runtime.model_shard import ModelShard, alone

    model.decoder.deepstack_visual_indexes = [1]  # the checkpoint returns features in a list
    with pytest.raises(PolicyError, match="full on layer 1, whose output the model also takes as"):
        apply("full", model)
    leanest = "full*1,selective[core_attn+layernorm+mlp]*1,full*2"
    assert ModelShard([model], all_gather=alone).leanest().format() == leanest
    apply(leanest, model).undo()


def test_a_policy_that_somebody_else_bypasses_is_an_error_and_not_another_training(monkeypatch):
    model = tiny_gpt(tiny_config())[0]
    with apply("full*1,none*3", model):
        fails = model.decoder.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            one_step([model])
        fails.remove()
        if is_method():
            method = type(model.decoder)._checkpointed_forward.__wrapped__
            megatrons = functools.partial(method, model.decoder)
            monkeypatch.setattr(model.decoder, "_checkpointed_forward", megatrons)
        else:
            from megatron.core.recompute import checkpointed_forward

            monkeypatch.setattr(transformer_block, "checkpointed_forward", checkpointed_forward)
        with pytest.raises(ApplyError, match="did not run the policy in force"):
            one_step([model], num_microbatches=1)
        monkeypatch.undo()


@pytest.mark.parametrize("found", ["0.15.3", "0.21.0", "1.0.0"])
def test_an_unknown_megatron_stops_with_found_and_supported_versions(found, monkeypatch):
    model = tiny_gpt(tiny_config())[0]
    monkeypatch.setattr("megatron.core.__version__", found)
    with pytest.raises(UnsupportedVersionError, match=rf"{found} is installed.*0\.16\.1.*0\.19\.2"):
        apply("full", model)


# ------------------------------------------------------------------------------ ranks that differ


def refusals(texts_by_rank, with_field):
    """What apply, switch and perhaps the config field say in this rank to its policy."""
    from megatron_autorecompute.runtime import config_field
    from megatron_autorecompute.runtime.apply import apply

    sizes = {"tensor_model_parallel_size": 2}
    start_parallel(**sizes)
    text = texts_by_rank[torch.distributed.get_rank()]
    model = tiny_gpt(tiny_config(**sizes))[0]
    said = {"apply": refusal_of(lambda: apply(text, model))}
    with apply("full", model) as applied:
        said["switch"] = refusal_of(lambda: applied.switch(text))
        said["still full"] = applied.policy.format()
        one_step([model])
    if with_field:
        config_field.install()
        built = tiny_gpt(tiny_config(**sizes, recompute_policy=text))[0]
        said["field"] = refusal_of(lambda: one_step([built]))
    return said


def refusal_of(action):
    try:
        action()
    except (ApplyError, PolicyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.any_version
def test_ranks_of_a_stage_with_different_policies_are_an_error_on_both_not_a_hang():
    for said in run_ranks(refusals, 2, ("full", "full,none*3"), True, timeout_s=60):
        for way in ("apply", "switch", "field"):
            assert said[way].startswith("ApplyError: The ranks of this pipeline stage were given")
            assert "rank 0: " in said[way]
            assert "rank 1: " in said[way]
        assert said["still full"] == "full*4"


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("selective[nonsense]", "Unknown module nonsense"),
        ("@nowhere.txt", "Cannot read the policy file nowhere.txt"),
    ],
)
def test_a_wrong_policy_on_one_rank_is_an_error_on_both(text, said):
    right, wrong = run_ranks(refusals, 2, ("full", text), False, timeout_s=60)
    for way in ("apply", "switch"):
        assert wrong[way].startswith(f"PolicyError: {said}")
        assert right[way].startswith("ApplyError: The ranks of this pipeline stage")
        assert f"rank 1: refused: {said}" in right[way]


def rank_0_alone(policy):
    """Rank 0 evaluates and trains the model while rank 1 does nothing; with the field in place."""
    from megatron_autorecompute.runtime import config_field

    start_parallel()
    config_field.install()
    (model,) = tiny_gpt(tiny_config(recompute_policy=policy))
    if torch.distributed.get_rank() > 0:
        return None
    with torch.no_grad():
        model(**microbatch())
    return one_step([model])


@pytest.mark.any_version
def test_a_forward_that_one_rank_runs_alone_does_not_wait_for_the_others():
    without, _ = run_ranks(rank_0_alone, 2, None, timeout_s=60)
    under_policy, _ = run_ranks(rank_0_alone, 2, "full,selective[mlp]*3", timeout_s=60)
    assert under_policy.same_bits(without)


def evaluation_of_other_policies():
    """Ranks that meet in layers and have different policies: evaluating recomputes nothing."""
    from megatron_autorecompute.runtime import config_field

    sizes = {"tensor_model_parallel_size": 2}
    start_parallel(**sizes)
    config_field.install()
    text = ("full", "none")[torch.distributed.get_rank()]
    (model,) = tiny_gpt(tiny_config(**sizes, recompute_policy=text))
    with torch.no_grad():
        model(**microbatch())
    return refusal_of(lambda: one_step([model]))


def test_policies_are_compared_before_the_first_training_and_not_in_an_evaluation():
    for said in run_ranks(evaluation_of_other_policies, 2, timeout_s=60):
        assert "rank 0: " in said
        assert "rank 1: " in said
