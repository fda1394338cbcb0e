"""The only file that knows megatron-core's versions: where recompute happens and how to steer it.

Read from the sources of 0.16.1 to 0.19.2. Layer indices are 0-based and global here as everywhere;
Megatron's 1-based `layer_number` is turned into them in this file and nowhere else.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import inspect
import logging
import os
import re
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import transformer_block
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from packaging.version import Version

from megatron_autorecompute.errors import (
    ApplyError,
    MachineError,
    PolicyError,
    ProfileError,
    UnsupportedVersionError,
)
from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy

logger = logging.getLogger(__name__)

TESTED = ("0.16.1", "0.19.2")
OLDEST, NEWEST = Version("0.16.0"), Version("0.21.0.dev0")

MODULE_FLAGS: dict[str, tuple[str, ...]] = {
    "core_attn": (
        "self_attention.checkpoint_core_attention",
        "cross_attention.checkpoint_core_attention",
    ),
    "layernorm": ("recompute_input_layernorm", "recompute_pre_mlp_layernorm"),
    "mlp": ("recompute_mlp",),
    "moe": ("mlp.moe_layer_recompute",),
    "shared_experts": ("mlp.shared_experts_recompute",),
    "moe_act": ("mlp.experts.activation_recompute",),
    "mla_up_proj": ("self_attention.recompute_up_proj",),
    "gdn_norm_out": ("self_attention.recompute_norm_out",),
}
"""Megatron's `recompute_modules` and the attributes of a layer that its forward reads for each.
Megatron sets them once, from the config all layers share; every forward reads them afresh."""


_COMPILED = {"layernorm", "moe_act", "mla_up_proj", "gdn_norm_out"}
"""Modules run through CheckpointWithoutOutput."""


def version() -> Version:
    """The installed megatron-core's version.

    Raises:
        UnsupportedVersionError: it is outside the versions whose sources this file describes.
    """
    found = Version(megatron.core.__version__)
    if not OLDEST <= found < NEWEST:
        raise UnsupportedVersionError(
            f"megatron-core {found} is installed; this package knows 0.16 to 0.20 and is tested "
            f"with {' and '.join(TESTED)}. Install one of these, or a newer megatron-autorecompute."
        )
    return found


# --- where full recompute happens -----------------------------------------------------------------


def _holds_seam_as_method() -> bool:
    """Whether `_checkpointed_forward` is still a method (through 0.17); a free function since."""
    return hasattr(TransformerBlock, "_checkpointed_forward")


def _seam_modules() -> list[ModuleType]:
    """Modules that import `megatron.core.recompute.checkpointed_forward` by name (since 0.18)."""
    modules: list[ModuleType] = [transformer_block]
    try:
        from megatron.core.models.hybrid import hybrid_block
    except ImportError:  # HybridStack came with 0.18
        return modules
    return [*modules, hybrid_block]


def checkpointed_forward(block: torch.nn.Module) -> Callable[..., Any]:
    """Megatron's own checkpointed forward for `block`, taking the block as first argument.

    Raises:
        UnsupportedVersionError: the sources have it in neither place.
    """
    if _holds_seam_as_method():
        return type(block)._checkpointed_forward
    try:
        from megatron.core.recompute import checkpointed_forward as function
    except ImportError as error:
        raise UnsupportedVersionError(
            f"megatron-core {version()} has neither TransformerBlock._checkpointed_forward nor "
            f"megatron.core.recompute.checkpointed_forward; tested are {', '.join(TESTED)}."
        ) from error
    return inspect.unwrap(_originals.get(transformer_block, function))


_RUNNER = "_autorecompute_runner"
_originals: dict[ModuleType, Callable[..., Any]] = {}
_runners: set[weakref.ref[Runner]] = set()
"""Those alive. Until the last one is let go of, Megatron's free functions ask for them."""


class Runner:
    """What a block runs in Megatron's full-recompute branch; a copy of the block has a copy of it.

    Args:
        run: takes the block, `segments`, and what Megatron's checkpointed forward takes.
        segments: what else it needs; of the block at most what is copied and pickled with it.
    """

    def __init__(self, run: Callable[..., Any], segments: Any) -> None:
        self.run, self.segments = run, segments
        if not _holds_seam_as_method():
            _ask_for_runners()
            _runners.add(weakref.ref(self, _let_go))

    def __reduce__(self) -> tuple[Any, ...]:
        return Runner, (self.run, self.segments)


