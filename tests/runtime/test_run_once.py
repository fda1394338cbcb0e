"""Parts of a layer that run once: what is rerun, what is held, and that nothing wrong passes."""

import contextlib
import copy
import gc
import importlib
import itertools
import pickle
import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron_autorecompute.compat import checkpoints
from megatron_autorecompute.compat.rules import check_allowed
from megatron_autorecompute.errors import ApplyError, PolicyError
from megatron_autorecompute.policy import RecomputePolicy
from testing.ranks import run_ranks
from tests.fused_attention import FlashLikeAttention
from tests.gloo import collectives_on_copies
from tests.support import (
    MICRO_BATCH_SIZE,
    SEQ_LENGTH,
    microbatch,
    one_step,
    start_parallel,
    tiny_config,
    tiny_gpt,
)

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def trusted(monkeypatch):
    """Modules and hooks of these tests count as Megatron's: the graph alone shows what is read."""
    from megatron_autorecompute.runtime import onlookers

    monkeypatch.setattr(onlookers, "KNOWN", (*onlookers.KNOWN, "tests"))


HIDDEN, LAYERS, TOKENS = 64, 4, SEQ_LENGTH * MICRO_BATCH_SIZE
SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}


class Flops(TorchDispatchMode):
    """Counts the FLOPs of all products."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


def model_of(**fields):
    attention = fields.pop("attention", None)
    seq_length = fields.pop("seq_length", SEQ_LENGTH)
    config = tiny_config(**fields)
    (model,) = tiny_gpt(config, seq_length=seq_length)
    for layer in model.decoder.layers if attention else ():
        layer.self_attention.core_attention = attention(config)
    return model


def applied(text, model):
    from megatron_autorecompute.runtime.apply import apply

    return apply(text, model)


def step_of(model, text, **options):
    """(FLOPs, result) of one step."""
    with applied(text, model), Flops() as flops:
        result = one_step([model], **{"num_microbatches": 1, **options})
    return flops.total, result


def products(ffn, gated):
    """FLOPs of one layer's products in a forward, by name; worked out by hand."""
    return {
        "qkv": 2 * TOKENS * HIDDEN * 3 * HIDDEN,
        "scores": 2 * TOKENS * SEQ_LENGTH * HIDDEN,
        "context": 2 * TOKENS * SEQ_LENGTH * HIDDEN,
        "proj": 2 * TOKENS * HIDDEN * HIDDEN,
        "fc1": 2 * TOKENS * HIDDEN * ffn * (2 if gated else 1),
        "fc2": 2 * TOKENS * HIDDEN * ffn,
    }


ALL = {"qkv", "scores", "context", "proj", "fc1", "fc2"}
RERUN = {
    "full+all": ALL,
    "megatron:full": ALL,
    "megatron:full/4": ALL,
    "megatron:selective[mlp]": {"fc1", "fc2"},
    "full": ALL - {"fc2"},
    "full+keep[core_attn]": {"qkv", "proj", "fc1"},
    "selective[mlp]+all": {"fc1", "fc2"},
    "selective[mlp]": {"fc1"},
    "selective[mlp_act]": set(),
    "selective[qkv]": {"qkv"},
    "selective[core_attn]+all": {"scores", "context"},
    "selective[core_attn]": {"scores"},
    "selective[core_attn+qkv]": {"qkv", "scores"},
    "selective[mlp+qkv]": {"qkv", "fc1"},
}


@pytest.mark.parametrize(("gated", "ffn"), [(False, 256), (True, 224)])
def test_each_choice_reruns_exactly_the_products_that_it_names(gated, ffn):
    model = model_of(dropout=0.0, ffn_hidden_size=ffn, **(SWIGLU if gated else {}))
    cost = products(ffn, gated)
    plain, reference = step_of(model, "none")
    for text, rerun in RERUN.items():
        flops, result = step_of(model, text)
        assert flops - plain == LAYERS * sum(cost[name] for name in rerun), text
        assert result.same_bits(reference), text


EXPERTS, TOPK, EXPERT_FFN = 4, 2, 64  # of the tiny model
TO_EXPERTS, BACK = 2, 1
"""Exchanges of an expert-parallel layer's forward: of tokens and their weights, and of results."""
RERUN_OF_MOE = {
    "full+all": ({*ALL, "router"}, TO_EXPERTS + BACK),
    "full": ({*ALL, "router"} - {"fc2"}, TO_EXPERTS),
    "full+keep[dispatch]": ({*ALL, "router"} - {"fc2"}, 0),
    "full+keep[core_attn+dispatch]": ({"qkv", "proj", "router", "fc1"}, 0),
    "selective[moe]+all": ({"router", "fc1", "fc2"}, TO_EXPERTS + BACK),
    "selective[moe]": ({"router", "fc1"}, TO_EXPERTS),
    "selective[moe]+keep[dispatch]": ({"router", "fc1"}, 0),
    "selective[experts]": ({"fc1"}, 0),
}


def test_each_choice_of_experts_reruns_exactly_the_products_and_exchanges_that_it_names():
    ranks = run_ranks(steps_of_experts, 2, timeout_s=120)
    cost = products(EXPERT_FFN * TOPK, gated=True) | {"router": 2 * TOKENS * HIDDEN * EXPERTS}
    plain = sum(rank["none"][0] for rank in ranks)
    for text, (rerun, exchanges) in {"none": ((), 0), **RERUN_OF_MOE}.items():
        flops, exchanged, same_bits = zip(*(rank[text] for rank in ranks), strict=True)
        more = len(ranks) * LAYERS * sum(cost[name] for name in rerun)
        assert sum(flops) - plain == more, text  # one rank's experts may get more tokens
        forward_and_backward = 2 * (TO_EXPERTS + BACK)
        assert {*exchanged} == {LAYERS * (forward_and_backward + exchanges)}, text
        assert all(same_bits), text


class AnotherDispatcher(MoEAlltoAllTokenDispatcher):
    """Stands for one that arranges tokens otherwise when it dispatches them again."""


