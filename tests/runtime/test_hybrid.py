"""A policy on a HybridModel: the bits of no recompute, and Megatron's own layers and choices."""

import functools
import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_autorecompute import megatron_fields
from megatron_autorecompute.errors import PipelineError, PolicyError
from megatron_autorecompute.planner.cost.hybrid_pattern import HybridPattern
from megatron_autorecompute.policy import MegatronStrategy, RecomputePolicy
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from testing.ranks import run_ranks
from tests.hybrid_models import hybrid_chunks, hybrid_config, make_runnable, runnable, small_model
from tests.mamba_kernels import chunk_scan, recurrence
from tests.support import microbatch, one_step, start_parallel, tiny_config, tiny_gpt

pytest.importorskip("megatron.core.models.hybrid.hybrid_model")


def counted(models):
    """How often the forward of every layer ran, by its index; inner layers of depths left out."""
    from megatron_autorecompute.compat import model_layers

    ran = {}
    for layer, index in dict(model_layers.numbered_layers(models)).items():
        layer.register_forward_pre_hook(
            lambda *_, index=index: ran.__setitem__(index, ran.get(index, 0) + 1)
        )
    return ran


def bits_of_policies(pattern, policies, sizes, fields):
    """In a rank: for every policy whether its bits are those of none, and forwards per layer."""
    from megatron_autorecompute.runtime.apply import apply
    from megatron_autorecompute.runtime.model_shard import ModelShard

    config = hybrid_config(pattern, **sizes, **fields)
    models = hybrid_chunks(config, pattern)
    shard = ModelShard(models)
    step = functools.partial(
        one_step, models, num_microbatches=2 * sizes.get("pipeline_model_parallel_size", 1)
    )
    base, again, ran, found = step(), step(), counted(models), {}
    assert again.same_bits(base)
    assert all(torch.isfinite(gradient).all() for gradient in base.gradients.values())
    for text in policies:
        ran.clear()
        with apply(parsed(text, shard), models):
            same = step().same_bits(base)
        found[text] = (same, dict(ran))
    return {kind.name: kind.layers for kind in shard.kinds}, found


def parsed(text, shard):
    """The policy; Megatron's strategies count in the chunks of the shard's pattern."""
    from megatron_autorecompute.policy import RecomputePolicy

    chunks = shard.layout.counted_chunks()
    return RecomputePolicy.parse(text, num_layers=shard.num_layers, layout=chunks)


def in_a_rank(pattern, policies, sizes, fields):
    start_parallel(**{name: size for name, size in sizes.items() if name != "sequence_parallel"})
    make_runnable()
    for text in policies:
        if text.startswith("megatron:"):
            costs_as_in_megatron(pattern, [text], **sizes, **fields)
    return bits_of_policies(pattern, policies, sizes, fields)


def cost(models):
    """A step's floating-point operations, its most bytes alive, and its bits."""
    weights = (parameter for model in models for parameter in model.parameters())
    with FlopCounterMode(display=False) as counter:
        step = one_step(models, num_microbatches=1)
    with LiveBytes(static=weights) as live:
        one_step(models, num_microbatches=1)
    return counter.get_total_flops(), live.peak_bytes, step


def costs_as_in_megatron(pattern, names, **fields):
    """Operations of strategies by name, and of `full`. Asserts that strategies by name cost what a
    model built with Megatron's own fields does.

    With experts they hold less: Megatron keeps the router's graph of a recomputed layer.
    """
    from megatron_autorecompute.compat import stage_layout
    from megatron_autorecompute.runtime.apply import apply

    models = hybrid_chunks(hybrid_config(pattern, **fields), pattern)
    read, flops = HybridPattern.parse(pattern), []
    chunks = stage_layout.pipeline_layout(models[0].config, pattern=read).counted_chunks()
    for name in names:
        strategy = MegatronStrategy.parse(name)
        policy = strategy.policy(read.num_layers + read.mtp_num_layers, chunks, len(read.depth))
        own = megatron_fields.of_strategy(strategy)
        theirs = cost(hybrid_chunks(hybrid_config(pattern, **fields, **own), pattern))
        with apply(name, models) as applied:
            assert applied.policy == policy
            ours = cost(models)
        assert ours[0] == theirs[0], (pattern, name)
        assert ours[1] <= theirs[1] if "E" in pattern else ours[1] == theirs[1], (pattern, name)
        assert ours[2].same_bits(theirs[2]), (pattern, name)
        flops.append(ours[0])
    with apply(RecomputePolicy.parse("full+all", num_layers=len(policy.layers)), models):
        return flops, cost(models)[0]


