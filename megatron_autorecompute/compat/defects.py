"""Workarounds for defects of Megatron's layers under recompute; each says when it can go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_autorecompute.compat import seam
from megatron_autorecompute.compat.untyped import Block, Layer


class LayersWithPaddingMask:
    """Passes to layers the padding mask that Megatron forgets.

    Symptom: the un-checkpointed layers of `block` ignore `padding_mask`, so a MoE layer's auxiliary
    loss counts padding. Reference: `TransformerBlock._checkpointed_forward` of 0.16 and 0.17;
    0.18's `chunk_runner` passes it. Remove when 0.17 is no longer supported.
    """

    def __init__(self, layers: Sequence[Layer], padding_mask: torch.Tensor | None) -> None:
        self.layers, self.padding_mask = layers, padding_mask

    @staticmethod
    def needed() -> bool:
        """Whether the installed version forgets the mask."""
        return seam.is_method()

    def __getitem__(self, index: int) -> Callable[..., Any]:
        layer = self.layers[index]

        @functools.wraps(layer, updated=())
        def with_mask(**kwargs: Any) -> Any:
            return layer(**{**kwargs, "padding_mask": self.padding_mask})

        with_mask.layer_number = layer.layer_number  # type: ignore[attr-defined]
        return with_mask


def stacked_features(block: Block, features: list[torch.Tensor]) -> Any:
    """A tower's features as one tensor [features, tokens, hidden], where a list is refused.

    Symptom: "save_for_backward can only save variables, but argument 6 is of type list" under full
    recompute of samples with images. Reference: `Qwen3VLTransformerBlock._checkpointed_forward` of
    Megatron Bridge to 0.3.1, which takes `len()` and indices of them; 0.4 gives the checkpoint each
    by itself. Remove when 0.3.1 is dropped.
    """
    code = getattr(seam.checkpointed_forward(block), "__code__", None)
    if "deepstack_visual_embeds_tuple" in getattr(code, "co_cellvars", ()):
        return features
    return torch.stack(features)


def bias_returned_by_mlp(layer: Layer) -> torch.nn.Module | None:
    """The MLP whose bias Parameter must not be returned from a checkpoint, or None.

    Symptom: with `add_bias_linear=True`, `recompute_modules=["mlp"]` never returns from backward:
    the checkpoint returns the bias Parameter itself, and autograd gives it a history. Reference:
    `TransformerLayer._forward_mlp` of 0.16 to 0.19 with `MLP.forward` returning `linear_fc2`'s
    bias. Remove when Megatron returns a copy or adds the bias inside.
    """
    mlp = getattr(layer, "mlp", None)
    bias = getattr(getattr(mlp, "linear_fc2", None), "bias", None)
    return mlp if isinstance(bias, torch.nn.Parameter) else None


def graph_keepers(layer: Layer) -> list[Any]:
    """The objects of a MoE layer that keep the router's probabilities with their autograd graph.

    Symptom: after the backward of a recomputed layer, its input and the input's gradient stay alive
    until its next forward. Reference: `self.probs` of MoEAlltoAllTokenDispatcher,
    `self.local_probs` of MoEAllGatherTokenDispatcher, `self.token_probs` and
    `self.dispatched_probs` of the flex dispatcher's `_comm_manager`, 0.16 to 0.19. Remove when
    Megatron frees them. Empty with EP overlap, where another microbatch's forward may be using the
    dispatcher.
    """
    if not isinstance(getattr(layer, "mlp", None), MoELayer):
        return []
    if layer.config.overlap_moe_expert_parallel_comm:
        return []
    dispatcher = layer.mlp.token_dispatcher
    return [dispatcher, *filter(None, [getattr(dispatcher, "_comm_manager", None)])]
