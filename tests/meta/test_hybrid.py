"""HybridModels without a device: what the stand-ins hold, and plans against Megatron's schedule."""

import contextlib
import importlib
import itertools
import sys
from argparse import Namespace
from dataclasses import dataclass, replace

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute.compat import layer_modules, model_layers, rules
from megatron_autorecompute.errors import OptionError, PipelineError
from megatron_autorecompute.meta import model, recipe, without_cuda
from megatron_autorecompute.meta.devices import device
from megatron_autorecompute.meta.fake_ranks import fake_ranks
from megatron_autorecompute.meta.job import contradictions, job_from
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.meta.verify import TOLERANCE, verify
from megatron_autorecompute.patched import patched
from megatron_autorecompute.planner.plan import make_plan
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import RecomputePolicy

pytest.importorskip("megatron.core.models.hybrid.hybrid_model")

H100 = device("h100-80gb")
NANO = {
    "hidden_size": 2688,
    "ffn_hidden_size": 1856,
    "num_attention_heads": 32,
    "num_query_groups": 2,
    "kv_channels": 128,
    "mamba_num_heads": 64,
    "num_moe_experts": 16,
    "moe_router_topk": 6,
    "moe_ffn_hidden_size": 1856,
    "activation_func": "squared_relu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def job(pattern, *, num_gpus=8, seq_length=4096, **fields):
    """A job of layers as wide as those of Nemotron 3 Nano."""
    return job_from(
        {
            "name": pattern,
            "num_gpus": num_gpus,
            "seq_length": seq_length,
            "global_batch_size": 64,
            "vocab_size": 1024,
            "position_embedding_type": "none",
            "config": {**NANO, "hybrid_layer_pattern": pattern, **fields},
        },
        "the job",
    )


def saved(function, *inputs):
    """Bytes that a function's backward saves, by shape; its inputs, parameters too, included."""
    found = {}

    def note(tensor):
        found[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function(*inputs)
    return listed((tuple(t.shape), t.dtype) for t in found.values())


def listed(tensors):
    return sorted(tensors, key=str)


BF16, FP32 = torch.bfloat16, torch.float32


def test_mambas_scan_saves_what_mamba_ssm_does():
    from megatron_autorecompute.meta import mixers

    length, heads, width, groups, state = 512, 8, 64, 2, 32
    inner, mixed = heads * width, heads * width + 2 * groups * state
    with torch.device("meta"):
        projected = torch.empty(1, length, inner + mixed + heads, dtype=BF16, requires_grad=True)
        weight, bias = torch.empty(mixed, 4, dtype=BF16), torch.empty(mixed, dtype=BF16)
        rest = [torch.empty(heads) for _ in range(3)]
        norm = mixers.GroupNorm(inner, 1e-5, inner // groups, False, dtype=BF16)

        def scan(projected):
            return mixers.split_conv1d_scan(projected, weight, bias, *rest, 128, width, groups)

        kept = saved(scan, projected)
        normed = saved(norm, torch.empty(length, 1, inner, dtype=BF16, requires_grad=True))
    # ssd_combined.py saves zxbcdt, conv1d_weight, conv1d_bias, out_x, A, D, dt_bias.
    assert kept == listed(
        [
            ((1, length, inner + mixed + heads), BF16),
            ((mixed, 4), BF16),
            ((mixed,), BF16),
            ((1, length, inner), BF16),
            *[((heads,), FP32)] * 3,
        ]
    )
    assert normed == listed([((length, 1, groups), FP32), ((length, 1, inner), BF16)])


def saved_in(asked, part, *shape):
    """What a part of the job's first layer saves for an input of this shape."""
    with model.meta_megatron(asked):
        config, sizes = model.megatron_config(asked, {}), model.step_shape(asked, 1)
        with fake_ranks(config, 0, sizes), torch.device("meta"):
            chunk = model.build_chunk(config, True, True, None, sizes, job=asked).to(BF16)
            module = chunk.decoder.layers[0].get_submodule(part)
            return saved(module, torch.empty(shape, dtype=BF16, requires_grad=True))


def test_mamba_under_context_parallelism_saves_all_tokens_of_a_part_of_the_heads():
    kept = saved_in(job("M", num_gpus=2, context_parallel_size=2), "mixer", 2048, 1, 2688)
    inner, groups, heads = 64 * 64, 8, 64  # tokens: 4096, of which a rank has half
    projected = 2 * inner + 2 * groups * 128 + heads
    activations = [entry for entry in kept if entry[0][:2] in ((1, 4096), (2048, 1))]
    assert activations == listed(
        [
            ((2048, 1), FP32),  # the first norm's statistics and its input
            ((2048, 1, 2688), BF16),
            ((2048, 1, 2688), BF16),  # the projection's input
            ((1, 4096, projected // 2), BF16),  # of the scan, after the all-to-all
            ((1, 4096, inner // 2), BF16),
            ((2048, 1, inner), BF16),  # the gated norm, after the all-to-all back
            ((2048, 1, groups), FP32),
            ((2048, 1, inner), BF16),  # the output projection's input
        ]
    )


def test_packed_samples_hold_no_more():
    asked = job("MG*", seq_length=2048, **GDN | {"experimental_attention_variant": None})
    held = [
        [one.held_bytes for kind in profile_job(each, H100, only=()).kinds for one in kind.choices]
        for each in (asked, replace(asked, packed_samples=True))
    ]
    assert held[0] == held[1]


@pytest.mark.parametrize("pattern", ["M*", "G*"])
def test_packed_samples_are_refused_where_ranks_exchange_their_tokens(pattern):
    asked = replace(job(pattern, context_parallel_size=2, **GDN), packed_samples=True)
    assert any("packed samples under context" in sentence for sentence in contradictions(asked))


def test_the_linear_layers_of_latent_experts_save_their_input_and_weight():
    latent = job("E", moe_latent_size=256)
    assert saved_in(latent, "mlp.fc1_latent_proj", 4096, 1, 2688) == listed(
        [((4096, 1, 2688), BF16), ((256, 2688), BF16)]
    )
    assert saved_in(latent, "mlp.fc2_latent_proj", 4096, 1, 256) == listed(
        [((4096, 1, 256), BF16), ((2688, 256), BF16)]
    )
    # The experts' tokens are as wide as the latent space: top 6 of 4096.
    kept = saved_in(latent, "mlp", 4096, 1, 2688)
    assert ((4096 * 6, 256), BF16) in kept
    assert not any(shape[:1] == (4096 * 6,) and shape[-1] == 2688 for shape, _ in kept)


def test_gated_delta_rule_saves_what_fla_does():
    from megatron_autorecompute.meta import mixers

    heads = (2, 512, 4)
    with torch.device("meta"):
        q, k, v = (torch.empty(*heads, n, dtype=BF16, requires_grad=True) for n in (32, 32, 64))
        g, beta = torch.empty(heads, requires_grad=True), torch.empty(heads, dtype=BF16)
        kept = saved(mixers.chunk_gated_delta_rule, q, k, v, g, beta)
        x, taps = torch.empty(2, 512, 96, dtype=BF16, requires_grad=True), torch.empty(96, 4)
        conv, unit = saved(mixers.causal_conv1d, x, taps), saved(mixers.l2norm, x)
    # chunk.py: q, k, v, g (its sums), beta, A; convolution.py: x, weight; l2norm.py: y, rstd
    wide = [((*heads, n), BF16) for n in (32, 32, 64, 64)]
    assert kept == listed([*wide, (heads, FP32), (heads, BF16)])
    assert conv == listed([((2, 512, 96), BF16), ((96, 4), FP32)])
    assert unit == listed([((2, 512), FP32), ((2, 512, 96), BF16)])


def in_this_process(run, stages, max_workers, done):
    runs = [run(stage) for stage in stages]
    for one in runs:
        done(one)
    return tuple(runs)


def middle_plan(asked):
    """The plan of a budget between the leanest need and none's."""
    problem = Problem(profile_job(asked, H100), asked.layout(), asked.schedule())
    lean, free = (
        max(choice.peak_bytes for choice in choices)
        for choices in (problem.stages.leanest, problem.stages.fastest)
    )
    return make_plan(problem.at((free + lean) // 2))


@pytest.mark.parametrize(
    ("pattern", "fields"),
    [
        ("M*|ME|", {"pipeline_model_parallel_size": 3, "num_gpus": 12}),
        ("M-|*/*-", {"pipeline_model_parallel_size": 2}),
        ("-/*-/*-", {"mtp_use_repeated_layer": True}),
    ],
)
def test_plans_are_what_megatrons_schedule_does(monkeypatch, pattern, fields):
    monkeypatch.setattr("megatron_autorecompute.meta.verify.in_processes", in_this_process)
    plan = middle_plan(job(pattern, **fields))
    for check in verify(plan):
        assert abs(check.error) <= TOLERANCE, (check, plan.policy.format())


@pytest.mark.parametrize(
    ("pattern", "fields", "said"),
    [
        ("M-X*", {}, "'X' at position 2 is no layer"),
        ("M-*", {"num_layers": 4}, "has 3 layers and 0 MTP depths (after /); num_layers is 4"),
        ("M-[*-]", {}, "'[' at position 2 is no layer"),
        ("-M", {"use_mamba_mem_eff_path": False}, "use_mamba_mem_eff_path false"),
        (
            "*E",
            {"overlap_moe_expert_parallel_comm": True},
            "overlap_moe_expert_parallel_comm beside hybrid_layer_pattern",
        ),
        ("-*|*", {"num_layers_in_first_pipeline_stage": 1}, "places layers by |"),
    ],
)
def test_a_bad_pattern_is_refused_by_position_and_symbol(pattern, fields, said):
    with pytest.raises((OptionError, PipelineError)) as error:
        job(pattern, **fields).layout()
    assert said in str(error.value)


GDN = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_conv_kernel_dim": 4,
    "activation_func": "silu",
    "moe_shared_expert_intermediate_size": 1856,
}


@pytest.mark.parametrize(
    ("pattern", "fields"),
    [
        ("M-GE", {}),
        ("-E", {"num_moe_experts": None}),
        ("-+", {}),
        ("M-G", {**GDN, "activation_func": "gelu"}),
    ],
)
def test_a_layer_that_lacks_its_fields_is_refused_where_megatron_builds_it(pattern, fields):
    with pytest.raises(OptionError, match=r"Megatron (cannot run this model|refuses this config)"):
        profile_job(job(pattern, **fields), H100, only=())


MLA = {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
}
DSA = {
    **MLA,
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 4,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 64,
}


def built(job, **recompute):
    """One chunk, with Megatron's own recompute fields."""
    left_out = {name: v for name, v in model.LEFT_OUT.items() if name not in recompute}
    config, shape = model.megatron_config(job, recompute, left_out), model.step_shape(job, 1)
    with fake_ranks(config, 0, shape), torch.device("meta"):
        return model.build_chunk(config, True, True, None, shape, job=job)


def switched_on(layer):
    """Attributes by which Megatron recomputes modules of a layer, but those without effect."""
    paths = (path.split(".") for paths in layer_modules.MODULE_FLAGS.values() for path in paths)
    for *owners, name in paths:
        owner = layer
        for part in owners:
            owner = getattr(owner, part, None)
        idle = {
            "recompute_mlp": isinstance(getattr(owner, "mlp", None), IdentityOp),
            "shared_experts_recompute": getattr(owner, "shared_experts", None) is None,
        }
        if getattr(owner, name, False) and not idle.get(name):
            yield (*owners, name)


@pytest.mark.parametrize(
    ("pattern", "fields", "quantised"),
    [
        ("-*GEM", GDN, {3: {"layernorm", "moe_act"}}),
        ("-+E", MLA, {1: {"layernorm"}, 2: {"moe_act"}}),
        ("D", DSA, {0: {"layernorm"}}),
    ],
)
def test_every_family_has_the_modules_that_megatron_builds_it_with(pattern, fields, quantised):
    """quantised: layers where, under fp8, a module saves its input as it is for a recompute."""
    asked, marked = job(pattern, **fields), []
    with model.meta_megatron(asked), contextlib.ExitStack() as undo:
        layers = dict(model_layers.numbered_layers([built(asked)]))
        assert not any(list(switched_on(layer)) for layer in layers)
        for name in rules.allowed_modules():
            selective = {"recompute_granularity": "selective", "recompute_modules": [name]}
            try:
                theirs = model_layers.numbered_layers([built(asked, **selective)])
            except OptionError:
                assert not any(layer_modules.flags(layer, name) for layer in layers)
                continue
            for layer, (own, _) in zip(layers, theirs, strict=True):
                layer_modules.set_modules(layer, [name])
                assert list(switched_on(layer)) == list(switched_on(own)), (name, layers[layer])
        attention = sys.modules["megatron.core.transformer.multi_latent_attention"]
        assert attention.set_save_original_input is not None
        for module in list(sys.modules.values()):
            if hasattr(module, "set_save_original_input"):
                undo.enter_context(patched(module, "set_save_original_input", marked.append))
        found = {}
        for (layer, index), name in itertools.product(layers.items(), rules.allowed_modules()):
            layer.config.fp8 = "e4m3"
            layer_modules.set_modules(layer, [name])
            if marked:
                found.setdefault(index, set()).add(name)
            marked.clear()
        assert found == quantised


SIZES = {"seq_length": 1024, "position_embedding_type": "none", "vocab_size": None}


def provider_as_bridges():
    """Bridge's HybridModelProvider of August 2026, as a recipe leaves it: its finalize takes
    num_layers and the depths from these fields."""

    @dataclass
    class HybridModelProvider(TransformerConfig):
        num_layers: int | None = None
        num_attention_heads: int = 8
        hybrid_layer_pattern: str = "M-*E|M-"
        mtp_hybrid_override_pattern: str = "*E"
        share_embeddings_and_output_weights: bool = False
        make_vocab_size_divisible_by: int = 128

        def __post_init__(self):
            vars(self).update(SIZES)

    return HybridModelProvider(**FIELDS_OF_RECIPE)


FIELDS_OF_RECIPE = {
    "hidden_size": 512,
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 512,
    "mtp_num_layers": 2,
    "mtp_use_repeated_layer": True,
    "pipeline_model_parallel_size": 2,
    "add_bias_linear": False,
}


def config_of_megatron():
    """Megatron's own HybridModelConfig, which holds a TransformerConfig."""
    with without_cuda.activate(training=True):
        hybrid = importlib.import_module("megatron.training.models.hybrid")
    fields = {**FIELDS_OF_RECIPE, "num_layers": 6, "num_attention_heads": 8}
    config = TransformerConfig(**fields, pipeline_dtype=BF16, bf16=True)
    pattern = "M-*E|M-/*E/*E"
    return hybrid.HybridModelConfig(transformer=config, hybrid_layer_pattern=pattern, **SIZES)


@pytest.mark.filterwarnings("ignore:Only transformer-engine:UserWarning")
@pytest.mark.parametrize("model_config", [provider_as_bridges, config_of_megatron])
def test_a_recipe_of_a_hybrid_model_is_one_of_its_pattern(monkeypatch, model_config):
    from megatron_autorecompute.integrations import megatron_bridge

    cfg = Namespace(
        model=model_config(),
        mixed_precision=None,
        tokenizer=Namespace(tokenizer_type="NullTokenizer", vocab_size=1000),
        train=Namespace(micro_batch_size=1, global_batch_size=8),
        ddp=Namespace(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        ),
        dist=Namespace(),
        optimizer=Namespace(use_precision_aware_optimizer=False),
        peft=None,
    )
    monkeypatch.setitem(sys.modules, "megatron.bridge", Namespace(__path__=[]))
    recipes = Namespace(__path__=[], ours=lambda: cfg)
    monkeypatch.setitem(sys.modules, "megatron.bridge.recipes", recipes)
    asked = recipe.job_from_recipe("ours")
    assert (str(asked.pattern), asked.num_layers, asked.vocab_size) == ("M-*E|M-/*E/*E", 6, 1000)
    assert recipe.job_from_recipe("ours", 2, 64).vocab_size == 64
    blocks = RecomputePolicy.parse(
        "megatron:block/1", num_layers=8, layout=[(0, 1, 2, 3), (4, 5)], depth_layers=2
    )
    fields = megatron_bridge.fields_of_policy(blocks, cfg.model)
    assert (fields["recompute_method"], fields["recompute_num_layers"]) == ("block", 1)
    cfg.tokenizer = Namespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="some/model")
    with pytest.raises(OptionError, match="Give --vocab-size N"):
        recipe.job_from_recipe("ours")