def run(pattern, policies, world, fields=None, **sizes):
    """Kinds of the model, and forwards per layer of every policy.

    Asserts that every policy leaves the bits of none.
    """
    results = run_ranks(in_a_rank, world, pattern, policies, sizes, fields or {})
    assert [p for _, found in results for p, (same, _) in found.items() if not same] == []
    forwards = {
        text: dict(sorted(kv for _, found in results for kv in found[text][1].items()))
        for text in policies
    }
    return results[0][0], forwards


ONE_RANK = {
    "*-*-": ["full,none*2,full", "full/2*2,selective[core_attn],selective[mlp]", "full/3*3,none"],
    "*E*E": ["full/2*2,selective[core_attn+layernorm],selective[moe]", "selective[layernorm]"],
    "G-": ["full,selective[mlp]", "full/2*2"],
    "GE": ["full,selective[moe]", "full/2*2"],
    "M-": ["full,selective[mlp]", "full/2*2"],
    "*-M*GE": ["full", "full+keep[core_attn+dispatch]", "selective[experts+mlp_act+qkv]"],
    "MEM*E/*E": [
        "full,none,full,selective[core_attn],selective[moe],full",
        "none,full/2*2,none*2,selective[core_attn+moe]",
    ],
}


WORDS = {
    "attention": ["full+keep[core_attn]", "selective[core_attn]", "selective[qkv]"],
    "mlp": ["selective[mlp]", "selective[mlp_act]", "selective[mlp]+all"],
    "moe": ["full+keep[dispatch]", "selective[experts]", "selective[moe]+keep[dispatch]"],
    "mtp": ["full+keep[core_attn]"],
}


def random_policies(pattern, number=4):
    """Mixes of what every layer's family can run, and of checkpoints around two layers."""
    rng, read = random.Random(pattern), HybridPattern.parse(pattern)
    families = [read.families[index] for index in range(read.num_layers)]
    for _ in range(number):
        texts = [rng.choice(["none", "full", *WORDS.get(each, [])]) for each in families]
        at = rng.randrange(len(texts) - 1)
        texts[at : at + 2] = [rng.choice(["full/2*2", "full/2+keep[core_attn]*2"])]
        depths = [rng.choice(["none", "full", *WORDS["mtp"]])] * read.mtp_num_layers
        yield ",".join(texts + depths)


@pytest.mark.parametrize("pattern", ONE_RANK)
def test_every_family_keeps_its_bits_under_mixed_policies(one_rank, pattern):
    policies = [*ONE_RANK[pattern], *random_policies(pattern)]
    with runnable():
        kinds, found = bits_of_policies(pattern, policies, {}, {})
    assert [text for text, (same, _) in found.items() if not same] == []
    families = HybridPattern.parse(pattern).families
    assert set(kinds) == {*families, *(["mtp"] if "/" in pattern else [])}
    assert all(families[i] == name for name, at in kinds.items() if name != "mtp" for i in at)
    for text, (_, ran) in found.items():
        choices = RecomputePolicy.parse(text, num_layers=len(ran)).layers
        assert ran == {i: 4 if one.granularity == "full" else 2 for i, one in enumerate(choices)}


def test_uneven_segments_recompute_the_layers_that_megatron_does():
    policies = ["megatron:block/1", "full,none*2,selective[mlp]"]
    kinds, forwards = run("*-*|-", policies, 2, pipeline_model_parallel_size=2)
    assert kinds == {"attention": (0, 2), "mlp": (1, 3)}
    assert forwards["megatron:block/1"] == {0: 8, 1: 4, 2: 4, 3: 8}


@pytest.mark.filterwarnings("ignore:recompute_method == 'block':UserWarning")
@pytest.mark.parametrize(
    ("pattern", "fields"),
    [("*-/*-", {}), ("M*/*E/*E", {"mtp_use_repeated_layer": True})],
)
def test_megatrons_strategies_cost_by_name_what_they_cost_in_megatron(one_rank, pattern, fields):
    names = [f"megatron:{name}" for name in ("uniform/1", "block/1", "block/2", "selective")]
    with runnable():
        (uniform, *others), full = costs_as_in_megatron(pattern, names, **fields)
    assert uniform > full > max(others)  # uniform runs the layers of depths twice more


def test_interleaved_segments_keep_their_bits():
    text = "full+keep[core_attn],none,full,full/2*2,none*3"
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    _, forwards = run("*-|*|-*M-|-", [text], 2, **sizes)
    assert list(forwards[text].values()) == [8, 4, 8, 8, 8, 4, 4, 4]


def test_tensor_and_sequence_parallel_layers_keep_their_bits():
    text = "full,full+keep[core_attn],full,selective[mlp]"
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    kinds, _ = run("M*G-", [text], 2, **sizes)
    assert kinds == {"mamba": (0,), "attention": (1,), "gdn": (2,), "mlp": (3,)}


