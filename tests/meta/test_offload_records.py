"""Records of offload: the bytes that Megatron's own code lets go, and where they are meanwhile."""

import random
from dataclasses import replace

import pytest

from megatron_autorecompute.cli import main
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta import offload_records
from megatron_autorecompute.meta.devices import device
from megatron_autorecompute.meta.job import load_job
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.meta.verify import verify
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.unit_costs import CostTable
from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import NONE, WHOLE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import Profile
from tests.meta.test_no_device import GROUPS, HEADS, MOE, SEQUENCE, UNIT, job

H100 = device("h100-80gb")
EVERY_TENSOR = {"min_offloaded_tensor_size": 1}
ROUNDING = 1e-9  # of shares of a layer's time, which are differences of sums
MODULES = ("layernorm", "moe_act")
SETS = [("core_attn", "attn_proj", "mlp_norm"), ("expert_fc1", "moe_act")]


@pytest.fixture(scope="module")
def profile():
    config = {**EVERY_TENSOR, **MOE}
    return profile_job(job(config), H100, only=MODULES, offload=SETS)


def test_what_leaves_is_what_the_layer_holds_less(profile):
    """Held bytes are those that LiveBytes counts, what leaves is counted by storage."""
    of_offload = [
        (kind.record(record.policy.recompute), record)
        for kind in profile.kinds
        for record in kind.choices
        if record.offload_groups
    ]
    assert len(of_offload) == 5  # on the dense kind one, on that with experts two of two
    for plain, record in of_offload:
        leaves = sum(group.device_bytes for group in record.offload_groups)
        assert record.held_bytes + leaves == plain.held_bytes, record.choice
        assert record.host_bytes >= leaves
        assert record.forward_ms == pytest.approx(plain.forward_ms)


@pytest.mark.any_version
@pytest.mark.filterwarnings("ignore:apply_rope_fusion for multi-latent attention")
def test_what_offload_leaves_behind_is_not_counted_as_static_bytes():
    fields = {
        "num_layers": 4,
        "hidden_size": 512,
        "ffn_hidden_size": 1024,
        "num_attention_heads": 8,
        "num_moe_experts": 16,
        "moe_ffn_hidden_size": 256,
        "moe_shared_expert_intermediate_size": 256,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_layer_freq": [0, 1, 1, 1],
        "expert_model_parallel_size": 8,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
    }
    deepseek = load_job("megatron_autorecompute/examples/deepseek-v3.yaml")
    small = replace(
        deepseek, num_gpus=16, global_batch_size=16, config={**deepseek.config, **fields}
    )
    with_offload, without = (
        profile_job(small, H100, only=MODULES, offload=sets).kinds
        for sets in ((("core_attn", "moe_act"),), ())
    )
    for one, other in zip(with_offload, without, strict=True):
        assert one.static.buffer_bytes == pytest.approx(other.static.buffer_bytes, rel=0.05)


def test_groups_are_those_that_megatrons_modules_save(profile):
    dense, moe = profile.kinds
    core, proj = dense.record("none+offload[attn_proj+core_attn]").offload_groups
    keys, log_sum_exp = UNIT * GROUPS / HEADS, 4 * HEADS * SEQUENCE
    assert (core.name, core.host_bytes) == ("core_attn", 2 * (2 * UNIT + 2 * keys) + log_sum_exp)
    # The attention's output is copied with both, and free once the projection's copy has left.
    assert (proj.name, proj.host_bytes, proj.device_bytes) == ("attn_proj", 2 * UNIT, 2 * UNIT)
    assert core.device_bytes == core.host_bytes - 2 * UNIT
    assert core.forward_end < proj.forward_end
    assert proj.backward_begin < proj.backward_end <= core.backward_begin + ROUNDING
    assert core.backward_begin < core.backward_end
    fc1, act = moe.record("none+offload[expert_fc1+moe_act]").offload_groups
    routed = SEQUENCE * MOE["moe_router_topk"]
    assert fc1.host_bytes == fc1.device_bytes == 2 * routed * UNIT // SEQUENCE
    assert act.forward_end > fc1.forward_end


