"""Profiles without a device, against formulas, Megatron's schedule on meta, and the commands."""

import contextlib
import importlib.util
import io
import json
import math
import re
import subprocess
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from megatron_autorecompute.cli import main
from megatron_autorecompute.errors import (
    MachineError,
    OptionError,
    ProfileError,
    VerificationError,
)
from megatron_autorecompute.meta.devices import Efficiency, device
from megatron_autorecompute.meta.job import job_from
from megatron_autorecompute.meta.measured_records import with_measured
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.meta.recipe import job_from_recipe
from megatron_autorecompute.meta.verify import TOLERANCE, require_verified, verify
from megatron_autorecompute.planner.cost.unit_costs import CostTable
from megatron_autorecompute.planner.plan import Plan, make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import NONE, RecomputePolicy
from megatron_autorecompute.work_order import GAP_MS
from testing.ranks import fresh_processes

H100 = device("h100-80gb")
SEQUENCE, HIDDEN, FFN, HEADS, GROUPS = 512, 256, 1024, 8, 2
UNIT = SEQUENCE * HIDDEN
DENSE = {
    "num_layers": 4,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": FFN,
    "num_attention_heads": HEADS,
    "num_query_groups": GROUPS,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
MOE = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 512,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_aux_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "aux_loss",
}
LOCAL = {
    **DENSE,
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": "gelu",
    "num_query_groups": None,
}


def job(config=None, **fields):
    data = {
        "name": "tiny",
        "config": {**DENSE, **(config or {})},
        "num_gpus": 8,
        "seq_length": SEQUENCE,
        "global_batch_size": 32,
        "vocab_size": 1000,
        **fields,
    }
    return job_from(data, "this job")


AHEAD = replace(H100, reaches=replace(H100.reaches, host_us=0, module_us=0))
"""With a host that layers as small as these do not wait for."""


def records(config=None, kind=0, only=None, **fields):
    found = profile_job(job(config, **fields), H100, only=only).kinds[kind]
    return {record.choice: record for record in found.choices}


def dense_held_bytes(linear_input=2.0, tensor=1):
    """What kernels.py says a dense layer keeps, tensor by tensor, with sequence parallelism."""
    token_bytes = 4 * SEQUENCE // tensor
    keys = UNIT * GROUPS / HEADS
    split = [
        2 * UNIT,  # the layer's input, read by the first norm
        2 * UNIT,  # input of the second norm
        2 * linear_input * UNIT,  # both norms' outputs, for the weight gradients
        2 * UNIT,  # q
        2 * 2 * keys,  # k, v
        2 * UNIT,  # attention's output, which under fp8 the projection keeps as it is, too
        4 * HEADS * SEQUENCE,  # log-sum-exp
        2 * 2 * SEQUENCE * FFN,  # SwiGLU's input
        linear_input * SEQUENCE * FFN,  # its output
    ]
    return sum(split) / tensor + 2 * token_bytes  # both norms' statistics


# ------------------------------------------------------------------------------------- held bytes


def test_dense_layer_holds_the_stated_tensors():
    assert records(only=())["none"].held_bytes == dense_held_bytes()


def test_fp8_keeps_one_byte_of_linear_inputs():
    assert records(precision="fp8", only=())["none"].held_bytes == dense_held_bytes(1.0)


def test_tensor_and_sequence_parallelism_split_all_of_it():
    found = records({"tensor_model_parallel_size": 2, "sequence_parallel": True}, only=())
    assert found["none"].held_bytes == dense_held_bytes(tensor=2)


def test_context_parallelism_splits_all_of_it():
    found = records({"context_parallel_size": 2}, only=())
    assert found["none"].held_bytes == dense_held_bytes() / 2


def test_full_recompute_holds_the_input_alone():
    assert records(only=())["full"].held_bytes == 2 * UNIT


RANDOM_STATES = 8
"""Bytes that a checkpoint keeps besides its inputs, where random states are stood in for."""


