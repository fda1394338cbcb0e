"""The kind of a layer, and its parts by name: functions that can run once in a checkpoint
(`runtime.run_once`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_autorecompute.compat.untyped import Layer
from megatron_autorecompute.megatron_fields import names_of


def signature(layer: Layer) -> str:
    """Text that is equal for layers of equal structure, shapes, attention window and trained
    parameters."""
    parts = [
        f"{name}:{type(module).__name__}:{getattr(module, 'window_size', '')}:"
        + ",".join(
            f"{p.dtype}{tuple(p.shape)}{'' if p.requires_grad else ' frozen'}"
            for p in module.parameters(recurse=False)
        )
        for name, module in layer.named_modules()
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def attends_to_context(layer: Layer) -> bool:
    """Whether the layer has cross-attention, to an encoder's output (T5's decoder)."""
    return not isinstance(getattr(layer, "cross_attention", None), IdentityOp | None)


def has_experts(layer: Layer) -> bool:
    """Whether the bytes that the layer holds depend on how tokens are routed."""
    return any(experts(layer))


def experts(layer: Layer) -> Iterator[torch.nn.Module]:
    """The modules that run a rank's experts; their first argument has a row for each token routed
    here, and for each of its experts here."""
    for module in layer.modules():
        if isinstance(module, MoELayer):
            yield module.experts


_FAMILY_OF_CLASS = {
    "MambaLayer": "mamba",
    "GatedDeltaNet": "gdn",
    "MLASelfAttention": "mla",
    "FusedMLASelfAttention": "mla",
    "AbsorbedMLASelfAttention": "dsa",
}
"""Families of a HybridModel's layers, by the class of the layer or of its attention."""


def kind_name(layer: Layer) -> str:
    """A label: moe, decoder (after an encoder), dense; a HybridModel's layer its family
    (attention, mlp, mamba, gdn, mla, dsa); or else the name of the class."""
    if isinstance(getattr(layer, "mlp", None), MoELayer):
        return "moe"
    if attends_to_context(layer):
        return "decoder"
    if not isinstance(layer, TransformerLayer):
        return _FAMILY_OF_CLASS.get(type(layer).__name__, type(layer).__name__)
    attends, has_mlp = (
        not isinstance(part, IdentityOp) for part in (layer.self_attention, layer.mlp)
    )
    if attends and not has_mlp:
        return _FAMILY_OF_CLASS.get(type(layer.self_attention).__name__, "attention")
    return "mlp" if has_mlp and not attends else "dense"


@dataclass(frozen=True, slots=True)
class Place:
    """A function of a layer: an attribute of one of its modules, or of an object that these use."""

    owner: Any
    attribute: str = "forward"
    inputs: int = 1
    """How many of the first positional arguments are activations."""
    draws: bool = False
    """Whether it may draw random numbers."""
    instead: Callable[[Any], None] | None = None
    """A side effect, which a recompute without this function must have too; takes the owner."""
    product: bool = False
    """The batched product alone of the function."""


_FIXED = "CUDA graphs fix what a recompute runs when they are captured"
REASONS = {
    "fp8": "fp8 runs Transformer Engine's checkpoints, and keeps quantised copies of inputs",
    "fp4": "fp4 runs Transformer Engine's checkpoints, and keeps quantised copies of inputs",
    "overlap_moe_expert_parallel_comm": "EP overlap runs layers in parts of its own",
    **dict.fromkeys(("enable_cuda_graph", "external_cuda_graph"), _FIXED),
    "delay_wgrad_compute": "delay_wgrad_compute keeps inputs for later weight gradients",
    "use_transformer_engine_op_fuser": (
        "use_transformer_engine_op_fuser runs linears and activation as one operator"
    ),
}
"""Fields of a config under which no part runs once in a checkpoint, and why."""
_CAPTURED_WITH = {
    "mlp": ("mlp",),
    "mlp_act": ("mlp", "moe", "moe_router"),
    "moe": ("moe", "moe_router", "moe_preprocess"),
    "experts": ("moe",),
}
"""The parts of a layer in whose CUDA graph a module's checkpoint would be, or which run through
it in two pieces. Without them it runs beside the graphs."""
_DISPATCHERS = (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher)
_ASKED = "fields_of_the_job"


