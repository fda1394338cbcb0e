"""Builds one rank of a job's model on a device, with one layer of every kind.

All other ranks are those of torch's fake process group, so routers give every expert equally many
tokens, as in a meta step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from importlib import util
from typing import Any

import torch

from megatron_autorecompute.errors import MachineError, OptionError, ProfileError
from megatron_autorecompute.meta import without_cuda
from megatron_autorecompute.meta.fake_ranks import fake_ranks
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.job_config import PRECISIONS
from megatron_autorecompute.meta.model import (
    LEFT_OUT,
    Shard,
    build_chunk,
    job_kinds,
    refusals,
    shard_config,
    step_shape,
)
from megatron_autorecompute.packages import lacking_kernels
from megatron_autorecompute.patched import patched, patched_environ
from megatron_autorecompute.planner.cost.hybrid_pattern import FAMILIES

SEED = 1234
RUN_HERE = ("fp8", "fp4", "fp8_recipe", "moe_permute_fusion", "moe_router_fusion")
"""Fields of the model on a device that the model on meta tensors is built without."""


def device_of(name: str) -> torch.device:
    """The device called cpu or cuda; raises MachineError if it is not there."""
    on_cuda = torch.cuda.is_available()
    if name == "cuda" and not on_cuda:
        raise MachineError(
            "--device cuda, and torch finds no CUDA device here. Run it on a machine with one, or "
            "take estimate, which needs none."
        )
    if name == "cpu" and on_cuda:
        raise MachineError(
            "--device cpu, and this process sees a CUDA device, which Megatron would use. Hide it: "
            "CUDA_VISIBLE_DEVICES= megatron-autorecompute profile --device cpu ..."
        )
    return torch.device(name)


def refuse(job: Job, device: torch.device) -> None:
    """Raise OptionError or MachineError for a job whose modules this device or machine lacks."""
    if job.lora_rank:
        raise OptionError(
            f"{job.name}: lora_rank {job.lora_rank}, and adapters are Megatron Bridge's, which is "
            "not built here. Take estimate, or auto in the job."
        )
    values = job.resolved
    groups, chosen = values.moe_router_num_groups, values.moe_router_group_topk
    # The top-k experts in turn are in this many groups, or one more.
    wide = groups and -(-values.moe_router_topk * groups // values.num_moe_experts) + 1
    sinkhorn = job.config.get("moe_router_load_balancing_type") == "sinkhorn"
    if values.num_moe_experts and (sinkhorn or (wide or 0) > (chosen or groups or 0)):
        raise ProfileError(
            f"{job.name}: the router's settings do not let every expert have equally many tokens "
            "(sinkhorn, or groups of experts that are too narrow). Measure such a model in the "
            "job, by auto."
        )
    if job.transformer_impl == "local":
        return
    if device.type != "cuda" or util.find_spec("transformer_engine") is None:
        # A HybridModel has no layers of Megatron's own.
        or_local = "" if job.pattern else ", or change the job to transformer_impl local"
        raise MachineError(
            f"{job.name}: transformer_impl transformer_engine, and Transformer Engine runs on CUDA "
            "only, where it is installed. Install it and measure on a GPU, or take "
            f"estimate{or_local}."
        )
    for symbol in dict.fromkeys(job.resolved.hybrid_layer_pattern or ""):
        if lacking := lacking_kernels(symbol):
            raise MachineError(
                f"{job.name}: {symbol!r} in hybrid_layer_pattern ({FAMILIES[symbol]}) runs kernels "
                f"that are not installed here. Install {', '.join(lacking)}; estimate needs none."
            )


@contextlib.contextmanager
def shard(job: Job, device: torch.device) -> Iterator[Shard]:
    """One layer of each of the job's kinds, embedding and head, with weights, in this block.

    Raises OptionError for a config that Megatron refuses.
    """
    quiet = patched_environ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    with quiet, megatron_on(device), even_routing(), refusals(job.name):
        config, kind_of = shard_config(job, [1] * len(job_kinds(job)), left_out(job))
        set_for_the_device(config, job)
        shape = step_shape(job, 1)
        with fake_ranks(config, 0, shape):
            seed()
            model = chunk(config, True, True, None, shape, job=job, device=device)
            yield Shard(model.to(device).to(config.params_dtype).train(), kind_of, config)


def set_for_the_device(config: Any, job: Job) -> None:
    """Give a config for meta tensors what a device has and they lack."""
    for name, value in PRECISIONS[job.precision].fields.items():
        setattr(config, name, job.config.get(name) or value)
    config.perform_initialization = True
    config.gradient_accumulation_fusion = adds_in_the_product(job)
    config.masked_softmax_fusion &= has_fused_softmax()


def chunk(config: Any, *where: Any, job: Job, device: torch.device) -> torch.nn.Module:
    """Build what `build_chunk` does, with weights on the device."""
    with device:
        spec = None if job.pattern is None else hybrid_spec()
        model = build_chunk(config, *where, job=job, spec=spec)
    if job.fuses_weight_gradients:
        _add_in_the_product(model)
    return model


def hybrid_spec() -> Any:
    """Megatron's spec of a HybridModel's layers, of real modules."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    return hybrid_stack_spec