def test_expert_parallel_layers_keep_their_bits():
    text = "full+keep[core_attn],selective[moe]+keep[dispatch],full,full+keep[dispatch]"
    kinds, _ = run("*EME", [text], 2, expert_model_parallel_size=2)
    assert kinds == {"attention": (0,), "moe": (1, 3), "mamba": (2,)}


def losses_and_gradients(pattern, size):
    """In one of two ranks: the loss of a sequence divided among `size` ranks, and gradients."""
    start_parallel(context_parallel_size=size)
    [model] = hybrid_chunks(
        hybrid_config(pattern, context_parallel_size=size, dropout=0.0, mamba_num_groups=1),
        pattern,
        position_embedding_type="none",
    )
    batch, rank = microbatch(), torch.distributed.get_rank() if size > 1 else 0
    for name in ("input_ids", "position_ids", "labels"):
        quarters = batch[name].chunk(2 * size, 1)
        batch[name] = torch.cat([quarters[rank], quarters[2 * size - 1 - rank]], 1)
    loss = model(**batch).mean() / size
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found["loss"] = loss.detach()
    for value in found.values() if size > 1 else ():
        torch.distributed.all_reduce(value)
    return found


def context_parallel(pattern, policies):
    make_runnable()
    divided, whole = (losses_and_gradients(pattern, size) for size in (2, 1))
    torch.testing.assert_close(divided, whole, rtol=1e-4, atol=1e-6)
    start_parallel(context_parallel_size=2)
    return bits_of_policies(pattern, policies, {"context_parallel_size": 2}, {})[1]


def test_mamba_under_context_parallelism_computes_the_same_and_keeps_its_bits():
    """By Megatron's own all-to-alls, with a group of B and C repeated for both ranks."""
    for found in run_ranks(context_parallel, 2, "M-", ["full/2*2", "none,selective[mlp]"]):
        assert all(same for same, _ in found.values())


def test_the_scan_of_these_tests_is_the_recurrence_it_stands_for():
    torch.manual_seed(0)

    def double(*shape):
        return torch.randn(*shape, dtype=torch.double, requires_grad=True)

    for length, chunk in ((50, 16), (33, 64)):
        x, b, c = double(2, length, 4, 8), double(2, length, 2, 8), double(2, length, 2, 8)
        dt, a = double(2, length, 4), -torch.rand(4, dtype=torch.double)
        found = [
            (y, torch.autograd.grad(y.square().sum(), (x, dt, b, c)))
            for y in (
                chunk_scan(x, dt.exp() / 9, a, b, c, chunk),
                recurrence(x, dt.exp() / 9, a, b, c),
            )
        ]
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("pattern", "text", "said"),
    [
        ("*-/*-", "megatron:uniform/1", "full+all*2,full+inner/2*1"),
        ("M-X*", "full", "'X' at position 2 is no layer"),
    ],
)
def test_the_field_of_a_hybrid_models_config_does_as_apply_does(one_rank, pattern, text, said):
    from megatron_autorecompute import config as field
    from megatron_autorecompute.apply import in_force

    field.install()
    try:
        with runnable():
            config = hybrid_config(pattern.replace("X", "E"), recompute_policy=text)
            try:
                found = in_force(hybrid_chunks(config, pattern)).policy.format()
            except (PolicyError, PipelineError) as error:
                found = str(error)
    finally:
        field.uninstall()
    assert said in found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("inner/1,none*2", "inner/1 on layer 0, which is no multi-token-prediction depth"),
        ("none*2,inner/3", "on layer 2, a multi-token-prediction depth with 2 layers inside"),
    ],
)
def test_checkpoints_inside_a_depth_are_refused_elsewhere(one_rank, text, said):
    from megatron_autorecompute.runtime.apply import apply

    policy = RecomputePolicy.parse(text, num_layers=3)
    with runnable():
        models = hybrid_chunks(hybrid_config("*-/*-"), "*-/*-")
        with pytest.raises(PolicyError) as error:
            apply(policy, models)
    assert said in str(error.value)


