"""A policy changes no bit of what a training run computes, whatever mix of choices it is."""

import functools
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from megatron_autorecompute.policy import OWN_MODULES, LayerPolicy, RecomputePolicy
from megatron_autorecompute.work_order import RERUN_WITH
from testing.ranks import run_ranks
from tests.support import (
    MICRO_BATCH_SIZE,
    SEQ_LENGTH,
    forward_step,
    global_parameters,
    microbatch,
    start_parallel,
    tiny_config,
    tiny_gpt,
)

SHARED_EXPERTS = {"moe_shared_expert_intermediate_size": 64}


# ------------------------------------------------------------------------------------ a real run


@dataclass(frozen=True)
class Run:
    """Losses of all steps and microbatches; the last step's gradients and weights by name."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]

    def differences(self, other: "Run") -> list[str]:
        """What differs by as much as one bit."""
        found = [] if self.losses == other.losses else [f"losses {self.losses} {other.losses}"]
        for name in ("gradients", "weights"):
            mine, theirs = getattr(self, name), getattr(other, name)
            assert mine.keys() == theirs.keys()
            found += [f"{name} {k}" for k in mine if not torch.equal(mine[k], theirs[k])]
        return found


def train(
    kind="dense",
    *,
    policies=(None,),
    distributed_optimizer=False,
    num_microbatches=2,
    sizes=None,
    **fields,
):
    """Train one step for each policy: Megatron's DDP, schedule and optimizer, fresh weights."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    chunks = tiny_gpt(tiny_config(kind, **(sizes or {}), **fields))
    models, optimizer = wrapped(chunks, distributed_optimizer)
    model_parallel_cuda_manual_seed(9, force_reset_rng=True)
    losses, applied = [], None
    for step, policy in enumerate(policies):
        if policy is not None:
            applied = switched(applied, policy, models)
        losses += one_step(models, seed=step, num_microbatches=num_microbatches)
        gradients = {
            name: parameter.main_grad.clone()
            for chunk in chunks
            for name, parameter in global_parameters(chunk).items()
        }
        optimizer.step()
    weights = {n: p.detach().clone() for c in chunks for n, p in global_parameters(c).items()}
    return Run(tuple(losses), gradients, weights)


def switched(applied, policy, models):
    """The policy in force from now on."""
    from megatron_autorecompute.runtime.apply import apply

    if applied is None:
        return apply(policy, models)
    applied.switch(policy)
    return applied


def wrapped(chunks, distributed_optimizer):
    """The chunks in Megatron's DDP, and Megatron's Adam for them."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = chunks[0].config
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer)
    models = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=distributed_optimizer,
        ),
        models,
    )
    config.finalize_model_grads_func = finalize_model_grads  # as megatron.training does, afterwards
    return models, optimizer


def one_step(models, *, seed, num_microbatches):
    """Megatron's own schedule; the losses, which the last stage alone has."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for model in models:
        model.zero_grad_buffer()
    batches = [microbatch(1000 * seed + index) for index in range(num_microbatches)]
    several = len(models) > 1
    reduced = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in models] if several else iter(batches),
        model=models if several else models[0],
        num_microbatches=num_microbatches,
        seq_length=SEQ_LENGTH,
        micro_batch_size=MICRO_BATCH_SIZE,
        forward_only=False,
    )
    return [entry["loss"].item() for entry in reduced]


# ------------------------------------------------------------------------------- random policies


def random_policy(rng, modules, *, chunk=4, chunks=1, depths=0):
    """Any mix of none, full, groups inside a chunk, and any selective set of `modules`."""
    layers = [layer for _ in range(chunks) for layer in _random_chunk(rng, modules, chunk)]
    layers += [layer for _ in range(depths) for layer in _random_chunk(rng, modules, 1)]
    return RecomputePolicy(tuple(layers))


def _random_chunk(rng, modules, length):
    layers = []
    while len(layers) < length:
        kind = rng.choice(["none", "full", "full", "selective", "selective", "group"])
        group = rng.randint(1, length - len(layers)) if kind == "group" else 1
        again = _random_again(rng, modules)
        if kind == "selective":
            some = _without_nested(rng.sample(modules, rng.randint(1, len(modules))))
            again = again if "moe" in some else {"rerun_all": rng.random() < 0.3}
            layers.append(LayerPolicy("selective", some, **_only_dispatch(again)))
        elif kind == "none":
            layers.append(LayerPolicy())
        else:
            layers += [LayerPolicy("full", group=group, **again)] * group
    return layers