class _OfBlock:
    """Through 0.17, what stands in a block in place of the method; it does not keep the block."""

    def __init__(self, block: torch.nn.Module, runner: Runner) -> None:
        self.block, self.runner = weakref.ref(block), runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.block()
        if block is None:
            raise ApplyError("A copy.copy of a block outlived the block: use copy.deepcopy.")
        return self.runner.run(block, self.runner.segments, *args, **kwargs)

    def __getstate__(self) -> Any:
        return self.block(), self.runner

    def __setstate__(self, state: Any) -> None:
        block, self.runner = state
        self.block = weakref.ref(block)


def redirect(block: torch.nn.Module, runner: Runner) -> None:
    """Make Megatron's full-recompute branch of this block, and of its copies, call `runner`."""
    if _holds_seam_as_method():
        block._checkpointed_forward = _OfBlock(block, runner)
    else:
        block.__dict__[_RUNNER] = runner


def restore(block: torch.nn.Module) -> None:
    """Undo `redirect`; when no block has a runner any more, Megatron's functions are its own."""
    block.__dict__.pop("_checkpointed_forward", None)
    block.__dict__.pop(_RUNNER, None)


def _ask_for_runners() -> None:
    if not _originals and not _sources_dispatch():
        for module in _seam_modules():
            _originals[module] = module.checkpointed_forward
            module.checkpointed_forward = dispatching(_originals[module])


def _let_go(runner: weakref.ref[Runner]) -> None:
    _runners.discard(runner)
    if not _runners:
        for module, original in _originals.items():
            module.checkpointed_forward = original
        _originals.clear()


def dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's free function, but a block that brings a runner goes through that."""

    def checkpointed_forward(block: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        runner = block.__dict__.get(_RUNNER)
        if runner is None:
            return original(block, *args, **kwargs)
        return runner.run(block, runner.segments, *args, **kwargs)

    return checkpointed_forward


def _sources_dispatch() -> bool:
    """Whether Megatron's sources have our patch, which decorates the function where it is."""
    return hasattr(transformer_block.checkpointed_forward, "__wrapped__")


class LayersWithPaddingMask:
    """Layers that get the padding mask Megatron forgets.

    Symptom: the un-checkpointed layers of `block` ignore `padding_mask`, so a MoE layer's auxiliary
    loss counts padding. Reference: `TransformerBlock._checkpointed_forward` of 0.16 and 0.17;
    0.18's `chunk_runner` passes it. Remove when 0.17 is no longer supported.
    """

    def __init__(
        self, layers: Sequence[torch.nn.Module], padding_mask: torch.Tensor | None
    ) -> None:
        self.layers, self.padding_mask = layers, padding_mask

    @staticmethod
    def needed() -> bool:
        """Whether the installed version forgets the mask."""
        return _holds_seam_as_method()

    def __getitem__(self, index: int) -> Callable[..., Any]:
        layer = self.layers[index]

        @functools.wraps(layer, updated=())
        def with_mask(**kwargs: Any) -> Any:
            return layer(**{**kwargs, "padding_mask": self.padding_mask})

        with_mask.layer_number = layer.layer_number  # type: ignore[attr-defined]
        return with_mask


# --- which layers a model has ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockSite:
    """A block of layers and their global indices."""

    block: torch.nn.Module
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MtpSite:
    """A multi-token-prediction layer, the transformer layer inside it, and its index."""

    mtp: torch.nn.Module
    layer: torch.nn.Module
    index: int


def _block_types() -> tuple[type, ...]:
    if _holds_seam_as_method():
        return (TransformerBlock,)
    from megatron.core.models.hybrid.hybrid_block import HybridStack

    return (TransformerBlock, HybridStack)


def constructed_types() -> tuple[type, ...]:
    """The classes whose instances a policy applies to once they are built."""
    return (*_block_types(), MultiTokenPredictionLayer)


def block_sites(modules: Iterable[torch.nn.Module]) -> list[BlockSite]:
    """Every block of layers below `modules` (model chunks, wrapped or bare).

    T5's encoder and decoder both number their layers from 1: here the decoder's follow the
    encoder's, in the order they run.

    Raises:
        PolicyError: two other blocks number their layers alike, or a T5Model is in stages.
    """
    chunks = list(modules)
    before = {id(t5.decoder): len(t5.encoder.layers) for t5 in _encoder_decoders(chunks)}
    blocks = [
        module
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, _block_types()) and not getattr(module, "is_mtp_layer", False)
    ]
    sites = [
        BlockSite(block, tuple(before.get(id(block), 0) + n - 1 for n in _layer_numbers(block)))
        for block in blocks
    ]
    indices = [index for site in sites for index in site.layers]
    if len(set(indices)) != len(indices):
        raise PolicyError(
            "Two blocks of this model number their layers alike: apply a policy of its own to each "
            "block, as apply(policy, model.decoder)."
        )
    return sites


