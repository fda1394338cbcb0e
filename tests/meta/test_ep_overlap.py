"""EP overlap: Megatron's own combined forward-backward on meta tensors."""

from dataclasses import replace

import pytest

from benchmarks.measured.stage_need import own_need
from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.meta.model import add_main_gradients, built_stage
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.meta.verify import require_verified, verify
from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.runtime.apply import apply
from testing.recorded_steps import recorded_step
from tests.meta.test_no_device import H100, HEADS, MOE, SEQUENCE, job

LAYERS = 4
FIELDS = {
    **MOE,
    "moe_layer_freq": 1,
    "expert_model_parallel_size": 4,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "none",
}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
HYBRID_EP = {
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_router_dtype": "fp32",
}


def moe_job(**fields):
    return job({**FIELDS, **fields}, num_gpus=4, global_batch_size=16)


def run(policy, **fields):
    layers = RecomputePolicy.parse(policy, num_layers=LAYERS)
    asked = moe_job(**fields)
    with built_stage(asked, 4, 0) as (models, shape, step), apply(layers, models):
        add_main_gradients((p for m in models for p in m.parameters()), dummies=asked.makes_dummies)
        return recorded_step(models, shape, step)


@pytest.mark.any_version
def test_a_forward_beside_a_backward_takes_one_microbatch_and_part_of_a_layer():
    # Megatron refuses delay_wgrad_compute without the overlap, and layers are profiled without.
    profile = profile_job(moe_job(**OVERLAP, delay_wgrad_compute=True), H100, only=())
    assert "delay_wgrad_compute" in profile.assumptions[-1]
    (kind,) = profile.kinds
    held = {record.choice: record.held_bytes for record in kind.choices}["none"]
    alone, beside = run("none"), run("none", **OVERLAP)
    assert 0 < beside.peak_bytes - alone.peak_bytes < held
    assert beside.peak_bytes < alone.peak_bytes + LAYERS * held  # two microbatches
    assert str(beside.peak_span.where).startswith("forward of microbatch ")


@pytest.mark.any_version
def test_recompute_at_the_begin_of_a_chunk_takes_less_beside_a_backward_than_at_its_end():
    lean = "selective[layernorm+moe_act]*2"
    first, last = (run(p, **OVERLAP).peak_bytes for p in (f"{lean},none*2", f"none*2,{lean}"))
    apart = [run(p).peak_bytes for p in (f"{lean},none*2", f"none*2,{lean}")]
    assert first < last
    assert last - first > abs(apart[1] - apart[0])


def problem_of(asked, policy=""):
    """The job's problem, of a profile with no other sets of modules than a policy has."""
    modules = [name for name in ("core_attn", "layernorm", "moe_act") if name in policy]
    profile = profile_job(asked, H100, only=modules)
    return Problem(profile, asked.layout(), asked.schedule())


def predicted(problem, policy, stage):
    """Activations of a stage's peak, without what its layers' dispatchers keep."""
    cost = problem.cost(RecomputePolicy.parse(policy, num_layers=LAYERS))
    return cost.stages[stage].peak.bytes - problem.profile.stages[stage].static.total_bytes


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        ("selective[core_attn+moe_act]*1,none*3", {}),
        ("none*2,selective[layernorm+moe_act]*2", {"moe_layer_freq": [0, 1, 1, 1]}),
        ("none*2,selective[moe_act]*2", HYBRID_EP),
    ],
)
def test_the_planners_peak_is_that_of_megatrons_combined_schedule(policy, fields):
    asked = moe_job(**OVERLAP, **fields)
    problem = problem_of(asked, policy)
    assert "full" not in {r.choice for kind in problem.profile.kinds for r in kind.choices}
    error = predicted(problem, policy, 0) / run(policy, **OVERLAP, **fields).peak_bytes - 1
    # The hidden size is 256: a boundary tensor is 1%. Megatron's nodes of losses are the rest.
    assert abs(error) < 0.0005


@pytest.mark.any_version
def test_two_stages_of_two_chunks_are_verified_in_the_combined_schedule():
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    asked = job({**FIELDS, **sizes, **OVERLAP}, num_gpus=8, global_batch_size=32)
    problem = problem_of(asked)
    checks = verify(make_plan(problem.at(H100.memory_bytes)))
    require_verified(checks)
    assert all(0 < check.error < 0.004 for check in checks)
    low = replace(checks[0], predicted_bytes=checks[0].megatron_bytes * 99 // 100)
    assert not low.agrees


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        pytest.param("none", {}, marks=pytest.mark.any_version),
        ("selective[layernorm+moe_act]*2,none*10", {"moe_layer_freq": [0] * 3 + [1] * 9}),
        pytest.param("none", {"overlap_p2p_comm": False}, marks=pytest.mark.any_version),
    ],
)
def test_chunks_between_a_backward_and_a_forward_keep_inputs_of_layers_and_gradients(
    policy, fields
):
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    fields = {**FIELDS, **sizes, **OVERLAP, "num_layers": 12, **fields}
    asked = job(fields, num_gpus=8, global_batch_size=32)
    problem = problem_of(asked, policy)
    layers = RecomputePolicy.parse(policy, num_layers=12).to_config()
    plan = replace(make_plan(problem.at(H100.memory_bytes)), recompute_policy=tuple(layers))
    # On the last stage the first chunk's forward beside its backward is highest, with nothing of
    # the other one in flight. What dispatchers keep that no layer saves counts more than once.
    assert all(0 <= check.error < 0.004 for check in verify(plan))


@pytest.mark.any_version
def test_a_job_that_offloads_beside_a_backward_is_run_as_it_is():
    """Also what no policy may: `mla_up_proj` made again from what `qkv_linear` offloads."""
    fields = {
        **OVERLAP,
        **{"multi_latent_attention": True, "q_lora_rank": 64, "kv_lora_rank": 64},
        **{"qk_head_dim": 32, "v_head_dim": 32, "qk_pos_emb_head_dim": 16},
        **{"attention_backend": "unfused", "attention_dropout": 0.0, "apply_rope_fusion": False},
    }
    modules = ["layernorm", "mla_up_proj", "moe_act"]
    offload = {
        **{"recompute_granularity": "selective", "recompute_modules": modules},
        **{"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1},
        "offload_modules": ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "expert_fc1"],
    }
    need = own_need(moe_job(**fields, **offload), H100, 0)
    less = run(f"selective[{'+'.join(modules)}]", **fields).peak_bytes - need.activation_bytes
    # Of four layers' scores the last one's stay; others are back, twice as torch saves them twice.
    scores = 2 * HEADS * SEQUENCE**2
    assert scores < less < 4 * scores
    assert need.first_step_bytes < need.peak_bytes  # in the warm-up all groups leave


def test_full_is_refused_beside_a_backward_in_megatrons_words():
    with pytest.raises(PolicyError, match=r"refuses full on layer 1 .*disable full recomputation"):
        run("none*1,full*3", **OVERLAP)