@pytest.mark.parametrize("fields", [{}, {"moe_router_force_load_balancing": True}])
def test_the_experts_alone_are_rerun_whatever_the_router_and_dispatcher_do(fields):
    model = model_of(kind="moe", dropout=0.0, **fields)
    for layer in model.decoder.layers:
        layer.mlp.token_dispatcher.__class__ = AnotherDispatcher
    cost = products(EXPERT_FFN * TOPK, gated=True)
    torch.manual_seed(5)  # random routing
    plain, reference = step_of(model, "none")
    torch.manual_seed(5)
    flops, result = step_of(model, "selective[experts]")
    assert flops - plain == LAYERS * cost["fc1"]
    assert result.same_bits(reference)


@pytest.mark.parametrize("dispatcher", [MoEAlltoAllTokenDispatcher, AnotherDispatcher])
def test_the_end_of_shared_experts_is_dead_work_whatever_the_dispatcher(dispatcher):
    shared = 96
    model = model_of(kind="moe", dropout=0.0, moe_shared_expert_intermediate_size=shared)
    for layer in model.decoder.layers:
        layer.mlp.token_dispatcher.__class__ = dispatcher
    cost = products(EXPERT_FFN * TOPK, gated=True)
    ends = products(shared, gated=True)["fc2"]
    ends += cost["fc2"] if dispatcher is MoEAlltoAllTokenDispatcher else 0
    _, reference = step_of(model, "none")
    for text in ("full", "selective[moe]"):
        whole, _ = step_of(model, f"{text}+all")
        ours, result = step_of(model, text)
        assert whole - ours == LAYERS * ends, text
        assert result.same_bits(reference), text


def test_shared_experts_activation_is_rerun_by_mlp_act_once():
    shared = {"moe_shared_expert_intermediate_size": 96}
    model = model_of(kind="moe", dropout=0.0, **shared)
    _, reference = step_of(model, "none")
    for text, same in {
        "selective[mlp_act+moe]": "selective[moe]",
        "selective[mlp_act+shared_experts]": "selective[shared_experts]",
        "selective[mlp_act]": "none",
    }.items():
        flops, result = step_of(model, text)
        assert flops == step_of(model, same)[0], text
        assert result.same_bits(reference), text
    dense = model_of(dropout=0.0, ffn_hidden_size=96, **SWIGLU)
    dropped = [held_bytes(each, "none") - held_bytes(each, text) for each in (model, dense)]
    assert dropped[0] == dropped[1] > 0


def test_a_gate_of_shared_experts_reads_their_end():
    shared = {"moe_shared_expert_intermediate_size": 96, "moe_shared_expert_gate": True}
    model = model_of(kind="moe", dropout=0.0, **shared)
    cost = products(EXPERT_FFN * TOPK, gated=True)
    _, reference = step_of(model, "none")
    whole, _ = step_of(model, "full+all")
    with applied("full", model):
        assert one_step([model], num_microbatches=1).same_bits(reference)  # learns what is read
        with Flops() as flops:
            result = one_step([model], num_microbatches=1)
    assert whole - flops.total == LAYERS * cost["fc2"]
    assert result.same_bits(reference)


def test_mlp_act_leaves_shared_experts_with_a_gate_as_they_are():
    shared = {"moe_shared_expert_intermediate_size": 96, "moe_shared_expert_gate": True}
    model = model_of(kind="moe", dropout=0.0, **shared)
    flops, reference = step_of(model, "none")
    again, result = step_of(model, "selective[mlp_act]")
    assert again == flops
    assert result.same_bits(reference)
    assert held_bytes(model, "selective[mlp_act]") == held_bytes(model, "none")


def steps_of_experts():
    """(FLOPs, exchanges between ranks, whether bits are those of none) of a step by choice."""
    start_parallel(expert_model_parallel_size=2)
    model = model_of(kind="moe", dropout=0.0, expert_model_parallel_size=2)
    exchange, calls, steps = torch.distributed.all_to_all_single, [], {}

    def counted(*args, **options):
        calls.append(1)
        return exchange(*args, **options)

    torch.distributed.all_to_all_single = counted
    for text in ("none", *RERUN_OF_MOE):
        before = len(calls)
        flops, result = step_of(model, text)
        steps[text] = flops, len(calls) - before, result
    reference = steps["none"][-1]
    return {
        text: (*counts, result.same_bits(reference)) for text, (*counts, result) in steps.items()
    }