def left_out(job: Job) -> dict[str, Any]:
    """Fields of the job's config that are not used here, and the values in place of theirs."""
    used = {name: value for name, value in LEFT_OUT.items() if name not in RUN_HERE}
    return {**used, "moe_token_dispatcher_type": "alltoall"}


def _add_in_the_product(model: torch.nn.Module) -> None:
    """Transformer Engine's layers do it by themselves, Megatron's own need Apex."""
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            setattr(module, "fuse_wgrad_accumulation", True)  # noqa: B010  # not every module has it


def adds_in_the_product(job: Job) -> bool:
    """Whether Megatron's own linear layers add weight gradients in the product: it needs Apex."""
    from megatron.core.tensor_parallel import layers

    return job.fuses_weight_gradients and bool(layers._grad_accum_fusion_available)


def has_fused_softmax() -> bool:
    """Whether the kernels of Megatron's masked_softmax_fusion are installed."""
    return util.find_spec("scaled_masked_softmax_cuda") is not None


@contextlib.contextmanager
def megatron_on(device: torch.device) -> Iterator[None]:
    """Megatron runs on this device in this block: without CUDA, or on one device of it alone."""
    with without_cuda.on_the_device() if device.type == "cuda" else without_cuda.activate():
        yield


def seed() -> None:
    """Make weights the same whenever they are made."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(SEED)
    model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)


# ------------------------------------------------------------------------------------ even routing


_FAVOUR = 100.0
"""Added to the chosen experts' logits, which are kept within +-10."""


@contextlib.contextmanager
def even_routing() -> Iterator[None]:
    """In this block Megatron's routers choose evenly.

    Logits are changed in place and out of autograd's sight, so that nothing else is kept than in a
    job. Scores, losses and permutation are Megatron's own.
    """
    from megatron.core.transformer.moe import router
    from megatron.core.transformer.moe.router import Router

    original = Router.gating

    @functools.wraps(original)
    def gating(self: Any, input: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = original(self, input)
        tokens, experts = logits.numel() // self.num_experts, self.num_experts
        favour = _favour(tokens, experts, self.topk, logits.dtype, logits.device)
        # What is no number would be chosen first, for all tokens alike.
        logits.data.nan_to_num_(0.0, 0.0, 0.0).clamp_(-10, 10).add_(favour.view_as(logits))
        return logits

    # Equally large logits in place of random ones, which balance in the mean only.
    forced = patched(router, "apply_random_logits", torch.clone)
    with patched(Router, "gating", gating), forced:
        yield


@functools.cache
def _favour(
    tokens: int, experts: int, topk: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    chosen = torch.arange(tokens * topk, device=device) % experts
    favour = torch.zeros(tokens, experts, dtype=dtype, device=device)
    return favour.scatter_(1, chosen.view(tokens, topk), _FAVOUR)
