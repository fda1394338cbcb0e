"""From a recipe to a model that runs the policy: bits, hooks, adapters."""

import copy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_autorecompute.compat import model_layers
from megatron_autorecompute.errors import ApplyError, PolicyError
from megatron_autorecompute.integrations import megatron_bridge
from megatron_autorecompute.policy import RecomputePolicy
from tests.bridge import recipes

pytestmark = pytest.mark.usefixtures("one_rank")

MIX = "full,selective[core_attn+mlp],none,full"


@pytest.fixture(params=["llama", "moe"])
def cfg(request):
    if request.param == "llama":
        return recipes.tiny_llama_pretrain_config()
    return recipes.tiny_moe_pretrain_config()


def policy_for(cfg):
    return MIX.replace("mlp", "moe") if cfg.model.num_moe_experts else MIX


def built(cfg, *hooks):
    """This rank's bare chunks, with the same weights every time."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    cfg.model.vocab_size = 128
    cfg.model.finalize()
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    for hook in hooks:
        megatron_bridge.register(cfg.model, hook)
    return cfg.model.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None
    )


def gradients(chunks):
    """One microbatch's loss and the gradient of every parameter that has one."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    tokens = torch.arange(64).view(2, 32) % 128
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1)
    positions = torch.arange(32).expand(2, 32)
    loss = chunks[0].train()(tokens, positions, mask, labels=tokens.roll(1, 1)).mean()
    loss.backward()
    return loss, {n: p.grad for n, p in chunks[0].named_parameters() if p.grad is not None}


def same_bits(one, other):
    return torch.equal(one[0], other[0]) and all(
        torch.equal(gradient, other[1][name]) for name, gradient in one[1].items()
    )


def test_a_policy_in_a_recipe_gives_the_same_bits_and_runs(cfg):
    without = gradients(built(copy.deepcopy(cfg)))
    megatron_bridge.set_policy(cfg.model, policy_for(cfg))
    policy = megatron_bridge.resolve(cfg)
    chunks = built(cfg, megatron_bridge.policy_hook(policy))
    calls = count_layer_calls(chunks)
    run = gradients(chunks)
    assert without[1].keys() == run[1].keys()
    assert same_bits(without, run)
    assert calls == {0: 2, 1: 1, 2: 1, 3: 2}  # full layers run again in the backward


def count_layer_calls(chunks):
    calls = {}
    for layer, index in model_layers.numbered_layers(chunks):
        calls[index] = 0

        def count(*_, index=index):
            calls[index] += 1

        layer.register_forward_pre_hook(count)
    return calls


def test_native_fields_run_as_the_policy_they_came_from():
    cfg = recipes.tiny_llama_pretrain_config()
    without = gradients(built(copy.deepcopy(cfg)))
    megatron_bridge.set_policy(cfg.model, "full+all*2,none*2")
    megatron_bridge.resolve(cfg)
    assert cfg.model.recompute_policy is None
    chunks = built(cfg)
    calls = count_layer_calls(chunks)
    assert same_bits(without, gradients(chunks))
    assert calls == {0: 2, 1: 2, 2: 1, 3: 1}


def test_the_hook_applies_where_the_model_was_built_without_the_field():
    cfg = recipes.tiny_llama_pretrain_config()
    policy = RecomputePolicy.parse(MIX, num_layers=4)
    chunks = built(cfg, megatron_bridge.policy_hook(policy))
    calls = count_layer_calls(chunks)
    gradients(chunks)
    assert calls == {0: 2, 1: 1, 2: 1, 3: 2}
    from megatron_autorecompute.runtime.apply import apply

    with pytest.raises(ApplyError, match="applied by the recompute_policy of a Megatron Bridge"):
        apply(policy, chunks)


def test_the_hook_refuses_a_model_that_can_run_no_policy():
    hook = megatron_bridge.policy_hook(RecomputePolicy.parse("none", num_layers=4))
    with pytest.raises(PolicyError, match="No TransformerBlock in this model"):
        hook([torch.nn.Linear(2, 2)])


def test_auto_without_anybody_who_decides_is_an_error():
    cfg = recipes.tiny_llama_pretrain_config()
    megatron_bridge.set_policy(cfg.model, "auto")
    with pytest.raises(ApplyError, match="nothing in this program measures and decides"):
        built(cfg)
    with megatron_bridge.claimed():
        built(cfg)


def with_adapters(cfg, policy, targets, dropout=0.0):
    """The bare chunks of the recipe with Bridge's LoRA, under a policy or without one."""
    from megatron.bridge.peft.lora import LoRA

    cfg.peft = LoRA(dim=4, alpha=8, dropout=dropout, target_modules=targets)
    megatron_bridge.set_policy(cfg.model, policy)
    resolved = megatron_bridge.resolve(cfg)
    hooks = [megatron_bridge.policy_hook(resolved)] if policy else []

    def adapt(model):
        """As Bridge's setup does: the adapters come after our hook. Its second matrix is zero at
        first, and the gradient of the other with it."""
        model = cfg.peft(model, training=True)
        for chunk in model:
            for parameter in chunk.parameters():
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter, std=0.1)
        return model

    return built(cfg, *hooks, adapt)


TARGETS = (["linear_qkv", "linear_proj"], ["linear_fc1", "linear_fc2"])
POLICIES = (
    *("full", MIX, "selective[mlp]", "full+all", "full/2", "full+keep[core_attn]"),
    *("selective[mlp_act]", "selective[qkv]", "selective[mlp+qkv]", "selective[mlp_act+qkv]"),
    "full*1,full+keep[core_attn]*1,selective[mlp_act+qkv]*1,selective[mlp]*1",
)
OF_EXPERTS = (
    *("full", "full/2", "full+keep[core_attn]", "full+keep[dispatch]", "selective[moe]"),
    *("selective[moe]+keep[dispatch]", "selective[experts]", "selective[qkv]"),
    "full*1,full+keep[core_attn+dispatch]*1,selective[experts+qkv]*1,selective[moe]*1",
)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("targets", [*TARGETS, TARGETS[0] + TARGETS[1]], ids="+".join)
@pytest.mark.parametrize(
    ("recipe", "policy"),
    [("llama", one) for one in POLICIES] + [("moe", one) for one in OF_EXPERTS],
)
def test_lora_behind_frozen_layers_gives_every_adapter_its_gradient(
    recipe, policy, targets, dropout
):
    make = getattr(recipes, f"tiny_{recipe}_pretrain_config")
    without = gradients(with_adapters(make(), None, targets, dropout))
    run = gradients(with_adapters(make(), policy, targets, dropout))
    trained = without[1].keys()
    assert all("adapter" in name for name in trained)
    assert {name.split(".")[2] for name in trained} == {"0", "1", "2", "3"}
    assert all(gradient.any() for gradient in without[1].values())
    assert trained == run[1].keys()
    assert same_bits(without, run)


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
@pytest.mark.parametrize("choice", ["full", "selective[mlp]"])
def test_dead_work_is_left_out_beside_bridges_adapters(choice, targets):
    """fc2 of each layer: beside linear_fc2's adapter too, whose input is what fc2's was."""

    def flops(policy):
        chunks = with_adapters(recipes.tiny_llama_pretrain_config(), policy, targets)
        with FlopCounterMode(display=False) as counter:
            gradients(chunks)
        return counter.get_total_flops()

    fc2 = 2 * (2 * 32) * 128 * 64
    assert flops(f"{choice}+all") - flops(choice) == 4 * fc2
