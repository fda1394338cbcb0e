"""What is offloaded comes back bit for bit, in Megatron's own code, whatever layers offload."""

import contextlib
import random
from unittest import mock

import pytest
import torch

from megatron_autorecompute.compat import offload_modules
from megatron_autorecompute.errors import ApplyError, MachineError, PolicyError
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.runtime.apply import apply, in_force
from testing.ranks import run_ranks
from tests.grouped_experts import grouped_experts
from tests.hybrid_models import HAVE_HYBRID, hybrid_chunks, hybrid_config, runnable
from tests.support import one_step, start_parallel, tiny_config, tiny_gpt

ATTENTION = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
EXPERTS = (*ATTENTION, "expert_fc1", "moe_act")
SHARED = {"moe_grouped_gemm": True, "moe_shared_expert_intermediate_size": 64}
MODELS = {
    "dense": (ATTENTION, ("core_attn", "layernorm", "mlp"), {}),
    "moe": (EXPERTS, ("core_attn", "layernorm", "moe", "moe_act", "shared_experts"), SHARED),
    "mla": (
        ATTENTION,
        ("layernorm", "mla_up_proj"),
        {"normalization": "LayerNorm", "add_bias_linear": True},
    ),
    "hybrid": (ATTENTION, ("core_attn", "layernorm", "mlp"), {}),
}


