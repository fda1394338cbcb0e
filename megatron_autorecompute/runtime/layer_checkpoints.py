"""What a choice changes in the checkpoints of one layer: checkpoints that Megatron lacks, and parts
that run once inside them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron_autorecompute.compat import layer_modules, layer_parts, model_layers
from megatron_autorecompute.compat.layer_parts import Place
from megatron_autorecompute.compat.untyped import Layer
from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.policy import OWN_MODULES, LayerPolicy, RecomputePolicy
from megatron_autorecompute.runtime.norm_again import NormAgain
from megatron_autorecompute.runtime.run_once import Part, ProductPart, Scope


def skips_dead_work(layer: Layer, choice: LayerPolicy) -> bool:
    """Whether a choice, which keeps no part, reruns less in this layer than Megatron's own
    checkpoints."""
    if choice.keep or not choice.has_dead_work:
        return False
    why_none = functools.partial(layer_parts.why_none, layer.config)
    full = choice.granularity == "full" and not model_layers.stack_size(layer)
    return (full and not why_none() and any(layer_parts.last_of_layer(layer))) or any(
        any(layer_parts.last_in(one, module, choice.modules))
        for one in model_layers.nested_layers(layer)
        for module in choice.modules
        if not why_none(module)
    )


def put(layer: Layer, choice: LayerPolicy, ends_checkpoint: bool) -> list[Part | Scope | NormAgain]:
    """Make a layer's checkpoints rerun what the choice says; returns what `undo` takes back.

    Args:
        layer: a built layer, or the stack inside a multi-token-prediction depth.
        choice: what the layer recomputes.
        ends_checkpoint: under full, the layer is the last one in its checkpoint, and nothing runs
            after it there.
    """
    if choice.rerun_all or choice.offload:
        return []
    found: list[Part | Scope | NormAgain] = []
    is_full = choice.granularity == "full" and not choice.inner
    if is_full and not layer_parts.why_none(layer.config):
        for name in choice.keep:
            found += _parts(layer, layer_parts.KEEPS[name](layer), keeps=True)
        if ends_checkpoint:
            found += _parts(layer, layer_parts.last_of_layer(layer))
    for one in model_layers.nested_layers(layer):
        found += _of_modules(one, choice)
    return found


def check_beside_offload(policy: RecomputePolicy) -> None:
    """Raise PolicyError for kept parts and modules of ours in a policy that offloads."""
    if not policy.offloads:
        return
    for index, choice in enumerate(policy.layers):
        if choice.own:
            raise PolicyError(
                f"{choice} on layer {index}, in a policy that offloads: there all checkpoints are "
                "Megatron's own, which lack it. Leave it or the offload out."
            )


def idle_in(layer: Layer, choice: LayerPolicy, index: int) -> Iterator[str]:
    """Kept parts and modules of a choice that a layer does not have.

    Raises PolicyError: it has one, which cannot run once inside a checkpoint here.
    """
    nested = model_layers.nested_layers(layer)
    wanted: list[tuple[str, Any]] = [(name, layer_parts.KEEPS[name]) for name in choice.keep]
    own = [module for module in choice.modules if module in OWN_MODULES]
    scope = functools.partial(layer_parts.scope, modules=choice.modules)
    wanted += [(name, functools.partial(scope, module=name)) for name in own]
    for name, places in wanted:
        if any(any(places(one)) for one in nested):
            continue
        why = next(filter(None, (layer_parts.why_not_part(one, name) for one in nested)), None)
        if why is not None:
            raise PolicyError(f"{name} of {choice} on layer {index}: {why}.")
        yield name
    for module in choice.modules:
        if module not in OWN_MODULES and not layer_modules.flags(layer, module):
            yield module


def _of_modules(layer: Layer, choice: LayerPolicy) -> Iterator[Part | Scope | NormAgain]:
    why_none = functools.partial(layer_parts.why_none, layer.config)
    modules = [module for module in choice.modules if not why_none(module)]
    for module in modules:
        if module == "ln_out":
            yield from map(NormAgain, layer_parts.scope(layer, module, choice.modules))
            continue
        scope = next(layer_parts.scope(layer, module, choice.modules), None)
        if scope is not None:
            yield Scope(scope)
            yield from _parts(layer, layer_parts.kept_in(layer, module, choice.modules), keeps=True)
        yield from _parts(layer, layer_parts.last_in(layer, module, choice.modules))
    if "moe" in modules:
        for name in choice.keep:
            yield from _parts(layer, layer_parts.KEEPS[name](layer), keeps=True)


def _parts(layer: torch.nn.Module, places: Iterable[Place], keeps: bool = False) -> Iterator[Part]:
    for place in places:
        kind = ProductPart if place.product else Part
        yield kind(
            place.owner,
            place.attribute,
            layer,
            inputs=place.inputs,
            keeps=keeps,
            draws=place.draws,
            instead=place.instead,
        )
