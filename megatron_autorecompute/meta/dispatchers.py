"""What MoE dispatchers keep of their last microbatch, and its layer saves for the backward as well.

Such a tensor is alive once, though it counts in what the layer holds and, because it stays until
the layer's next forward, in static bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_autorecompute.compat import defects, model_layers
from megatron_autorecompute.policy import LayerPolicy
from megatron_autorecompute.profile import LayerKind
from megatron_autorecompute.runtime.live_bytes import LiveBytes

SavedAnyway = dict[tuple[int, LayerPolicy], int]
"""Bytes by layer and choice."""


def saved_anyway(
    model: torch.nn.Module, policy: Sequence[LayerPolicy], live: LiveBytes
) -> SavedAnyway:
    """Bytes that each decoder layer's dispatcher and another share; call it after a forward.

    Args:
        model: on meta tensors.
        policy: the choices that ran, by layer.
        live: has counted them.
    """
    found = {}
    for site in model_layers.block_sites([model]):
        for layer, index in zip(site.block.layers, site.layers, strict=True):
            sizes = [_shared_bytes(each, live) for each in defects.graph_keepers(layer)]
            found[index, policy[index]] = sum(sizes)
    return found


def _shared_bytes(keeper: Any, live: LiveBytes) -> int:
    """Of the tensors that an object keeps, bytes of those that stay alive without it."""
    kept = {
        name: each
        for name, each in vars(keeper).items()
        if isinstance(each, torch.Tensor) and each.is_meta and live.counted_bytes([each])
    }
    size_bytes, before = live.counted_bytes(kept.values()), live.current_bytes
    known = [(name, _Like(tensor)) for name, tensor in kept.items()]
    for name in kept:
        setattr(keeper, name, None)
    kept.clear()
    shared_bytes = size_bytes - (before - live.current_bytes)
    for name, like in known:
        setattr(keeper, name, like.again())
    return shared_bytes


class _Like:
    """A tensor that can be made again: on its own storage if that is alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._options: dict[str, Any] = {"dtype": tensor.dtype, "device": "meta"}

    def again(self) -> torch.Tensor:
        storage, (offset, shape, stride) = self._storage(), self._place
        if storage is None:
            return torch.empty_strided(shape, stride, **self._options)
        return torch.empty(0, **self._options).set_(storage, offset, shape, stride)


def counted_once(kind: LayerKind, found: Mapping[tuple[int, LayerPolicy], int]) -> LayerKind:
    """The kind with `also_static_bytes`; of several layers the least."""

    def least(choice: LayerPolicy) -> int:
        return min(_of(kind, choice, found), default=0)

    choices = (replace(each, also_static_bytes=least(each.policy)) for each in kind.choices)
    return replace(kind, choices=tuple(choices))


def _of(
    kind: LayerKind, choice: LayerPolicy, found: Mapping[tuple[int, LayerPolicy], int]
) -> Iterator[int]:
    return (found[i, choice] for i in kind.layers if (i, choice) in found)