def note_asked(config: Any, asked: Mapping[str, Any]) -> None:
    """Make a model whose own config lacks some fields have the checkpoints of the model of these
    fields."""
    setattr(config, _ASKED, dict(asked))


def _field(config: Any, name: str) -> Any:
    asked: dict[str, Any] = getattr(config, _ASKED, {})
    return asked.get(name, getattr(config, name, None))


def why_none(config: Any, module: str | None = None) -> str | None:
    """Why no part of such a model's layers can run once in a checkpoint, by default in the layer's,
    else in that of a module, which may be beside the CUDA graphs of other parts; None if they can.
    """
    why = next((why for name, why in REASONS.items() if _field(config, name)), None)
    if why is None and _field(config, "cuda_graph_impl") not in (None, "none"):
        return None if _is_beside_graphs(config, module) else _FIXED
    return why


def _is_beside_graphs(config: Any, module: str | None) -> bool:
    fields = ("cuda_graph_modules", "cuda_graph_scope")
    names = next(filter(None, (names_of(_field(config, each)) for each in fields)), [])
    of_parts = _field(config, "cuda_graph_impl") == "transformer_engine" and names
    if not of_parts or module not in _CAPTURED_WITH:
        return False
    return not {"full", *_CAPTURED_WITH[module]}.intersection(names)


def last_of_layer(layer: Layer) -> Iterator[Place]:
    """What a layer runs last, in the order in which it runs. Nothing where dropout is fused with
    the bias: the mask that a compiled function saves is not told from its input."""
    if layer.config.bias_dropout_fusion and layer.config.hidden_dropout > 0:
        return
    mlp = getattr(layer, "mlp", None)
    if mlp is not None and not isinstance(mlp, IdentityOp):
        yield from last_of_mlp(mlp)
    elif hasattr(layer, "self_attention"):
        yield from _forwards(layer.self_attention, "linear_proj", "out_proj")
    elif hasattr(layer, "mixer"):
        yield from _forwards(layer.mixer, "out_proj")


def last_of_mlp(moe: Any) -> Iterator[Place]:
    """What an MLP, or a layer of experts, runs last."""
    if not isinstance(moe, MoELayer):
        yield from _forwards(moe, "linear_fc2")
        return
    if not _field(moe.config, "moe_shared_expert_overlap"):
        yield from _forwards(moe.shared_experts, "linear_fc2")
    if why_not_dispatched_again(moe) is not None:
        return
    if getattr(moe.config, "moe_latent_size", None):
        yield from _forwards(moe, "fc2_latent_proj")
        return
    yield from last_of_experts(moe)
    for attribute in ("combine_preprocess", "token_combine", "combine_postprocess"):
        yield Place(moe.token_dispatcher, attribute)


def last_of_experts(moe: Any) -> Iterator[Place]:
    """The experts' second products."""
    yield from _forwards(moe.experts, "linear_fc2")
    for expert in getattr(moe.experts, "local_experts", ()):
        yield from _forwards(expert, "linear_fc2")


def why_not_dispatched_again(moe: Any) -> str | None:
    """Why no part of a layer of experts can run once if the recompute dispatches tokens again; None
    if it can."""
    config = moe.config
    kind = _field(config, "moe_token_dispatcher_type")
    if kind == "flex" or type(moe.token_dispatcher) not in _DISPATCHERS:
        return f"{kind} may arrange tokens otherwise when it dispatches them again"
    if _field(config, "moe_shared_expert_overlap"):
        return "moe_shared_expert_overlap runs shared experts inside the dispatcher"
    if _field(config, "moe_router_force_load_balancing"):
        return "moe_router_force_load_balancing routes tokens otherwise when it runs again"
    return None


def why_not_part(layer: Layer, name: str) -> str | None:
    """Why an exchange of a layer's tokens cannot run once; None for other parts."""
    moe = getattr(layer, "mlp", None)
    is_exchange = name == "dispatch" and isinstance(moe, MoELayer)
    return why_not_dispatched_again(moe) if is_exchange else None


