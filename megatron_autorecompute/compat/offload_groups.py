"""Megatron's groups of what it offloads, switched between steps without another warm-up.

In the warm-up Megatron's manager learns the groups of every microbatch. A policy that offloads some
of them is put in force by leaving the others out of the manager's lists and letting Megatron
decide again which of the rest stay, as if the policy's own warm-up had just ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as megatron_offload

from megatron_autorecompute.compat import model_layers, offload_modules
from megatron_autorecompute.errors import ApplyError
from megatron_autorecompute.patched import patched

Switches = Mapping[int, Sequence[frozenset[str]]]
"""The modules that every layer offloads, in the order of their forwards, by virtual chunk."""


def switches(owners: Iterable[tuple[torch.nn.Module, Sequence[Any]]]) -> Switches:
    """The switches of blocks and multi-token-prediction depths, each with its layers."""
    found: dict[int, list[frozenset[str]]] = defaultdict(list)
    for owner, layers in owners:
        own = found[int(getattr(owner, "vp_stage", None) or 0)]
        own += [_on(one) for layer in layers for one in model_layers.nested_layers(layer)]
    return found


def _on(layer: Any) -> frozenset[str]:
    places = {module: offload_modules.switch(layer, module) for module in offload_modules.SWITCHES}
    return frozenset(module for module, place in places.items() if place and getattr(*place))


def learnt() -> Any:
    """Megatron's manager of this process, past its warm-up.

    Raises:
        ApplyError: there is none.
    """
    manager = megatron_offload.PipelineOffloadManager.OFFLOAD_MGR
    if manager is None or manager._is_warmup:
        raise ApplyError(
            "No step has run in which Megatron learnt what this policy offloads: switch with a "
            "warm-up."
        )
    return manager


def switch(manager: Any, before: Switches, after: Switches) -> None:
    """Let a manager offload other groups of those that it knows from its warm-up.

    Args:
        manager: past its warm-up.
        before: what every layer offloaded until now.
        after: what it will offload.

    Raises:
        ApplyError: layers are to offload what they did not in the warm-up.
    """
    chunks = manager._cached_chunks_forward
    wanted = [_wanted(chunk, before, after) for chunk in chunks]
    for chunk, groups in zip(chunks, wanted, strict=True):
        chunk.offload_groups, chunk._max_group_size = groups, len(groups)
        for group in groups:
            group.offload = True
    manager.__dict__.pop("_pairs_kept", None)
    with without_table():
        manager.post_warmup_callback()


def without_table() -> AbstractContextManager[None]:
    """In this block a warm-up ends without a table of what was offloaded. It is gathered from all
    ranks, also from those that have nothing to offload, or do not switch."""
    return patched(megatron_offload, "print_offload_summary_table", lambda total_bytes: None)


Method = Callable[..., Any]


@contextmanager
def watched(around: Mapping[str, Callable[[Method], Method]]) -> Iterator[None]:
    """In this block the handlers of microbatches' chunks have other methods.

    Args:
        around: by a method's name in Megatron, what makes the new one of it.
    """
    handler: Any = megatron_offload.ChunkOffloadHandler
    with ExitStack() as undo:
        for name, made_of in around.items():
            undo.enter_context(patched(handler, name, made_of(getattr(handler, name))))
        yield


def leaving(chunk: Any) -> tuple[Any, str]:
    """The group that a handler offloads next, and its module."""
    group = chunk._groups_to_offload[-1]
    return group, group._name


def coming_back(chunk: Any) -> Any | None:
    """The group that a handler would bring back next."""
    waiting = chunk._groups_to_reload
    return waiting[-1] if waiting else None


def _wanted(chunk: Any, before: Switches, after: Switches) -> list[Any]:
    """The groups of one microbatch in one chunk that will leave, of all that it knows."""
    known = chunk._known_groups if hasattr(chunk, "_known_groups") else _known(chunk, before)
    chunk._known_groups = known
    on = {(at, name) for at, names in enumerate(after.get(chunk.vpp_rank, ())) for name in names}
    missing = on - {place for place, _ in known}
    if missing:
        at, name = min(missing)
        raise ApplyError(
            f"In Megatron's warm-up {name} of layer {at} of virtual chunk {chunk.vpp_rank} was not "
            "offloaded: switch with a warm-up."
        )
    return [group for place, group in known if place in on]


def _known(chunk: Any, before: Switches) -> list[tuple[tuple[int, str], Any]]:
    """Every group with its layer and module. The k-th group of a name belongs to the k-th layer
    that offloads this module."""
    layers: dict[str, list[int]] = defaultdict(list)
    for at, names in enumerate(before.get(chunk.vpp_rank, ())):
        for name in names:
            layers[name].append(at)
    groups: dict[str, list[Any]] = defaultdict(list)
    for group in chunk.offload_groups:
        groups[group._name].append(group)
    if {name: len(own) for name, own in groups.items()} != {n: len(o) for n, o in layers.items()}:
        raise ApplyError(
            "Megatron's groups of what is offloaded are not those of this model's layers: switch "
            "with a warm-up."
        )
    place = {
        id(group): (at, name)
        for name, own in groups.items()
        for at, group in zip(layers[name], own, strict=True)
    }
    return [(place[id(group)], group) for group in chunk.offload_groups]
