"""Megatron's fine-grained activation offloading for a single layer: its rules and its switches.

Every forward reads the switches again. In one step, the warm-up, all groups leave. In it Megatron's
manager learns which groups there are and which of them stay on the device. So other switches need
another manager, and another warm-up.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import is_te_min_version
from torch.utils.hooks import RemovableHandle

from megatron_autorecompute import megatron_fields
from megatron_autorecompute.compat import model_layers, versions
from megatron_autorecompute.compat.untyped import Layer
from megatron_autorecompute.errors import ApplyError, MachineError
from megatron_autorecompute.patched import patched
from megatron_autorecompute.policy import WHOLE_LAYER, LayerPolicy, RecomputePolicy

SWITCHES = {
    "attn_norm": "offload_attn_norm",
    "qkv_linear": "self_attention.offload_qkv_linear",
    "core_attn": "self_attention.offload_core_attention",
    "attn_proj": "self_attention.offload_attn_proj",
    "mlp_norm": "offload_mlp_norm",
    "expert_fc1": "mlp.experts.offload_expert_fc1",
    "moe_act": "mlp.experts.offload_moe_act",
    "fused_group_mlp": "mlp.experts.offload_fused_group_mlp",
}
"""The attribute of a layer that turns each module's offload on."""
NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "pre_mlp_layernorm"}
"""Modules that Megatron leaves off where the norm is fused into a linear layer."""
OF_EXPERTS = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})
"""Modules whose groups lie inside what `moe` recomputes."""
SWITCH_OF_ALL = "fine_grained_activation_offloading"
"""A config's switch: with it a model's forward and schedules tell the manager of microbatches."""


def broken_rules(config: TransformerConfig, choice: LayerPolicy) -> Iterator[str]:
    """Why a choice that Megatron accepts would offload wrongly or without effect."""
    if not choice.offload:
        return
    own = megatron_fields.offload_of(config)
    graphs = getattr(config, "cuda_graph_impl", None) or "none"
    rules = [
        (
            own is not None and choice.offload != (WHOLE_LAYER,),
            f"its config offloads on its own; leave that out, as a policy it is {str(own)!r}",
        ),
        (
            "core_attn" in choice.modules
            and "core_attn" in choice.offload
            and "attn_proj" not in choice.offload,
            "recompute of core_attn bypasses core_attn's offload, so that nothing would leave",
        ),
        (
            "moe" in choice.modules and bool(OF_EXPERTS & {*choice.offload}),
            "moe recompute wraps the experts in a checkpoint, which makes their activations again",
        ),
        (
            {"mla_up_proj"} <= {*choice.modules} and {"qkv_linear"} <= {*choice.offload},
            "recompute of mla_up_proj reads what qkv_linear offloads before it must have left",
        ),
        (
            graphs not in ("none", "full_iteration") and choice.offload != (WHOLE_LAYER,),
            f"with cuda_graph_impl={graphs} copies are captured as the layers were built",
        ),
    ]
    yield from (reason for broken, reason in rules if broken)


def check_can_run(policy: RecomputePolicy) -> None:
    """Refuse offload that would fail in the first step, or offload weights.

    Raises:
        ApplyError: `megatron:cpu_offloading/N`, which only a constructor can put in force.
        MachineError: Transformer Engine is missing, or not told to use its first offload.
    """
    if any(WHOLE_LAYER in choice.offload for choice in policy.layers):
        raise ApplyError(
            "Megatron decides on cpu_offloading when it builds a model: set cpu_offloading and "
            "cpu_offloading_num_layers there, and leave the recompute policy out."
        )
    if policy.offloads:
        check_machine()


