"""A step on meta tensors against the same step on real tensors in real gloo ranks.

RMSNorm in the exact comparisons: fused LayerNorm keeps its statistics in fp32 on CUDA and meta but
in bf16 on CPU, 4 bytes per token and norm that only the real ranks save.
"""

import dataclasses
import functools
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta import without_cuda
from megatron_autorecompute.meta.fake_ranks import StepShape
from megatron_autorecompute.meta.meta_step import (
    build_chunks,
    build_gpt,
    in_processes,
)
from megatron_autorecompute.meta.model import refusals
from megatron_autorecompute.planner.cost.schedule import Event, Schedule
from megatron_autorecompute.policy import RecomputePolicy
from testing.meta_stages import TokenStep, stage_step
from testing.ranks import fresh_processes, run_ranks
from testing.recorded_steps import RecordedStep, recorded_step
from tests.meta.boundary_tensors import boundary_tensors, events
from tests.support import start_parallel, tiny_config

SHAPE = StepShape(seq_length=128, micro_batch_size=2, num_microbatches=4, vocab_size=512)
MIXED_LENGTHS = dataclasses.replace(SHAPE, lengths=(64, 128, 16, 96))
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LENGTHS = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
BLOCK_1 = {
    "recompute_granularity": "full",
    "recompute_method": "block",
    "recompute_num_layers": 1,
}
FLEX = {"moe_token_dispatcher_type": "flex", "expert_model_parallel_size": 2}
CAPACITY = {
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
    "moe_token_drop_policy": "probs",
}


def small_config(kind: str, fields: dict):
    # Of narrower layers with experts the router's temporaries are highest, which are not counted.
    width = 128 if kind == "moe" else 64
    sizes = {"num_layers": 8, "hidden_size": width, "num_attention_heads": 4}
    usual = {"attention_softmax_in_fp32": False, "normalization": "RMSNorm", "bf16": True}
    return tiny_config(kind, **{**sizes, **usual, **fields})


def parse(text: str | None) -> RecomputePolicy | None:
    return text and RecomputePolicy.parse(text, num_layers=8)


def after_gloo_let_go(function):
    """Before function, time for gloo's thread to drop the tensor it has sent or received."""

    def wrapper(*args, **kwargs):
        time.sleep(0.01)
        return function(*args, **kwargs)

    return wrapper


def real_stage(kind: str, fields: dict, policy: str | None) -> RecordedStep:
    from megatron.core.pipeline_parallel import schedules

    from megatron_autorecompute.runtime.apply import apply

    schedules.forward_step = after_gloo_let_go(schedules.forward_step)
    schedules.backward_step = after_gloo_let_go(schedules.backward_step)
    start_parallel(**{n: v for n, v in fields.items() if n.endswith("parallel_size")})
    shape, config = shape_of(fields), small_config(kind, fields)
    models = build_chunks(config, shape, build_gpt, torch.device("cpu"))
    if policy is None:
        return recorded_step(models, shape, TokenStep(shape, torch.device("cpu")))
    with apply(parse(policy), models):
        return recorded_step(models, shape, TokenStep(shape, torch.device("cpu")))


def shape_of(fields: dict) -> StepShape:
    """One more microbatch than there are in flight; chunks take a multiple of the stages."""
    if fields.get("variable_seq_lengths"):
        return MIXED_LENGTHS
    chunks = fields.get("virtual_pipeline_model_parallel_size")
    return SHAPE if chunks else dataclasses.replace(SHAPE, num_microbatches=3)


def meta_stages(kind: str, fields: dict, policy: str | None) -> list[RecordedStep]:
    config = small_config(kind, fields)
    stages = range(config.pipeline_model_parallel_size)
    shape = shape_of(fields)
    return [stage_step(config, stage, shape, parse(policy)) for stage in stages]


@pytest.fixture(scope="module")
def fresh_process():
    """Runs functions in one other process: meta steps want no process group and no activation."""
    context = fresh_processes()
    with ProcessPoolExecutor(1, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=240)


def both(fresh_process, kind: str, fields: dict, policy: str | None = None):
    tensor_ranks = fields.get("tensor_model_parallel_size", 1)
    ranks = tensor_ranks * fields.get("pipeline_model_parallel_size", 1)
    real = run_ranks(real_stage, ranks, kind, fields, policy, timeout_s=240)[::tensor_ranks]
    return real, fresh_process(meta_stages, kind, fields, policy)