@pytest.mark.parametrize(
    ("recipe", "shared"), [({}, True), ({"fp8_recipe": "delayed"}, False), (None, True)]
)
def test_core_attn_under_fused_attention_holds_the_whole_projection_instead(recipe, shared):
    # q and k in place of log-sum-exp, and of the output where the projection keeps it quantised.
    keys = UNIT * GROUPS / HEADS
    more = 2 * UNIT + 2 * keys - 4 * HEADS * SEQUENCE - (0 if shared else 2 * UNIT)
    found = records(recipe, precision="bf16" if recipe is None else "fp8")
    cost = found["selective[core_attn]"].held_bytes - found["none"].held_bytes
    assert more <= cost <= more + RANDOM_STATES
    assert found["selective[core_attn]"].backward_ms > found["none"].backward_ms


def test_core_attn_costs_qwen3_as_much_as_was_measured():
    # Megatron Bridge #3880: Qwen3-30B-A3B holds 1.79 GB more with core_attn, in its 48 layers.
    attention = {"num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128}
    found = records({**attention, "qk_layernorm": True}, only=("core_attn",), seq_length=4096)
    cost = found["selective[core_attn]"].held_bytes - found["none"].held_bytes
    assert 48 * cost == pytest.approx(1.79e9, rel=0.002)


@pytest.mark.any_version
def test_core_attn_saves_the_scores_under_unfused_attention():
    found = records(LOCAL, only=("core_attn",), transformer_impl="local")
    saved = found["none"].held_bytes - found["selective[core_attn]"].held_bytes
    # One 16-bit score per head and pair at the least.
    assert saved >= 2 * HEADS * SEQUENCE**2 - RANDOM_STATES


@pytest.mark.any_version
def test_mlp_is_inert_on_a_moe_layer():
    dense, moe = profile_job(job(MOE), H100).kinds
    assert (dense.name, moe.name) == ("dense", "moe")
    assert dense.record("selective[mlp]").held_bytes < dense.record("none").held_bytes
    assert moe.inert["selective[mlp]"] == "none"
    assert moe.inert["selective[layernorm+mlp]"] == "selective[layernorm]"
    # What Megatron itself runs of a list for all layers, dead work included.
    assert moe.inert["selective[mlp+moe]+all"] == "selective[moe]+all"
    assert dense.inert["selective[mlp+moe]+all"] == "selective[mlp]+all"


@pytest.mark.any_version
def test_experts_hold_their_tokens_as_stated():
    found = records(MOE, kind=1, only=("moe_act",))
    rows = 2 * SEQUENCE  # two experts for each token
    # moe_act gives back the activation's output, 2 bytes for each row and width.
    saved = found["none"].held_bytes - found["selective[moe_act]"].held_bytes
    # The first layer to run also shows the aux losses' tracker, 4 bytes for each layer built.
    assert saved - 2 * rows * MOE["moe_ffn_hidden_size"] in (0, 4 * 96)


@pytest.mark.any_version
def test_recompute_of_an_activation_gives_back_all_of_it_under_fp8_too():
    found = records(MOE, kind=1, only=("moe_act",), precision="fp8")
    saved = found["none"].held_bytes - found["selective[moe_act]"].held_bytes
    assert saved - 2 * SEQUENCE * MOE["moe_ffn_hidden_size"] in (0, 4 * 96)


@pytest.mark.newest_version  # before, Megatron needs fla to build such a layer
@pytest.mark.filterwarnings("ignore:Deterministic mode. set TRITON_CACHE_AUTOTUNING:UserWarning")
def test_layers_of_linear_attention_are_a_kind_of_their_own():
    fields = {f"linear_{of}_head_dim": HIDDEN // HEADS for of in ("key", "value")}
    fields |= {f"linear_num_{of}_heads": HEADS for of in ("key", "value")}
    linear = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 3}
    linear |= {"linear_conv_kernel_dim": 4, "deterministic_mode": True}
    kinds = profile_job(job({**fields, **linear}), H100, only=()).kinds
    layers = DENSE["num_layers"]
    whole = tuple(range(2, layers, 3))
    assert [k.layers for k in kinds] == [tuple(i for i in range(layers) if i not in whole), whole]


@pytest.mark.any_version
def test_capacity_pads_every_expert_to_its_factor():
    capacity = {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True}
    found = records({**MOE, **capacity}, kind=1, only=("moe_act",))
    saved = found["none"].held_bytes - found["selective[moe_act]"].held_bytes
    rows = 1.5 * 2 * SEQUENCE
    assert saved == pytest.approx(2 * rows * MOE["moe_ffn_hidden_size"], abs=4 * 96)


@pytest.mark.any_version
@pytest.mark.filterwarnings("ignore:apply_rope_fusion for multi-latent attention")
def test_mla_up_proj_gives_back_q_k_v_and_what_the_up_projections_keep():
    widths = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_head_dim": 32, "v_head_dim": 24}
    mla = {"multi_latent_attention": True, "qk_layernorm": True, "qk_pos_emb_head_dim": 16}
    found = records({**widths, **mla, "num_query_groups": HEADS}, only=("mla_up_proj",))
    saved = found["none"].held_bytes - found["selective[mla_up_proj]"].held_bytes
    attention = 2 * (32 + 16) + 24  # q, k and v of one head
    # The checkpoint's inputs are parts of one tensor, which it keeps with those that rotate.
    normalised = 96 + 64 - 16
    statistics = 2 * 4 * SEQUENCE
    assert saved == 2 * SEQUENCE * (HEADS * attention + normalised) + statistics


@pytest.mark.any_version
def test_logits_are_held_in_16_bit_by_te_and_in_32_bit_unfused():
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    logits = SEQUENCE * 1024
    te, unfused = (
        profile_job(job(config), H100, only=()).head.held_bytes for config in (fused, {})
    )
    assert 2 * logits <= te < 4 * logits <= unfused


# -------------------------------------------------------------------- against Megatron's schedule


def meta_step_peaks(asked, policy=None):
    """Activation peak and parameter bytes of every stage, from Megatron's own schedule."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_autorecompute.meta.fake_ranks import StepShape
    from testing.meta_stages import stage_step

    config = TransformerConfig(
        **{**asked.config, "activation_func": torch.nn.functional.gelu},
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        deallocate_pipeline_outputs=True,
    )
    shape = StepShape(
        asked.seq_length,
        asked.micro_batch_size,
        asked.num_microbatches,
        asked.padded_vocab_size,
        asked.data_parallel,
    )
    stages = range(asked.size("pipeline"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about an environment variable for communication speed
        runs = [stage_step(config, stage, shape, policy) for stage in stages]
    return [run.peak_bytes for run in runs], [run.parameter_bytes for run in runs]


@pytest.mark.parametrize(
    "text",
    [
        "full*2,none*2",
        pytest.param("none*2,full*2", marks=pytest.mark.any_version),
        pytest.param("selective[core_attn]", marks=pytest.mark.any_version),
    ],
)
def test_peaks_agree_with_megatrons_own_schedule(text):
    # The schedule runs without the fused softmax, which is a stand-in.
    apart = {"pipeline_model_parallel_size": 2, "masked_softmax_fusion": False}
    asked = job({**LOCAL, **apart}, transformer_impl="local")
    policy = RecomputePolicy.parse(text, num_layers=4)
    peaks, _ = meta_step_peaks(asked, policy)
    problem = Problem(profile_job(asked, H100), asked.layout(), asked.schedule())
    for stage, peak in zip(problem.cost(policy).stages, peaks, strict=True):
        static = problem.profile.stages[stage.stage].static.total_bytes
        # The meta step adds weight gradients apart: at most one matrix more is alive there.
        assert stage.peak.bytes - static == pytest.approx(peak, rel=0.05)


def middle_plan(asked, profile):
    """A plan that has to recompute something."""
    problem = Problem(profile, asked.layout(), asked.schedule())
    lean = max(choice.peak_bytes for choice in problem.stages.leanest)
    fast = max(choice.peak_bytes for choice in problem.stages.fastest)
    return make_plan(problem.at((lean + fast) // 2))


@pytest.fixture(scope="module")
def moe_job():
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    sizes |= {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}
    return job({**MOE, **sizes, "expert_tensor_parallel_size": 1})


@pytest.fixture(scope="module")
def moe_profile(moe_job):
    return profile_job(moe_job, H100)


def test_a_plan_of_a_dense_job_is_what_megatrons_schedule_does_with_the_stand_ins(tmp_path, capsys):
    pipeline = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    asked = job(pipeline, described_by="flags")
    path = tmp_path / "plan.json"
    middle_plan(asked, profile_job(asked, H100)).save(path)
    assert main(["verify", str(path), "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)
    assert [check["stage"] for check in checks] == [0, 1]
    assert all(check["fits"] and check["megatron_bytes"] > 0 for check in checks)


@pytest.mark.any_version
def test_a_plan_of_a_moe_job_is_what_megatrons_schedule_does_with_the_stand_ins(
    moe_job, moe_profile
):
    plan = middle_plan(moe_job, moe_profile)
    assert len(set(plan.recompute_policy)) > 1
    require_verified(verify(plan))


@pytest.mark.any_version
def test_what_a_dispatcher_keeps_counts_once_a_layer_and_not_for_every_microbatch():
    # With many experts, its map of tokens to experts weighs something beside the activations.
    experts = {"num_moe_experts": 64, "moe_router_dtype": "fp32"}
    asked = job({**MOE, **experts, "pipeline_model_parallel_size": 2})
    profile = profile_job(asked, H100, only=())
    dense, moe = (kind.static.buffer_bytes for kind in profile.kinds)
    assert dense == 0 < moe
    problem = Problem(profile, asked.layout(), asked.schedule())
    plan = replace(
        make_plan(problem.at(1 << 50)), recompute_policy=("full", "none", "full", "full")
    )
    for check in verify(plan):
        assert abs(check.predicted_bytes - check.megatron_bytes) < 64 < moe / 1000
    # The first stage's peak is in its last layer, where its output's gradient is alive anyway.
    unknown = tuple(
        replace(kind, choices=tuple(replace(r, kept_gradient_bytes=None) for r in kind.choices))
        for kind in profile.kinds
    )
    higher = Problem(replace(profile, kinds=unknown), asked.layout(), asked.schedule())
    known, twice = (each.cost(plan.policy).stages[0].peak for each in (problem, higher))
    assert twice.bytes - known.bytes == profile.boundary_bytes


@pytest.mark.any_version
@pytest.mark.parametrize("stages", [1, 2])
def test_on_the_last_stage_what_a_dispatcher_keeps_and_its_layer_saves_counts_once(stages):
    experts = {"num_moe_experts": 64, "moe_router_dtype": "fp32"}
    asked = job({**MOE, **experts, "pipeline_model_parallel_size": stages})
    profile = profile_job(asked, H100, only=("moe",))
    saved = {r.choice: r.also_static_bytes for r in profile.kinds[1].choices}
    assert saved["full+all"] < 64 > saved["selective[moe]+all"]
    problem = Problem(profile, asked.layout(), asked.schedule())
    plan = replace(make_plan(problem.at(1 << 50)), recompute_policy=("none",) * 4)
    last = verify(plan)[-1]
    assert abs(last.predicted_bytes - last.megatron_bytes) < 64 < saved["none"] / 100


@pytest.mark.parametrize(("limit", "chunks"), [(0, None), (3, None), (5, 2)])
def test_gradients_of_logits_wait_as_in_megatrons_schedule_and_not_for_the_optimizer(limit, chunks):
    fields = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": chunks,
        "gradient_accumulation_fusion": True,
    }
    asked, at_once = (
        job({**fields, "defer_embedding_wgrad_compute": later, "wgrad_deferral_limit": limit})
        for later in (True, False)
    )
    found, plain = (profile_job(each, H100, only=()) for each in (asked, at_once))
    plan = make_plan(Problem(found, asked.layout(), asked.schedule()).at(H100.memory_bytes))
    first, last = verify(plan)
    for check in (first, last):
        assert abs(check.predicted_bytes - check.megatron_bytes) < 64
    logits = 2 * SEQUENCE * asked.padded_vocab_size
    assert last.megatron_bytes > 2 * logits
    assert found.stages == plain.stages  # what the optimizer's step finds


@pytest.mark.any_version
def test_a_stand_in_that_keeps_more_than_its_record_says_is_found(moe_job, moe_profile):
    kinds = tuple(
        replace(
            kind,
            choices=tuple(replace(c, held_bytes=int(c.held_bytes * 0.97)) for c in kind.choices),
        )
        for kind in moe_profile.kinds
    )
    plan = middle_plan(moe_job, replace(moe_profile, kinds=kinds))
    with pytest.raises(VerificationError, match=r"of activations were predicted|Stage 1 needs"):
        require_verified(verify(plan))


def in_this_process(run, stages, max_workers, done):
    found = tuple(run(stage) for stage in stages)
    for each in found:
        done(each)
    return found


APART = {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tt|t|mL"}


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("base", "depths", "stages", "pipeline"),
    [
        pytest.param(DENSE, 2, 1, {}, id="one stage"),
        pytest.param(DENSE, 2, 2, {}, id="two stages"),
        pytest.param(MOE, 1, 2, APART, id="a depth in a chunk of its own"),
    ],
)
def test_multi_token_prediction_is_what_megatrons_schedule_does(
    monkeypatch, base, depths, stages, pipeline
):
    monkeypatch.setattr("megatron_autorecompute.meta.verify.in_processes", in_this_process)
    config = {**base, **pipeline, "pipeline_model_parallel_size": stages, "mtp_num_layers": depths}
    asked = job(config, moe_imbalance={"99": 1.0} if base is MOE else {})
    boundless = replace(H100, bandwidth_bytes=1e30)
    profile = profile_job(asked, boundless, Efficiency(gemm=1, attention=1))
    of_depths = profile.kinds[-depths:]
    assert [kind.layers for kind in of_depths] == [(4 + depth,) for depth in range(depths)]
    # Each depth: a projection of two hidden states to one, and a layer like the last.
    projection_ms = 2 * SEQUENCE * 2 * HIDDEN * HIDDEN / H100.rate("bf16") * 1e3
    logits_ms = 2 * SEQUENCE * HIDDEN * asked.padded_vocab_size / H100.rate("bf16") * 1e3
    layer = profile.kind_of(3).record("none")
    for kind in of_depths:
        none, full = kind.record("none"), kind.record("full")
        assert none.forward_ms == pytest.approx(layer.forward_ms + projection_ms)
        assert none.backward_ms == pytest.approx(layer.backward_ms + 2 * projection_ms, rel=1e-3)
        assert full.backward_ms == pytest.approx(none.backward_ms + none.forward_ms, rel=1e-3)
        assert bool(kind.imbalance) == (base is MOE)
    assert profile.head.forward_ms == pytest.approx((1 + depths) * logits_ms)
    assert profile.head.backward_ms == pytest.approx(2 * (1 + depths) * logits_ms)

    problem = Problem(profile, asked.layout(), asked.schedule())
    for plan in (middle_plan(asked, profile), make_plan(problem.at(1 << 50))):
        assert all(stage.recompute_ms >= 0 for stage in plan.cost.stages)
        for check in verify(plan):
            assert abs(check.error) <= TOLERANCE


@pytest.mark.any_version
def test_parameters_of_every_stage_are_megatrons():
    config = {**LOCAL, "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2}
    asked = job(config, transformer_impl="local")
    _, expected = meta_step_peaks(asked)
    found = profile_job(asked, H100, only=()).stages
    assert [stage.static.parameter_bytes for stage in found] == expected


# ------------------------------------------------------------------------------------------ times


@pytest.mark.any_version
def test_forward_time_is_the_layers_arithmetic_where_bandwidth_is_free():
    # Not of a capability whose narrow heads are slower.
    boundless = replace(H100, bandwidth_bytes=1e30, capability=10.3)
    reached = Efficiency(gemm=1, attention=1)
    layer = profile_job(job(), boundless, reached, only=()).kinds[0].record("none")
    weights = HIDDEN * (HIDDEN + 2 * HIDDEN * GROUPS // HEADS) + HIDDEN**2 + 3 * HIDDEN * FFN
    products = 2 * SEQUENCE * weights
    attention = 4 * SEQUENCE**2 * HIDDEN / 2  # causal: half of all pairs
    expected_ms = (products + attention) / H100.rate("bf16") * 1e3
    assert layer.forward_ms == pytest.approx(expected_ms, abs=GAP_MS)  # where reruns cost nothing
    backward_ms = (2 * products + 2.5 * attention) / H100.rate("bf16") * 1e3
    assert layer.backward_ms == pytest.approx(backward_ms, abs=GAP_MS)


@pytest.mark.any_version
def test_full_recompute_adds_exactly_one_forward():
    [kind] = profile_job(job(), AHEAD, only=()).kinds
    found = {record.choice: record for record in kind.choices}
    assert found["full+all"].backward_ms == pytest.approx(
        found["none"].backward_ms + found["none"].forward_ms, rel=1e-4
    )


@pytest.mark.any_version
def test_fp8_takes_the_products_at_its_own_rate():
    boundless = replace(H100, bandwidth_bytes=1e30)
    reached = Efficiency(gemm=0.5, gemm_quantised=0.5)
    bf16, fp8 = (
        profile_job(job(precision=precision), boundless, reached, only=()).kinds[0].record("none")
        for precision in ("bf16", "fp8")
    )
    saved_ms = bf16.forward_ms - fp8.forward_ms
    weights = HIDDEN * (HIDDEN + 2 * HIDDEN * GROUPS // HEADS) + HIDDEN**2 + 3 * HIDDEN * FFN
    slower_s = 1 / H100.rate("bf16") - 1 / H100.rate("fp8")
    assert saved_ms == pytest.approx(2 * SEQUENCE * weights / 0.5 * slower_s * 1e3)


@pytest.mark.any_version
def test_tensor_parallelism_pays_for_its_communication():
    sharded = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    slow = replace(AHEAD, link_bytes=1e6)
    fast, slowed = (
        profile_job(job(sharded), gpu, only=()).kinds[0].record("none").forward_ms
        for gpu in (AHEAD, slow)
    )
    # Two gathers and two reduce-scatters of 2 bytes for each element, half of it received.
    moved = 4 * 2 * UNIT / 2
    expected_ms = moved / H100.reaches.link * (1 / 1e6 - 1 / H100.link_bytes) * 1e3
    assert slowed - fast == pytest.approx(expected_ms, rel=1e-6)


# ----------------------------------------------------------------------------- measured records


@pytest.fixture(scope="module")
def modelled():
    return profile_job(job(MOE), H100)


@pytest.mark.any_version
def test_what_is_assumed_of_a_device_is_said_in_words(modelled):
    said = modelled.fingerprint["efficiency"].split(", ")
    assert f"gemm {H100.reaches.gemm:g}" in said
    assert all(re.fullmatch(r"[a-z_]+ [\d.]+", word) for word in said)


def measured_like(profile, **changed):
    """A profile of the dense layers alone with two choices, twice and three times as slow."""
    dense = profile.kinds[0]
    slower = tuple(
        replace(
            record,
            held_bytes=record.held_bytes + 1,
            forward_ms=2 * record.forward_ms,
            backward_ms=3 * record.backward_ms,
            source="measured",
        )
        for record in (dense.record("none"), dense.record("full"))
    )
    others = tuple(replace(kind, name="other") for kind in profile.kinds[1:])
    config = {**profile.model.facts["transformer_config"], **changed}
    return replace(
        profile,
        kinds=(replace(dense, choices=slower, inert={}), *others),
        model=replace(profile.model, facts={"transformer_config": config}),
        fingerprint={"device": "a real GPU"},
    )


@pytest.mark.any_version
def test_measured_records_replace_modelled_ones_and_scale_the_other_times(modelled):
    found = with_measured(modelled, measured_like(modelled))
    dense, moe = found.kinds
    for choice in ("none", "full"):
        assert dense.record(choice).held_bytes == modelled.kinds[0].record(choice).held_bytes + 1
        assert dense.record(choice).source == "measured"
    # Both kinds' other choices are as much slower as what was measured, their bytes as before.
    for kind, before, choice in (
        (dense, modelled.kinds[0], "selective[mlp]"),
        (moe, modelled.kinds[1], "selective[moe_act]"),
    ):
        scaled, was = kind.record(choice), before.record(choice)
        assert scaled.held_bytes == was.held_bytes
        assert scaled.forward_ms == pytest.approx(2 * was.forward_ms)
        assert scaled.backward_ms == pytest.approx(3 * was.backward_ms)
        assert "scaled by what was measured" in scaled.source
    assert found.head.forward_ms == pytest.approx(2 * modelled.head.forward_ms)
    assert found.assumptions[0].startswith("Measured on a real GPU: choices 2 of dense.")
    assert "Nothing here is measured" not in " ".join(found.assumptions)


@pytest.mark.any_version
def test_measured_records_of_other_layers_or_shapes_are_refused_with_what_differs(modelled):
    with pytest.raises(OptionError, match="ffn_hidden_size 4096, not 1024"):
        with_measured(modelled, measured_like(modelled, ffn_hidden_size=4096))
    longer = replace(modelled.parallelism, seq_length=1024)
    with pytest.raises(OptionError, match="seq_length 1024, not 512"):
        with_measured(modelled, replace(measured_like(modelled), parallelism=longer))


@pytest.mark.any_version
def test_modelled_records_are_not_taken_for_measured_ones(modelled):
    with pytest.raises(
        OptionError, match=r"no record of \S+ there is measured; they come from .bytes"
    ):
        with_measured(modelled, modelled)
    measured = measured_like(modelled)
    dense = measured.kinds[0]
    # As profiles said before: read, and no measurement either.
    none = replace(dense.record("none"), source="bytes: dry run; times: roofline")
    partly = replace(dense, choices=(none, dense.record("full")))
    found = with_measured(modelled, replace(measured, kinds=(partly, *measured.kinds[1:])))
    assert found.assumptions[0].startswith("Measured on a real GPU: choices 1 of dense.")
    assert found.kinds[0].record("none").source.startswith("bytes: meta step;")


@pytest.mark.any_version
def test_a_plan_of_measured_records_is_not_verified_against_stand_ins(modelled):
    found = with_measured(modelled, measured_like(modelled))
    with pytest.raises(ProfileError, match="Verify the plan of a profile made by estimate"):
        verify(middle_plan(job(MOE), found))


# ------------------------------------------------------------------------------ what is said of it


@pytest.mark.any_version
def test_assumptions_travel_with_the_profile():
    text = " ".join(profile_job(job(MOE, precision="fp8_block"), H100, only=()).assumptions)
    for said in ("Nothing here is measured", "gemm 68%", "stand-ins", "fp8_block", "equally many"):
        assert said in text


@pytest.mark.any_version
def test_stated_imbalance_is_on_moe_layers_only():
    profile = profile_job(job(MOE, moe_imbalance={"99": 1.3}), H100, only=())
    dense, moe = profile.kinds
    assert dense.imbalance == ()
    even, stated = (CostTable(profile, percentile) for percentile in (None, 99))
    for kind, factor in ((dense, 1.0), (moe, 1.3)):
        layer = kind.layers[0]
        held = even.record(layer, NONE).held_bytes
        assert stated.record(layer, NONE).held_bytes == math.ceil(held * factor)


@pytest.mark.any_version
def test_an_unknown_field_of_the_config_is_named():
    with pytest.raises(OptionError, match="config names num_layer"):
        profile_job(job({"num_layer": 3}), H100)


@pytest.mark.skipif(not importlib.util.find_spec("megatron.core.recompute"), reason="since 0.18")
def test_a_layer_that_is_repeated_for_every_depth_has_its_weights_once():
    repeated = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
    first, second = profile_job(job(repeated), H100, only=()).kinds[-2:]
    assert (first.name, second.name) == ("mtp-0", "mtp-1")
    assert first.static.parameter_bytes > 0 == second.static.parameter_bytes
    assert second.record("none").held_bytes > second.record("full").held_bytes > 0


def test_what_megatron_refuses_is_refused_with_its_reason():
    with pytest.raises(OptionError, match=r"Megatron refuses this config: .*num_attention_heads"):
        profile_job(job({"tensor_model_parallel_size": 16}, num_gpus=16), H100)
    # What a stage alone does not show: its config is one of a pipeline.
    later = {"defer_embedding_wgrad_compute": True, "pipeline_model_parallel_size": 2}
    for fields, reason in (
        ({}, "gradient accumulation fusion is not used"),
        ({"pipeline_model_parallel_size": 1}, "pipeline model parallel is not used"),
    ):
        with pytest.raises(OptionError, match=f"Megatron refuses this config: .*{reason}"):
            profile_job(job({**later, **fields}), H100)


def test_a_recipe_needs_bridge():
    if importlib.util.find_spec("megatron.bridge") is not None:
        pytest.skip("Megatron Bridge is installed")
    with pytest.raises(MachineError, match="--recipe llama3_8b asks for Megatron Bridge"):
        job_from_recipe("llama3_8b")


def command(*words, **options):
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "megatron_autorecompute", *words],
        capture_output=True,
        text=True,
        **options,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_flags_of_pretrain_gpt_give_the_same_layers_as_yaml(tmp_path):
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("this megatron-core wheel carries no megatron.training")
    flags = (
        f"--num-layers 4 --hidden-size {HIDDEN} --ffn-hidden-size {FFN} "
        f"--num-attention-heads {HEADS} --group-query-attention --num-query-groups {GROUPS} "
        "--swiglu --normalization RMSNorm --disable-bias-linear --hidden-dropout 0 "
        f"--attention-dropout 0 --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} "
        "--position-embedding-type rope --untie-embeddings-and-output-weights --bf16 "
        "--micro-batch-size 1 --global-batch-size 32 --vocab-size 1000 --train-iters 1 --lr 1e-4 "
        "--tokenizer-type NullTokenizer --mock-data --use-distributed-optimizer"
    )
    path = tmp_path / "p.json"
    # From flags to a plan in one command; its file has the profile.
    words = ("plan", "--gpu", "h100-80gb", "--num-gpus", "8", "-o", str(path))
    said = command(*words, "--set", "global_batch_size=64", "--", *flags.split())
    assert f"Written to {path}" in said
    assert Plan.load(path).schedule.num_microbatches == 8
    found = Plan.load(path).profile.kinds[0]
    assert {r.choice: r.held_bytes for r in found.choices} == {
        choice: record.held_bytes for choice, record in records().items()
    }


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--nonsense", "Megatron refuses these flags: unrecognized arguments: --nonsense\n"),
        ("--optimizer-cpu-offload", "--optimizer-cpu-offload: an optimizer in host memory is not"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp: FSDP shards weights and gradients, which is"),
    ],
)
def test_flags_that_megatron_does_not_know_or_that_are_not_modelled_are_refused(flag, said):
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("this megatron-core wheel carries no megatron.training")
    words = ["estimate", "--gpu", "h100-80gb", "--num-gpus", "8", "--", flag]
    with ProcessPoolExecutor(1, fresh_processes()) as pool:
        code, error = pool.submit(answered, words).result(timeout=240)
    assert code == 9
    assert error.startswith(f"megatron-autorecompute estimate: {said}")


def answered(words):
    """Exit code of a command in this process, and what it says to stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as error:
        return main(words), error.getvalue()


@pytest.mark.any_version
def test_unfused_rope_keeps_cosines_and_sines_of_the_rotated_share():
    whole = job({"apply_rope_fusion": False})
    held = [
        profile_job(replace(whole, rotary_percent=share), H100, only=()).kinds[0].record(NONE)
        for share in (1.0, 0.5)
    ]
    of_half_a_head = 2 * whole.seq_length * HIDDEN // HEADS // 2
    queries_and_keys = 2 * 2 * of_half_a_head
    assert held[0].held_bytes - held[1].held_bytes == queries_and_keys
