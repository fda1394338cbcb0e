"""What LoRA's adapters and frozen layers keep and compute without a device, by layer.

tests/bridge/test_lora.py compares with Bridge's own adapters.
"""

import pytest

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta.devices import device
from megatron_autorecompute.meta.job import job_from
from megatron_autorecompute.meta.job_config import ADAPTED, LORA_TARGETS
from megatron_autorecompute.meta.model import shard
from megatron_autorecompute.meta.profiling import assumed, profile_job
from megatron_autorecompute.meta.verify import verify
from tests.meta.test_no_device import (
    DENSE,
    FFN,
    GROUPS,
    H100,
    HEADS,
    HIDDEN,
    MOE,
    SEQUENCE,
    UNIT,
    dense_held_bytes,
    job,
    middle_plan,
    records,
)

RANK = 4
LOW = 2 * SEQUENCE * RANK
"""Bytes of what an adapter's first product makes, which its second keeps."""
B200 = device("b200-180gb")


def held_bytes(*targets, config=None, **fields):
    asked = {"lora_rank": RANK, "lora_target_modules": list(targets), **fields}
    return records(config, only=(), **asked)["none"].held_bytes


def frozen_held_bytes():
    """Of a dense layer that keeps no input of a linear layer; attention keeps its own output."""
    return dense_held_bytes() - 2 * 2 * UNIT - 2 * SEQUENCE * FFN


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("target", "input_bytes"),
    [
        ("linear_qkv", 2 * UNIT),
        ("linear_proj", 0),  # attention's output, which attention keeps
        ("linear_fc1", 2 * UNIT),
        ("linear_fc2", 2 * SEQUENCE * FFN),
    ],
)
def test_only_layers_with_an_adapter_keep_their_input(target, input_bytes):
    assert held_bytes(target) == frozen_held_bytes() + input_bytes + LOW
    assert held_bytes(f"*.{target}") == held_bytes(target)


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("precision", "gpu", "element_bytes"), [("fp8", H100, 1), ("mxfp8", B200, 1 + 1 / 32)]
)
def test_under_fp8_an_adapter_keeps_the_norms_output_beside_the_quantised_one(
    precision, gpu, element_bytes
):
    """TE pytorch/module/layernorm_linear.py saves `ln_out`, quantised, of a frozen weight too if it
    returns it, and else clears it."""
    found = {}
    for target in ("linear_qkv", "linear_proj"):
        asked = job(lora_rank=RANK, lora_target_modules=[target], precision=precision)
        found[target] = profile_job(asked, gpu, only=()).kinds[0].record("none").held_bytes
    assert found["linear_qkv"] - found["linear_proj"] == (2 + element_bytes) * UNIT


@pytest.mark.any_version
@pytest.mark.parametrize("userbuffers", [False, True])
def test_under_sequence_parallelism_an_adapter_keeps_the_whole_gathered_input(userbuffers):
    config = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "tp_comm_overlap": userbuffers,
    }
    found = {name: held_bytes(name, config=config) for name in ("linear_qkv", "linear_proj")}
    own, whole = 2 * UNIT // 2, 2 * UNIT  # Transformer Engine's, and the adapter's
    assert found["linear_qkv"] - found["linear_proj"] == own + whole


@pytest.mark.any_version
def test_dropout_keeps_a_mask_and_what_it_left():
    more = {t: held_bytes(t, lora_dropout=0.1) - held_bytes(t) for t in LORA_TARGETS}
    assert more["linear_fc2"] == SEQUENCE * FFN  # the mask: nobody keeps what went in
    assert more["linear_proj"] == (1 + 2) * UNIT  # attention keeps its output, too