ONE_VERSION = pytest.mark.any_version
MIXED = "none,full/2*2,selective[core_attn],full/3*3,selective[core_attn+layernorm+mlp]"


@pytest.mark.parametrize(
    ("kind", "fields", "policy"),
    [
        ("dense", PP2, MIXED),
        pytest.param(
            "dense", {**PP2, "deallocate_pipeline_outputs": False}, MIXED, marks=ONE_VERSION
        ),
        pytest.param("mla", PP2, "selective[mla_up_proj]*4,none*4", marks=ONE_VERSION),
        pytest.param("moe", PP2, "full*4,selective[moe]*4", marks=ONE_VERSION),
        pytest.param("dense", {**PP2, "mtp_num_layers": 1}, None, marks=ONE_VERSION),
        pytest.param("dense", {**PP2, **BLOCK_1}, None, marks=ONE_VERSION),
        # stages tell each other the shapes, which without a device are filled in
        pytest.param("dense", {**PP2, **LENGTHS}, MIXED, marks=ONE_VERSION),
        pytest.param("moe", {**PP2, **CAPACITY, **LENGTHS}, "full*4,none*4", marks=ONE_VERSION),
    ],
)
def test_every_layer_has_the_bytes_of_real_ranks(fresh_process, kind, fields, policy):
    real, meta = both(fresh_process, kind, fields, policy)
    for r, m in zip(real, meta, strict=True):
        assert (m.peak_bytes, m.parameter_bytes) == (r.peak_bytes, r.parameter_bytes)
        assert m.buffer_bytes == r.buffer_bytes
        assert [s for s in m.spans if s.where.layer is not None] == [
            s for s in r.spans if s.where.layer is not None
        ]


@pytest.mark.any_version
def test_layers_that_gather_tokens_for_their_experts_have_the_bytes_of_real_ranks(fresh_process):
    gathering = {**PP2, "moe_token_dispatcher_type": "allgather"}
    real, meta = both(fresh_process, "moe", gathering, "full*4,selective[moe]*4")
    # Under a dispatch mode torch does not make the gradient of masked_select in place.
    of_map = 2 * SHAPE.seq_length * SHAPE.micro_batch_size * 4
    for r, m in zip(real, meta, strict=True):
        assert (m.peak_bytes, m.buffer_bytes) == (r.peak_bytes, r.buffer_bytes)
        pairs = [(s, t) for s, t in zip(r.spans, m.spans, strict=True) if s.where.layer is not None]
        assert all((s.where, s.start_bytes) == (t.where, t.start_bytes) for s, t in pairs)
        assert all(0 <= s.peak_bytes - t.peak_bytes <= of_map for s, t in pairs)


@pytest.mark.parametrize(
    ("fields", "policy"),
    [
        pytest.param(VPP2, None, marks=ONE_VERSION),
        pytest.param(VPP2, "full*2,none*2,full/2*2,selective[mlp]*2", marks=ONE_VERSION),
        pytest.param(
            {**VPP2, **LENGTHS}, "full*2,none*2,full/2*2,selective[mlp]*2", marks=ONE_VERSION
        ),
        pytest.param(TP2_SP, "none*4,full*4", marks=ONE_VERSION),
        pytest.param({**PP2, **TP2_SP, **LENGTHS}, "full*2,none*6", marks=ONE_VERSION),
    ],
)
def test_peak_has_the_bytes_of_real_ranks_where_gloo_holds_tensors_longer(
    fresh_process, fields, policy
):
    # A handle of gloo, or its thread, keeps a tensor a little longer than the fake group does.
    boundary_bytes = 2 * SHAPE.seq_length * SHAPE.micro_batch_size * 128
    real, meta = both(fresh_process, "dense", fields, policy)
    for r, m in zip(real, meta, strict=True):
        assert 0 <= r.peak_bytes - m.peak_bytes <= boundary_bytes
        assert [s.where for s in m.spans] == [s.where for s in r.spans]
        assert (m.parameter_bytes, m.buffer_bytes) == (r.parameter_bytes, r.buffer_bytes)


