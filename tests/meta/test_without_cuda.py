"""Megatron runs without CUDA, with the same numbers in every layout, and leaves no trace after."""

import importlib.util
import subprocess
import sys
import time

import pytest
import torch

from megatron_autorecompute.errors import MachineError
from megatron_autorecompute.meta import without_cuda
from testing.ranks import RankError, run_ranks
from tests.support import StepResult, one_step, start_parallel, tiny_config, tiny_gpt

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
SP = {"sequence_parallel": True}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def selective(*modules: str) -> dict:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def steps_here(kind: str, sizes: dict, variants: list[dict]) -> list[StepResult]:
    start_parallel(**sizes)
    models = [tiny_gpt(tiny_config(kind, **sizes, **fields)) for fields in variants]
    return [one_step(chunks, num_microbatches=4) for chunks in models]


def steps(kind: str, sizes: dict, *variants: dict) -> list[list[StepResult]]:
    """One step per variant of the config, in the same ranks; results by variant, then by rank."""
    ranks = 1
    for name in ("tensor_model", "pipeline_model", "expert_model"):
        ranks *= sizes.get(f"{name}_parallel_size", 1)
    by_rank = run_ranks(steps_here, ranks, kind, sizes, list(variants))
    return [list(results) for results in zip(*by_rank, strict=True)]


def together(results: list[StepResult]) -> StepResult:
    """Pipeline ranks as one: the losses of the last, everybody's gradients."""
    gradients = {name: g for result in results for name, g in result.gradients.items()}
    return StepResult(results[-1].losses, gradients)


NO_DROPOUT = {"dropout": 0.0}


@pytest.fixture(scope="module")
def one_rank() -> StepResult:
    return steps("dense", {}, NO_DROPOUT)[0][0]


@pytest.mark.any_version
@pytest.mark.parametrize("sizes", [PP2, VPP2], ids=["pp2", "pp2-vpp2"])
def test_pipeline_layouts_give_the_bits_of_one_rank(one_rank, sizes):
    assert together(steps("dense", sizes, NO_DROPOUT)[0]).same_bits(one_rank)


@pytest.mark.any_version
def test_tensor_parallel_losses_differ_by_rounding_alone(one_rank):
    for ranks in steps("dense", TP2, NO_DROPOUT, {**NO_DROPOUT, **SP}):
        assert ranks[0].losses == pytest.approx(one_rank.losses, rel=1e-6)


@pytest.mark.any_version
def test_expert_parallel_losses_differ_by_rounding_alone():
    one, two = (steps("moe", sizes, NO_DROPOUT)[0][0] for sizes in ({}, EP2))
    assert two.losses == pytest.approx(one.losses, rel=1e-6)


@pytest.mark.any_version
@pytest.mark.parametrize(
    ("kind", "sizes", "fields", "recompute"),
    [
        ("dense", {}, {}, FULL),
        ("dense", {}, {}, selective("core_attn", "layernorm", "mlp")),
        ("dense", TP2, SP, FULL),
        ("dense", VPP2, {}, selective("core_attn", "layernorm")),
        ("dense", {}, {"mtp_num_layers": 1}, FULL),
        ("moe", EP2, {}, selective("moe")),
        # RMSNorm, MLA's default, is not bit-equal under selective layernorm (upstream).
        ("mla", {}, {}, selective("mla_up_proj", "core_attn")),
    ],
)
def test_recompute_changes_no_bit_with_dropout_on(kind, sizes, fields, recompute):
    plain, again = steps(kind, sizes, fields, {**fields, **recompute})
    assert all(a.same_bits(b) for a, b in zip(plain, again, strict=True))
    assert plain[0].gradients


def test_dropout_changes_the_bits_so_equality_above_means_something(one_rank):
    assert not steps("dense", {}, {"dropout": 0.1})[0][0].same_bits(one_rank)


# ------------------------------------------------------------------------------- optimizer and DDP


def weights_after_training(num_steps: int) -> tuple[float, bool]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    start_parallel()
    config = tiny_config(bf16=True)
    model = tiny_gpt(config)[0]
    before = [p.detach().clone() for p in model.parameters()]
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [wrapped])
    losses = []
    for _ in range(num_steps):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(sum(one_step([wrapped], clear=False).losses))
        wrapped.finish_grad_sync()
        succeeded, _, _ = optimizer.step()
        assert succeeded
    moved = all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    return losses[-1] - losses[0], moved


@pytest.mark.any_version
def test_distributed_optimizer_lowers_the_loss_and_moves_every_weight():
    for change, moved in run_ranks(weights_after_training, 2, 3):
        assert change < 0
        assert moved


# ---------------------------------------------------------------------------- coming and going


