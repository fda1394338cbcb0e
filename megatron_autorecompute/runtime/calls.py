"""What all ranks know of the next training call, in a loop whose calls differ."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.runtime.ranks import all_reduce_max


class Calls:
    """The next training call of the schedule; every rank makes one in the same way.

    Ranks may have other lengths and other numbers of microbatches than each other. They need one
    policy, so they agree on the most of both, by one all-reduce before each call.

    Args:
        max_tokens: the most tokens of a microbatch on a rank, as the loop packs them; None if it
            has no such limit.
        most_microbatches: of a plan; a call of more holds no more bytes at any moment.

    Raises:
        OptionError: max_tokens is no number of tokens.
    """

    def __init__(self, max_tokens: int | None, most_microbatches: int) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise OptionError(f"max_tokens={max_tokens}: give a number of tokens, such as 16384.")
        self.max_tokens, self._most = max_tokens, most_microbatches
        self._said: list[int] | None = None
        self.largest = 0
        """Tokens of the call's largest microbatch on any rank; 0 if no rank said lengths."""
        self._microbatches = most_microbatches

    def num_microbatches(self) -> int:
        """Of the plan for the next call."""
        return self._microbatches

    def say(self, tokens: Sequence[int]) -> None:
        """Keep the tokens of each microbatch of this rank's next call; forgotten after it."""
        self._said = [int(one) for one in tokens]

    def agree(self, num_microbatches: int | None, outcome: int) -> int:
        """Exchange what is known of the next call; returns the worst outcome of the last one."""
        said, self._said = self._said or [], None
        mine = num_microbatches or len(said) or self._most
        self.largest, found, worst = all_reduce_max(max(said, default=0), mine, outcome)
        self._microbatches = min(found, self._most)
        return worst
