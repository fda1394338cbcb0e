"""CUDA graphs of layers: what is in their pool and what is not, by Megatron's own code."""

import dataclasses
import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer import cuda_graphs

from megatron_autorecompute.compat.graph_fields import graph_fields
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta.devices import Efficiency
from megatron_autorecompute.meta.job import job_from
from megatron_autorecompute.meta.job_config import GraphScope
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.policy import FULL, LayerPolicy
from megatron_autorecompute.profile import ChoiceRecord, LayerBytes
from tests.meta.test_no_device import H100, HIDDEN, MOE, SEQUENCE, job
from tests.planner.uniform_profiles import peak_of, uniform_profile

HIDDEN_BYTES = 2 * SEQUENCE * HIDDEN
MASK_BYTES = SEQUENCE * SEQUENCE


def graphs(impl, *modules, **more):
    return job({**more, "cuda_graph_impl": impl, "cuda_graph_modules": list(modules)})


@pytest.fixture(scope="module")
def eager():
    return profile_job(job(), H100)


def records(profile):
    """Of the last kind of layers, by choice; what changes nothing has the record it equals."""
    kind = profile.kinds[-1]
    found = {record.choice: record for record in kind.choices}
    return found | {choice: found[other] for choice, other in kind.inert.items()}


def expected(without, choice, captured):
    """What Megatron runs of a choice: since 0.19 no checkpoint of a module in a graph."""
    if "is_graph_capturing" not in inspect.getsource(checkpoint):
        return without.get(f"{choice}+all", without[choice])
    modules = [each for each in LayerPolicy.parse(choice).modules if each not in captured]
    same = LayerPolicy("selective", tuple(modules), rerun_all=True) if modules else LayerPolicy()
    return without.get(str(same)) or without[str(replace(same, rerun_all=False))]


@pytest.mark.any_version
def test_whole_layers_hold_what_they_hold_without_graphs(eager):
    # With `local` a layer's output is the next one's input, in the pool as in any memory.
    without, pooled = records(eager), records(profile_job(graphs("local"), H100))
    lacking = [LayerPolicy.parse(choice) for choice in without if choice not in pooled]
    assert FULL in lacking
    assert all(c == FULL or c.rerun_all or not c.is_megatrons for c in lacking)
    for choice, record in pooled.items():
        same = expected(without, choice, ["core_attn", "mlp"])
        assert record.held_bytes == record.graph.held_bytes == same.held_bytes
        assert record.forward_transient_bytes == same.forward_transient_bytes
        # The gradient that a layer gets from the next graph and a copy of it.
        more = record.backward_transient_bytes - same.backward_transient_bytes
        assert 0 <= more <= HIDDEN_BYTES


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("modules", "more"),
    [(["attn"], MASK_BYTES), (["mlp"], HIDDEN_BYTES), (["attn", "mlp"], HIDDEN_BYTES + MASK_BYTES)],
)
def test_parts_of_layers_are_in_the_pool_and_the_rest_is_not(eager, modules, more):
    # The output of `mlp` is one more tensor; that of `attn` is what the MLP's norm saves anyway.
    found = records(profile_job(graphs("transformer_engine", *modules), H100))
    without = records(eager)
    for choice, record in found.items():
        captured = {"attn": ["core_attn"], "mlp": ["mlp"]}
        own = [module for part in modules for module in captured[part]]
        assert record.held_bytes == expected(without, choice, own).held_bytes + more
        if choice == "none":
            assert (record.graph.held_bytes == record.held_bytes) == (len(modules) == 2)


SLOW_HOST = Efficiency(module_us=1e3)
"""A millisecond for each module, and nothing else that counts at this size."""


def modules_ms(asked):
    """Of the layers under none, forward and backward."""
    record = records(profile_job(asked, H100, SLOW_HOST, only=()))["none"]
    return record.forward_ms, record.backward_ms


@pytest.mark.any_version
def test_the_host_starts_a_graph_as_one_module_and_what_is_beside_it_one_by_one():
    eager = modules_ms(job())
    whole = modules_ms(graphs("local"))
    assert whole == pytest.approx((1, 1), abs=0.1)
    parts = ("attn",), ("mlp",), ("attn", "mlp")
    attention, mlp, both = (modules_ms(graphs("transformer_engine", *one)) for one in parts)
    assert both == pytest.approx((1, 1), abs=0.1)
    for without, *one in zip(eager, attention, mlp, strict=True):
        # Each part's graph is one module, and the other part's modules are what it has elsewhere.
        assert sum(one) == pytest.approx(without + 2, abs=0.2)


@pytest.mark.any_version
def test_in_a_graph_of_the_iteration_the_host_takes_no_time():
    asked = graphs("full_iteration")
    slow, free = profile_job(asked, H100, SLOW_HOST), profile_job(asked, H100, Efficiency())
    for one, other in zip(times(slow), times(free), strict=True):
        assert one == other
    assert min(times(profile_job(job(), H100, SLOW_HOST, only=()))) >= 1