def contents() -> dict:
    """Every attribute of what activation may touch, by owner and name."""
    import megatron.core.extensions.transformer_engine as te
    import megatron.core.tensor_parallel.random as rng
    import megatron.core.transformer.dot_product_attention as attention
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    import megatron.core.transformer.multi_latent_attention as mla
    import megatron.core.transformer.torch_norm as norm

    owners = [torch, torch.cuda, torch.cuda.random, torch.nn.functional, torch.UntypedStorage]
    owners += [torch.Tensor, torch.nn.Module, te, rng, rng.CudaRNGStatesTracker, mla, norm]
    owners += [norm.WrappedTorchNorm, attention.DotProductAttention, moe_utils, dispatcher]
    owners += [dispatcher.MoEAlltoAllTokenDispatcher]
    return {
        (owner.__name__, name): value for owner in owners for name, value in vars(owner).items()
    }


def differences(before: dict, after: dict) -> list:
    missing = object()
    names = before.keys() | after.keys()
    return sorted(
        str(n) for n in names if before.get(n, missing) is not after.get(n, missing)
    )  # fmt: skip


def changes_left_behind(options: dict) -> tuple[list, list]:
    torch.compiler.set_stance("default")
    before = contents()
    with without_cuda.activate(**options):
        during = contents()
    return differences(before, during), differences(before, contents())


OPTIONS = [{}, {"meta": True}]
if importlib.util.find_spec("megatron.training"):
    OPTIONS.append({"training": True})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_its_end_brings_every_original_object_back(options):
    during, after = run_ranks(changes_left_behind, 1, options, activate=False)[0]
    assert len(during) > 40
    assert after == []


@pytest.mark.any_version
def test_import_changes_nothing_and_loads_no_megatron():
    code = (
        "import sys, torch;"
        "owners = [torch, torch.cuda, torch.Tensor, torch.nn.Module, torch.nn.functional];"
        "before = [dict(vars(o)) for o in owners];"
        "import megatron_autorecompute.meta.without_cuda;"
        "new = lambda o, b: [n for n, v in vars(o).items() if n in b and b[n] is not v];"
        "changed = [n for o, b in zip(owners, before) for n in new(o, b)];"
        "sys.exit(str(changed) if changed or 'megatron.core' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_second_activation_is_refused_and_names_the_first():
    with (
        without_cuda.activate(),
        pytest.raises(MachineError, match=r"test_without_cuda\.py:\d+ already did"),
    ):
        without_cuda.activate()


def test_activation_is_refused_where_cuda_is_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MachineError, match="CUDA is available"):
        without_cuda.activate()


def test_a_run_finds_no_loss_scale_of_the_run_before_it():
    with without_cuda.activate():
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(0.5))
        assert MoEAuxLossAutoScaler.main_loss_backward_scale == 0.5
    with without_cuda.activate(meta=True):
        assert MoEAuxLossAutoScaler.main_loss_backward_scale is None


def test_deactivating_twice_is_harmless():
    before = torch.cuda.current_device
    activation = without_cuda.activate()
    assert torch.cuda.current_device is not before
    activation.close()
    activation.close()
    assert torch.cuda.current_device is before
    without_cuda.activate().close()
    assert torch.cuda.current_device is before


# ------------------------------------------------------------------------------------ stand-ins


def test_cuda_device_arguments_land_on_the_cpu():
    with without_cuda.activate():
        made = [
            torch.zeros(2, device="cuda"),
            torch.empty(2, device=torch.device("cuda", 0)),
            torch.ones(2, device=torch.cuda.current_device()),
            torch.ones(2).cuda(),
            torch.ones(2).to("cuda"),
        ]
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_device_context_is_still_obeyed():
    with without_cuda.activate(), torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"


def test_dropout_keeps_one_byte_per_element():
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    with without_cuda.activate(), hooks:
        torch.nn.functional.dropout(torch.ones(8, 8, requires_grad=True), 0.5)
    assert [t.dtype for t in packed if t.shape == (8, 8)] == [torch.bool]


def test_events_measure_time():
    with without_cuda.activate():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began_s = time.monotonic()
        start.record()
        time.sleep(0.02)
        end.record()
        took_s = time.monotonic() - began_s
    assert 20 <= start.elapsed_time(end) <= took_s * 1e3


def test_compiled_functions_run_eagerly_meanwhile():
    calls = []

    @torch.compile
    def function(x):
        calls.append(None)  # a compiled graph would not call this again
        return x + 1

    with without_cuda.activate():
        for _ in range(3):
            function(torch.ones(1))
    assert len(calls) == 3


# -------------------------------------------------------------------------------------- run_ranks


def fail_on_rank_one() -> None:
    if torch.distributed.get_rank() == 1:
        raise KeyError("a clear sign")
    time.sleep(3600)  # longer than a test may take


@pytest.mark.any_version
def test_failure_of_one_rank_ends_all_with_its_traceback():
    with pytest.raises(RankError, match=r"rank 1 raised:[\s\S]*fail_on_rank_one[\s\S]*clear sign"):
        run_ranks(fail_on_rank_one, 2)


@pytest.mark.any_version
def test_ranks_that_never_finish_are_an_error_not_a_hang():
    with pytest.raises(RankError, match=r"ranks \[0\] did not finish"):
        run_ranks(time.sleep, 1, 60, timeout_s=1)
