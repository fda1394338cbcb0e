"""The search of a stage on which forwards run beside backwards (EP overlap), or whose layers are
CUDA graphs.

What a pair of events side by side needs is no sum of what its two chunks need: it depends on which
layers of both are alive at once. So the search sees the two events of a pair one after the other,
each without the other's microbatch. No choices that fit need less than that, so its bound holds;
what it finds is then held against the true peak, and where that is too high, the search is asked
again with some bytes added to the events of pairs.

With CUDA graphs of layers, what their pool and everything else need together is at least what any
moment has of both, and here too only all choices of a stage say how much more: bytes are added to
all events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from megatron_autorecompute.planner.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.layout import Chunk
from megatron_autorecompute.planner.p2p_tensors import Moment
from megatron_autorecompute.planner.peak_memory import StageBase, stage_peak
from megatron_autorecompute.planner.stage_search.problem import (
    ChunkProblem,
    Split,
    StageChoice,
    StageProblem,
)
from megatron_autorecompute.planner.unit_costs import CostTable
from megatron_autorecompute.policy import NONE, LayerPolicy, RecomputePolicy

TRIES = 6
"""Searches of one budget; what they leave open is the gap of the answer."""


class _Search(Protocol):
    problem: StageProblem

    def apart(self, added_bytes: int) -> _Search: ...

    def fastest(self, budget_bytes: int) -> StageChoice | None: ...

    @property
    def leanest(self) -> StageChoice: ...


def true_peak(
    table: CostTable, chunks: Sequence[Chunk], base: StageBase, moments: Sequence[Moment]
) -> Callable[[Split], int] | None:
    """A function for the peak of a stage's choices; None where its moments say it, because nothing
    runs side by side and no layer is a CUDA graph."""
    if not table.profile.graphs_of_layers and not any(m.in_parts for m in moments):
        return None
    num_layers = table.profile.num_layers

    def peak_bytes(split: Split) -> int:
        layers = [NONE] * num_layers
        for chunk, policies in zip(chunks, split, strict=True):
            for layer, choice in zip(chunk.layers, policies, strict=True):
                layers[layer] = choice
        policy = RecomputePolicy(tuple(layers))
        columns = [ChunkColumns(chunk, table.chunk_units(chunk, policy)) for chunk in chunks]
        return stage_peak(base, 0, columns, moments).bytes

    return peak_bytes


def fastest(search: _Search, budget_bytes: int) -> StageChoice | None:
    """The fastest choices found whose true peak is at most the budget, and a bound that holds."""
    found = search.apart(0).fastest(budget_bytes)
    if found is None:
        return None
    bound_ps = found.bound_ps
    best: StageChoice | None = None
    low, added, high = 0, 0, 1 << 60
    for _ in range(TRIES):
        over = 1 << 60
        if found is not None:
            found = arranged(search.problem, found)
            over = found.peak_bytes - budget_bytes
            if over <= 0 and (best is None or found.time_ps < best.time_ps):
                best = found
        if found is None or over <= 0:
            high = added
        else:
            low = added
        if high <= low + 1 or (best is not None and best.time_ps <= bound_ps):
            break
        added = low + over if high == 1 << 60 else (low + high) // 2
        found = search.apart(added).fastest(budget_bytes)
    if best is None and search.leanest.peak_bytes <= budget_bytes:
        best = search.leanest
    return best and replace(best, bound_ps=min(best.time_ps, bound_ps))


def arranged(problem: StageProblem, choice: StageChoice) -> StageChoice:
    """The choice with its true peak; layers of one kind in the order of what they hold, if that is
    lower: as one microbatch's first layers come, another's last ones have gone."""
    assert problem.true_peak is not None
    splits = choice.policies, tuple(map(_ascending, problem.chunks, choice.policies))
    peaks = [problem.true_peak(split) for split in splits]
    best = 1 if peaks[1] < peaks[0] else 0
    runs = sum(map(_runs, splits[best]))
    return replace(choice, policies=splits[best], peak_bytes=peaks[best], runs=runs)


def _ascending(chunk: ChunkProblem, policies: tuple[LayerPolicy, ...]) -> tuple[LayerPolicy, ...]:
    alike = defaultdict[object, list[int]](list)
    for position, key in enumerate(chunk.signature):
        if policies[position].group == 1:
            alike[key].append(position)
    result = list(policies)
    for positions in alike.values():
        single = chunk.singles[positions[0]]
        held = dict(zip(single.policies, single.held.tolist(), strict=True))
        own = sorted((policies[position] for position in positions), key=held.__getitem__)
        for position, policy in zip(positions, own, strict=True):
            result[position] = policy
    return tuple(result)


def _runs(choices: Sequence[LayerPolicy]) -> int:
    return sum(1 for i, own in enumerate(choices) if i == 0 or own != choices[i - 1])