@pytest.mark.parametrize("seed", [1, 2])
def test_peaks_of_stages_that_offload_are_those_of_megatrons_schedule(profile, seed):
    """Megatron's own manager, past its warm-up, in Megatron's own schedule."""
    rng = random.Random(seed)
    records = [kind.choices for layer in range(4) for kind in profile.kinds if layer in kind.layers]
    choices = [rng.choice([r for r in own if r.offload_groups or seed > 1]) for own in records]
    policy = RecomputePolicy(tuple(record.policy for record in choices))
    problem = Problem(profile, Layout.from_flags(4, 2, None), Schedule(2, 1, 6))
    plan = make_plan(problem.at(1 << 40))
    checks = verify(replace(plan, recompute_policy=tuple(policy.to_config())))
    for check in checks:
        assert check.agrees, (policy.format(), check)
        assert check.error > -1e-5


def test_of_a_dense_layer_that_leaves_as_a_whole_nothing_is_left(profile, monkeypatch):
    """What LiveBytes counts as held, and what autograd saves, are the same storages."""
    monkeypatch.setattr(offload_records, "LEAST_ELEMENTS", 1)
    asked = job({**EVERY_TENSOR, **MOE})
    dense, experts = offload_records.with_whole_layers(asked, profile).kinds
    for kind in (dense, experts):
        plain, record = kind.record(NONE), kind.record(WHOLE)
        (group,) = record.offload_groups
        assert record.held_bytes + group.device_bytes == plain.held_bytes
        # A view leaves without the rest of its storage, which is free then, too.
        assert group.host_bytes >= 0.99 * group.device_bytes
        level = record.held_bytes + record.backward_transient_bytes
        assert level == plain.held_bytes + plain.backward_transient_bytes
    assert dense.record(WHOLE).held_bytes == 0
    # What a router and a dispatcher keep otherwise than for autograd; 0.19 one [s, b, h] more.
    left = experts.record(WHOLE).held_bytes
    assert left < 0.02 * plain.held_bytes + 2 * UNIT


def test_a_setting_for_all_layers_is_known_on_layers_that_lack_its_modules(profile):
    table = CostTable(profile)
    for modules in SETS:
        asked = LayerPolicy(offload=modules)
        assert all(table.record(layer, asked) is not None for layer in range(4))


@pytest.mark.any_version
def test_a_file_has_the_records_that_were_asked_for(tmp_path, capsys):
    yaml, written = tmp_path / "job.yaml", tmp_path / "profile.json"
    yaml.write_text(
        "name: tiny\nnum_gpus: 8\nseq_length: 512\nglobal_batch_size: 32\nvocab_size: 1000\n"
        "config: {num_layers: 2, hidden_size: 256, num_attention_heads: 8, "
        "add_bias_linear: false, min_offloaded_tensor_size: 1}\n"
    )
    words = ["--gpu", "h100-80gb", "--offload", "qkv_linear", "--offload", "cpu_offloading"]
    assert main(["estimate", str(yaml), *words, "-o", str(written)]) == 0
    [kind] = Profile.load(written).kinds
    found = kind.record("selective[mlp]+offload[qkv_linear]")
    assert [group.name for group in found.offload_groups] == ["qkv_linear"]
    assert [group.name for group in kind.record(WHOLE).offload_groups] == ["cpu_offloading"]
    assert main(["estimate", str(yaml), "--gpu", "h100-80gb", "--offload", "mlp"]) != 0
    assert "Unknown module mlp to offload" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "sets", "error", "said"),
    [
        (
            {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 4},
            [("cpu_offloading",)],
            OptionError,
            "no support for Pipeline parallelism with CPU offloading",
        ),
        ({"mtp_num_layers": 1}, [("cpu_offloading",)], OptionError, "depths stay"),
        ({"overlap_moe_expert_parallel_comm": True}, SETS, OptionError, "beside EP overlap"),
    ],
)
def test_what_has_no_records_is_refused(fields, sets, error, said):
    with pytest.raises(error, match=said):
        profile_job(job({**MOE, "expert_model_parallel_size": 8, **fields}), H100, offload=sets)
