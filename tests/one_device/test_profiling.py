"""What one device says of a job of two ranks, against these two ranks themselves.

A HybridModel with every family of layers where Megatron has it, and GPTs before. Megatron's local
layers then stand for Transformer Engine's, in the job, on the device and on meta tensors.
"""

import contextlib
import functools
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
import yaml

from megatron_autorecompute.cli import main
from megatron_autorecompute.compare.comparison import Shape
from megatron_autorecompute.compat import model_facts
from megatron_autorecompute.meta.devices import device
from megatron_autorecompute.meta.job import job_from
from megatron_autorecompute.meta.profiling import longest_end_ms, replace_mtp, stage_parameters
from megatron_autorecompute.one_device import build, profiling
from megatron_autorecompute.one_device.profiling import least_runs, measure
from megatron_autorecompute.patched import patched
from megatron_autorecompute.policy import LayerPolicy
from megatron_autorecompute.profile import MEASURED_ON_ONE_DEVICE, LayerBytes, Profile
from megatron_autorecompute.runtime.model_shard import choices
from megatron_autorecompute.runtime.samples import SAMPLES, TURNS
from testing.ranks import run_ranks
from tests import hybrid_models
from tests.gloo import collectives_on_copies

TEXT = Path(__file__).parents[2].joinpath("LICENSE").read_bytes()
SHAPE = Shape(
    num_layers=10,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=64,
    micro_batch_size=2,
    num_microbatches=1,
    pipeline_stages=1,
    bf16=True,
)
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "add_bias_linear": False}
EXPERT = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 0.01,
    "moe_router_load_balancing_type": "aux_loss",
    "expert_model_parallel_size": 2,
    "add_bias_linear": False,
}
FORCED = {"moe_router_force_load_balancing": True}
GPT = {**TENSOR, **EXPERT, **FORCED, "expert_tensor_parallel_size": 1, "moe_layer_freq": [0, 1] * 5}
PATTERN = "M*-GE"
HYBRID = {
    **TENSOR,
    **EXPERT,
    "expert_tensor_parallel_size": 1,
    "moe_grouped_gemm": False,
    "is_hybrid_model": True,
    **hybrid_models.mamba_kernels.SIZES,
    **hybrid_models.GDN,
}


@contextlib.contextmanager
def local_layers():
    """In this block the command builds HybridModels of local layers, on CPU and on meta tensors."""
    on_device, with_modules = build.megatron_on, model_facts.hybrid_spec

    @contextlib.contextmanager
    def megatron_on(where):
        with on_device(where), hybrid_models.runnable():
            yield

    def local_spec(*_):
        with patched(model_facts, "hybrid_spec", with_modules):
            return hybrid_models.local_spec()

    with (
        patched(build, "refuse", lambda *_: None),
        patched(build, "hybrid_spec", local_spec),
        patched(model_facts, "hybrid_spec", local_spec),
        patched(build, "megatron_on", megatron_on),
    ):
        yield


def hybrid_model(shape, config, _):
    """In place of the job's GPT."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    model = HybridModel(
        config,
        hybrid_models.local_spec(),
        vocab_size=256,
        max_sequence_length=shape.seq_length,
        hybrid_layer_pattern=PATTERN,
        position_embedding_type="learned_absolute",
    )
    model.register_forward_pre_hook(without_mask, with_kwargs=True)
    return model


def without_mask(_, args, kwargs):
    """Transformer Engine's layers make their own."""
    return args, {**kwargs, "attention_mask": None}


def hybrid_in_the_job():
    from megatron_autorecompute.compare import workload

    shape = replace(SHAPE, num_layers=len(PATTERN))
    with patched(workload, "_model", hybrid_model), hybrid_models.runnable():
        return measured_in_the_job(HYBRID, shape)


