"""Static bytes by counts of parameters; what Megatron's own optimizer makes of them."""

import contextlib
import itertools
import types
from unittest import mock

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    OptimizerConfig,
    distrib_optimizer,
    get_megatron_optimizer,
    optimizer_config,
)

from benchmarks.measured.rounding import StaticBlocks
from megatron_autorecompute.meta import kernels
from megatron_autorecompute.meta.devices import device
from megatron_autorecompute.meta.kept_bytes import counted_weights
from megatron_autorecompute.meta.model import run_stage, shard
from megatron_autorecompute.meta.profiling import profile_job
from megatron_autorecompute.meta.static_bytes import (
    Parameters,
    Trained,
    Weights,
    expert_data_parallel,
    optimizer_step_bytes,
    static_bytes,
    weight_bytes,
)
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.runtime.live_bytes import LiveBytes
from tests.meta.test_job import job
from tests.meta.test_no_device import MOE
from tests.meta.test_no_device import job as model_job

H100, B200 = device("h100-80gb"), device("b200-180gb")
ADAM = {"use_precision_aware_optimizer": True}
BF16 = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


def of(the_job, frozen=0, dense=0, dense_matrices=0, expert=0):
    parameters = Parameters(Trained(dense, dense_matrices), Trained(expert), frozen)
    return static_bytes(the_job, H100, Weights(others=parameters))


def test_distributed_optimizer_takes_6_plus_12_over_d_bytes():
    # The table in Megatron-LM's docs of the distributed optimizer: bf16 weights, fp32 gradients.
    assert of(job(), dense=800).total_bytes == 800 * (6 + 12 / 8)


def test_without_it_every_rank_takes_18_bytes():
    assert of(job(use_distributed_optimizer=False), dense=800).total_bytes == 800 * 18


def test_context_parallel_ranks_share_the_optimizer_state():
    found = of(job({"context_parallel_size": 4}), dense=800)
    assert found.optimizer_state_bytes == 800 * 12 // 8


def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones():
    moe = job({"expert_model_parallel_size": 4})
    assert expert_data_parallel(moe) == 2
    assert of(moe, expert=800).optimizer_state_bytes == 800 * 12 // 2


def test_muon_keeps_8_bytes_of_a_matrix_and_divides_whole_ones():
    counts = {"dense": 8000, "dense_matrices": 6400}
    found = [
        of(job(optimizer="muon", **fields), **counts).optimizer_state_bytes
        for fields in (
            {"use_distributed_optimizer": False},
            {},
            {"use_layer_wise_param_layout": False},
        )
    ]
    assert found == [8 * 6400 + 12 * 1600, 8 * 800 + 12 * 200, 8 * 800 + 12 * 1600]


def test_muon_trains_matrices_outside_embedding_and_output_layer():
    with shard(model_job(MOE), [1, 1]) as built:
        parts = built.model.embedding, built.model.output_layer, built.model.decoder
        embedding, output, layers = map(counted_weights, parts)
        flat = sum(p.numel() for p in built.model.decoder.parameters() if p.dim() == 1)
    assert embedding.total.dense.in_matrices == output.total.dense.in_matrices == 0
    assert layers.total.dense.count - layers.total.dense.in_matrices == flat
    assert layers.total.expert.count == layers.total.expert.in_matrices > 0


def test_every_stage_counts_the_weights_that_megatron_builds_there():
    # The last stage has the tied word embeddings again, but not those of positions.
    asked = model_job(
        {"pipeline_model_parallel_size": 2},
        position_embedding_type="learned_absolute",
        untie_embeddings_and_output_weights=False,
    )
    profile = profile_job(asked, H100, only=())
    nothing = RecomputePolicy.parse("none*4", num_layers=4)
    for stage, record in enumerate(profile.stages):
        built = run_stage(asked, 2, nothing, stage)
        assert record.static.parameter_bytes == built.parameter_bytes


def test_frozen_weights_have_neither_gradient_nor_state():
    assert of(job(), frozen=800).total_bytes == 1600