def _layer_numbers(block: torch.nn.Module) -> list[int]:
    return [layer.layer_number for layer in block.layers]


def _encoder_decoders(chunks: Iterable[torch.nn.Module]) -> list[T5Model]:
    modules = (module for chunk in chunks for module in chunk.modules())
    found = [module for module in modules if isinstance(module, T5Model)]
    for t5 in found:
        if t5.encoder is None or t5.decoder is None or pipeline_size() > 1:
            raise PolicyError(
                f"A T5Model on {pipeline_size()} pipeline stages: one policy for its encoder and "
                "its decoder needs both whole on one, pipeline_model_parallel_size=1, which is all "
                "that Megatron's pretrain_t5.py takes."
            )
    return found


def encoder_layers(chunks: Iterable[torch.nn.Module]) -> int:
    """How many layers of an encoder (T5's) come before the decoder's; 0 elsewhere."""
    return sum(len(t5.encoder.layers) for t5 in _encoder_decoders(chunks))


def mtp_sites(modules: Iterable[torch.nn.Module]) -> list[MtpSite]:
    """Every multi-token-prediction layer below `modules`; depth d has index num_layers + d.

    The inner layer is `transformer_layer` in 0.16 and `mtp_model_layer` since 0.17, where it is
    numbered from 1 again: the outer layer's number is the depth in both.
    """
    return [
        MtpSite(
            module,
            getattr(module, "mtp_model_layer", None) or module.transformer_layer,
            module.config.num_layers + module.layer_number - 1,
        )
        for chunk in modules
        for module in chunk.modules()
        if isinstance(module, MultiTokenPredictionLayer)
    ]


def repeats_depths(config: TransformerConfig) -> bool:
    """Whether one multi-token-prediction layer runs for all of several depths (since 0.18)."""
    several = (config.mtp_num_layers or 0) > 1
    return several and bool(getattr(config, "mtp_use_repeated_layer", False))


def layers(chunks: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, int]]:
    """Every single layer of these model chunks with its global index."""
    chunks = list(chunks)
    pairs = [p for s in block_sites(chunks) for p in zip(s.block.layers, s.layers, strict=True)]
    return pairs + [(site.layer, site.index) for site in mtp_sites(chunks)]


