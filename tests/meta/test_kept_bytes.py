"""Dummy weight gradients and workspaces: one for each shape of a stage, by Megatron's own calls."""

import importlib
import weakref
from dataclasses import replace

import pytest
import torch
from megatron.core import full_cuda_graph
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.transformer.moe.router import TopKRouter

from megatron_autorecompute.meta import kernels
from megatron_autorecompute.meta.devices import device
from megatron_autorecompute.meta.kept_bytes import deferred_output_layer, workspaces
from megatron_autorecompute.meta.model import JobStep, add_main_gradients, built_stage, shard
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.meta.static_bytes import Parameters, Trained, Weights, static_bytes
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.peak_memory import stage_base
from megatron_autorecompute.runtime.live_bytes import LiveBytes, storage_bytes
from tests.meta.test_no_device import FFN, GROUPS, H100, HEADS, HIDDEN, LOCAL, MOE, job

VOCABULARY = 1024  # of `job`, padded
DENSE_SHAPES = [
    (HIDDEN + 2 * HIDDEN * GROUPS // HEADS, HIDDEN),
    (HIDDEN, HIDDEN),
    (2 * FFN, HIDDEN),
    (HIDDEN, FFN),
]
EXPERT_SHAPES = [(2 * 512, HIDDEN), (HIDDEN, 512)]


def dummies(shared):
    return {name: size for name, size in shared.items() if name.startswith("dummy")}


def bytes_of(shapes):
    return sum(2 * rows * columns for rows, columns in set(shapes))


def test_a_stage_has_one_dummy_of_each_shape_however_many_layers_it_has():
    profile = profile_job(job(), H100, only=())
    (kind,) = profile.kinds
    assert sum(dummies(kind.static.shared).values()) == bytes_of(DENSE_SHAPES)
    assert dummies(profile.head_static.shared) == {
        f"dummy weight gradient {VOCABULARY}x{HIDDEN}": 2 * VOCABULARY * HIDDEN
    }
    assert profile.embedding_static.shared == {}
    whole = bytes_of([*DENSE_SHAPES, (VOCABULARY, HIDDEN)])
    for layout in (Layout.from_flags(4, 1), Layout.from_flags(4, 2)):
        last = stage_base(profile, layout, layout.num_stages - 1).static
        assert sum(dummies(last.shared).values()) == whole
        layers = layout.num_layers // layout.num_stages
        parts = layers * kind.static.parameter_bytes + profile.head_static.parameter_bytes
        assert last.parameter_bytes - parts in (0, profile.embedding_static.parameter_bytes)


def test_tensor_parallelism_splits_the_dummies():
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    (kind,) = profile_job(job(split), H100, only=()).kinds
    assert 2 * sum(dummies(kind.static.shared).values()) == bytes_of(DENSE_SHAPES)


@pytest.mark.any_version
def test_all_experts_of_a_layer_share_one_dummy():
    moe = profile_job(job(MOE), H100, only=()).kinds[1]
    assert sum(dummies(moe.static.shared).values()) == bytes_of([*DENSE_SHAPES[:2], *EXPERT_SHAPES])


@pytest.mark.parametrize("tied", [False, True])
def test_megatrons_output_layer_asks_for_the_dummies_that_are_counted(monkeypatch, tied):
    asked = job(LOCAL, transformer_impl="local", untie_embeddings_and_output_weights=not tied)
    kept = {}

    def get_dummy_wgrad(shape, dtype, zero=False):
        return kept.setdefault((*shape, dtype), torch.empty(shape, dtype=dtype, device="meta"))

    monkeypatch.setattr(megatron_layers, "HAVE_TE", True)
    monkeypatch.setattr(megatron_layers, "get_dummy_wgrad", get_dummy_wgrad, raising=False)
    with shard(asked, [1]) as built:
        add_main_gradients(built.model.parameters(), dummies=True)
        JobStep(asked)(None, built.model)[0].float().mean().backward()
    profile = profile_job(asked, H100, only=())
    counted = {**profile.kinds[0].static.shared, **profile.head_static.shared}
    size = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    assert sum(dummies(counted).values()) == size


def test_of_frozen_layers_only_adapters_have_dummies():
    (kind,) = profile_job(job(lora_rank=4), H100, only=()).kinds
    products = [((4, columns), (rows, 4)) for rows, columns in DENSE_SHAPES]
    assert sum(dummies(kind.static.shared).values()) == bytes_of(sum(products, ()))


def test_without_fusion_a_weight_gradient_is_alive_while_its_layer_runs():
    # With so few tokens the largest weight's gradient makes the peak.
    fused, real = (
        profile_job(
            job({"gradient_accumulation_fusion": fusion}, seq_length=16), H100, only=()
        ).kinds[0]
        for fusion in (True, False)
    )
    assert dummies(real.static.shared) == {}
    largest = max(2 * rows * columns for rows, columns in DENSE_SHAPES)
    more = (
        real.record("none").backward_transient_bytes - fused.record("none").backward_transient_bytes
    )
    assert 0.9 * largest < more <= largest
    assert real.record("none").held_bytes == fused.record("none").held_bytes


@pytest.mark.any_version
@pytest.mark.parametrize(("version", "kept"), [("2.11", True), ("2.9", False), ("", False)])
def test_versions_before_2_10_make_every_experts_dummy_anew(version, kept):
    moe = profile_job(job(MOE, te_version=version), H100, only=()).kinds[1]
    names = {f"dummy weight gradient {rows}x{columns}" for rows, columns in EXPERT_SHAPES}
    assert (names <= moe.static.shared.keys()) == kept
    newest = profile_job(job(MOE), H100, only=()).kinds[1]
    for choice in ("none", "full"):
        more = (
            moe.record(choice).backward_transient_bytes
            - newest.record(choice).backward_transient_bytes
        )
        assert more == 0 if kept else more > 0


@pytest.mark.parametrize(
    ("fields", "each"),
    [
        ({"torch_version": "2.11"}, 8320 << 10),
        ({"torch_version": "2.12"}, 32 << 20),
        ({"torch_version": "2.12", "cublas_workspace_config": ":16:8"}, 128 << 10),
        ({"config": {"deterministic_mode": True}}, 32 << 20),
    ],
)
def test_torch_takes_hoppers_workspace_on_blackwell_since_2_12_if_none_is_given(fields, each):
    layer = object.__new__(megatron_layers.ColumnParallelLinear)
    found = workspaces(job(**fields), device("b200-180gb"), [layer])
    assert found == {"cuBLAS workspaces of torch": 2 * each}


@pytest.mark.any_version
def test_workspaces_are_those_of_the_device_and_of_the_products_that_run():
    sizes = {}
    for gpu in ("h100-80gb", "a100-80gb"):
        dense, moe = profile_job(job(MOE), device(gpu), only=()).kinds
        for kind in (dense, moe):
            found = kind.static.shared
            sizes[gpu, kind.name] = sum(found.values()) - sum(dummies(found).values())
    of_te = (32 << 20) + 1024
    assert sizes["h100-80gb", "dense"] == of_te
    assert sizes["h100-80gb", "moe"] == 5 * of_te
    assert sizes["a100-80gb", "dense"] == 4 << 20


@pytest.mark.parametrize(
    ("fields", "of_te", "of_torch"),
    [
        ({}, (32 << 20) + 1024, 0),
        ({"te_version": "1.2"}, 0, 64 << 20),
        ({"config": {"moe_router_dtype": "fp64"}}, 0, 64 << 20),
    ],
)
def test_a_router_has_the_workspace_of_whom_its_products_are(fields, of_te, of_torch):
    # A workspace of torch each for the threads of forward and backward.
    router = object.__new__(TopKRouter)
    found = workspaces(job(**fields), H100, [router])
    asked = {"cuBLAS workspaces of torch": of_torch, "cuBLAS workspace": of_te}
    assert found == {name: size for name, size in asked.items() if size}


@pytest.mark.parametrize(
    ("gpu", "deterministic", "each"),
    [
        ("h100-80gb", False, 32 << 20),
        ("b200-180gb", False, (8 << 20) + (128 << 10)),
        ("b200-180gb", True, 32 << 20),
    ],
)
def test_torchs_workspaces_count_with_the_output_layer(gpu, deterministic, each):
    asked = job({"deterministic_mode": deterministic})
    shared = profile_job(asked, device(gpu), only=()).head_static.shared
    assert shared["cuBLAS workspaces of torch"] == 2 * each


def test_a_shared_buffer_counts_once_and_at_its_largest():
    static = profile_job(job(), H100, only=()).kinds[0].static
    smaller = replace(static, shared={name: 1 for name in static.shared})
    both = type(static).sum([static, smaller, static])
    assert both.shared == static.shared
    assert both.total_bytes == 3 * (static.total_bytes - sum(static.shared.values())) + sum(
        static.shared.values()
    )


@pytest.mark.parametrize("limit", [0, 2])
def test_deferred_gradients_of_logits_are_those_that_megatrons_output_layer_keeps(limit):
    fused = {"gradient_accumulation_fusion": True, "defer_embedding_wgrad_compute": True}
    both = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    asked = job({**fused, **both, "wgrad_deferral_limit": limit, "sequence_parallel": True})
    with built_stage(asked, asked.num_microbatches, stage=1) as ([model], _, step):
        add_main_gradients(model.parameters(), dummies=asked.makes_dummies)
        received = []
        for _ in range(asked.num_microbatches):
            size = (asked.seq_length // 2, asked.micro_batch_size, asked.config["hidden_size"])
            with torch.device("meta"):
                tensor = torch.empty(size, dtype=torch.bfloat16, requires_grad=True)
            model.set_input_tensor(tensor)
            step(None, model)[0].float().mean().backward()
            received.append(weakref.ref(tensor))
        model.set_input_tensor(None)
        del tensor
        alive = [leaf for one in received if (leaf := one()) is not None]
        kept = [*model.embedding_activation_buffer, *model.grad_output_buffer, *alive]
        waiting = deferred_output_layer(asked)
        assert waiting.each_bytes * waiting.waiting(asked.num_microbatches) == storage_bytes(
            [*kept, *(one.grad for one in alive)]
        )
    assert deferred_output_layer(job()) is None


def test_the_compiled_backward_of_the_fused_cross_entropy_makes_one_fp32_copy_more():
    fused = importlib.import_module("megatron.core.fusions.fused_cross_entropy")
    rows, columns = 64, 512
    with torch.device("meta"):
        softmax, gradient = torch.ones(8, 8, columns), torch.ones(8, 8)
        mask, target = torch.zeros(8, 8, dtype=torch.bool), torch.zeros(rows, dtype=torch.long)

    def peak_bytes():
        with LiveBytes([softmax, gradient, mask, target]) as live:
            fused.calculate_gradients(softmax, gradient, mask, target)
        return live.peak_bytes

    plain = peak_bytes()
    with kernels.stand_ins(job()):
        assert peak_bytes() - plain == 4 * rows * columns
    assert peak_bytes() == plain


def test_instances_of_the_distributed_optimizer_each_have_the_whole_state():
    weights = Weights(others=Parameters(dense=Trained(8000)))
    one, two = (
        static_bytes(job(num_distributed_optimizer_instances=number), H100, weights)
        for number in (1, 2)
    )
    assert two.optimizer_state_bytes == 2 * one.optimizer_state_bytes == 2 * 12 * 1000


@pytest.mark.parametrize("stages", [1, 4])
def test_a_graph_of_the_iteration_keeps_what_megatrons_loader_copies(monkeypatch, stages):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    fields = {"pipeline_model_parallel_size": stages, "cuda_graph_impl": "local"}
    asked = job({**fields, "cuda_graph_scope": ["full_iteration"]}, global_batch_size=8)
    asked = replace(asked, attention_mask_in_dataloader=True)
    length = (1, asked.seq_length)
    sample = {name: torch.zeros(length, dtype=torch.int64) for name in ("tokens", "labels")}
    sample["position_ids"], sample["loss_mask"] = sample["tokens"] + 1, torch.zeros(length)
    sample["attention_mask"] = torch.ones(1, 1, *2 * [asked.seq_length], dtype=torch.bool)
    kept = [full_cuda_graph.copy_tensors_in_struct(sample) for _ in range(asked.num_microbatches)]
    copies = [tensor for own in kept for tensor in own.values()]
    profile = profile_job(asked, H100, only=())
    found = [stage.static.shared.get("samples of a CUDA graph", 0) for stage in profile.stages]
    ends = {0, stages - 1}
    assert found == [storage_bytes(copies) * (stage in ends) for stage in range(stages)]
