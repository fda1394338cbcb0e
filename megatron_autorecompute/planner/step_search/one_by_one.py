"""All combinations of stages' options that no path rules out, looked at one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from megatron_autorecompute.planner.arrays import Ints

_WHOLE = 20
"""A whole combination is replayed, and counts as so many parts of one at the least."""
_EVENTS_OF_A_PART = 128
"""It is as much work to look at a part of one as to replay so many and to follow their paths."""
Combination = tuple[int, ...]
"""The number of an option for every stage."""


class Replays(Protocol):
    """Steps of combinations, and the paths that are known."""

    step: int
    """The shortest so far."""
    all_paths: list[Ints]
    """`[direction, stage, chunk]` each."""
    events: int
    """That are replayed of a combination."""

    def replay(self, combinations: Sequence[Combination]) -> None:
        """Work out their steps."""

    def look_at(self, combination: Combination) -> None:
        """Add its critical paths."""

    def lengths(self, stage: int, options: Sequence[int], paths: Sequence[Ints]) -> Ints:
        """`[path, option]` what options of a stage take on each path."""


class OneByOne:
    """Depth first, one stage after the other.

    Args:
        replays: of what.
        options: per stage, the numbers of those that may be part of a shorter step; at least one.
        mixture: a sum of paths, `[direction, stage, chunk]`.
        parts: of how many.
        nodes: combinations, whole or in part, that may be looked at.
    """

    def __init__(
        self,
        replays: Replays,
        options: Sequence[Sequence[int]],
        mixture: Ints,
        parts: int,
        nodes: int,
    ) -> None:
        self.replays, self.options, self.nodes_left = replays, options, nodes
        self.of_whole = max(_WHOLE, replays.events // _EVENTS_OF_A_PART)
        self.order = sorted(range(len(options)), key=lambda stage: (len(options[stage]), stage))
        self.lengths = [np.zeros((0, len(own)), np.int64) for own in options]
        """`[path, option]` of every stage; the first is the mixture's."""
        self.parts: Ints = np.zeros(0, np.int64)
        """Of how many paths each is the sum."""
        self.paths_seen = 0
        self._know([mixture], parts)

    def done(self) -> bool:
        """Look at all; whether none is left that may be shorter than the best one then known."""
        return self._below([])

    def _below(self, chosen: list[int]) -> bool:
        whole = len(chosen) == len(self.order)
        self.nodes_left -= self.of_whole if whole else 1
        if self.nodes_left < 0:
            return False
        if not whole:
            return all(self._below([*chosen, option]) for option in self._open(chosen))
        places = dict(zip(self.order, chosen, strict=True))
        combination = tuple(own[places[stage]] for stage, own in enumerate(self.options))
        self.replays.replay([combination])
        self.replays.look_at(combination)
        return True

    def _open(self, chosen: Sequence[int]) -> Iterator[int]:
        """Options of the next stage that no path rules out, the likeliest first."""
        self._know(self.replays.all_paths[self.paths_seen :], 1)
        self.paths_seen = len(self.replays.all_paths)
        total = self.lengths[self.order[len(chosen)]] + self.rest[len(chosen) + 1][:, None]
        for stage, option in zip(self.order, chosen, strict=False):
            total = total + self.lengths[stage][:, [option]]
        may_win = (total <= (self.parts * (self.replays.step - 1))[:, None]).all(axis=0)
        longest = (total / self.parts[:, None]).max(axis=0)
        yield from (i for i in np.argsort(longest, kind="stable").tolist() if may_win[i])

    def _know(self, paths: Sequence[Ints], parts: int) -> None:
        if not paths:
            return
        self.parts = np.concatenate([self.parts, np.full(len(paths), parts)])
        for stage, own in enumerate(self.options):
            more = self.replays.lengths(stage, own, paths)
            self.lengths[stage] = np.concatenate([self.lengths[stage], more])
        none = np.zeros(len(self.parts), np.int64)
        least = [self.lengths[s].min(axis=1, initial=1 << 62) for s in reversed(self.order)]
        self.rest = np.cumsum([none, *least], axis=0)[::-1]
        """`[depth, path]` the least that the stages from there on take."""
