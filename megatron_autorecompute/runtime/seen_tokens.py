"""Notes the longest microbatch of each training call, at the price of a hook on a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_autorecompute.compat import model_layers


class SeenTokens:
    """Counts the tokens of every microbatch with gradients, on one rank.

    Args:
        chunks: this rank's model chunks.
        split: over how many ranks sequence parallelism splits the hidden states.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], split: int) -> None:
        self.longest = 0
        """Tokens of the longest microbatch since `forget`."""
        self._split = split
        layers = [layer for layer, _ in model_layers.numbered_layers(chunks)]
        self._hooks = [
            layer.register_forward_pre_hook(self._see, with_kwargs=True) for layer in layers[:1]
        ]

    def forget(self) -> None:
        """Begin a call."""
        self.longest = 0

    def close(self) -> None:
        """Take the hook away."""
        for hook in self._hooks:
            hook.remove()

    def _see(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            tokens = hidden_states.numel() // hidden_states.shape[-1] * self._split
            self.longest = max(self.longest, tokens)