@pytest.mark.parametrize("pattern", [None, "*-/*E/*E"])
def test_one_layer_for_several_depths_runs_the_choice_of_each(one_rank, pattern):
    """Not bit for bit: a checkpoint adds the depths' gradients to the weights' one after the other,
    as Megatron's own does."""
    from megatron_autorecompute.compat import model_layers
    from megatron_autorecompute.runtime.apply import apply
    from megatron_autorecompute.runtime.model_shard import ModelShard

    repeated = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
    with runnable():
        if pattern is None:
            models = tiny_gpt(tiny_config("moe", num_layers=2, **repeated))
        else:
            models = hybrid_chunks(hybrid_config(pattern, **repeated), pattern)
        base, ran = one_step(models), []
        (site,) = model_layers.mtp_sites(models)
        assert site.indices == (2, 3)
        parts = {name.split(".")[-1]: part for name, part in site.layer.named_modules()}
        for name in ("router", "pre_mlp_layernorm"):
            parts[name].register_forward_hook(lambda *_, name=name: ran.append(name))
        for depths, times in {
            "none,full": (6, 6),
            "full,none": (6, 6),
            "full,selective[layernorm]": (6, 8),
            "selective[moe],none": (6, 4),
            "none,selective[moe+layernorm]": (6, 6),
        }.items():
            ran.clear()
            with apply(RecomputePolicy.parse(f"none*2,{depths}", num_layers=4), models):
                step = one_step(models)
            assert step.losses == base.losses
            assert (ran.count("router"), ran.count("pre_mlp_layernorm")) == times, depths
            for name, gradient in step.gradients.items():
                torch.testing.assert_close(gradient, base.gradients[name], rtol=1e-4, atol=1e-7)
        with pytest.raises(PolicyError, match=r"experts would change all of them"):
            apply(RecomputePolicy.parse("none*3,selective[experts]", num_layers=4), models)
        kinds = ModelShard(models).kinds
        assert not any(choice.own for kind in kinds for choice in kind.choices if 2 in kind.layers)


@pytest.mark.parametrize("at", [0, -1], ids=["at the first layer", "at the last"])
def test_an_error_midway_leaves_every_layer_as_it_was(one_rank, monkeypatch, at):
    from megatron_autorecompute.apply import apply, in_force
    from megatron_autorecompute.compat import layer_modules, model_layers

    with runnable():
        models = hybrid_chunks(hybrid_config("*E/*E"), "*E/*E")
    layers = list(model_layers.numbered_layers(models))
    broken, _ = layers[at]

    def state():
        flags = [place for layer, _ in layers for place in layer_modules.settings(layer)]
        configs = [id(m.config) for m in models[0].modules() if hasattr(m, "config")]
        return [getattr(*place) for place in flags], configs

    def fails(layer, modules, original=layer_modules.set_modules):
        original(layer, modules)
        if layer is broken and "core_attn" in modules:
            raise RuntimeError("midway")

    monkeypatch.setattr(layer_modules, "set_modules", fails)
    failing = RecomputePolicy.parse("selective[core_attn],full,selective[core_attn]", num_layers=3)
    before = state()
    with pytest.raises(RuntimeError, match="midway"):
        apply(failing, models)
    assert in_force(models) is None
    assert state() == before
    applied = apply(RecomputePolicy.parse("full,selective[moe],full", num_layers=3), models)
    before = state()[0], applied.policy
    with pytest.raises(RuntimeError, match="midway"):
        applied.switch(failing)
    assert (state()[0], in_force(models).policy) == before


def test_a_norm_whose_recompute_changes_bits_is_no_choice_on_any_family(one_rank):
    from megatron_autorecompute.compat import model_layers, rules

    with runnable():
        models = hybrid_chunks(hybrid_config("MG*-E", normalization="RMSNorm"), "MG*-E")
        for layer, index in model_layers.numbered_layers(models):
            assert ("layernorm" in rules.runnable_modules(layer)) == (index > 0)
            assert "layernorm" not in rules.usable_modules(layer)


def test_a_pattern_of_other_numbers_than_the_config_is_refused(one_rank):
    from megatron_autorecompute.runtime.apply import apply

    with runnable():
        models = hybrid_chunks(hybrid_config("*-*-", num_layers=3), "*-*-")
        with pytest.raises(PipelineError, match="num_layers is 3"):
            apply(RecomputePolicy.parse("full", num_layers=4), models)


def test_a_loop_of_many_lengths_has_the_results_of_one_without_us(one_rank, monkeypatch):
    from benchmarks import any_loop

    with_mamba = functools.partial(small_model, pattern="M-*-M-")
    monkeypatch.setattr(any_loop, "SmallGPT", with_mamba)
    job = any_loop.Job("hybrid", 1, None, 1, 8_400, microbatches=3)
    with runnable():
        ours, theirs = (any_loop.trained(job, 18, with_auto) for with_auto in (True, False))
    assert [call.result for call in ours] == [call.result for call in theirs]
    planned = [call for call in ours if call.predicted_bytes is not None]
    assert len(planned) >= 4
    assert len({call.policy for call in planned}) > 1
    for call in planned:
        assert call.peak_bytes <= min(call.bound_bytes, job.budget_kib * 1024)
        assert abs(call.peak_bytes / call.predicted_bytes - 1) < 0.015