@pytest.mark.parametrize(
    ("fields", "gpu", "bytes_each"),
    [
        ({"precision": "bf16"}, H100, 2),
        ({"precision": "fp8"}, H100, 2),
        ({"precision": "fp8"}, B200, 1),
        ({"precision": "fp8", "disable_parameter_transpose_cache": True}, H100, 2),
        ({"precision": "fp8", "fp8_param_gather": False}, H100, 4),
        ({"precision": "mxfp8"}, B200, 2 + 2 / 32),
        ({"precision": "nvfp4"}, B200, 2 + 2 * (0.5 + 1 / 16)),
    ],
)
def test_quantised_weights_are_kept_for_forward_and_backward(fields, gpu, bytes_each):
    assert weight_bytes(job(**fields), gpu) == bytes_each
    both = Weights(Parameters(dense=Trained(800)), Parameters(dense=Trained(7)))
    assert static_bytes(job(**fields), gpu, both).parameter_bytes == 800 * bytes_each + 2 * 7


def test_uncached_copies_of_weights_are_activations_of_every_microbatch():
    fields = {"precision": "mxfp8", "fp8_param_gather": False}
    cached, uncached = (
        held(model_job(**fields, disable_parameter_transpose_cache=each)) for each in (False, True)
    )
    (weights,) = {sum(w.numel() for w in weights) for _, weights in (cached, uncached)}
    assert uncached[0] - cached[0] == 2 * weights * (1 + 1 / 32)
    assert weight_bytes(model_job(**fields), B200) == 2 + 2 * (1 + 1 / 32)
    assert weight_bytes(model_job(**fields, disable_parameter_transpose_cache=True), B200) == 2


def held(the_job):
    """Bytes that a layer holds after forward, and its weights."""
    with shard(the_job, [1]) as built:
        (layer,) = built.model.decoder.layers
        weights = [m.weight for m in layer.modules() if isinstance(m, kernels.LinearModule)]
        x = torch.empty(512, 1, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
        with LiveBytes([x, *layer.parameters()]) as live:
            kept = layer(x, attention_mask=None)
            found = live.current_bytes
            del kept
        return found, weights


# -------------------------------------------------------------------- Megatron's own optimizer


@pytest.mark.parametrize(
    ("fields", "config"),
    [
        ({"accumulate_allreduce_grads_in_fp32": True}, {}),
        ({"accumulate_allreduce_grads_in_fp32": False}, {}),
        ({"accumulate_allreduce_grads_in_fp32": False}, {"expert_model_parallel_size": 4}),
        ({"accumulate_allreduce_grads_in_fp32": True, "precision": "fp8"}, {}),
        ({"accumulate_allreduce_grads_in_fp32": False, "precision": "fp8_block"}, {}),
    ],
)
def test_megatrons_distributed_optimizer_makes_as_many_bytes(fields, config):
    the_job = model_job({**MOE, **config}, **fields)
    with shard(the_job, [1, 1]) as built, own_optimizer(built.model, the_job) as (live, optimizer):
        weights = counted_weights(built.model)
        run(optimizer)  # makes the moments
        optimizer.zero_grad()
        static = live.current_bytes
        live.reset_peak()
        run(optimizer)
        # The buffers of DistributedDataParallel are in bf16 here under every precision.
        in_bf16 = model_job({**MOE, **config}, **{**fields, "precision": "bf16"})
        counted = static_bytes(in_bf16, H100, weights).total_bytes
        assert static == pytest.approx(counted, rel=2e-3)  # ends of buckets are padded
        made = optimizer_step_bytes(the_job, weights)
        assert live.peak_bytes - static == pytest.approx(made, rel=2e-3)
        if the_job.precision == "bf16":
            with_padding = StaticBlocks(the_job, H100, [built.model], first_stage=True, rank=0)
            with_padding.allocate_moments()
            assert static == with_padding.allocator.requested_bytes


@contextlib.contextmanager
def own_optimizer(model, the_job):
    """Megatron's optimizer of a model on meta tensors, with Adam's moments and no kernels."""
    in_fp32 = the_job.accumulate_allreduce_grads_in_fp32
    quantised = {
        id(m.weight)
        for m in model.modules()
        if the_job.precision != "bf16"
        if isinstance(m, kernels.LinearModule)
    }
    with (
        LiveBytes(model.parameters()) as live,
        mock.patch.object(torch.Tensor, "type", type_on_cuda),
        mock.patch.object(torch.optim.AdamW, "step", make_moments),
    ):
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=in_fp32,
            overlap_grad_reduce=True,
            overlap_param_gather=True,  # no gather in the step, which has no meta kernel
        )
        chunk = DistributedDataParallel(model.config, ddp, model)
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        )
        optimizer = get_megatron_optimizer(config, [chunk], use_gloo_process_groups=False)
        ddp.fp8_param_gather = bool(quantised)
        with (
            mock.patch.object(distrib_optimizer, "is_float8tensor", lambda p: id(p) in quantised),
            mock.patch.object(distrib_optimizer, "quantize_param_shard", cast),
        ):
            yield live, optimizer