def test_all_but_the_adapters_is_frozen():
    config = {"moe_layer_freq": [1] * 4, "moe_shared_expert_intermediate_size": 64}
    asked = job({**MOE, **config}, lora_rank=RANK)
    with shard(asked, [1]) as built:
        trained = [name for name, p in built.model.named_parameters() if p.requires_grad]
    assert all(".adapter." in name for name in trained)
    assert {name.partition(".adapter")[0].rpartition("layers.0.")[2] for name in trained} == {
        *("self_attention.linear_qkv", "self_attention.linear_proj"),
        *("mlp.experts.linear_fc1", "mlp.experts.linear_fc2"),
        *("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
    }


def test_gradients_are_of_the_adapters_alone():
    (kind,) = profile_job(
        job(lora_rank=RANK, lora_target_modules=["linear_qkv"]), H100, only=()
    ).kinds
    outputs = HIDDEN + 2 * HIDDEN * GROUPS // HEADS
    assert kind.static.gradient_bytes == 4 * RANK * (HIDDEN + outputs)


@pytest.mark.any_version
def test_experts_share_one_adapter_on_a_rank():
    asked = {"lora_rank": RANK, "lora_target_modules": ["linear_fc1"]}
    asked = job({**MOE, "moe_layer_freq": [1] * 4}, **asked)
    (kind,) = profile_job(asked, H100, only=()).kinds
    width = MOE["moe_ffn_hidden_size"]
    assert kind.static.gradient_bytes == 4 * RANK * (HIDDEN + 2 * width)


@pytest.mark.any_version
@pytest.mark.filterwarnings("ignore:apply_rope_fusion for multi-latent attention")
def test_latent_attention_has_the_adapters_that_are_named():
    widths = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_head_dim": 32, "v_head_dim": 24}
    mla = {"multi_latent_attention": True, "qk_layernorm": True, "qk_pos_emb_head_dim": 16}

    def adapted(*targets):
        asked = {"lora_rank": RANK, "lora_target_modules": list(targets)}
        asked = job({**widths, **mla, "num_query_groups": HEADS}, **asked)
        with shard(asked, [1]) as built:
            named = [name for name, _ in built.model.named_modules() if name.endswith(".adapter")]
        return {name.split(".")[-2] for name in named}

    assert adapted(*LORA_TARGETS) == {"linear_proj", "linear_fc1", "linear_fc2"}
    assert adapted("linear_q_down_proj", "linear_kv_up_proj") == {
        "linear_q_down_proj",
        "linear_kv_up_proj",
    }


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.any_version)])
def test_a_plan_is_what_megatrons_schedule_does_with_adapters(tensor):
    """But for the first stage: what the embedding gives is a leaf that requires grad, as Bridge's
    peft/recompute.py and `runtime.apply` make it, and a leaf and its gradient stay as long as the
    graph of the microbatch before, which schedules drop when the next one has run."""
    config = {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": tensor}
    config |= {"sequence_parallel": tensor > 1}
    targets = {"lora_rank": RANK, "lora_target_modules": ["linear_qkv", "linear_fc2"]}
    asked = job({**MOE, **config}, **targets)
    profile = profile_job(asked, H100)
    plan = middle_plan(asked, profile)
    assert set(plan.recompute_policy) != {"none"}
    first, last = (check.megatron_bytes - check.predicted_bytes for check in verify(plan))
    assert abs(last) < 256
    # Static bytes count what a dispatcher keeps of a layer without recompute: KiB more.
    assert -10_000 < first < 2 * profile.boundary_bytes + 256


# -------------------------------------------------------------------------------------- the fields


@pytest.mark.any_version
def test_a_job_has_bridges_default_targets():
    assert tuple(job(lora_rank=RANK).lora_target_modules) == LORA_TARGETS


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"lora_target_modules": ["q_proj"]},
            "q_proj: adapters .* linear_qkv, .*give these names",
        ),
        ({"lora_target_modules": ["*"]}, "or patterns that end in one"),
        ({"lora_target_modules": ["*.layers.0.*.linear_qkv"]}, "modelled on every layer"),
        ({"lora_target_modules": []}, "lora_rank without lora_target_modules"),
        ({"lora_target_modules": ["in_proj"], "lora_rank": 0}, "without lora_rank"),
        ({"lora_dropout": 0.1, "lora_rank": 0}, "without lora_rank"),
        ({"lora_dropout": 1.0}, "lora_dropout"),
    ],
)
def test_targets_that_are_not_modelled_are_refused(fields, said):
    with pytest.raises(OptionError, match=said):
        job(**{"lora_rank": RANK, **fields})


@pytest.mark.any_version
def test_targets_that_a_model_does_not_have_are_refused():
    with pytest.raises(OptionError, match=r"no layer of the model is one of .*in_proj"):
        profile_job(job(lora_rank=RANK, lora_target_modules=["in_proj"]), H100)


def test_every_name_of_megatrons_linear_layers_is_taken():
    for target in ADAPTED:
        assert job(lora_rank=RANK, lora_target_modules=[target, f"*.{target}"])


@pytest.mark.any_version
def test_what_has_adapters_is_said():
    asked = job(lora_rank=RANK, lora_target_modules=["linear_qkv", "linear_fc2"])
    said = assumed(asked, H100, H100.reaches)
    assert "LoRA of rank 4 on linear_qkv, linear_fc2; everything else is frozen." in said


@pytest.mark.any_version
def test_a_job_with_adapters_comes_back_from_json():
    asked = job(lora_rank=RANK, lora_target_modules=["linear_qkv"], lora_dropout=0.1)
    facts = profile_job(asked, H100, only=()).model.facts["job"]
    assert job_from(facts, "the profile") == asked
    assert asked.config == DENSE
