"""Bridge's own LoRA on the CPU, against the model of it without a device."""

import importlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta import ops
from megatron_autorecompute.meta.devices import device
from megatron_autorecompute.meta.job import job_from
from megatron_autorecompute.meta.job_config import LORA_TARGETS
from megatron_autorecompute.meta.model import JobStep, add_main_gradients, shard
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.meta.recipe import fields_of_peft, job_from_recipe
from megatron_autorecompute.meta.roofline import Roofline
from scripts import nvidia_recipes
from scripts.public_models import hub_config
from tests.bridge import recipes
from tests.bridge.test_model import built, gradients

H100 = device("h100-80gb")
RANK, SAMPLES, SEQUENCE, LAYERS = 4, 2, 32, 4
"""Of `tests.bridge.test_model.gradients` and the tiny recipe."""
FC1 = ("linear_fc1",)
TARGETS = [(one,) for one in LORA_TARGETS] + [LORA_TARGETS]


@pytest.fixture
def given(bridge, monkeypatch):
    """The tiny Llama's recipe, which `job_from_recipe("given_config")` reads."""
    from megatron.bridge import recipes as bridges

    cfg = recipes.tiny_llama_pretrain_config()
    monkeypatch.setattr(bridges, "given_config", lambda: cfg, raising=False)
    return cfg


def lora(*targets, **fields):
    from megatron.bridge.peft.lora import LoRA

    return LoRA(dim=RANK, alpha=8, target_modules=list(targets), **fields)


def of_bridge(targets):
    """FLOPs of its matrix products, and elements kept for backward, of one microbatch."""
    cfg = recipes.tiny_llama_pretrain_config()
    peft = lora(*targets)
    chunks = built(cfg, lambda model: peft(model, training=True))
    # As what other stages send is: else the first layer computes and keeps less.
    chunks[0].embedding.register_forward_hook(lambda _, __, out: out.detach().requires_grad_())
    own = {p.untyped_storage().data_ptr() for p in chunks[0].parameters()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so no two share a place
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with FlopCounterMode(display=False) as counter, hooks:
        gradients(chunks)
    flops = counter.get_flop_counts()["Global"]
    products = sum(flops.get(name, 0) for name in (torch.ops.aten.mm, torch.ops.aten.addmm))
    return products, sum(tensor.untyped_storage().nbytes() // 4 for tensor in kept.values())


def job(targets):
    """The same step, in 16 bits."""
    sizes = {
        "num_layers": LAYERS,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "gated_linear_unit": True,
        "activation_func": "silu",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    data = {
        "name": "tiny",
        "config": sizes,
        "num_gpus": 1,
        "seq_length": SEQUENCE,
        "micro_batch_size": SAMPLES,
        "global_batch_size": SAMPLES,
        "vocab_size": 128,
        "lora_rank": RANK,
        "lora_target_modules": list(targets),
    }
    return job_from(data, "the tiny recipe")


def of_model(targets):
    """The same of the model without a device; FLOPs of everything but attention."""
    asked = job(targets)
    with shard(asked, [LAYERS]) as one:
        add_main_gradients(one.model.parameters())
        with Roofline(H100, H100.reaches) as clock:
            JobStep(asked)(None, one.model)[0].float().mean().backward()
    queries = torch.empty(SEQUENCE, SAMPLES, 4, 16, device="meta")
    attention = ops.FLOPS["attention"](queries, queries, queries, 0.5, 0)
    attention += attention * 5 // 2
    (kind,) = profile_job(asked, H100).kinds
    return clock.flops - LAYERS * attention, LAYERS * kind.record("none").held_bytes // 2


@pytest.fixture(scope="module")
def modelled(bridge):
    """Of all targets, before Megatron runs on the CPU in this process."""
    return {targets: of_model(targets) for targets in TARGETS}


@pytest.fixture(scope="module")
def run(modelled, one_rank):
    """The same of Bridge's own."""
    return {targets: of_bridge(targets) for targets in TARGETS}


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_matrix_products_are_those_of_bridges_lora(modelled, run, targets):
    assert modelled[targets][0] == run[targets][0]


@pytest.mark.parametrize("targets", TARGETS, ids="+".join)
def test_what_adapters_keep_is_what_bridges_keep(modelled, run, targets):
    """Beside that of linear_fc1: of the rest, local layers and stand-ins keep different tensors.
    Fused attention keeps its output however the projection is trained."""
    ours, theirs = (found[targets][1] - found[FC1][1] for found in (modelled, run))
    output = LAYERS * SAMPLES * SEQUENCE * 64 if "linear_proj" in targets else 0
    assert ours == theirs - output


def test_a_recipes_adapters_are_read(given):
    given.peft = lora("linear_qkv", dropout=0.1)
    read = job_from_recipe("given_config")
    assert (read.lora_rank, read.lora_target_modules, read.lora_dropout) == (4, ["linear_qkv"], 0.1)
    given.peft = lora("*.mlp.linear_fc1")
    assert job_from_recipe("given_config").lora_target_modules == ["*.mlp.linear_fc1"]


def test_default_targets_are_bridges(bridge):
    from megatron.bridge.peft.lora import LoRA

    assert tuple(LoRA().target_modules) == LORA_TARGETS


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target_modules": ["*.layers.3.*.linear_qkv"]}, "adapters are modelled on every layer"),
        ({"target_modules": [], "exclude_modules": ["linear_qkv"]}, "sets peft.exclude_modules"),
        ({"dropout": 0.1, "dropout_position": "post"}, "sets peft.dropout_position 'post'"),
        ({"target_modules": ["router"]}, "lora_target_modules router"),
    ],
)
def test_settings_of_bridges_lora_that_are_not_modelled_are_refused(given, fields, said):
    from megatron.bridge.peft.lora import LoRA

    given.peft = LoRA(**fields)
    with pytest.raises(OptionError, match=said):
        job_from_recipe("given_config")


def test_an_experimental_exchange_is_refused_where_sequences_are_split(given):
    given.peft = lora("linear_qkv", a2a_experimental=True)
    assert job_from_recipe("given_config").lora_rank == RANK
    given.model.tensor_model_parallel_size, given.model.sequence_parallel = 2, True
    with pytest.raises(OptionError, match=r"sets peft.a2a_experimental True"):
        job_from_recipe("given_config")


@pytest.mark.parametrize("method", ["DoRA", "CanonicalLoRA"])
def test_other_methods_of_bridge_are_refused(given, method):
    module = {"DoRA": "dora", "CanonicalLoRA": "canonical_lora"}[method]
    given.peft = getattr(importlib.import_module(f"megatron.bridge.peft.{module}"), method)()
    with pytest.raises(OptionError, match=f"trains with {method} .*only LoRA is modelled"):
        job_from_recipe("given_config")


def test_adapters_of_nvidias_recipes_are_those_that_their_table_assumes(bridge, monkeypatch):
    pytest.importorskip("megatron.bridge.perf_recipes", reason="Bridge 0.6 on")
    from megatron.bridge import AutoBridge
    from megatron.bridge.perf_recipes.llama import llama3_70b_peft_8gpu_h100_fp8cs_config

    monkeypatch.setattr(
        AutoBridge,
        "from_hf_pretrained",
        classmethod(lambda cls, path, **_: cls.from_hf_config(hub_config(path))),
    )
    cfg = llama3_70b_peft_8gpu_h100_fp8cs_config()
    assert fields_of_peft(cfg.peft, cfg.model, "this") == {**nvidia_recipes.LORA, "lora_dropout": 0}