@pytest.mark.any_version
def test_layernorm_statistics_are_all_that_meta_counts_more_than_cpu(fresh_process):
    real, meta = both(fresh_process, "dense", {**PP2, "normalization": "LayerNorm"})
    # Stage 0, 4 layers: 2 microbatches in flight, 2 norms a layer, mean and 1/std, 2 bytes more.
    tokens = SHAPE.seq_length * SHAPE.micro_batch_size
    assert meta[0].peak_bytes - real[0].peak_bytes == 2 * 4 * 2 * 2 * 2 * tokens


# ------------------------------------------------------------------------ 80 layers, tp 8, pp 8

# Ten layers' activations of one microbatch as Korthikanti et al. 2022 count them, over tp.
TEN_LAYERS_BYTES = 10 * 2048 * 8192 / 8 * (34 + 5 * 64 * 2048 / 8192)


def large_stage(stage: int, chunks: int | None, text: str) -> RecordedStep:
    config = tiny_config(
        bf16=True,
        num_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=8,
        virtual_pipeline_model_parallel_size=chunks,
        sequence_parallel=True,
        deallocate_pipeline_outputs=True,
        attention_softmax_in_fp32=False,
    )
    build = functools.partial(build_gpt, position_embedding_type="learned_absolute")
    policy = RecomputePolicy.parse(text, num_layers=80)
    # As few as have as many in flight as more would have.
    shape = StepShape(2048, 1, num_microbatches=16 if chunks else 9, vocab_size=51200)
    return stage_step(config, stage, shape, policy, build)


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("stage", "chunks", "policy", "expected"),
    [
        (0, None, "none*80", 8),  # microbatches in flight under 1F1B: p - stage
        (7, None, "none*80", 1),
        (0, 5, "none*80", (2 * 7 + 4 * 8 + 1) * 2 / 10),  # interleaved: chunks of 2 layers
        (0, None, "full*80", (8 * 10 * 2 / 114 + 1) / 10),  # inputs, and one layer recomputed
    ],
)
def test_peak_at_70b_scale_is_the_papers_bytes_times_microbatches_in_flight(
    fresh_process, stage, chunks, policy, expected
):
    result = fresh_process(large_stage, stage, chunks, policy)
    assert result.peak_bytes / TEN_LAYERS_BYTES == pytest.approx(expected, abs=0.1)


# ---------------------------------------------------------------------------------- what it tells


@pytest.mark.parametrize("fields", [PP2, VPP2], ids=["1f1b", "interleaved"])
def test_events_come_in_the_order_of_the_schedule_replay(fresh_process, fields):
    chunks = fields.get("virtual_pipeline_model_parallel_size", 1)
    schedule = Schedule(2, chunks, shape_of(fields).num_microbatches)
    for stage, result in enumerate(fresh_process(meta_stages, "dense", fields, None)):
        seen = [Event(*event.where[:3]) for event in events(result)]
        assert tuple(seen) == schedule.events(stage)


@pytest.mark.any_version
def test_peak_span_and_events_agree_with_the_peak(fresh_process):
    for result in fresh_process(meta_stages, "dense", PP2, MIXED):
        assert result.peak_span.peak_bytes == result.peak_bytes
        assert max(event.peak_bytes for event in events(result)) == result.peak_bytes


@pytest.mark.any_version
def test_moe_experts_share_tokens_evenly_across_expert_parallel_ranks(fresh_process):
    # Two ranks with half the experts each receive what they send: the activations of one rank.
    one = fresh_process(expert_peak_bytes, 1)
    two = fresh_process(expert_peak_bytes, 2)
    assert two == pytest.approx(one, rel=0.02)


def expert_peak_bytes(expert_ranks: int) -> int:
    config = small_config("moe", {"expert_model_parallel_size": expert_ranks})
    shape = dataclasses.replace(SHAPE, data_parallel_size=expert_ranks)
    return stage_step(config, 0, shape).peak_bytes


@pytest.mark.any_version
def test_stages_in_processes_of_their_own_give_the_same(fresh_process):
    both_stages = fresh_process(meta_stages, "dense", PP2, None)
    assert list(in_processes(one_stage, [1, 0])) == both_stages[::-1]