def measured_in_the_job(fields, shape=SHAPE):
    """The profile of two real ranks, in which routing is forced as on one device."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron_autorecompute.compare.workload import TrainingJob, Variant
    from megatron_autorecompute.one_device.build import even_routing
    from megatron_autorecompute.policy import RecomputePolicy
    from megatron_autorecompute.profile import Model, Parallelism
    from megatron_autorecompute.runtime.apply import apply
    from megatron_autorecompute.runtime.measurement import Measurement
    from megatron_autorecompute.runtime.model_shard import ModelShard

    sizes = {name: size for name, size in fields.items() if name.endswith("parallel_size")}
    parallel_state.initialize_model_parallel(**sizes)
    spec = functools.partial(get_gpt_decoder_block_spec, use_transformer_engine=False)
    job = TrainingJob(shape, TEXT, Variant(fields, spec))
    leanest = RecomputePolicy.parse("full", num_layers=shape.num_layers)
    with (
        even_routing(),
        collectives_on_copies(),
        apply(leanest, job.chunks) as applied,
        job.memory() as memory,
    ):
        job.step()
        measurement = Measurement(ModelShard(job.chunks), applied)
        for _ in measurement.policies():
            with measurement.watch(memory):
                job.step()
        return measurement.profile(
            Model("GPT", shape.num_layers),
            Parallelism(shape.micro_batch_size, shape.seq_length),
            job.static(),
        )


def job_file(path, fields, **changed):
    """The same job as YAML."""
    config = {"num_layers": SHAPE.num_layers, "hidden_size": SHAPE.hidden_size, **fields}
    job = {
        "name": "two ranks",
        "config": {
            **config,
            "num_attention_heads": SHAPE.num_attention_heads,
            "attention_dropout": 0.1,
            "hidden_dropout": 0.1,
        },
        "num_gpus": 2,
        "seq_length": SHAPE.seq_length,
        "micro_batch_size": SHAPE.micro_batch_size,
        "global_batch_size": 4,
        "vocab_size": 256,
        "transformer_impl": "local",
        "position_embedding_type": "learned_absolute",
        **changed,
    }
    path.write_text(yaml.safe_dump(job))
    return str(path)


COMMAND = ["profile", "--device", "cpu", "--gpu", "h100-80gb", "--repeats", "2"]


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """Of one device, and of two real ranks."""
    folder = tmp_path_factory.mktemp("one_device")
    output, text = str(folder / "p.json"), folder / "job.yaml"
    if not hybrid_models.HAVE_HYBRID:
        assert main([*COMMAND, job_file(text, GPT), "-o", output]) == 0
        return Profile.load(output), run_ranks(measured_in_the_job, 2, GPT)[0]
    fields = {**HYBRID, "activation_func": "silu", "hybrid_layer_pattern": PATTERN}
    layers = {"num_layers": len(PATTERN)}
    with local_layers():
        path = job_file(text, fields | layers, transformer_impl="transformer_engine")
        assert main([*COMMAND, path, "-o", output]) == 0
    return Profile.load(output), run_ranks(hybrid_in_the_job, 2)[0]


def test_every_choice_holds_what_it_holds_on_two_real_ranks(profiles):
    one, two = profiles
    own: list[str] = []
    for kind, same in zip(one.kinds, two.kinds, strict=True):
        real = {record.choice: record.held_bytes for record in same.choices}
        held = {r.choice: r.held_bytes for r in kind.choices if r.choice in real}
        own += [choice for choice in held if LayerPolicy.parse(choice).own]
        # Of MoE's dispatcher, small tensors of the step before remain, by what the layer did in it.
        loose = 256 if kind.name == "moe" else 0
        assert held == pytest.approx(real, abs=loose, rel=0)
        assert kind.layers == same.layers
    assert own
    assert one.head.held_bytes == two.head.held_bytes
    assert one.boundary_bytes == two.boundary_bytes


def test_no_transient_is_above_that_of_two_real_ranks_whose_gloo_copies_what_it_sends(profiles):
    one, two = profiles
    pairs = [(one.head, two.head)]
    for kind, same in zip(one.kinds, two.kinds, strict=True):
        real = {record.choice: record for record in same.choices}
        pairs += [(r, real[r.choice]) for r in kind.choices if r.choice in real]
    # In the place of an output that is not computed stands another one, here for a moment longer.
    loose = 256 + one.boundary_bytes
    for record, real in pairs:
        held = record.held_bytes - real.held_bytes
        assert record.forward_transient_bytes + held <= real.forward_transient_bytes + loose
        assert record.backward_transient_bytes + held <= real.backward_transient_bytes + loose


@pytest.mark.filterwarnings("ignore:`sequence_parallel` is set to:UserWarning")
def test_a_record_says_what_was_measured_and_what_modelled(profiles):
    one = profiles[0]
    full, none = (one.kinds[0].record(choice) for choice in ("full", "none"))
    for record in (*one.kinds[0].choices, one.embedding, one.head):
        assert record.source == MEASURED_ON_ONE_DEVICE
        assert 0 <= record.communication_ms < record.forward_ms + record.backward_ms
    assert full.communication_ms > none.communication_ms > 0  # it gathers once more
    # Gradients are reduced behind layers as measured, and not behind their communication.
    job, gpu = job_from(one.model.facts["job"], "the job"), device("h100-80gb")
    with local_layers():
        parameters = stage_parameters(job, gpu)
    assert one.step_end_ms == longest_end_ms(job, gpu, gpu.reaches, parameters, one.kinds)
    said = " ".join(one.assumptions)
    assert "Measured on one CPU" in said
    assert "Modelled: communication" in said
    assert ("routing is forced" in said) == any(kind.name == "moe" for kind in one.kinds)
    assert one.fingerprint["device"] == "CPU"
    assert one.fingerprint["links"] == "h100-80gb"


@pytest.mark.any_version
def test_a_plan_of_it_is_no_modelled_one(profiles, tmp_path, capsys):
    path = tmp_path / "p.json"
    profiles[0].save(path)
    assert main(["plan", "--profile", str(path), "--budget-gib", "8", "-v"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "times are modelled" not in said
    assert "communication is modelled" in said
    assert main(["verify", str(path)]) == 4


@pytest.mark.any_version
def test_layers_hold_the_same_in_front_of_an_mtp_depth_on_another_stage(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "every_choice", lambda layer: choices(layer, ["core_attn"]))
    fields = {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2, "num_layers": 2}
    path = job_file(tmp_path / "job.yaml", fields)
    job = job_from(yaml.safe_load(Path(path).read_text()), path)
    without = measure(replace_mtp(job, 0), torch.device("cpu"), 1, lambda _: None)
    whole = measure(job, torch.device("cpu"), 1, lambda _: None)
    assert [kind.name for kind in whole.kinds] == ["dense", "mtp"]
    for record, other in zip(without.kinds[0].choices, whole.kinds[0].choices, strict=True):
        assert record.choice == other.choice
        assert LayerBytes.of(record) == LayerBytes.of(other)
    assert LayerBytes.of(without.embedding) == LayerBytes.of(whole.embedding)


SMALL = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 32,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "expert_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "cross_entropy_loss_fusion": False,
}


@pytest.mark.newest_version
@pytest.mark.filterwarnings("ignore:`sequence_parallel` is set to:UserWarning")
def test_deepseek_v3_is_measured_in_few_steps_and_no_choice_is_left_out():
    """A device takes one step more for each switch; see tests/runtime/test_measurement.py."""
    text = resources.files("megatron_autorecompute.examples").joinpath("deepseek-v3.yaml")
    data = yaml.safe_load(text.read_text())
    data["config"] |= SMALL
    data |= {"transformer_impl": "local", "seq_length": 32, "num_gpus": 4, "vocab_size": 256}
    said = []
    found = measure(job_from(data, "the job"), torch.device("cpu"), None, said.append)
    assert [kind.name for kind in found.kinds] == ["dense", "moe", "mtp"]
    asked = [len(kind.choices) + len(kind.inert) for kind in found.kinds]
    count = {what: sum(f": {what}, step" in each for each in said) for what in ("bytes", "times")}
    assert max(asked) == count["bytes"] > 30
    assert count["times"] <= profiling.STEPS < TURNS * SAMPLES * max(asked) / 3
    assert least_runs(found.kinds) >= 9