def _random_again(rng, modules):
    """What a checkpoint reruns: all but dead work, all, or neither dead work nor kept parts."""
    parts = ["core_attn", *["dispatch"] * ("moe" in modules)]
    keep = tuple(part for part in parts if rng.random() < 0.4)
    return {"keep": keep} if keep else {"rerun_all": rng.random() < 0.3}


def _only_dispatch(again):
    keep = [part for part in again.get("keep", ()) if part == "dispatch"]
    return {**again, "keep": tuple(keep)}


def _without_nested(modules):
    """The modules but for those of ours that lie inside another one, which is refused."""
    within = {inner for outer in modules for inner in RERUN_WITH.get(outer, ())}
    own = set(OWN_MODULES) & set(modules)
    twice = {m for m in within & set(modules) if m in own or "experts" in own or "qkv" in own}
    return tuple(module for module in modules if module not in twice)


# ---------------------------------------------------------------------------------- a single rank


DENSE = ("core_attn", "layernorm", "mlp", "mlp_act", "qkv")
MOE = ("core_attn", "layernorm", "mlp", "moe", "shared_experts", "experts", "qkv")
MODELS = {
    "dense": (DENSE, {}),
    "dense with linear biases and grouped queries": (
        DENSE,
        {"add_bias_linear": True, "num_query_groups": 2},
    ),
    "dense in bf16": (DENSE, {"bf16": True}),
    "dense with two prediction depths": (DENSE, {"mtp_num_layers": 2}),
    "MoE": (MOE, {"kind": "moe", **SHARED_EXPERTS}),
    "MoE with two prediction depths": (
        MOE,
        {"kind": "moe", "mtp_num_layers": 2, "moe_router_topk": 3},
    ),
    "MoE in every second layer": (MOE, {"kind": "moe", "moe_layer_freq": 2, **SHARED_EXPERTS}),
    # MLA configs say RMSNorm by default: the exception below.
    "MLA": ((*DENSE, "mla_up_proj"), {"kind": "mla", "normalization": "LayerNorm"}),
    "four unlike layers": (DENSE, {"kind": "heterogeneous"}),
}


@functools.cache
def without_us(name, **fields):
    """The same run with no recompute at all."""
    return train(**MODELS[name][1], **fields)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False))
def test_random_policies_change_no_bit_of_losses_gradients_and_updated_weights(name, rng):
    modules, fields = MODELS[name]
    policy = random_policy(rng, modules, depths=fields.get("mtp_num_layers", 0))
    note(policy.format())
    assert train(policies=(policy,), **fields).differences(without_us(name)) == []


@pytest.mark.usefixtures("one_rank")
def test_the_comparison_sees_one_changed_bit():
    run = train()
    weights = dict(run.weights)
    name = next(iter(weights))
    changed = weights[name].clone()
    changed.view(torch.int32).flatten()[0] ^= 1
    assert run.differences(Run(run.losses, run.gradients, {**weights, name: changed})) == [
        f"weights {name}"
    ]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_takes_part_in_the_compared_step(name):
    without_gradient = [n for n, g in without_us(name).gradients.items() if not g.any()]
    assert without_gradient == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("name", "distributed_optimizer"), [("dense", False), ("MoE", True)])
def test_changing_the_policy_every_step_leaves_the_loss_curve_alone(name, distributed_optimizer):
    modules, fields = MODELS[name]
    rng = random.Random(1)
    policies = tuple(random_policy(rng, modules) for _ in range(6))
    options = {"distributed_optimizer": distributed_optimizer, **fields}
    run = train(policies=policies, **options)
    assert run.differences(train(policies=(None,) * 6, **options)) == []
    assert len(set(run.losses)) == 12


@pytest.mark.usefixtures("one_rank")
def test_layernorm_on_unfused_rmsnorm_differs_by_less_than_1e_6_of_the_largest_gradient():
    fields = {"normalization": "RMSNorm"}
    run = train(policies=(RecomputePolicy.parse("selective[layernorm]", num_layers=4),), **fields)
    reference = train(**fields)
    assert run.losses[0] == reference.losses[0]  # the forward is the same
    for name, gradient in reference.gradients.items():
        largest = gradient.abs().max()
        assert (run.gradients[name] - gradient).abs().max() <= 1e-6 * largest, name


