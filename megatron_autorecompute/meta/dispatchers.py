"""What MoE dispatchers keep of their last microbatch, beside what its layer saves for the backward.

A tensor of both is alive once but counts twice: in what the layer holds and, because it stays until
the layer's next forward, in static bytes. So do tensors to which the graph of a kept tensor leads.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_autorecompute.compat import defects, model_layers
from megatron_autorecompute.policy import LayerPolicy
from megatron_autorecompute.profile import LayerKind
from megatron_autorecompute.runtime.live_bytes import LiveBytes

KeptBeside = dict[tuple[int, LayerPolicy], int]
"""Bytes by layer and choice."""


def kept_beside(
    model: torch.nn.Module, policy: Sequence[LayerPolicy], live: LiveBytes
) -> KeptBeside:
    """Bytes that only the dispatcher of a decoder layer keeps; call it after a forward.

    Args:
        model: on meta tensors.
        policy: the choices that ran, by layer.
        live: has counted them.
    """
    found = {}
    for site in model_layers.block_sites([model]):
        for layer, index in zip(site.block.layers, site.layers, strict=True):
            keepers = defects.graph_keepers(layer)
            if keepers:
                found[index, policy[index]] = _own_bytes(keepers, live)
    return found


def _own_bytes(keepers: Sequence[Any], live: LiveBytes) -> int:
    """The bytes of tensors that vanish with the objects that keep them."""
    kept = [
        (keeper, name, each)
        for keeper in keepers
        for name, each in vars(keeper).items()
        if isinstance(each, torch.Tensor) and live.counted_bytes([each])
    ]
    # Numbers of tokens, which have values on the CPU, are nobody else's.
    own_bytes = live.counted_bytes([each for _, _, each in kept if not each.is_meta])
    known = [(keeper, name, _Like(each)) for keeper, name, each in kept if each.is_meta]
    kept.clear()
    before = live.current_bytes
    for keeper, name, _ in known:
        setattr(keeper, name, None)
    own_bytes += before - live.current_bytes
    made: dict[int, torch.Tensor] = {}
    for keeper, name, like in known:
        setattr(keeper, name, like.again(made))
    return own_bytes


class _Like:
    """A tensor that can be made again: on its own storage if that is alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._key = int(tensor.untyped_storage()._cdata)
        self._size_bytes = tensor.untyped_storage().nbytes()
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    def again(self, made: dict[int, torch.Tensor]) -> torch.Tensor:
        """made: fills with tensors in place of storages that are gone."""
        storage = self._storage()
        if storage is None:
            if self._key not in made:
                made[self._key] = torch.empty(self._size_bytes, dtype=torch.uint8, device="meta")
            storage = made[self._key].untyped_storage()
        return torch.empty(0, dtype=self._dtype, device="meta").set_(storage, *self._place)


def counted_once(
    kind: LayerKind, kept_bytes: int, beside: Mapping[tuple[int, LayerPolicy], int]
) -> LayerKind:
    """The kind with `also_static_bytes`.

    Args:
        kind: the kind of the layers that were built.
        kept_bytes: what static bytes count of a dispatcher.
        beside: as `kept_beside` found; of several layers the most counts.
    """

    def also(choice: LayerPolicy) -> int:
        own = [beside[i, choice] for i in kind.layers if (i, choice) in beside]
        return max(0, kept_bytes - max(own)) if own else 0

    choices = (replace(each, also_static_bytes=also(each.policy)) for each in kind.choices)
    return replace(kind, choices=tuple(choices))
