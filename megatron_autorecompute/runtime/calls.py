"""The lengths of training calls, in a loop whose calls differ: all ranks agree on those of the next
one, and hooks note those of the last one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_autorecompute.compat import layer_parts, model_layers
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.lines import Microbatch
from megatron_autorecompute.patched import TemporaryHook
from megatron_autorecompute.planner.search.buckets import bucket
from megatron_autorecompute.runtime.probe import is_recomputing
from megatron_autorecompute.runtime.ranks import all_reduce_max

AHEAD = 1.25
"""Without said lengths and without a cap, plans are for this multiple of the longest seen."""

LIMIT = 1 << 40
"""No call has as many tokens; ranks exchange integers of 64 bits."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """What a plan for a call depends on."""

    tokens: int
    """Tokens of the longest microbatch planned for; 0 before any length is known."""
    call_tokens: int
    """Tokens of all microbatches of a call on a rank."""
    microbatches: int
    """The number of microbatches of the plan."""

    @property
    def microbatch(self) -> Microbatch:
        """The longest one, as `Microbatch.longest`."""
        return Microbatch.longest(self.tokens)


def whole(value: Any) -> int | None:
    """A positive whole number of any type, as an int; None if it is none."""
    try:
        number = int(value)
        return number if number == value and 0 < number < LIMIT else None
    except (TypeError, ValueError, OverflowError):
        return None


class Calls:
    """The next training call of the schedule; every rank makes one in the same way.

    Ranks may have other lengths and other numbers of microbatches than each other. They need one
    policy, so they agree on the most of both, by one all-reduce before each call.

    Args:
        max_tokens: the most tokens of a microbatch on a rank, as the loop packs them; None if it
            has no such limit.
        most_microbatches: the most of a plan; a call of more holds no more bytes at any moment.

    Raises OptionError: max_tokens is no number of tokens.
    """

    def __init__(self, max_tokens: int | None, most_microbatches: int) -> None:
        cap = None if max_tokens is None else whole(max_tokens)
        if cap is None and max_tokens is not None:
            raise OptionError(
                f"max_tokens={max_tokens!r}: give a whole number of tokens, such as 16384."
            )
        self.max_tokens, self._most = cap, most_microbatches
        self._said: list[int] | None = None
        self.is_said = False
        """Whether every rank said the lengths of this call."""
        self.seen = 0
        """Tokens of the longest microbatch so far, on any rank."""
        self.last = 0
        """Tokens of the longest microbatch of the last call, on any rank."""
        self.longest = 0
        """Tokens of the longest microbatch of this call, if every rank said lengths."""
        self.missed_bytes: tuple[int, ...] = ()
        """By stage: how much more than predicted the last call needed."""
        self.short_bytes: tuple[int, ...] = ()
        """By stage: how much less memory there is now than when it was measured."""
        self.shape = CallShape(max_tokens or 0, 0, most_microbatches)
        """The shape of the plan for this call."""

    def num_microbatches(self) -> int:
        """The number of microbatches of the plan for the next call."""
        return self.shape.microbatches

    def say(self, tokens: Sequence[int]) -> None:
        """Keep the tokens of each microbatch of this rank's next call; forgotten after it.

        Raises: OptionError if it is not one positive whole number for each microbatch."""
        given: list[Any] = list(tokens) if isinstance(tokens, Iterable) else [tokens]
        said = [whole(one) for one in given]
        if not said or None in said or not isinstance(tokens, Iterable):
            raise OptionError(
                f"tokens {tokens!r:.100}: say how many tokens each microbatch of the next call "
                "has, on this rank and after padding, as a list of whole numbers."
            )
        self._said = [one for one in said if one is not None]

    def agree(
        self,
        num_microbatches: int | None,
        outcome: int,
        seen: int = 0,
        missed_bytes: Sequence[int] = (),
        short_bytes: Sequence[int] = (),
    ) -> int:
        """Exchange what is known of the next call; returns the worst outcome of the last one.

        Args:
            num_microbatches: how many this rank's next call has; None if it is not known.
            outcome: the outcome of the last call on this rank.
            seen: tokens of the longest microbatch of the last call on this rank.
            missed_bytes: by stage, 0 for all but this rank's.
            short_bytes: likewise, how much less memory there is than when it was measured.

        Raises OptionError: on every rank, if one said lengths for another number of microbatches,
        or has none.
        """
        said, self._said = self._said or [], None
        wrong = num_microbatches is not None and (
            whole(num_microbatches) is None or len(said) not in (0, num_microbatches)
        )
        mine = self._most if wrong else whole(num_microbatches) or len(said) or self._most
        longest, total, found, worst, unsaid, seen, failed, *missed = all_reduce_max(
            max(said, default=0),
            sum(said),
            mine,
            outcome,
            not said,
            seen,
            wrong,
            *missed_bytes,
            *short_bytes,
        )
        if failed:
            raise OptionError(
                f"num_microbatches={num_microbatches!r} and the lengths that tokens() named, "
                f"{len(said) or 'none'}, do not go together on this rank, or the like on another. "
                "A call has one microbatch or more; say the length of each, or of none."
            )
        stages, self.last = len(missed_bytes), seen
        self.missed_bytes, self.short_bytes = tuple(missed[:stages]), tuple(missed[stages:])
        self.seen = max(self.seen, self.last)
        self.is_said, self.longest = not unsaid, longest
        self._plan_for(found, total)
        return worst

    def _plan_for(self, microbatches: int, said_total: int) -> None:
        tokens = self._tokens()
        total = said_total if self.is_said else microbatches * tokens
        # What a loop holds of all microbatches is little: a few powers of two make few plans.
        rounded = 1 << (total - 1).bit_length() if total else 0
        self.shape = CallShape(
            tokens, max(rounded, self.shape.call_tokens), min(microbatches, self._most)
        )

    def _tokens(self) -> int:
        """Tokens of the microbatch that the plan for this call is for."""
        if self.is_said:
            cap = self.max_tokens or self.seen or self.longest
            return bucket(self.longest, cap)
        if self.max_tokens is not None:
            return bucket(max(self.max_tokens, self.seen), self.max_tokens)
        if self.seen > self.shape.tokens or not self.shape.tokens:
            return math.ceil(AHEAD * self.seen)
        return self.shape.tokens


class SeenTokens:
    """Counts the tokens of every microbatch with gradients, on one rank. Sequence parallelism
    splits the hidden states over `split` ranks."""

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
            for experts in layer_parts.experts(layer):
                self._before(experts, partial(self._see_routed, index))

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