def unwrapped(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel, Float16Module and their like."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def final_norm(block: torch.nn.Module) -> torch.nn.Module | None:
    """The norm behind the last layer: `final_layernorm`, or `final_norm` of a HybridStack."""
    return getattr(block, "final_layernorm", None) or getattr(block, "final_norm", None)


def signature(layer: torch.nn.Module) -> str:
    """Text that is equal for layers of equal structure, shapes and attention window."""
    parts = [
        f"{name}:{type(module).__name__}:{getattr(module, 'window_size', '')}:"
        + ",".join(f"{p.dtype}{tuple(p.shape)}" for p in module.parameters(recurse=False))
        for name, module in layer.named_modules()
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def attends_to_context(layer: torch.nn.Module) -> bool:
    """Whether the layer has cross-attention, to an encoder's output (T5's decoder)."""
    return not isinstance(getattr(layer, "cross_attention", None), IdentityOp | None)


def has_experts(layer: torch.nn.Module) -> bool:
    """Whether what the layer holds depends on how tokens are routed."""
    return any(isinstance(module, MoELayer) for module in layer.modules())


def kind_name(layer: torch.nn.Module) -> str:
    """A word for people: moe, decoder behind an encoder, dense, or the class where it is none."""
    if isinstance(getattr(layer, "mlp", None), MoELayer):
        return "moe"
    if attends_to_context(layer):
        return "decoder"
    return "dense" if isinstance(layer, TransformerLayer) else type(layer).__name__


def pipeline_size() -> int:
    """Number of pipeline stages, 1 where parallel state is not set up."""
    if not parallel_state.model_parallel_is_initialized():
        return 1
    return int(parallel_state.get_pipeline_model_parallel_world_size())


def pipeline_rank() -> int:
    """This rank's pipeline stage, 0 where parallel state is not set up."""
    if not parallel_state.model_parallel_is_initialized():
        return 0
    return int(parallel_state.get_pipeline_model_parallel_rank())


def global_buffers() -> list[torch.Tensor]:
    """Megatron's buffers that all layers share and that stay once made (unfused attention's)."""
    if not parallel_state.model_parallel_is_initialized():
        return []
    return list(parallel_state.get_global_memory_buffer().buffer.values())


# --- a step that one rank cannot finish -----------------------------------------------------------

_GROUPS_INSIDE_LAYERS = {
    "tensor": "get_tensor_model_parallel_world_size",
    "context": "get_context_parallel_world_size",
    "expert": "get_expert_model_parallel_world_size",
    "expert tensor": "get_expert_tensor_parallel_world_size",
}
"""Kinds of parallelism whose ranks meet inside layers, and `parallel_state`'s function for each."""

_KEPT_BETWEEN_FORWARDS = {
    "cpu_offloading": "what it has moved to the host",
    "defer_embedding_wgrad_compute": "the gradients that it still owes",
    "delay_wgrad_compute": "the gradients that it still owes",
    "fine_grained_activation_offloading": "what it has moved to the host",
    "log_max_attention_logit": "the largest logits, which ranks compare after the optimizer's step",
    "moe_paged_stash": "the pages in use",
    "moe_shared_expert_overlap": "how far the shared experts have come",
    "qk_clip": "the largest logits, by which weights are clipped after the optimizer's step",
}
"""Flags under which Megatron keeps something from one forward to the next that an interrupted one
leaves half done; in which versions each exists does not matter here."""


def why_no_stand_in(config: TransformerConfig) -> str | None:
    """Why a rank that runs out of memory cannot finish its step with zeros; None where it may."""
    if parallel_state.model_parallel_is_initialized():
        for name, size in _GROUPS_INSIDE_LAYERS.items():
            if getattr(parallel_state, size)() > 1:
                return f"ranks of a {name} parallel group meet inside layers"
    for flag, kept in _KEPT_BETWEEN_FORWARDS.items():
        if getattr(config, flag, False):
            return f"{flag} keeps {kept}"
    if config.fp8 and config.fp8_recipe == "delayed":
        return "delayed scaling takes fp8's scales from the microbatches before"
    return None


def leave_interrupted_checkpoint() -> None:
    """Clear what a checkpoint left behind that an exception ended.

    Symptom: `is_checkpointing()` stays true. Reference: `CheckpointFunction.forward` in
    `tensor_parallel.random` sets the flag without `finally`. Remove when it does.
    """
    if hasattr(megatron_random, "_unset_checkpointing"):
        megatron_random._unset_checkpointing()


def stop_interrupted_timer(config: TransformerConfig) -> None:
    """Stop the timer of a backward that an exception ended.

    Symptom: "timer has already been started" in the next step, with `timing_log_level` 2.
    Reference: `backward_step` of `pipeline_parallel.schedules`, 0.16 to 0.19, stops it without
    `finally`. Remove when it does.
    """
    if config.timers is None:
        return
    timer = config.timers("backward-compute", log_level=2)
    if getattr(timer, "_started", False):
        timer.stop()


def output_shape(
    model: torch.nn.Module,
    tokens: torch.Size | None,
    received: torch.Size | None,
    another: torch.Size,
) -> torch.Size | None:
    """The shape of what a forward returns, on a rank that shares its layers with no other.

    Args:
        model: a bare model chunk.
        tokens: of the microbatch, [b, s]; None on a stage that takes none.
        received: hidden states from the stage before, [s, b, h]; None on the first.
        another: what the forward returns for another microbatch.

    Returns:
        None where it is not known for this model.
    """
    if tokens is None:
        return received
    if len(tokens) != 2 or not hasattr(model, "post_process"):
        return None
    batch, sequence = tokens
    front = (batch, sequence) if model.post_process else (sequence, batch)
    return torch.Size((*front, *another[2:]))


def forget_lost_step(config: TransformerConfig, chunks: Sequence[torch.nn.Module]) -> None:
    """Drop what Megatron's routers have counted for `finalize_model_grads`, which is left out."""
    reset_model_temporary_tensors(config, list(chunks))


def loss_groups() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The trackers of losses that are logged, each with the groups it reduces over.

    Symptom: after a lost step ranks wait for ever where losses are logged. Reference:
    `MTPLossLoggingHelper` and `DSAIndexerLossLoggingHelper` of 0.16 to 0.19 learn the groups in a
    forward and forget them when they log. Remove when they do not.
    """
    trackers = [MTPLossLoggingHelper.tracker]
    try:
        from megatron.core.transformer.experimental_attention_variant import dsa
    except ImportError:
        pass
    else:
        trackers.append(dsa.DSAIndexerLossLoggingHelper.tracker)
    names = ("reduce_group", "avg_group")
    return [(tracker, {name: tracker.get(name) for name in names}) for tracker in trackers]


def num_policy_layers(config: TransformerConfig, encoder_layers: int = 0) -> int:
    """How many layers a policy for this model covers, multi-token-prediction depths included."""
    return encoder_layers + int(config.num_layers) + int(config.mtp_num_layers or 0)


def pipeline_layout(config: TransformerConfig, encoder_layers: int = 0) -> Layout:
    """Which stage and chunk holds which layers, from the config's own fields."""
    given = config.pipeline_model_parallel_layout
    return Layout.from_flags(
        encoder_layers + config.num_layers,
        config.pipeline_model_parallel_size,
        config.virtual_pipeline_model_parallel_size,
        mtp_num_layers=config.mtp_num_layers or 0,
        num_layers_in_first_pipeline_stage=config.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=config.num_layers_in_last_pipeline_stage,
        account_for_embedding_in_pipeline_split=config.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=config.account_for_loss_in_pipeline_split,
        # Megatron turns the text or list into an object that keeps what was given.
        pipeline_model_parallel_layout=getattr(given, "input_data", given),
    )


def layout(config: TransformerConfig, encoder_layers: int = 0) -> list[list[int]]:
    """Layer indices, MTP depths left out, of every block that Megatron counts in: in model order,
    one for every pipeline chunk, an encoder's first."""
    chunks = pipeline_layout(config).chunk_layers()
    decoder = [
        [encoder_layers + index for index in chunk if index < config.num_layers] for chunk in chunks
    ]
    return [list(range(encoder_layers)), *decoder] if encoder_layers else decoder


# --- what a single layer can be told --------------------------------------------------------------


def flags(layer: torch.nn.Module, module: str) -> list[tuple[Any, str]]:
    """The (object, attribute) pairs that turn `module` on in this layer; empty where inert."""
    found = (_flag(layer, path) for path in MODULE_FLAGS[module])
    return [flag for flag in found if flag is not None]


def _flag(layer: torch.nn.Module, path: str) -> tuple[Any, str] | None:
    *owners, attribute = path.split(".")
    owner: Any = layer
    for name in owners:
        owner = getattr(owner, name, None)
    if not hasattr(owner, attribute) or _is_inert(owner, attribute):
        return None
    return owner, attribute


def _is_inert(owner: Any, attribute: str) -> bool:
    """Where Megatron's constructor leaves a flag False although the module was asked for."""
    if attribute == "recompute_input_layernorm":
        return isinstance(owner.input_layernorm, IdentityOp)
    if attribute == "recompute_pre_mlp_layernorm":
        return isinstance(owner.pre_mlp_layernorm, IdentityOp)
    if attribute == "recompute_mlp":
        return isinstance(owner.mlp, MoELayer)
    if attribute == "shared_experts_recompute":
        return owner.shared_experts is None
    return False


def runnable_modules(layer: torch.nn.Module) -> list[str]:
    """The modules this layer has, Megatron allows here, and this machine can run."""
    return [
        name
        for name in MODULE_FLAGS
        if flags(layer, name)
        and is_allowed(layer.config, LayerPolicy("selective", (name,)))
        and _can_be_compiled(name)
    ]


def usable_modules(layer: torch.nn.Module) -> list[str]:
    """Those of `runnable_modules` that keep results bit-identical.

    `layernorm` on torch's RMSNorm is left out: its recompute adds gradients up in another order
    (1e-8 to 1e-7). Say it explicitly to use it.
    """
    return [
        name
        for name in runnable_modules(layer)
        if not (name == "layernorm" and isinstance(layer.input_layernorm, torch.nn.RMSNorm))
    ]


def _can_be_compiled(module: str) -> bool:
    try:
        check_compiler(RecomputePolicy((LayerPolicy("selective", (module,)),)))
    except MachineError as error:
        logger.warning("recompute of %s is left out: %s", module, error)
        return False
    return True


def set_modules(layer: torch.nn.Module, modules: Sequence[str]) -> None:
    """Make this layer recompute exactly `modules`, as if Megatron had built it with them."""
    for name in MODULE_FLAGS:
        for owner, attribute in flags(layer, name):
            setattr(owner, attribute, name in modules)
    if layer.config.fp8 or layer.config.fp4:
        _set_saved_inputs(layer, modules)


def _set_saved_inputs(layer: torch.nn.Module, modules: Sequence[str]) -> None:
    """What Megatron's constructors do besides, under fp8 and fp4: TE modules whose input is
    recomputed must save it unquantised (TransformerLayer.__init__, TEGroupedMLP.__init__)."""
    from megatron.core.extensions.transformer_engine import set_save_original_input

    if "layernorm" in modules:
        if flags(layer, "layernorm") and not isinstance(layer.input_layernorm, IdentityOp):
            layer.self_attention.set_for_recompute_input_layernorm()
        if not isinstance(layer.pre_mlp_layernorm, IdentityOp):
            if isinstance(layer.mlp, MoELayer):
                layer.mlp.set_for_recompute_pre_mlp_layernorm()
            else:
                set_save_original_input(layer.mlp.linear_fc1)
    if "moe_act" in modules and flags(layer, "moe_act"):
        set_save_original_input(layer.mlp.experts.linear_fc2)


def settings(layer: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    """Every (object, attribute) of a layer that `set_modules` may change, for undoing it."""
    for name in MODULE_FLAGS:
        yield from flags(layer, name)
    for module in layer.modules():
        if hasattr(module, "save_original_input"):
            yield module, "save_original_input"


def bias_returned_by_mlp(layer: torch.nn.Module) -> torch.nn.Module | None:
    """The MLP whose bias Parameter must not leave a checkpoint as it is, or None.

    Symptom: with `add_bias_linear=True`, `recompute_modules=["mlp"]` never returns from backward:
    the checkpoint's output is the bias Parameter itself, which autograd then gives a history.
    Reference: `TransformerLayer._forward_mlp` of 0.16 to 0.19 with `MLP.forward` returning
    `linear_fc2`'s bias. Remove when Megatron returns a copy or adds the bias inside.
    """
    mlp = getattr(layer, "mlp", None)
    bias = getattr(getattr(mlp, "linear_fc2", None), "bias", None)
    return mlp if isinstance(bias, torch.nn.Parameter) else None


def graph_keepers(layer: torch.nn.Module) -> list[Any]:
    """The objects of a MoE layer that keep the router's probabilities with their graph.

    Symptom: after a recomputed layer's backward its input and that input's gradient stay alive
    until its next forward. Reference: `self.probs` of MoEAlltoAllTokenDispatcher,
    `self.local_probs` of MoEAllGatherTokenDispatcher, `self.token_probs` and
    `self.dispatched_probs` of the flex dispatcher's `_comm_manager`, 0.16 to 0.19. Remove when
    Megatron lets them go. Empty with EP overlap, where another microbatch's forward may be using
    the dispatcher.
    """
    if not isinstance(getattr(layer, "mlp", None), MoELayer):
        return []
    if layer.config.overlap_moe_expert_parallel_comm:
        return []
    dispatcher = layer.mlp.token_dispatcher
    return [dispatcher, *filter(None, [getattr(dispatcher, "_comm_manager", None)])]


# --- what Megatron allows -------------------------------------------------------------------------


def allowed_modules() -> tuple[str, ...]:
    """The installed Megatron's `recompute_modules`, from its validator's own message.

    Raises:
        UnsupportedVersionError: the validator no longer lists them.
    """
    try:
        TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            recompute_granularity="selective",
            recompute_modules=["?"],
        )
    except (AssertionError, ValueError) as error:
        found = re.findall(r"'(\w+)'", str(error).split("Allowed", 1)[-1])
        if found:
            return tuple(sorted(found))
    raise UnsupportedVersionError(
        f"megatron-core {version()} does not say which recompute_modules it allows; tested are "
        f"{', '.join(TESTED)}."
    )


def check_allowed(config: TransformerConfig, policy: RecomputePolicy) -> None:
    """Ask Megatron's own rules, on a copy of the config, about every choice in the policy.

    Megatron checks them only when `recompute_granularity` is set, which it is not under a policy.

    Raises:
        PolicyError: an unknown module, or Megatron's own reason against a choice.
    """
    version()
    for choice in dict.fromkeys(policy.layers):
        _check_known(choice)
        _check_own_rules(config, choice)
        reason = _refusal(config, choice)
        if reason is not None and reason != _refusal(config, LayerPolicy()):
            raise PolicyError(f"Megatron-Core {version()} refuses {choice} here: {reason}")


def is_allowed(config: TransformerConfig, choice: LayerPolicy) -> bool:
    """Whether `check_allowed` has nothing against a choice."""
    try:
        check_allowed(config, RecomputePolicy((choice,) * choice.group))
    except PolicyError:
        return False
    return True


def _check_known(choice: LayerPolicy) -> None:
    unknown = [m for m in choice.modules if m not in MODULE_FLAGS or m not in allowed_modules()]
    if unknown:
        usable = [m for m in allowed_modules() if m in MODULE_FLAGS]
        raise PolicyError(
            f"Unknown module {', '.join(unknown)} in {choice}: megatron-core {version()} has "
            f"{', '.join(usable)}."
        )


def _check_own_rules(config: TransformerConfig, choice: LayerPolicy) -> None:
    """What is wrong upstream and not refused there."""
    rules = [
        (
            "layernorm" in choice.modules and getattr(config, "fused_residual_rmsnorm", False),
            "fused_residual_rmsnorm returns a residual that this recompute would discard",
        ),
        (
            "moe" in choice.modules and getattr(config, "cuda_graph_impl", None) == "local",
            "with cuda_graph_impl=local the MoE layer's recompute is fixed when graphs are made",
        ),
        (
            choice.granularity == "full"
            and getattr(config, "fine_grained_activation_offloading", False),
            "fine_grained_activation_offloading moves tensors a full recompute makes anew",
        ),
    ]
    for broken, reason in rules:
        if broken:
            raise PolicyError(f"{choice} cannot be used with this model: {reason}.")


def _refusal(config: TransformerConfig, choice: LayerPolicy) -> str | None:
    """Megatron's reason against running the whole model with `choice`, or None."""
    trial = copy.copy(config)
    trial.recompute_policy = None
    trial.recompute_granularity = None if choice.granularity == "none" else choice.granularity
    trial.recompute_method = "uniform" if choice.granularity == "full" else None
    trial.recompute_num_layers = choice.group if choice.granularity == "full" else None
    trial.recompute_modules = list(choice.modules)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's own config has already warned
            # Megatron Bridge's configs keep their rules in finalize(); __post_init__ is empty.
            getattr(trial, "finalize", functools.partial(_own_post_init(trial), trial))()
    except (AssertionError, ValueError) as error:
        return str(error) or type(error).__name__
    return None


def _own_post_init(config: TransformerConfig) -> Callable[[TransformerConfig], None]:
    """`__post_init__` of Megatron's own class. A class derived from it has been through its own,
    which may take an InitVar, gone since, and may not be meant to run twice."""
    kinds = type(config).__mro__
    return next(kind for kind in kinds if kind.__module__.startswith("megatron.")).__post_init__


def check_compiler(policy: RecomputePolicy) -> None:
    """Refuse what would fail in the middle of the first step for want of TE or a compiler.

    Symptoms, of modules whose output is discarded and recomputed: without Transformer Engine a
    NameError, as `CheckpointWithoutOutput` takes `fp8=False` for fp8; since 0.17 a C++ extension
    compiled at run time. Reference: `tensor_parallel.random`, `CheckpointWithoutOutput.__init__`
    and `_get_share_storage`. Remove when the first is mended and the extension comes built.

    Raises:
        MachineError: Transformer Engine, g++ (or $CXX) or ninja is missing.
    """
    used = sorted({m for layer in policy.layers for m in layer.modules} & _COMPILED)
    if used and not hasattr(megatron_random, "FP8GlobalStateManager"):
        raise MachineError(
            f"Recomputing {', '.join(used)} with megatron-core {version()} needs Transformer "
            "Engine, whatever the precision, and it is not installed. Install it (the extra `te`), "
            "or choose a policy without these modules."
        )
    share_storage = getattr(megatron_random, "_get_share_storage", None)
    if getattr(share_storage, "__module__", None) != megatron_random.__name__:
        return  # an older version, or the stand-in of `without_cuda`
    tools = [os.environ.get("CXX", "g++"), "ninja"]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if used and missing:
        raise MachineError(
            f"Recomputing {', '.join(used)} with megatron-core {version()} compiles a small C++ "
            f"extension at run time, and {' and '.join(missing)} cannot be found. Install it, or "
            "choose a policy without these modules."
        )


def own_recompute(config: TransformerConfig) -> str | None:
    """Megatron's own recompute settings said as a policy, or None when there are none."""
    if getattr(config, "moe_layer_recompute", False):
        return "selective[moe]"
    if config.recompute_granularity == "selective":
        return f"megatron:selective[{'+'.join(config.recompute_modules or ['core_attn'])}]"
    if config.recompute_granularity == "full":
        return f"megatron:{config.recompute_method}/{config.recompute_num_layers}"
    return None


def stage_groups() -> list[Any]:
    """The group of the ranks that share a pipeline stage (TP x CP x DP); none for a single rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return []
    if not parallel_state.model_parallel_is_initialized():
        return [torch.distributed.group.WORLD]
    return [parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)]


def groups_inside(block: torch.nn.Module) -> list[Any]:
    """The groups of ranks that wait for each other in every forward of this block's layers."""
    if not parallel_state.model_parallel_is_initialized():
        return []
    groups = [parallel_state.get_tensor_and_context_parallel_group()]
    if has_experts(block):
        groups.append(parallel_state.get_expert_tensor_and_model_parallel_group())
    return [group for group in groups if torch.distributed.get_world_size(group) > 1]


MODEL_FACTS = (
    "transformer_config",
    "transformer_impl",
    "vocab_size",
    "position_embedding_type",
    "share_embeddings_and_output_weights",
)
"""What `model_facts` returns and `verify` needs to build a model again."""

_FUNCTIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "squared_relu": squared_relu,
}


def model_facts(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """What a GPTModel is built from, JSON-able, for `Model.facts` of a profile; see MODEL_FACTS.

    The same from every rank but one without layers, which lacks transformer_impl. Empty for other
    models: how to build them is not known here.
    """
    # Not above: it is built of modules that import this file where Megatron's sources are patched.
    from megatron.core.models.gpt import GPTModel

    model = unwrapped(chunks[0])
    if not isinstance(model, GPTModel):
        return {}
    facts = {
        "transformer_config": config_facts(model.config),
        "vocab_size": model.vocab_size,
        "position_embedding_type": model.position_embedding_type,
        "share_embeddings_and_output_weights": model.share_embeddings_and_output_weights,
    }
    for layer, _ in layers(chunks)[:1]:
        attention = type(getattr(layer.self_attention, "core_attention", None)).__module__
        fused = attention.startswith("megatron.core.extensions")
        facts["transformer_impl"] = "transformer_engine" if fused else "local"
    return facts


def config_facts(config: TransformerConfig) -> dict[str, Any]:
    """The fields of a config that differ from TransformerConfig's defaults, JSON-able.

    Numbers, texts, lists of these, dtypes and the usual activation functions; initialisers and a
    running job's callbacks have no part in what a step holds, nor have fields that other packages
    add, and recompute fields are the plan's.
    """
    kind = MLATransformerConfig if isinstance(config, MLATransformerConfig) else TransformerConfig
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    facts = {}
    for field in dataclasses.fields(kind):
        value = getattr(config, field.name)
        default = defaults.get(field.name, dataclasses.MISSING)
        if field.name.startswith("recompute_") or value == default:
            continue
        if isinstance(value, torch.dtype):
            facts[field.name] = str(value)
        elif named := [name for name, function in _FUNCTIONS.items() if function is value]:
            facts[field.name] = named[0]
        elif _is_plain(value):
            facts[field.name] = list(value) if isinstance(value, tuple) else value
    return facts


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def rebuilt_config(facts: dict[str, Any], changed: dict[str, Any]) -> TransformerConfig:
    """The config that `config_facts` described, with some fields changed.

    Raises ProfileError for fields the installed version does not have, and for what Megatron
    refuses.
    """
    kind = MLATransformerConfig if facts.get("multi_latent_attention") else TransformerConfig
    unknown = sorted(set(facts) - {field.name for field in dataclasses.fields(kind)})
    if unknown:
        raise ProfileError(
            f"The profile's transformer_config names {', '.join(unknown)}, which megatron-core "
            f"{version()} does not have. Verify with the version the profile was made with."
        )
    values = facts | changed
    for name, value in values.items():
        if isinstance(value, str) and value.startswith("torch."):
            values[name] = getattr(torch, value.removeprefix("torch."))
    if values.get("activation_func") in _FUNCTIONS:
        values["activation_func"] = _FUNCTIONS[values["activation_func"]]
    try:
        return kind(**values)
    except (AssertionError, ValueError) as error:
        raise ProfileError(f"Megatron refuses the plan's config: {error}") from error