def core_attention(layer: Layer) -> Iterator[Place]:
    """The attention itself, from query, key and value to context."""
    attention = getattr(layer, "self_attention", None)
    core = getattr(attention, "core_attention", None)
    if core is not None:
        yield Place(core, inputs=3, draws=True)


def plain_mlp(layer: Layer) -> torch.nn.Module | None:
    """A layer's MLP, or its shared experts if they run in one piece; None if it has neither."""
    mlp = getattr(layer, "mlp", None)
    if isinstance(mlp, MoELayer):
        overlapped = _field(mlp.config, "moe_shared_expert_overlap")
        mlp = None if overlapped else mlp.shared_experts
    return mlp if isinstance(mlp, MLP) else None


def dispatch(layer: Layer) -> Iterator[Place]:
    """The exchange that brings tokens to their experts."""
    moe = getattr(layer, "mlp", None)
    if not isinstance(moe, MoELayer) or why_not_dispatched_again(moe) is not None:
        return
    alltoall = type(moe.token_dispatcher) is MoEAlltoAllTokenDispatcher
    besides = _synchronize if alltoall else _gather_routing
    yield Place(moe.token_dispatcher, "token_dispatch", inputs=2, instead=besides)


def scope(layer: Layer, module: str, modules: Sequence[str] = ()) -> Iterator[torch.nn.Module]:
    """What the checkpoint of one of our modules contains, of ln_out the linears whose norm runs
    again; nothing if the layer lacks it, or if it is inside others of `modules`."""
    mlp = getattr(layer, "mlp", None)
    with_shared = isinstance(mlp, MoELayer) and {"moe", "shared_experts"}.intersection(modules)
    if module == "ln_out":
        yield from fused_norms(layer, modules)
    elif module == "mlp_act" and any(_first_linear(layer)) and not with_shared:
        shared = cast(torch.nn.Module, plain_mlp(layer))
        if not getattr(shared, "use_shared_expert_gate", False):  # sums gradients in another order
            yield shared
    elif module == "qkv" and any(core_attention(layer)) and any(_projection(layer)):
        yield layer.self_attention
    elif module == "experts" and isinstance(mlp, MoELayer):
        yield mlp.experts


_RERUNS_NORMS_OF = {
    "mlp": ("mlp.",),
    "qkv": ("self_attention.",),
    "mla_up_proj": ("self_attention.linear_q_up_proj", "self_attention.linear_kv_up_proj"),
}


def fused_norms(layer: torch.nn.Module, modules: Sequence[str] = ()) -> Iterator[Any]:
    """Linears of a layer in whose module a norm is fused, whose output nobody gets, and which do
    not lie inside other `modules` that the layer recomputes."""
    within = tuple(path for module in modules for path in _RERUNS_NORMS_OF.get(module, ()))
    for name, module in layer.named_modules():
        norm, weight = (getattr(module, each, None) for each in ("layer_norm_weight", "weight"))
        is_fused = isinstance(norm, torch.Tensor) and isinstance(weight, torch.Tensor)
        returns = getattr(module, "return_layernorm_output", False)
        if is_fused and not returns and not name.startswith(within):
            yield module