_type = torch.Tensor.type


def type_on_cuda(tensor, *args):
    name = {torch.bfloat16: "BFloat16Tensor", torch.float32: "FloatTensor"}
    return _type(tensor, *args) if args else f"torch.cuda.{name[tensor.dtype]}"


def make_moments(adam):
    for parameter in itertools.chain(*(group["params"] for group in adam.param_groups)):
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in adam.state[parameter]:
                adam.state[parameter][name] = torch.empty_like(parameter)


def cast(weights, masters, *_):
    """As TE pytorch/tensor/utils.py `cast_master_weights_to_fp8` begins."""
    return [m.to(w.dtype) for w, m in zip(weights, masters, strict=True) if m is not None]


def run(optimizer):
    optimizer.prepare_grads()
    optimizer.step_with_ready_grads()


# ----------------------------------------------------------------- the precision-aware optimizer


def test_it_keeps_two_bytes_of_a_master_weight_and_of_each_bf16_moment():
    assert of(job(**ADAM, **BF16), dense=800).optimizer_state_bytes == 800 * (2 + 2 + 2) // 8


@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("main", ["fp32", "fp16"])
def test_who_keeps_master_weights_is_as_megatrons_optimizer_config_says(recipe, main):
    precision = {None: "bf16", "blockwise": "fp8_block", "mxfp8": "mxfp8"}.get(recipe, "fp8")
    ours = job({"fp8_recipe": recipe}, precision=precision, main_params_dtype=main, **ADAM)
    dtypes = {"fp32": torch.float32, "fp16": torch.float16}
    adam = types.SimpleNamespace(FusedAdam=fused_adam)
    with (
        mock.patch.dict("sys.modules", {"transformer_engine.pytorch.optimizers": adam}),
        mock.patch.object(optimizer_config, "is_te_min_version", return_value=True),
    ):
        theirs = OptimizerConfig(
            fp8_recipe=recipe,
            main_params_dtype=dtypes[main],
            use_distributed_optimizer=True,
            reuse_grad_buf_for_mxfp8_param_ag=recipe == "mxfp8",
            **ADAM,
        )
    keeps = theirs.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    assert ours.adam_keeps_main_params == keeps
    main_bytes = {"fp32": 2, "fp16": 2}[main] if keeps else 4
    assert of(ours, dense=800).optimizer_state_bytes == 800 * (main_bytes + 4 + 4) // 8


def fused_adam(master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad):
    """Has the parameters that Megatron looks for."""


def test_fused_adam_copies_moments_that_are_not_fp32_of_one_group_at_a_time():
    moe = {"num_moe_experts": 8, "expert_model_parallel_size": 4}
    bf16 = {**ADAM, "accumulate_allreduce_grads_in_fp32": False}
    # 1,000 and 3,000 of them on this rank.
    weights = Weights(Parameters(expert=Trained(6000)), Parameters(dense=Trained(8000)))

    def made(**fields):
        return optimizer_step_bytes(job(moe, **bf16, **fields), weights)

    assert made(**BF16) == 2 * 4 * 3000
    assert made(**BF16, te_version="2.14") == 0
    assert made(exp_avg_dtype="fp16", te_version="2.14") == 4 * 3000
    assert made() == 0
    # Under fp8 with scales of the current tensor, gradients are copied as well.
    assert made(**BF16, precision="fp8") == 4 * 4000 + 2 * 4 * 3000
    assert made(precision="fp8") == 4 * 4000 + 2 * 3000