def check_machine() -> None:
    """Raise MachineError if Transformer Engine is missing, or not told to use its first offload."""
    if getattr(transformer_engine, "cpu_offload", None) is None:
        raise MachineError(
            f"Offload with megatron-core {versions.installed()} needs Transformer Engine, and it "
            "is not installed. Install it (the extra `te`), or choose a policy without offload."
        )
    installed = importlib.util.find_spec("transformer_engine") is not None
    if installed and is_te_min_version("2.10.0") and os.environ.get("NVTE_CPU_OFFLOAD_V1") != "1":
        raise MachineError(
            "Offload with Transformer Engine 2.10 or newer would move weights, too: set "
            "NVTE_CPU_OFFLOAD_V1=1 in the environment before Python starts."
        )


def switch(layer: Layer, module: str) -> tuple[Any, str] | None:
    """The (object, attribute) that turns a module's offload on; None if the layer lacks it."""
    *owners, attribute = SWITCHES[module].split(".")
    owner: Any = layer
    for name in owners:
        owner = getattr(owner, name, None)
    norm = NORMS.get(module)
    if norm is not None and isinstance(getattr(layer, norm, None), IdentityOp):
        return None
    return (owner, attribute) if hasattr(owner, attribute) else None


def set_offload(layer: Layer, modules: Sequence[str]) -> None:
    """Make this layer offload exactly `modules`, as if Megatron had built it with them."""
    for one in model_layers.nested_layers(layer):
        for module in SWITCHES:
            found = switch(one, module)
            if found is not None:
                setattr(*found, module in modules)
        experts = switch(one, "expert_fc1")
        if "expert_fc1" in modules and experts is not None and _quantises(one.config):
            transformer_engine.set_save_original_input(experts[0].linear_fc1)


def _quantises(config: TransformerConfig) -> bool:
    """Whether TEGroupedMLP's constructor makes an offloaded linear_fc1 keep its input as it is;
    on bf16 that changes nothing."""
    block_scaled = (config.fp8 and config.fp8_recipe == "mxfp8") or bool(config.fp4)
    return bool(config.fp8) and not block_scaled


def settings(layer: Layer) -> Iterator[tuple[Any, str]]:
    """Every switch of a layer that `set_offload` may change, for undoing it."""
    for one in model_layers.nested_layers(layer):
        found = (switch(one, module) for module in SWITCHES)
        yield from (pair for pair in found if pair is not None)


def own_switch(config: TransformerConfig) -> bool:
    """The value of `SWITCH_OF_ALL` that the config alone gives, without a policy."""
    return bool(getattr(config, SWITCH_OF_ALL, False) and config.offload_modules)


def forget() -> None:
    """Drop Megatron's manager: the next forward makes a new one, which begins with a warm-up."""
    PipelineOffloadManager.OFFLOAD_MGR = None


def begin_forward(_: torch.nn.Module, __: Any) -> None:
    """Check, before a block's forward, that the model told the manager of this microbatch.

    Raises ApplyError: it did not; nothing would be offloaded.
    """
    manager = PipelineOffloadManager.get_instance()
    if manager._is_warmup:
        chunk = manager.cur_forward_chunk()
        if chunk is None:
            raise ApplyError(
                "This model's forward does not begin Megatron's activation offload, as GPTModel's "
                "and HybridModel's do: choose a policy without offload."
            )
        _let_kept_groups_be(chunk)
    elif not hasattr(manager, "_pairs_kept"):
        manager._pairs_kept = True
        for chunk in manager._cached_chunks_forward:
            _keep_pairs(chunk)


def _let_kept_groups_be(chunk: Any) -> None:
    """Make a microbatch end with its last group, not with a group that stays on the device.

    Symptom: after the warm-up, "Chunk mismatch" if the first groups of a chunk are kept, as they
    are where a single layer of the chunk offloads. Reference:
    `ChunkOffloadHandler.finish_all_groups` of 0.19: no group is waiting, so it takes the chunk as
    finished. Remove when it asks for further groups first.
    """
    chunk.finish_all_groups = functools.partial(has_no_next_group, weakref.proxy(chunk))