def normed_again(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """The output of a fused linear's norm in training, by the kernel of its forward; [n, h]."""
    if hasattr(linear, "normed_again"):  # a stand-in
        return cast(torch.Tensor, linear.normed_again(x))
    from transformer_engine.pytorch.module._common import apply_normalization

    bias = linear.layer_norm_bias
    weights = [None if w is None else w.to(x.dtype) for w in (linear.layer_norm_weight, bias)]
    options = linear.normalization, linear.fwd_ln_sm_margin, linear.zero_centered_gamma
    rows = x.reshape(-1, x.shape[-1])
    found = apply_normalization(rows, None, *weights, linear.eps, None, x.dtype, *options)
    return cast(torch.Tensor, found[0])


def kept_in(layer: Layer, module: str, modules: Sequence[str]) -> Iterator[Place]:
    """What runs once inside the checkpoint of one of our modules beside all `modules`, its output
    kept. Megatron's checkpoint around an attention runs once with it, and again inside the
    attention's own backward."""
    if module == "mlp_act":
        yield from _first_linear(layer)
    elif module == "qkv" and "core_attn" in modules:
        owner = layer.self_attention
        yield Place(owner, "_checkpointed_attention_forward", inputs=3, draws=True)
    elif module == "qkv":
        yield from core_attention(layer)


def last_in(layer: Layer, module: str, modules: Sequence[str] = ()) -> Iterator[Place]:
    """What runs last inside a module's checkpoint, beside all `modules`."""
    mlp = getattr(layer, "mlp", None)
    if module in ("mlp", "moe") and mlp is not None:
        yield from last_of_mlp(mlp)
    elif module == "mlp_act":
        for one in scope(layer, module, modules):
            yield from last_of_mlp(one)
    elif module == "qkv":
        yield from _projection(layer)
    elif module == "experts" and any(scope(layer, module)):
        yield from last_of_experts(layer.mlp)
    elif module == "core_attn":
        for place in core_attention(layer):
            if isinstance(place.owner, DotProductAttention):  # unfused: the last product
                yield Place(place.owner, inputs=2, product=True)


KEEPS: dict[str, Callable[[Layer], Iterator[Place]]] = {
    "core_attn": core_attention,
    "dispatch": dispatch,
}
"""Parts that `+keep[…]` may name."""


def worth_recomputing(layer: Layer) -> list[str]:
    """The modules of ours that a layer has and that are measured unasked. `qkv` is not: with it
    plans were within 0.3% of those without. Nor are norms of latents and the activation of shared
    experts that are narrower than the hidden states, whose outputs are small."""
    config, wide = layer.config, {"experts"}
    if config.hidden_size in {each.layer_norm_weight.numel() for each in fused_norms(layer)}:
        wide.add("ln_out")
    if isinstance(plain := plain_mlp(layer), MLP) and (
        not isinstance(layer.mlp, MoELayer) or plain.config.ffn_hidden_size >= config.hidden_size
    ):
        wide.add("mlp_act")
    return sorted(
        name for name in wide if any(scope(layer, name)) and why_none(config, name) is None
    )


def worth_keeping(layer: Layer) -> list[str]:
    """The parts that a layer has and that are measured unasked, kept inside full: an attention that
    saves no probabilities, and an exchange between ranks."""
    if why_none(layer.config) is not None:
        return []
    core = [place.owner for place in core_attention(layer)]
    fused = any(not isinstance(owner, DotProductAttention) for owner in core)
    exchange = any(place.owner.ep_size > 1 or place.owner.tp_size > 1 for place in dispatch(layer))
    return ["core_attn"] * fused + ["dispatch"] * exchange


def _synchronize(dispatcher: Any) -> None:
    """What `token_dispatch` does before the exchange."""
    if hasattr(dispatcher, "_maybe_dtoh_and_synchronize"):
        dispatcher.tokens_per_expert = dispatcher._maybe_dtoh_and_synchronize(
            "before_ep_alltoall", dispatcher.tokens_per_expert
        )


def _gather_routing(dispatcher: Any) -> None:
    """What `token_dispatch` of allgather does besides its exchange."""
    if dispatcher.tp_size > 1 or dispatcher.ep_size > 1:
        dispatcher.routing_map = gather_from_sequence_parallel_region(
            dispatcher.routing_map, group=dispatcher.tp_ep_group
        )


def _first_linear(layer: Layer) -> Iterator[Place]:
    return _forwards(plain_mlp(layer), "linear_fc1")


def _projection(layer: Layer) -> Iterator[Place]:
    return _forwards(getattr(layer, "self_attention", None), "linear_proj")


def _forwards(owner: Any, *names: str) -> Iterator[Place]:
    for name in names:
        module = getattr(owner, name, None)
        if isinstance(module, torch.nn.Module) and not isinstance(module, IdentityOp):
            yield Place(module)