@pytest.mark.parametrize(
    ("fields", "whole", "kept"),
    [(SWIGLU | {"ffn_hidden_size": 7 * HIDDEN // 2}, 79, 67), ({}, 71, 57)],
)
def test_shares_of_a_layers_products_that_full_reruns(fields, whole, kept):
    """At a length of one hidden size: 26 of 33, 22 of 33; of a GELU layer 20 of 28, 16 of 28."""
    model = model_of(dropout=0.0, seq_length=HIDDEN, **fields)
    flops = {
        text: step_of(model, text, seq_length=HIDDEN)[0]
        for text in ("none", "full+all", "full", "full+keep[core_attn]")
    }
    forward = flops["full+all"] - flops["none"]
    assert round(100 * (flops["full"] - flops["none"]) / forward) == whole
    assert round(100 * (flops["full+keep[core_attn]"] - flops["none"]) / forward) == kept


@pytest.mark.any_version
def test_full_reruns_all_where_dropout_is_fused_with_the_bias():
    # Compiled, it saves a mask that is not told from what it reads.
    fused = {"dropout": 0.1, "bias_dropout_fusion": True}
    counted = {
        text: [
            step_of(model_of(**{**fused, **fields}), text)[0] for fields in ({}, {"dropout": 0.0})
        ]
        for text in ("full+all", "full")
    }
    (whole, _), (dropped, undropped) = counted["full+all"], counted["full"]
    assert dropped == whole > undropped


def test_a_checkpoint_around_two_layers_skips_the_end_of_the_last_one_alone():
    model = model_of(dropout=0.0)
    cost = products(256, False)
    whole, _ = step_of(model, "full/2+all")
    ours, _ = step_of(model, "full/2")
    assert whole - ours == LAYERS // 2 * cost["fc2"]


@pytest.mark.parametrize("text", [text for text in RERUN if not text.startswith("megatron:")])
def test_in_a_prediction_depth_the_norm_after_the_layer_reads_its_end(text):
    """So full reruns all of it there, and the projection of two hidden states to one."""
    model = model_of(dropout=0.0, num_layers=1, mtp_num_layers=2)
    cost = products(256, False) | {"eh_proj": 2 * TOKENS * 2 * HIDDEN * HIDDEN}
    rerun = {*RERUN[text], *["eh_proj", "fc2"] * ("full" in text)}
    plain, reference = step_of(model, "none")
    flops, result = step_of(model, f"none*1,{text}*2")
    assert flops - plain == 2 * sum(cost[name] for name in rerun)
    assert result.same_bits(reference)


def held_bytes(model, text):
    """What one layer keeps of a forward beside its input and output."""
    from megatron_autorecompute.runtime.live_bytes import LiveBytes

    layer = model.decoder.layers[0]
    hidden = torch.randn(SEQ_LENGTH, MICRO_BATCH_SIZE, HIDDEN, requires_grad=True)
    mask = microbatch()["attention_mask"]
    with applied(text, model):
        with LiveBytes([*model.parameters(), hidden, mask]) as live:
            output, _ = layer(hidden_states=hidden, attention_mask=mask)
            found = live.current_bytes - output.untyped_storage().nbytes()
        output.sum().backward()
    return found


def test_held_bytes_are_the_formulas():
    ffn, element = 256, 4
    model = model_of(dropout=0.0, attention=FlashLikeAttention)
    wide, narrow = TOKENS * ffn * element, TOKENS * HIDDEN * element
    none = held_bytes(model, "none")
    # The activation's output, which fc2 saves.
    assert none - held_bytes(model, "selective[mlp_act]") == wide
    # And its input, fc1's output; the norm's output is the checkpoint's own.
    assert none - held_bytes(model, "selective[mlp]") == 2 * wide
    # Query, key and value, of which a fused attention saves nothing else.
    assert none - held_bytes(model, "selective[qkv]") == 3 * narrow
    assert held_bytes(model, "selective[mlp]") == held_bytes(model, "selective[mlp]+all")


def test_a_kept_attention_adds_its_output_and_its_sums_alone():
    model = model_of(dropout=0.0, attention=FlashLikeAttention)
    policies = ("full+all", "full", "full+keep[core_attn]")
    peaks = {text: alive_after_forward(model, text) for text in policies}
    sums = 4 * SEQ_LENGTH * MICRO_BATCH_SIZE * model.config.num_attention_heads
    assert peaks["full"] == peaks["full+all"]
    more = peaks["full+keep[core_attn]"] - peaks["full"]
    assert more == LAYERS * (4 * TOKENS * HIDDEN + sums)


def alive_after_forward(model, text):
    from megatron_autorecompute.runtime.live_bytes import LiveBytes

    with applied(text, model):
        one_step([model], num_microbatches=1)  # what stays between steps
        with collectives_on_copies(), LiveBytes(model.parameters()) as live:
            loss = model(**microbatch()).mean()
            found = live.current_bytes
        loss.backward()
    return found


# ------------------------------------------------------------------------- nothing wrong passes


def part_of(model, **options):
    """A part in the place of the first layer's linear after attention, whose output is read."""
    from megatron_autorecompute.runtime.run_once import Part

    layer = model.decoder.layers[0]
    return Part(layer.self_attention.linear_proj, "forward", layer, **options)


def test_an_output_that_is_read_after_all_is_computed_again():
    model = model_of()
    _, reference = step_of(model, "none", num_microbatches=3)
    part = part_of(model)
    _, result = step_of(model, "full", num_microbatches=3)
    part.undo()
    assert result.same_bits(reference)
    assert set(part.reads.values()) == {(True,)}


def test_an_output_that_is_read_after_all_is_computed_again_for_microbatches_in_flight():
    model, found = model_of(dropout=0.0), []
    for text in ("full+all", "full"):
        model.zero_grad(set_to_none=True)
        with applied(text, model):
            part = part_of(model)
            losses = [model(**microbatch(number)).mean() for number in range(3)]
            for loss in losses:
                loss.backward()
            part.undo()
        found.append([each.grad for each in model.parameters()])
    assert all(map(torch.equal, *found))


def test_an_output_that_is_read_at_one_length_alone_is_refused_beside_other_ranks(monkeypatch):
    model = model_of(dropout=0.0)
    with applied("full", model):
        part = part_of(model)
        one_step([model], num_microbatches=1)
        (around,) = part.reruns
        part.reruns[around] = False
        monkeypatch.setattr(
            "megatron_autorecompute.compat.checkpoints.has_other_ranks", lambda: True
        )
        with pytest.raises(ApplyError, match=r"Linear\.forward is read with inputs of .*\+all"):
            one_step([model], num_microbatches=1, seq_length=SEQ_LENGTH // 2)
        part.undo()


def experts_before_a_norm(model):
    for layer in model.decoder.layers:
        torch.manual_seed(0)
        layer.mlp.norm = torch.nn.LayerNorm(HIDDEN)
        layer.mlp.register_forward_hook(lambda mlp, _, out: (mlp.norm(out[0]), out[1]))


def gradients_over_lengths(text, lengths):
    """Of this rank, whose microbatches have `lengths[rank]`."""
    start_parallel(expert_model_parallel_size=2)
    (model,) = tiny_gpt(tiny_config("moe", dropout=0.0, expert_model_parallel_size=2))
    experts_before_a_norm(model)
    with applied(text, model):
        for number, length in enumerate(lengths[torch.distributed.get_rank()]):
            model(**microbatch(number, seq_length=length)).mean().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("text", ["full", "full+keep[core_attn+dispatch]"])
def test_ranks_whose_lengths_differ_run_the_same_collectives(text):
    lengths = ([32, 32], [32, 16])
    found = [run_ranks(gradients_over_lengths, 2, each, lengths) for each in ("full+all", text)]
    for reference, own in zip(*found, strict=True):
        assert all(map(torch.equal, reference, own))


def copied(tensor):
    return tensor if isinstance(tensor, torch.nn.Parameter) else tensor.clone()


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize("text", ["full", "full+keep[core_attn]", "selective[mlp_act+qkv]"])
def test_hooks_on_what_is_saved_change_no_bit(text, is_seen, monkeypatch):
    if not is_seen:  # before torch 2.8
        monkeypatch.setattr("megatron_autorecompute.runtime.run_once.top_hooks", None)
    found = {}
    for each in ("none", text):
        model = model_of(dropout=0.0)
        with applied(each, model):
            for number in range(2):
                model.zero_grad(set_to_none=True)
                hooks = torch.autograd.graph.saved_tensors_hooks(copied, lambda kept: kept)
                with hooks if number == 0 else contextlib.nullcontext():
                    loss = model(**microbatch(number)).mean()
                loss.backward()
        found[each] = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, found["none"], found[text]))


def test_a_wrong_claim_that_an_output_is_dead_leaves_no_gradient_that_looks_right():
    model = model_of()
    with applied("full", model):
        part = part_of(model)
        one_step([model], num_microbatches=1)  # learns what is read
        part.reads, part.reruns = _AlwaysDead(), {}
        result = one_step([model], num_microbatches=1)
        part.undo()
    assert result.gradients["decoder.layers.0.mlp.linear_fc1.weight"].isnan().all()


class _Square(torch.autograd.Function):
    """Keeps its input where autograd does not look."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.x * gradient


class _Doubles(torch.nn.Linear):
    """Changes its input in place."""

    def forward(self, x):
        return super().forward(x.mul_(2))


class Around(torch.nn.Module):
    """A function of a module inside it."""

    def __init__(self, function, inner=torch.nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.after, self.function = inner(8, 8), torch.nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(self, x + 0)


@torch.jit.script
def _gate(one, other):
    return torch.tanh(one * other) * one


def _reads_a_changed_input(net, x):
    output = net.inner(x)
    return output * x


FUNCTIONS = {
    "kept as an attribute of a context": lambda net, x: _Square.apply(net.inner(x)),
    "whose order is kept": lambda net, x: net.inner(x).sort().values,
    "kept by a torch.jit function": lambda net, x: _gate(net.inner(x), x),
    "changed in place": lambda net, x: net.inner(x).mul_(3),
    "changed in place, and read": lambda net, x: net.after(net.inner(x).mul_(3)),
    "read in the first of two calls": lambda net, x: net.inner(x).tanh() + net.inner(x),
    "of a chain of calls": lambda net, x: net.inner(net.inner(x)).tanh() + net.inner(x),
    "and an input changed in place, and read": _reads_a_changed_input,
}


def bits_of(net):
    """Output and gradients inside a checkpoint."""
    from megatron_autorecompute.compat import checkpoints

    generator = torch.Generator().manual_seed(1)
    net.zero_grad()
    x = torch.randn(4, 8, generator=generator).requires_grad_()
    output = checkpoints.run(net, x)
    (output * torch.randn(4, 8, generator=generator)).sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in net.inner.parameters())]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("output", FUNCTIONS)
@pytest.mark.usefixtures("trusted")
def test_an_output_keeps_its_bits(output, keeps):
    from megatron_autorecompute.runtime.run_once import Part

    changes = output.startswith("and an input")
    net = Around(FUNCTIONS[output], _Doubles if changes else torch.nn.Linear)
    reference = bits_of(net)
    part = Part(net.inner, "forward", net, keeps=keeps)
    for _ in range(2):  # the first learns what is read
        assert all(map(torch.equal, bits_of(net), reference))
    part.undo()


@pytest.mark.usefixtures("trusted")
def test_an_input_that_is_changed_after_its_part_is_refused():
    from megatron_autorecompute.errors import ApplyError
    from megatron_autorecompute.runtime.run_once import Part

    net = Around(lambda net, x: net.inner(x).tanh() + x.mul_(2))
    part = Part(net.inner, "forward", net, keeps=True)
    with pytest.raises(ApplyError, match=r"Linear\.forward was changed in place after it.*\+all"):
        bits_of(net)
    part.undo()


class _AlwaysDead(dict):
    def __contains__(self, key):
        return True

    def get(self, key, default=None):
        return (False,)


def test_what_is_read_is_learnt_anew_for_another_length_and_for_frozen_layers():
    model = model_of(dropout=0.0)
    with applied("full", model):
        part = model.decoder.layers[0].mlp.linear_fc2.forward
        one_step([model], num_microbatches=2)
        assert len(part.reads) == 1
        one_step([model], num_microbatches=1, seq_length=SEQ_LENGTH // 2)
        assert len(part.reads) == 2
        model.decoder.layers[0].self_attention.requires_grad_(False)
        one_step([model], num_microbatches=1)
        assert len(part.reads) == 3


def test_an_evaluation_in_training_mode_between_two_microbatches_changes_no_bit():
    model = model_of(dropout=0.0)
    _, reference = step_of(model, "none")
    text = "full*1,full+keep[core_attn]*1,selective[mlp_act+qkv]*1,selective[mlp]*1"
    with applied(text, model):
        loss = model(**microbatch(9)).mean()
        with torch.no_grad():
            model(**microbatch(3))
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        assert one_step([model], num_microbatches=1).same_bits(reference)


IN_FLIGHT = ("full", "full/2+keep[core_attn]", "selective[mlp_act+qkv]", "selective[mlp]", "none")


@pytest.mark.parametrize("then", [*IN_FLIGHT, None])
def test_a_policy_changed_between_forward_and_backward_changes_no_bit(then):
    model = model_of(dropout=0.0)
    reference = gradients_of(model)
    for text in IN_FLIGHT:
        policy = applied(text, model)

        def change(policy=policy):
            policy.undo() if then is None else policy.switch(then)

        assert all(map(torch.equal, gradients_of(model, change), reference)), text
        policy.undo()


def gradients_of(model, between=lambda: None):
    model.zero_grad(set_to_none=True)
    loss = model(**microbatch()).mean()
    between()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_graph_that_is_kept_runs_its_backward_twice():
    hidden = torch.randn(SEQ_LENGTH, MICRO_BATCH_SIZE, HIDDEN, requires_grad=True)
    mask = microbatch()["attention_mask"]
    for text in ("none", *IN_FLIGHT[1:]):
        model = model_of(dropout=0.0)
        with applied(text, model):
            layer = model.decoder.layers[0]
            loss = layer(hidden_states=hidden, attention_mask=mask)[0].square().sum()
            loss.backward(retain_graph=True)
            once = [parameter.grad.clone() for parameter in layer.parameters()]
            loss.backward()
        twice = [parameter.grad for parameter in layer.parameters()]
        assert all(torch.equal(both, 2 * one) for both, one in zip(twice, once, strict=True)), text


@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
@pytest.mark.parametrize(
    "what",
    [
        pytest.param("mlp", marks=pytest.mark.any_version),
        pytest.param("self_attention.core_attention", marks=pytest.mark.newest_version),
    ],
)
def test_torch_compile_of_what_is_in_a_layer_changes_no_bit(what, monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    enabled = importlib.import_module("torch._dynamo.config").patch(disable=False)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model = model_of(dropout=0.0)
    for layer in model.decoder.layers:
        layer.get_submodule(what).compile(backend=backend)
    text = "full*1,full+keep[core_attn]*1,selective[mlp_act+qkv]*1,selective[mlp]*1"
    torch.compiler.reset()
    with enabled, torch.compiler.set_stance("default"):
        reference = one_step([model])
        without = len(graphs)
        with applied(text, model):
            assert one_step([model]).same_bits(reference)
    assert 0 < without < len(graphs)


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("again", [False, True])
def test_a_thread_trains_a_model_while_another_is_inside_a_checkpoint(again):
    """In its first run or its second. Megatron's generators allow no two at the same time."""
    waiting, other = (model_of(dropout=0.0) for _ in range(2))
    reference, found = gradients_of(waiting), []
    other.eval()  # its parts run outside checkpoints

    def train_other(*_):
        if torch.is_grad_enabled() == again and not found:
            with ThreadPoolExecutor(1) as pool:
                found.append(pool.submit(gradients_of, other).result())

    waiting.decoder.layers[1].mlp.register_forward_pre_hook(train_other)
    with applied("full+keep[core_attn]", waiting), applied("full", other):
        found.append(gradients_of(waiting))
    assert len(found) == 2
    assert all(all(map(torch.equal, each, reference)) for each in found)


class PackedAttention(torch.nn.Module):
    """Attends inside each sample of a packed microbatch, as with Megatron's PackedSeqParams."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, query, key, value, *_, packed_seq_params, **__):
        ends = packed_seq_params.cu_seqlens_q.tolist()
        heads = [
            [x[one].transpose(0, 1) for x in (query, key, value)]
            for one in map(slice, ends, ends[1:])
        ]
        attend = torch.nn.functional.scaled_dot_product_attention
        found = [attend(*one, is_causal=True).transpose(0, 1) for one in heads]
        return torch.cat(found).flatten(1)


PACKS = ([5, 11, 16], [32], [8, 8, 8, 8], [3, 7, 6], [16])


@pytest.mark.any_version
@pytest.mark.parametrize(
    "text",
    ["full", "full+keep[core_attn]", "selective[mlp_act+qkv]", "full/2*2,selective[mlp+qkv]*2"],
)
def test_packed_samples_of_many_lengths_change_no_bit(text):
    model = model_of(dropout=0.0, attention=PackedAttention)
    reference = packed_gradients(model)
    with applied(text, model):
        for _ in range(2):  # the first learns what is read
            assert all(map(torch.equal, packed_gradients(model), reference))


def packed_gradients(model):
    from megatron.core.packed_seq_params import PackedSeqParams

    model.zero_grad(set_to_none=True)
    for number, lengths in enumerate(PACKS):
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        batch = microbatch(number, micro_batch_size=1, seq_length=sum(lengths))
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        model(**batch, packed_seq_params=packed).mean().backward()
    return [parameter.grad for parameter in model.parameters()]


class AttentionAcrossRanks(torch.nn.Module):
    """Attends to the keys and values of all context-parallel ranks, the sequence cut in order."""

    runs = 0

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, query, *others, **_):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        AttentionAcrossRanks.runs += 1
        group, length = parallel_state.get_context_parallel_group(), len(query)
        gathered = [gather_from_sequence_parallel_region(x, group=group) for x in others[:2]]
        seen = torch.ones(length, len(gathered[0]), dtype=torch.bool).tril(group.rank() * length)
        heads = [x.permute(1, 2, 0, 3) for x in (query, *gathered)]
        context = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen)
        return context.permute(2, 0, 1, 3).flatten(2)


RUNS_UNDER_CONTEXT_PARALLELISM = {
    "none": 1,
    "full": 2,
    "full/2+keep[core_attn]": 1,
    "selective[qkv]": 1,
    "selective[core_attn+qkv]": 2,
    "selective[mlp_act]": 1,
}


def test_an_attention_across_context_parallel_ranks_keeps_its_bits_and_a_kept_one_runs_once():
    expected = {
        text: (LAYERS * runs, True) for text, runs in RUNS_UNDER_CONTEXT_PARALLELISM.items()
    }
    assert run_ranks(across_ranks, 2, timeout_s=120) == [expected, expected]


def across_ranks():
    start_parallel(context_parallel_size=2)
    model = model_of(dropout=0.0, attention=AttentionAcrossRanks)
    _, reference = step_of(model, "none")
    found = {}
    for text in RUNS_UNDER_CONTEXT_PARALLELISM:
        before = AttentionAcrossRanks.runs
        _, result = step_of(model, text)
        found[text] = AttentionAcrossRanks.runs - before, result.same_bits(reference)
    return found


class _Fused:
    """In the place of Apex's kernels, which add a weight's gradient to main_grad in the product."""

    calls = 0

    def wgrad_gemm_accum_fp32(self, total_input, gradient, main_grad):
        self.calls += 1
        main_grad.add_(gradient.t().matmul(total_input))


@pytest.mark.parametrize("text", ["full", "full+keep[core_attn]", "selective[mlp_act+qkv]"])
def test_weight_gradients_that_are_added_in_the_product_are_added_once(monkeypatch, text):
    fused, layers = _Fused(), "megatron.core.tensor_parallel.layers"
    monkeypatch.setattr(f"{layers}._grad_accum_fusion_available", True)
    monkeypatch.setattr(f"{layers}.fused_weight_gradient_mlp_cuda", fused, raising=False)
    model = model_of(dropout=0.0, gradient_accumulation_fusion=True)
    found = []
    for each in ("none", text):
        fused.calls = 0
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.grad_added_to_main_grad = False
        with applied(each, model):
            one_step([model], num_microbatches=2)
        linear = model.decoder.layers[0].mlp.linear_fc2.weight
        assert linear.grad_added_to_main_grad
        found.append((fused.calls, [p.main_grad for p in model.parameters()]))
    (calls, reference), (again, gradients) = found
    assert calls == again == 2 * (4 * LAYERS + 1)
    assert all(map(torch.equal, gradients, reference))


@pytest.mark.any_version
def test_generators_end_where_no_recompute_leaves_them():
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    model = model_of(attention=FlashLikeAttention)
    states = {}
    for text in ("none", "full", "full+keep[core_attn]", "selective[qkv]", "selective[mlp_act]"):
        _, result = step_of(model, text, num_microbatches=2)
        tracked = {name: each.clone() for name, each in get_cuda_rng_tracker().get_states().items()}
        states[text] = result, torch.get_rng_state(), tracked
    result, state, tracked = states.pop("none")
    for text, (other, own, mine) in states.items():
        assert other.same_bits(result), text
        assert torch.equal(own, state), text
        assert all(torch.equal(mine[name], each) for name, each in tracked.items()), text


@pytest.mark.any_version
def test_routers_count_tokens_and_losses_once():
    fields = {
        "kind": "moe",
        "moe_aux_loss_coeff": 1e-2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
    }
    found = {}
    for text in ("none", "full", "full+keep[dispatch]", "selective[moe]", "selective[experts]"):
        model = model_of(dropout=0.0, **fields)
        _, result = step_of(model, text, num_microbatches=2)
        counted = [
            layer.mlp.router.local_tokens_per_expert.clone() for layer in model.decoder.layers
        ]
        found[text] = result, counted
    result, counted = found.pop("none")
    for text, (other, own) in found.items():
        assert other.same_bits(result), text
        assert all(map(torch.equal, own, counted)), text


@pytest.mark.any_version
@pytest.mark.parametrize("text", ["full", "full+keep[core_attn+dispatch]"])
@pytest.mark.usefixtures("trusted")
def test_experts_before_a_norm_run_again_and_their_router_counts_once(text):
    fields = {
        "moe_aux_loss_coeff": 1e-2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
    }
    model = model_of(kind="moe", dropout=0.0, **fields)
    experts_before_a_norm(model)
    counters = [layer.mlp.router.local_tokens_per_expert for layer in model.decoder.layers]
    found = []
    for each in ("none", text):
        for counter in (*counters, *checkpoints.logged_losses().values()):
            counter.zero_()
        _, result = step_of(model, each, num_microbatches=2)
        counted = (*counters, *checkpoints.logged_losses().values())
        assert any(each.any() for each in counted[len(counters) :])
        found.append((result, [counter.clone() for counter in counted]))
    (reference, counted), (result, own) = found
    assert result.same_bits(reference)
    assert all(map(torch.equal, own, counted))


# --------------------------------------------------------------------------- copies and leftovers


def test_copies_have_parts_of_their_own(monkeypatch):
    group = torch.distributed.ProcessGroup
    monkeypatch.setitem(copy._deepcopy_dispatch, group, lambda found, memo: found)
    model = model_of(dropout=0.0)
    _, reference = step_of(model, "none")
    text = "full+keep[core_attn]*2,selective[mlp_act+qkv]*2"
    with applied(text, model):
        twin = copy.deepcopy(model)
    assert one_step([model], num_microbatches=1).same_bits(reference)
    with Flops() as flops:
        assert one_step([twin], num_microbatches=1).same_bits(reference)
    plain, _ = step_of(model, "none")
    cost = products(256, False)
    rerun = 2 * (cost["qkv"] + cost["proj"] + cost["fc1"]) + 2 * cost["qkv"]
    assert flops.total - plain == rerun


def test_a_pickled_module_has_a_part_of_its_own():
    from megatron_autorecompute.runtime.run_once import Part

    module = torch.nn.Linear(2, 2)
    part = Part(module, "forward", module)
    restored = pickle.loads(pickle.dumps(module))
    part.undo()
    assert restored.forward.owner is restored
    assert torch.equal(restored(torch.ones(1, 2)), module(torch.ones(1, 2)))


def test_undo_leaves_no_trace():
    run_ranks(leave_no_trace, 1)  # alone: models of other tests may still need the replacement


def leave_no_trace():
    from megatron.core import tensor_parallel

    start_parallel()
    original = tensor_parallel.checkpoint
    model = model_of()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    policy = applied("full+keep[core_attn]*1,selective[mlp_act+qkv]*2,selective[mlp]*1", model)
    assert tensor_parallel.checkpoint is not original
    policy.undo()
    del policy
    assert tensor_parallel.checkpoint is original
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_a_forward_without_a_backward_is_freed_at_once():
    from megatron_autorecompute.runtime.live_bytes import LiveBytes

    model = model_of()
    with applied("full+keep[core_attn]*2,selective[mlp_act+qkv]*2", model):
        one_step([model], num_microbatches=1)
        gc.collect()
        gc.disable()
        try:
            with collectives_on_copies(), LiveBytes(model.parameters()) as live:
                model(**microbatch())  # makes what stays between forwards
                alive = live.current_bytes
                for _ in range(3):
                    model(**microbatch())
                assert live.current_bytes <= alive
        finally:
            gc.enable()


@pytest.mark.any_version
@pytest.mark.parametrize("text", ["full", "full+keep[core_attn]", "selective[mlp_act+qkv]"])
def test_a_step_leaves_nothing_for_the_garbage_collector(text):
    model = model_of()
    with applied(text, model):
        one_step([model])
        gc.collect()
        one_step([model])
        assert gc.collect() == 0


def test_what_others_have_put_around_ours_stays():
    from megatron.core import tensor_parallel

    model = model_of(dropout=0.0)
    _, reference = step_of(model, "none")
    original, ran = tensor_parallel.checkpoint, []
    linear = model.decoder.layers[0].mlp.linear_fc2

    def noted(function):
        return lambda *args: [ran.append(function), function(*args)][1]

    theirs = tensor_parallel.checkpoint = noted(original)
    try:
        policy = applied("full", model)
        around = linear.forward = noted(linear.forward)
        assert one_step([model], num_microbatches=1).same_bits(reference)
        policy.undo()
        del policy
        assert linear.forward is around
        assert one_step([model], num_microbatches=1).same_bits(reference)
        del linear.forward, around
        ran.clear()
        gc.collect()
        assert tensor_parallel.checkpoint is theirs
    finally:
        tensor_parallel.checkpoint = original


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        (
            "full+keep[mlp]",
            {},
            r"Unknown part mlp to keep in full\+keep\[mlp\] on layer 0: there are",
        ),
        (
            "full+keep[core_attn]*1,none*2,none+offload[core_attn]*1",
            {},
            r"full\+keep\[core_attn\] on layer 0, in a policy that offloads",
        ),
        (
            "none*2,selective[mlp+mlp_act]*2",
            {},
            r"selective\[mlp\+mlp_act\] on layer 2 .*: mlp contains mlp_act, leave one of them out",
        ),
        (
            "full+keep[dispatch]",
            {"kind": "moe", "moe_router_force_load_balancing": True},
            r"dispatch of full\+keep\[dispatch\] on layer 0: moe_router_force_load_balancing",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_its_reason(text, fields, message):
    with pytest.raises(PolicyError, match=message):
        applied(text, model_of(**fields))


def test_a_config_refuses_a_kept_part_in_one_sentence_with_layer_and_reason():
    model = model_of()
    model.config.cuda_graph_impl = "local"
    said = (
        "full+keep[core_attn] on layer 1 cannot be used with this model: "
        "CUDA graphs fix what a recompute runs when they are captured."
    )
    with pytest.raises(PolicyError, match=f"^{re.escape(said)}$"):
        applied("none*1,full+keep[core_attn]*3", model)


def test_the_fused_operators_of_an_mlp_refuse_what_would_skip_a_part_of_them():
    config = tiny_config()
    config.use_transformer_engine_op_fuser = True
    for text in ("selective[mlp_act]", "selective[qkv]", "full+keep[core_attn]"):
        with pytest.raises(PolicyError, match="runs linears and activation as one operator"):
            check_allowed(config, RecomputePolicy.parse(text, num_layers=LAYERS))


@pytest.mark.parametrize(
    ("captured", "beside"),
    [
        (["attn"], {"experts", "mlp_act", "moe+keep[dispatch]"}),
        (["attn", "moe_router", "moe_preprocess"], {"experts"}),
        (["attn", "mlp"], {"experts", "moe+keep[dispatch]"}),
        (["attn", "moe"], set()),
        ("attn,moe", set()),  # as a config has it that Megatron has not read yet
        ([], set()),
    ],
)
def test_checkpoints_of_ours_stay_outside_of_what_cuda_graphs_capture(captured, beside):
    config = tiny_config("moe")
    config.cuda_graph_impl = "transformer_engine"
    config.cuda_graph_scope = config.cuda_graph_modules = captured
    choices = {
        "experts": "selective[experts]",
        "mlp_act": "selective[mlp_act]",
        "moe+keep[dispatch]": "selective[moe]+keep[dispatch]",
        "qkv": "selective[qkv]",
        "ln_out": "selective[ln_out]",
        "full": "full+keep[core_attn]",
    }
    for name, text in choices.items():
        policy = RecomputePolicy.parse(text, num_layers=LAYERS)
        refused = pytest.raises(PolicyError, match="CUDA graphs fix what a recompute runs")
        with contextlib.nullcontext() if name in beside else refused:
            check_allowed(config, policy)


def test_a_kept_part_that_layers_lack_is_said_once(caplog):
    with applied("full+keep[dispatch]", model_of()):
        pass
    (record,) = [each for each in caplog.records if "does nothing" in each.getMessage()]
    assert "dispatch of full+keep[dispatch] does nothing on 4 layers" in record.getMessage()


@pytest.mark.parametrize(
    ("text", "idle"),
    [
        ("selective[moe]", ["moe of selective[moe] does nothing on 4 layers"]),
        ("selective[ln_out]", ["ln_out of selective[ln_out] does nothing on 4 layers"]),
        (
            "selective[layernorm+moe]*2,none*2",
            ["moe of selective[layernorm+moe] does nothing on 2"],
        ),
        ("selective[core_attn+mlp]", []),
    ],
)
def test_a_module_that_layers_lack_is_said_once(text, idle, caplog):
    with applied(text, model_of()):
        pass
    said = [each.getMessage() for each in caplog.records if "does nothing" in each.getMessage()]
    assert len(said) == len(idle)
    for line, expected in zip(said, idle, strict=True):
        assert expected in line


# --------------------------------------------------------------------- code that looks at values


def finite(_, __, output):
    """A guard that changes nothing where all is finite."""
    ends = torch.where(torch.isfinite(output[0]), output[0], torch.zeros_like(output[0]))
    return ends, output[1]


def gated(_, __, output):
    """Values decide, through a mask that is no part of autograd's graph."""
    wide = output[0].norm(dim=-1, keepdim=True) > 0.1
    return output[0] * wide, output[1]


def halved(_, __, output):
    """Values decide, in Python."""
    large = output[0].detach().abs().max() > 0.01
    return (output[0] / 2 if large else output[0]), output[1]


CHOICES = ("full", "full/2", "full+keep[core_attn]", "selective[mlp]", "selective[mlp_act]")


@pytest.mark.any_version
@pytest.mark.parametrize(
    "hook",
    [finite, *(pytest.param(each, marks=pytest.mark.any_version) for each in (gated, halved))],
)
@pytest.mark.parametrize("where", ["mlp", "layer"])
def test_a_hook_that_looks_at_values_changes_no_bit_and_is_said_once(hook, where):
    from megatron_autorecompute.runtime import run_once

    model = model_of()
    for layer in model.decoder.layers:
        (layer.mlp if where == "mlp" else layer).register_forward_hook(hook)
    reference = one_step([model])
    run_once.say_that_more_is_held.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for text in CHOICES:
            assert step_of(model, text, num_microbatches=2)[1].same_bits(reference), text
    ours = [str(each.message) for each in said if "may look at" in str(each.message)]
    assert len(ours) == 1
    assert f"{hook.__name__} on" in ours[0]


@pytest.mark.any_version
def test_a_forward_that_others_wrote_changes_no_bit():
    class Clipped(type(model_of().decoder.layers[0].mlp)):
        def forward(self, hidden_states, **options):
            output, bias = super().forward(hidden_states, **options)
            return output.masked_fill(output.abs() > 0.02, 0.0), bias

    model = model_of()
    for layer in model.decoder.layers:
        layer.mlp.__class__ = Clipped
    reference = one_step([model])
    for text in CHOICES:
        assert step_of(model, text, num_microbatches=2)[1].same_bits(reference), text


@pytest.mark.any_version
@pytest.mark.parametrize("text", ["full", "full+keep[core_attn]", "selective[mlp]"])
def test_a_hook_that_comes_after_a_step_is_seen(text):
    def squashed(_, __, output):
        return output[0] * torch.tanh(output[0]), output[1]

    def two_steps(model):
        before = one_step([model])
        for layer in model.decoder.layers:
            layer.mlp.register_forward_hook(squashed)
        return before, one_step([model])

    expected = two_steps(model_of())
    model = model_of()
    with applied(text, model):
        found = two_steps(model)
    assert [mine.same_bits(theirs) for mine, theirs in zip(found, expected, strict=True)] == [
        True,
        True,
    ]


def test_a_module_that_takes_the_place_of_one_after_a_step_is_learnt_anew():
    class Squashing(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, *inputs):
            output, bias = self.linear(*inputs)
            return output * torch.tanh(output), bias

    def two_steps(model):
        one_step([model])
        for layer in model.decoder.layers:
            layer.mlp.linear_fc2 = Squashing(layer.mlp.linear_fc2)
        return one_step([model])

    expected, model = two_steps(model_of()), model_of()
    with applied("full", model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert two_steps(model).same_bits(expected)


def test_hooks_of_megatron_leave_dead_work_out():
    """Such as those that its DDP puts on every module for overlap_param_gather."""
    model = model_of()
    plain = step_of(model, "full")[0]

    def hook(*_):
        return None

    hook.__module__ = "megatron.core.distributed.distributed_data_parallel"
    for module in model.modules():
        module.register_forward_pre_hook(hook)
    assert step_of(model, "full")[0] == plain < step_of(model, "full+all")[0]


def test_a_part_that_is_called_by_keyword_runs_as_usual():
    def by_keyword(_, inputs, __):
        return (), {"input_": inputs[0]}

    by_keyword.__module__ = "megatron.core"
    model = model_of()
    for layer in model.decoder.layers:
        layer.mlp.linear_fc2.register_forward_pre_hook(by_keyword, with_kwargs=True)
    reference = one_step([model])
    assert step_of(model, "full", num_microbatches=2)[1].same_bits(reference)


@pytest.mark.any_version
def test_a_module_in_the_place_of_one_that_is_freed_is_seen():
    """The new one may have the address of the old one."""
    from megatron_autorecompute.runtime.onlookers import Onlookers

    layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    for _ in range(20):
        found = Onlookers(layer, layer[0])
        assert not found.are_of_another_layer()
        layer[1] = None
        gc.collect()
        layer[1] = torch.nn.Dropout()
        assert found.are_of_another_layer()


@pytest.mark.any_version
def test_a_hook_on_one_of_two_tensor_parallel_ranks_changes_no_bit_and_no_collective():
    """Such as one that writes norms on rank 0. Unequal collectives would hang."""
    assert run_ranks(hooked_on_one_rank, 2, timeout_s=120) == [[], []]


def hooked_on_one_rank():
    start_parallel(tensor_model_parallel_size=2)
    model = model_of(tensor_model_parallel_size=2, sequence_parallel=True)
    reference, norms = one_step([model]), []

    def note(_, __, output):
        norms.append(output[0].detach().norm().item())

    if torch.distributed.get_rank() == 0:
        for layer in model.decoder.layers:
            layer.register_forward_hook(note)
    differ = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for text in CHOICES:
            if not step_of(model, text, num_microbatches=2)[1].same_bits(reference):
                differ.append(text)
    assert all(norm == norm for norm in norms)  # none is NaN
    return differ