@pytest.mark.usefixtures("one_rank")
def test_unfused_rmsnorm_differs_because_its_input_gradient_is_summed_in_another_order():
    """RMSNorm is many small operations on CPU: without recompute autograd adds the gradients of
    their common input to the residual's one by one, a checkpoint adds them to each other first."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    norm = torch.nn.RMSNorm(64)
    torch.manual_seed(0)
    data, residual_gradient, norm_gradient = torch.randn(3, 32, 2, 64)

    def input_gradient(recompute):
        source = data.clone().requires_grad_()
        hidden_states = source * 1.0
        checkpoint = CheckpointWithoutOutput()
        output = checkpoint.checkpoint(norm, hidden_states) if recompute else norm(hidden_states)
        used = output * norm_gradient
        if recompute:
            checkpoint.discard_output_and_register_recompute(used)
        (used.sum() + (hidden_states * residual_gradient).sum()).backward()
        return source.grad

    kept, recomputed = input_gradient(False), input_gradient(True)
    assert not torch.equal(kept, recomputed)
    torch.testing.assert_close(recomputed, kept, rtol=0, atol=1e-6)


# ----------------------------------------------------------------------------------- several ranks


TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}


def compare_in_ranks(kind, sizes, fields_of_runs, policies):
    """In every rank: what differs from no recompute, by fields and policy."""
    start_parallel(**sizes)
    found = {}
    for fields in fields_of_runs:
        in_flight = 2 * sizes.get("pipeline_model_parallel_size", 1)
        options = {"sizes": sizes, "num_microbatches": in_flight, **fields}
        reference = train(kind, **options)
        for policy in policies:
            run = train(kind, policies=(policy,), **options)
            found[f"{fields} {policy.format()}"] = run.differences(reference)
    return found


def assert_equal_in_ranks(kind, sizes, policies, *fields_of_runs, ranks=2):
    results = run_ranks(compare_in_ranks, ranks, kind, sizes, fields_of_runs or ({},), policies)
    for rank, found in enumerate(results):
        assert len(found) == len(policies) * max(1, len(fields_of_runs))
        assert {run: names for run, names in found.items() if names} == {}, f"rank {rank}"


def policies_for(modules, *, seed, chunk=4, chunks=1):
    """Four policies that random ones seldom are, and three random ones, all different."""
    rng = random.Random(seed)
    keep = "core_attn+dispatch" if "moe" in modules else "core_attn"
    together = "+".join(_without_nested(modules))
    texts = ["full", f"full/{chunk}", f"full+keep[{keep}]", f"selective[{together}]"]
    policies = {RecomputePolicy.parse(text, num_layers=chunk * chunks): None for text in texts}
    while len(policies) < 7:
        policies[random_policy(rng, modules, chunk=chunk, chunks=chunks)] = None
    return list(policies)


@pytest.mark.any_version  # with a pipeline on every version
def test_tensor_parallel_ranks_with_and_without_sequence_parallelism_change_no_bit():
    # distribute_saved_activations cuts what a full checkpoint keeps across the ranks.
    fields = ({}, {"distribute_saved_activations": True}, {"sequence_parallel": True})
    assert_equal_in_ranks("dense", TP2, policies_for(DENSE, seed=2)[:5], *fields)


def test_two_pipeline_stages_change_no_bit():
    assert_equal_in_ranks("dense", PP2, policies_for(DENSE, seed=3, chunk=2, chunks=2))


@pytest.mark.parametrize(
    ("kind", "modules", "fields"),
    [("dense", DENSE, {}), ("mla", (*DENSE, "mla_up_proj"), {"normalization": "LayerNorm"})],
)
def test_two_chunks_on_each_of_two_stages_change_no_bit(kind, modules, fields):
    policies = policies_for(modules, seed=4, chunk=2, chunks=4)
    assert_equal_in_ranks(kind, VPP2, policies, {"num_layers": 8, **fields})


def test_tensor_and_pipeline_parallel_ranks_change_no_bit():
    policies = policies_for(DENSE, seed=5, chunk=2, chunks=2)
    assert_equal_in_ranks("dense", TP2 | PP2, policies, {"sequence_parallel": True}, ranks=4)


def test_expert_parallel_ranks_with_the_distributed_optimizer_change_no_bit():
    fields = {**SHARED_EXPERTS, "distributed_optimizer": True}
    assert_equal_in_ranks("moe", EP2, policies_for(MOE, seed=6), fields)