def one_stage(stage: int) -> RecordedStep:
    return stage_step(small_config("dense", PP2), stage, shape_of(PP2))


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("moe", FLEX, "DeepEP is not installed"),
        ("dense", {"context_parallel_size": 2}, "supported by TEDotProductAttention"),
    ],
)
def test_a_config_that_needs_a_device_is_refused_with_megatrons_reason(
    fresh_process, kind, fields, said
):
    with pytest.raises(OptionError, match=said):
        fresh_process(refused_stage, kind, fields)


def refused_stage(kind: str, fields: dict) -> None:
    with refusals("this model"):
        stage_step(small_config(kind, fields), 0, dataclasses.replace(SHAPE, data_parallel_size=2))


@pytest.mark.any_version
def test_a_meta_step_leaves_neither_process_group_nor_stand_ins(fresh_process):
    fresh_process(meta_stages, "dense", {}, None)
    assert fresh_process(torch.distributed.is_initialized) is False
    fresh_process(activate_and_close)


def activate_and_close() -> None:
    without_cuda.activate().close()


# ------------------------------------------------------------------------------ boundary tensors


def counts(fields: dict, num_microbatches: int = 8) -> list[tuple[list[int], list[int]]]:
    """Per stage: extra tensors at each forward, and at each backward."""
    config = small_config("dense", fields)
    per_stage = []
    for stage in range(config.pipeline_model_parallel_size):
        found = boundary_tensors(config, stage, num_microbatches)
        phases = ("forward", "backward")
        per_stage.append(tuple([b.extra for b in found if b.phase == phase] for phase in phases))
    return per_stage


def test_one_f_one_b_keeps_three_tensors_at_a_middle_stages_forward(fresh_process):
    first, middle, _, last = fresh_process(counts, {"pipeline_model_parallel_size": 4})
    assert first == ([0, 0, 0, 0, 1, 1, 1, 1], [0] * 8)
    assert middle == ([0, 0, 0, 3, 3, 3, 3, 3], [0, 1, 1, 1, 1, 1, 1, 1])
    assert last == ([0, 2, 2, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1])


def test_outputs_kept_by_the_schedule_add_one_tensor_per_microbatch_in_flight(fresh_process):
    fields = {"pipeline_model_parallel_size": 4}
    freed = fresh_process(counts, fields)
    kept = fresh_process(counts, {**fields, "deallocate_pipeline_outputs": False})
    in_flight = [4, 3, 2, 0]  # at a steady backward; the last stage's output is the loss
    assert [max(k[1]) - max(f[1]) for k, f in zip(kept, freed, strict=True)] == in_flight


def full_stage_excess(fields: dict, stage: int) -> list[tuple[str, int]]:
    """Per event of a GPT of full layers: tensors beyond its layers' inputs and one gradient."""
    config = small_config("dense", {"hidden_size": 512, "dropout": 0.0, **fields})
    shape = StepShape(seq_length=64, micro_batch_size=1, num_microbatches=8, vocab_size=512)
    build = functools.partial(build_gpt, position_embedding_type="learned_absolute")
    result = stage_step(config, stage, shape, parse("full*8"), build)
    starts = {}  # of the first layer that runs in each event
    for span in result.spans:
        if span.where.layer is not None:
            starts.setdefault(span.where[:3], span.start_bytes)
    chunks = config.virtual_pipeline_model_parallel_size or 1
    layers_per_chunk = 8 // (config.pipeline_model_parallel_size * chunks)
    inputs, excess = 0, []
    for (phase, _, _), start_bytes in starts.items():
        excess.append((phase, round(start_bytes / (64 * 512 * 2)) - inputs - 1))
        inputs += layers_per_chunk if phase == "forward" else -layers_per_chunk
    return excess


@pytest.mark.any_version
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("fields", [PP2, VPP2], ids=["1f1b", "interleaved"])
def test_counts_are_those_of_a_real_gpt(fresh_process, fields, stage):
    forwards, backwards = fresh_process(counts, fields)[stage]
    excess = fresh_process(full_stage_excess, fields, stage)
    assert [extra for phase, extra in excess if phase == "forward"] == forwards
    assert [extra for phase, extra in excess if phase == "backward"] == backwards
