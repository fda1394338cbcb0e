"""Notes the tokens of each training call, and those that experts got, at the price of hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from megatron_autorecompute.compat import layer_kinds, model_layers
from megatron_autorecompute.patched import TemporaryHook
from megatron_autorecompute.runtime.probe import is_recomputing


class SeenTokens:
    """Counts the tokens of every microbatch with gradients, on one rank.

    Args:
        chunks: this rank's model chunks.
        split: over how many ranks sequence parallelism splits the hidden states.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], split: int) -> None:
        self.longest = 0
        """Tokens of the longest microbatch since `forget`."""
        self.routed: list[Counter[int]] = []
        """For each microbatch since `forget`: rows that this rank's experts got, by layer."""
        self._counts = False
        """Whether a training call runs; what runs between two is none of its microbatches."""
        self._split = split
        self._trains = False
        """Whether the forward that began last has a backward."""
        self._numbers: Counter[int] = Counter()
        """Forwards of each chunk."""
        self._now: Counter[int] = Counter()
        """What `routed` has of the running forward."""
        self._hooks: list[TemporaryHook] = []
        for number, chunk in enumerate(chunks):
            model = model_layers.unwrapped(chunk)
            self._before(model, partial(self._begin, number))
        layers = model_layers.numbered_layers(chunks)
        tower = model_layers.tower_layers(chunks)
        for layer, _ in [each for each in layers if each[1] >= tower][:1]:
            self._before(layer, self._see)
        for layer, index in {id(layer): (layer, index) for layer, index in layers}.values():
            for experts in layer_kinds.experts(layer):
                self._before(experts, partial(self._see_routed, index))

    @property
    def most_routed(self) -> int:
        """The most rows in `routed`, in any microbatch and layer."""
        return max((rows for one in self.routed for rows in one.values()), default=0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Surround a training call."""
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def forget(self) -> None:
        """Forget the tokens of the call before."""
        self.longest = 0
        self.routed = []
        self._numbers.clear()

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: torch.nn.Module, do: Callable[..., None]) -> None:
        self._hooks.append(TemporaryHook(module.register_forward_pre_hook, do, with_kwargs=True))

    def _begin(self, chunk: int, *_: Any) -> None:
        self._trains = self._counts and torch.is_grad_enabled()
        if self._trains:
            number, self._numbers[chunk] = self._numbers[chunk], self._numbers[chunk] + 1
            if number == len(self.routed):
                self.routed.append(Counter())
            self._now = self.routed[number]

    def _see(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._trains:
            self.longest = max(self.longest, self._split * _rows(_first(args, kwargs)))

    def _see_routed(
        self, layer: int, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._trains and not is_recomputing():
            self._now[layer] += _rows(_first(args, kwargs))


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
    return tensor


def _rows(hidden_states: torch.Tensor) -> int:
    return hidden_states.numel() // hidden_states.shape[-1]