@contextlib.contextmanager
def offloading():
    """Megatron's offload and its grouped experts, on CPU. Gives the list of tensors that leave."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

    from testing.offload_on_cpu import offload_on_cpu

    left, usual = [], ChunkOffloadHandler.offload

    def offload(self, tensor, *args, **kwargs):
        left.append(tensor.shape)
        return usual(self, tensor, *args, **kwargs)

    counted = mock.patch.object(ChunkOffloadHandler, "offload", offload)
    with offload_on_cpu(), grouped_experts(), counted:
        yield left


def model(kind, **fields):
    if kind == "hybrid":
        return hybrid_chunks(hybrid_config("*-*-", min_offloaded_tensor_size=1), "*-*-")
    return tiny_gpt(tiny_config(kind, min_offloaded_tensor_size=1, **MODELS[kind][2], **fields))


def random_choice(rng, kind):
    offloaded, recomputed, _ = MODELS[kind]
    offload = set(rng.sample(offloaded, rng.randint(0, 3)))
    modules = set(rng.sample(recomputed, rng.randint(0, 2)))
    if "attn_proj" in offload:
        offload.add("core_attn")
    elif "core_attn" in modules:
        offload.discard("core_attn")
    if "mla_up_proj" in modules:
        offload.discard("qkv_linear")
    if "moe" in modules:
        offload -= {"expert_fc1", "moe_act"}
    if rng.random() < 0.15:
        return LayerPolicy("full")
    return LayerPolicy("selective" if modules else "none", tuple(modules), offload=tuple(offload))


def random_policy(rng, kind, layers=4):
    return RecomputePolicy(tuple(random_choice(rng, kind) for _ in range(layers)))


def same_bits_in_steps(kind, policies, left, *, num_microbatches=2, **fields):
    """By policy: whether losses and gradients of the warm-up and of a step after it are those of
    the same model without a policy, and whether anything left."""
    models = model(kind, **fields)
    seeds = (1, 2)
    plain = [one_step(models, num_microbatches=num_microbatches, seed=seed) for seed in seeds]
    found = []
    applied = None
    for policy in policies:
        if applied is None:
            applied = apply(policy, models)
        else:
            applied.switch(policy)
        left.clear()
        steps = [one_step(models, num_microbatches=num_microbatches, seed=seed) for seed in seeds]
        same = [step.same_bits(other) for step, other in zip(steps, plain, strict=True)]
        found.append((policy.format(), all(same), bool(left)))
    applied.undo()
    left.clear()
    again = one_step(models, num_microbatches=num_microbatches, seed=1)
    return [*found, ("undone", again.same_bits(plain[0]), bool(left))]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", MODELS if HAVE_HYBRID else [*MODELS][:-1])
def test_random_mixes_of_recompute_and_offload_change_no_bit(kind):
    rng = random.Random(7)
    with runnable(), offloading() as left:
        found = same_bits_in_steps(kind, [random_policy(rng, kind) for _ in range(3)], left)
    assert found == [(text, True, "offload" in text) for text, *_ in found]


def built_the_same(kind, text, **fields):
    """Whether a model that is built with a policy has the bits of one that is built without."""
    from megatron_autorecompute.runtime import config_field

    plain = one_step(model(kind, **fields), num_microbatches=4, seed=1)
    config_field.install()
    try:
        built = model(kind, recompute_policy=text, **fields)
        return one_step(built, num_microbatches=4, seed=1).same_bits(plain)
    finally:
        config_field.uninstall()


def in_ranks(kind, policies, sizes, fields):
    start_parallel(**sizes)
    with offloading() as left:
        parsed = [RecomputePolicy.parse(text, num_layers=4) for text in policies]
        found = same_bits_in_steps(kind, parsed, left, num_microbatches=4, **sizes, **fields)
        found.append(("built", built_the_same(kind, policies[0], **sizes, **fields), True))
        return found


RANKS = {
    # A single layer of a chunk offloads: Megatron 0.19 alone ends in "Chunk mismatch".
    "two stages": (
        "dense",
        [
            "full/2*2,none+offload[attn_proj+core_attn]*2",
            "none,none+offload[attn_proj+core_attn]*2,full",
            "none+offload[mlp_norm],full*3",
        ],
        {"pipeline_model_parallel_size": 2},
    ),
    "two chunks on each of two stages": (
        "dense",
        [
            "none+offload[attn_proj+core_attn]*1,selective[mlp]+offload[mlp_norm]*1,"
            "none+offload[core_attn]*2"
        ],
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "two ranks of experts": (
        "moe",
        ["none+offload[expert_fc1+moe_act]*2,selective[moe]+offload[core_attn]*1,full*1"],
        {"expert_model_parallel_size": 2},
    ),
}


@pytest.mark.parametrize("case", RANKS)
def test_ranks_change_no_bit_before_and_after_the_warm_up(case):
    kind, policies, sizes = RANKS[case]
    for found in run_ranks(in_ranks, 2, kind, policies, sizes, {}):
        assert {same for _, same, _ in found} == {True}
        assert len(found) == len(policies) + 2


POLICY = "none+offload[core_attn]*1,selective[layernorm]+offload[mlp_norm]*2,full*1"


@pytest.mark.usefixtures("one_rank")
def test_a_policy_at_construction_is_the_same_and_undo_restores_every_switch():
    from megatron_autorecompute.runtime import config_field

    policy = RecomputePolicy.parse(POLICY, num_layers=4)
    config_field.install()
    try:
        with offloading():
            built = model("dense", recompute_policy=POLICY)
            later = model("dense")
            untouched = switches(later)
            with apply(policy, later) as applied:
                assert switches(built) == switches(later) != untouched
                for seed in (1, 2):
                    assert one_step(built, seed=seed).same_bits(one_step(later, seed=seed))
                assert applied.host_memory().pinned_bytes > 0
                waiting = applied.host_memory().waiting_bytes
                assert set(waiting) <= {"core_attn", "mlp_norm"}
                assert sum(waiting.values()) > 0
            in_force(built).undo()
            assert switches(built) == switches(later) == untouched
            assert applied.host_memory().pinned_bytes == 0
    finally:
        config_field.uninstall()


def switches(models):
    names = ("fine_grained_activation_offloading", "offload_modules")
    found = [{name: getattr(models[0].config, name) for name in names}]
    for module in models[0].modules():
        found.append({k: v for k, v in vars(module).items() if "offload" in k and k[0] != "_"})
    return [
        {
            k: v
            for k, v in each.items()
            if isinstance(v, bool | list) and k != "disable_param_offloading"
        }
        for each in found
    ]


@pytest.mark.usefixtures("one_rank")
def test_what_cannot_be_run_is_refused_with_the_way_out(monkeypatch):
    models = model("dense")
    moved = RecomputePolicy.parse(POLICY, num_layers=4)
    with pytest.raises(MachineError, match="needs Transformer Engine, and it is not installed"):
        apply(moved, models)
    with offloading():
        whole = RecomputePolicy.parse("megatron:cpu_offloading/2", num_layers=4)
        with pytest.raises(ApplyError, match="set cpu_offloading and cpu_offloading_num_layers"):
            apply(whole, models)
        late = RecomputePolicy.parse("selective[mla_up_proj]+offload[qkv_linear]", num_layers=4)
        with pytest.raises(PolicyError, match="offloads before it must have left"):
            apply(late, model("mla"))
        with apply(moved, models), pytest.raises(ApplyError, match="does not begin Megatron's"):
            models[0].decoder(torch.zeros(32, 2, 64), attention_mask=None)


def test_what_attention_reads_as_one_tensor_is_copied_apart_and_other_attention_is_left_alone():
    class TEDotProductAttention(torch.nn.Module):
        def forward(self, query, key, value, attention_mask):
            self.storages = {t.untyped_storage()._cdata for t in (query, key, value)}
            return query + 2 * key + 3 * value

    layer = torch.nn.Module()
    layer.self_attention = torch.nn.Module()
    layer.self_attention.core_attention = attention = TEDotProductAttention()
    packed = torch.randn(4, 2, 3, 3 * 8, requires_grad=True)
    three = packed.split(8, dim=-1)
    [handle] = offload_modules.keep_apart(layer)
    summed = attention(*three, None)
    assert len(attention.storages) == 3
    assert torch.equal(summed, three[0] + 2 * three[1] + 3 * three[2])
    summed.sum().backward()
    assert packed.grad[..., ::8].unique().tolist() == [1, 2, 3]
    handle.remove()
    attention(*three, None)
    assert len(attention.storages) == 1
    layer.self_attention.core_attention = torch.nn.Identity()
    assert offload_modules.keep_apart(layer) == []