def has_no_next_group(chunk: Any, name: str) -> bool:
    """Whether a microbatch's chunk has had its last group of a name."""
    return chunk.find_next_group(name) is None


def _keep_pairs(chunk: Any) -> None:
    """Keep attn_proj's group where core_attn's before it is kept.

    Symptom: attn_proj frees core_attn's output, which core_attn's backward then lacks. Reference:
    `PipelineOffloadManager.post_warmup_callback`, which keeps groups by name and by bytes, each by
    itself. Remove when it keeps both.
    """
    kept = False
    for group in chunk.offload_groups:
        if group._name == "core_attn":
            kept = not group.offload
        elif group._name == "attn_proj" and kept:
            group.offload = False


def keep_apart(layer: Layer) -> list[RemovableHandle]:
    """Give Transformer Engine's attention queries, keys and values that are not one tensor.

    Symptom: gradients are NaN, or "an illegal memory access was encountered", for attention whose
    heads each have keys and values of their own, without rotary embeddings: there the three are
    views of linear_qkv's output, and the fused kernel's backward reads them as such (its layout
    sbh3d), though three tensors came back from the host. Seen on an H100 with Transformer Engine
    2.20. Remove when Megatron passes the one tensor, as `qkv_layer`, and offloads that.

    Returns handles that take this away.
    """
    attention: Any = getattr(getattr(layer, "self_attention", None), "core_attention", None)
    if type(attention).__name__ != "TEDotProductAttention":
        return []
    return [attention.register_forward_pre_hook(_apart)]


def _apart(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Copies of query, key and value, [s, b, h, d] each, if they have fewer than three storages."""
    query, key, value, *rest = inputs
    three = (query, key, value)
    if len({each.untyped_storage()._cdata for each in three}) == len(three):
        return None
    return (*(each.contiguous() for each in three), *rest)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory that this rank's offload uses."""

    pinned_bytes: int
    """Bytes of the pool, which never shrinks. Experts' groups, whose sizes vary, are not in it."""
    waiting_bytes: dict[str, int]
    """Bytes of each module that wait at once when the first backward begins, as Megatron counts
    them in the warm-up; empty before the warm-up has ended."""


def host_memory() -> HostMemory:
    """What Megatron's manager of this process holds; zeros if there is none."""
    manager = PipelineOffloadManager.OFFLOAD_MGR
    if manager is None:
        return HostMemory(0, {})
    pools = manager.cpu_tensor_pool._pools.values()
    pinned_bytes = sum(one.untyped_storage().nbytes() for pool in pools for one in pool["all"])
    return HostMemory(pinned_bytes, dict(getattr(manager, "_offload_summary_bytes", {})))


def without_table() -> AbstractContextManager[None]:
    """In this block a warm-up ends without a table of what was offloaded. It is gathered from all
    ranks, also from those that have nothing to offload, or do not switch."""
    return patched(megatron_offload, "print_offload_summary_table", lambda total_bytes: None)


Method = Callable[..., Any]


@contextmanager
def watched(instead: Mapping[str, Method]) -> Iterator[None]:
    """In this block the handlers of microbatches' chunks have other methods.

    instead: by a method's name in Megatron, what runs: it gets the method, then its arguments.
    """
    handler: Any = megatron_offload.ChunkOffloadHandler
    with ExitStack() as undo:
        for name, run in instead.items():
            made = _through(run, getattr(handler, name))
            undo.enter_context(patched(handler, name, made))
        yield


def _through(run: Method, usual: Method) -> Method:
    return lambda *args, **named: run(usual, *args, **named)


def leaving(chunk: Any) -> tuple[Any, str]:
    """The group that a handler offloads next, and its module."""
    group = chunk._groups_to_offload[-1]
    return group, group._name


def coming_back(chunk: Any) -> Any | None:
    """The group that a handler would bring back next."""
    waiting = chunk._groups_to_reload
    return waiting[-1] if waiting else None