def times(profile):
    """Of all records with modules of Transformer Engine."""
    found = [*profile.kinds[-1].choices, profile.head]
    return [ms for record in found for ms in (record.forward_ms, record.backward_ms)]


@pytest.mark.any_version
def test_experts_beside_the_graphs_of_their_router_hold_what_they_did():
    eager = profile_job(job(MOE), H100, only=["moe"])
    asked = graphs("transformer_engine", "attn", "moe_router", "moe_preprocess", **MOE)
    profile = profile_job(asked, H100, only=["moe"])
    assert any("moe recompute is not supported" in line for line in profile.assumptions)
    moe, without = profile.kinds[1], eager.kinds[1].record(LayerPolicy())
    record = moe.record(LayerPolicy())
    assert record.graph.held_bytes < record.held_bytes
    # Its outputs are what experts save, and in 0.16 two hidden states besides.
    more = record.held_bytes - without.held_bytes - MASK_BYTES
    assert -0.02 * without.held_bytes < more < 2 * HIDDEN_BYTES


@pytest.mark.any_version
def test_the_experts_checkpoint_is_beside_the_graphs_and_drops_what_it_drops_elsewhere():
    parts = "attn", "moe_router", "moe_preprocess"
    for asked in (job(MOE), graphs("transformer_engine", *parts, **MOE)):
        kind = profile_job(asked, H100, only=["experts"]).kinds[1]
        none, again = (
            kind.record(LayerPolicy()),
            kind.record(LayerPolicy.parse("selective[experts]")),
        )
        dropped = none.held_bytes - again.held_bytes
        assert again.graph == none.graph
        rows = MOE["moe_router_topk"] * SEQUENCE
        product_and_halves = 2 * rows * 3 * MOE["moe_ffn_hidden_size"]
        counts = 8 * MOE["num_moe_experts"]  # tokens of each expert, which a checkpoint may keep
        assert product_and_halves - counts <= dropped <= product_and_halves


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(2, 1, 6), (4, 1, 8), (2, 2, 8)])
def test_the_pool_of_a_stage_is_that_of_megatrons_order_of_captures(
    monkeypatch, stages, chunks, microbatches
):
    layers, own = 2, LayerBytes(100, 7, 31)
    record = ChoiceRecord("none", 100, 7, 31, 1.0, 2.0, graph=own)
    profile = uniform_profile(layers * stages * chunks, record)
    layout = Layout.from_flags(layers * stages * chunks, stages, chunks if chunks > 1 else None)
    schedule = Schedule(stages, chunks, microbatches)
    monkeypatch.setattr(cuda_graphs, "is_te_min_version", lambda *_: True)
    for stage in range(stages):
        table = get_schedule_table(microbatches, chunks, schedule.group_size)
        order = cuda_graphs.convert_schedule_table_to_order(schedule.warmup(stage), chunks, table)
        current = highest = 0
        for chunk in order:
            for _ in range(layers):
                size = 100 if chunk > 0 else -100
                transient = 7 if chunk > 0 else 31
                highest = max(highest, max(current, current + size) + transient)
                current += size
        assert peak_of(profile, layout, schedule, "none", stage).bytes == highest
        assert inputs_of(order, layers, chunks, microbatches) == (highest - 31) // 100


def inputs_of(order, layers, chunks, microbatches):
    """How many input buffers Megatron makes for such graphs."""
    helper = object.__new__(cuda_graphs.TECudaGraphHelper)
    stage = [[SimpleNamespace() for _ in range(layers)] for _ in range(chunks)]
    for layer in (layer for chunk in stage for layer in chunk):
        layer.get_layer_static_inputs = lambda *_: {"hidden_states": torch.empty(1)}
    blocks = [SimpleNamespace(decoder=SimpleNamespace(layers=chunk)) for chunk in stage]
    fields = {
        "num_model_chunks": chunks,
        "num_microbatches": microbatches,
        "num_layers_per_chunk": [layers] * chunks,
        "callables_per_chunk": stage,
        "flattened_callables": [layer for chunk in stage for layer in chunk],
        "chunks_with_decoder": blocks,
        "config": SimpleNamespace(**graph_fields("transformer_engine", ["mlp"])),
        "seq_length": 1,
        "micro_batch_size": 1,
    }
    vars(helper).update(fields)
    arguments, _ = helper._get_sample_arguments(order)
    return len({id(hidden) for (hidden,) in arguments})


def test_a_scope_is_read_under_its_old_names_and_its_new_ones():
    old = {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}
    assert GraphScope.of(old) == GraphScope.of({"cuda_graph_impl": "full_iteration"})
    assert GraphScope.of({"enable_cuda_graph": True}) == GraphScope("local")
    assert GraphScope.of({"cuda_graph_impl": "none", "cuda_graph_scope": "full"}) == GraphScope()
    with pytest.raises(OptionError, match=r"cuda_graph_modules\[0\]: 'attention', must be 'attn'"):
        job_from(
            {
                **{f.name: getattr(job(), f.name) for f in dataclasses.fields(job())},
                "config": {**job().config, "cuda_graph_modules": ["attention"]},
            },
            "job.yaml",
        )
