"""Exact search for the fastest choices of one stage under its memory limits.

Constraints. For every binding moment k (kind, running chunk r, microbatches in flight n[k, c]):

    constant[k] + sum over chunks c of n[k, c] * H[c] + M[r, kind] <= budget

where H[c] is what chunk c holds and M[c, kind] the highest point of its forward or backward:
max over its units of (held of the units up to it + its transient). Prepending a unit (h, x) to a
suffix of a chunk gives H' = H + h and M' = h + max(x, M). So all that matters of a suffix is a
*label* (time, H, M forward, M backward), and of two labels of the same suffix the one that is not
better in anything is dropped. Chunks are then combined the same way, a label being the time and
the load on every moment.

What keeps the labels few is a Lagrangian bound: multipliers lambda[k] >= 0 of a linear relaxation
(`scipy.optimize.linprog`, HiGHS) price the bytes, and a label whose time plus priced bytes cannot
get below the best known solution is dropped. Any multipliers give a valid bound, so rounding in
them costs speed, never exactness: bytes and times are compared as integers. A MILP solver alone
would not do: its tolerance of 1e-6 is 80 kB at 80 GB. Rounds of growing width find the best known
solution; the round in which nothing had to be cut off proves it.

Equal times: the lower peak wins; equal both: the fewest runs of equal policy, counted per chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from megatron_autorecompute.boundary import Load
from megatron_autorecompute.cost_model import Checkpoints, CostTable, StageBase, Unit
from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.pipeline import Chunk
from megatron_autorecompute.policy import LayerPolicy

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WIDTHS = (64, 256, 1024, 4096, 16_384, 131_072)
"""Labels kept per position in successive rounds; the last bounds memory to about 100 MB."""
MOST_WORK = 6e8
"""Width times squared layers of a chunk, beyond which no wider round is begun: about 30 s on one
core for 512 layers of 12 choices in one chunk. What is left open is the gap of the answer."""
COMPLETE_LAYERS, COMPLETE_WIDTH = 4, 256
"""Layers of a chunk, and labels of a position, up to which all labels of a stage are found once and
kept for every budget. Longer chunks have too many: each budget then searches its own."""
_SLACK = 1e-9  # relative; the bound is a float sum of about 1e3 terms, wrong by at most 1e-12
_NO_LIMIT = np.int64(1) << 60
_NEVER = np.int64(1) << 60  # ps


@dataclass(frozen=True, slots=True)
class Singles:
    """Choices of one layer by itself, `[choice]`."""

    policies: tuple[LayerPolicy, ...]
    held: Ints
    forward: Ints
    backward: Ints
    time: Ints
    keeps: Ints
    """1 where the choice is a checkpoint; see `Unit.keeps_output_gradient`."""


@dataclass(frozen=True)
class ChunkProblem:
    """What may be chosen in one chunk. Independent of budget and schedule."""

    layers: tuple[int, ...]
    before: tuple[Unit, ...]
    after: tuple[Unit, ...]
    singles: tuple[Singles, ...]
    """Per position in the chunk."""
    groups: tuple[Checkpoints, ...]
    """Per position: one checkpoint around the g layers from there, `[g - 1]`."""
    output_gradient_bytes: int
    """In the backward of every unit, but of a checkpoint that is the chunk's last."""

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """Per position, what tells layers of different cost apart."""
        return tuple(tuple(tuple(column.tolist()) for column in _numbers(s)) for s in self.singles)

    def covering(self, price: float, timed: bool) -> Floats:
        """Least time + price * held over the ways to cover the layers before each position.

        `[position]` for 0 .. number of layers, `before` included.
        """
        cost = np.zeros(len(self.layers) + 1)
        cost[0] = sum(u.time_ps * timed + price * u.held_bytes for u in self.before)
        cost[1:] = np.inf
        for i, single in enumerate(self.singles):
            alone = (single.time * timed + price * single.held).min()
            cost[i + 1] = min(cost[i + 1], cost[i] + alone)
            group = self.groups[i]
            if len(group.held_bytes) > 1:
                together = (group.forward_ps + group.backward_ps) * timed + price * group.held_bytes
                reached = cost[i + 2 : i + 1 + len(together)]
                np.minimum(reached, cost[i] + together[1:], out=reached)
        return cost

    @cached_property
    def least_ps(self) -> int:
        """Time when every layer has its fastest choice."""
        return _time_ps(self, [s.policies[int(s.time.argmin())] for s in self.singles])

    @cached_property
    def least_held(self) -> Ints:
        """Least bytes held by the layers before each position, `before` included."""
        return np.floor(self.covering(1.0, timed=False)).astype(np.int64)

    @cached_property
    def least_total(self) -> int:
        """Least bytes the whole chunk can hold."""
        return int(self.least_held[-1]) + sum(unit.held_bytes for unit in self.after)

    @cached_property
    def forward_is_below_backward_by(self) -> int:
        """Least (backward transient - forward transient) over all units; negative if above."""
        pairs = [
            (u.forward_transient_bytes, u.backward_transient_bytes)
            for u in (*self.before, *self.after)
        ]
        gaps = [b - f for f, b in pairs]
        gaps += [int((s.backward - s.forward).min()) for s in self.singles]
        gaps += [
            int((g.backward_transient_bytes - g.forward_transient_bytes)[1:].min())
            for g in self.groups
            if len(g.held_bytes) > 1
        ]
        return min(gaps)


def _numbers(single: Singles) -> tuple[Ints, ...]:
    return single.held, single.forward, single.backward, single.time


def chunk_problem(
    table: CostTable,
    chunk: Chunk,
    base: StageBase,
    allowed: frozenset[str] | None = None,
) -> ChunkProblem:
    """Collect the options of a chunk; `allowed` restricts choices, None allows all recorded."""
    before, after = table.pseudo_layers(chunk)
    layers = chunk.layers
    grouped = allowed is None or "full/N" in allowed
    groups = [table.checkpoints(layers[i:] if grouped else ()) for i in range(len(layers))]
    return ChunkProblem(
        layers,
        tuple(before),
        tuple(after),
        tuple(
            _singles(table, layer, allowed, received=layer == layers[0] and not chunk.embedding)
            for layer in layers
        ),
        tuple(groups),
        0 if chunk.head else base.boundary_bytes,
    )


def _singles(
    table: CostTable, layer: int, allowed: frozenset[str] | None, received: bool
) -> Singles:
    policies = tuple(p for p in table.choices(layer) if allowed is None or str(p) in allowed)
    if not policies:
        raise ProfileError(
            f"None of the allowed choices {sorted(allowed or ())} has a record for layer {layer}, "
            f"which has {', '.join(map(str, table.choices(layer)))}. Allow one of these."
        )
    units = [table.layer(layer, policy, received) for policy in policies]
    columns = [
        np.array([getattr(unit, name) for unit in units], np.int64)
        for name in (
            "held_bytes",
            "forward_transient_bytes",
            "backward_transient_bytes",
            "time_ps",
            "keeps_output_gradient",
        )
    ]
    return Singles(policies, *columns)


@dataclass(frozen=True)
class StageProblem:
    """One stage: its chunks and its binding moments, `[moment]`."""

    chunks: tuple[ChunkProblem, ...]
    counts: Ints
    """`[moment, chunk]` microbatches in flight."""
    running: Ints
    """Chunk that runs."""
    is_forward: NDArray[np.bool_]
    constant: Ints
    """Bytes alive whatever is chosen."""
    floor_bytes: int
    """Peak outside forwards and backwards: static bytes and the optimizer step."""

    @cached_property
    def complete(self) -> _Combiner | None:
        """All labels of all chunks, whatever the budget; None where they are too many to keep."""
        if max(len(chunk.layers) for chunk in self.chunks) > COMPLETE_LAYERS:
            return None
        run = _Run(self, int(_NO_LIMIT), unpriced=True)
        options, left_ps = run.options(_Goal(), COMPLETE_WIDTH)
        return _Combiner(self, options) if left_ps == math.inf else None


def stage_problem(
    chunks: Sequence[ChunkProblem], moments: Sequence[Load], base: StageBase
) -> StageProblem:
    """Put chunks and moments together, without the moments that others imply."""
    kept = [moment for moment in moments if not _implied(moment, moments, chunks, base)]
    return StageProblem(
        tuple(chunks),
        np.array([moment.in_flight for moment in kept], np.int64).reshape(len(kept), len(chunks)),
        np.array([moment.chunk for moment in kept], np.int64),
        np.array([moment.kind == "forward" for moment in kept], np.bool_),
        np.array([base.constant_bytes(load.kind, load.extra) for load in kept], np.int64),
        base.static.total_bytes + base.optimizer_step_peak_bytes,
    )


def _implied(
    moment: Load, moments: Sequence[Load], chunks: Sequence[ChunkProblem], base: StageBase
) -> bool:
    """Whether a forward never needs more than some backward of the same chunk."""
    if moment.kind == "backward":
        return False
    constant = base.constant_bytes("forward", moment.extra)
    below = chunks[moment.chunk].forward_is_below_backward_by
    return any(
        other.kind == "backward"
        and other.chunk == moment.chunk
        and constant <= base.constant_bytes("backward", other.extra) + below
        and all(n >= k for n, k in zip(other.in_flight, moment.in_flight, strict=True))
        for other in moments
    )


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The best choices of a stage, and the proof."""

    policies: tuple[tuple[LayerPolicy, ...], ...]
    """`[chunk][position]`."""
    time_ps: int
    """Forward plus backward of one microbatch through all chunks."""
    peak_bytes: int
    runs: int
    """Runs of equal policy, counted per chunk."""
    bound_ps: int
    """No choices that fit are faster than this."""

    @property
    def gap(self) -> float:
        """(time - bound) / time; 0 is proven optimal."""
        return (self.time_ps - self.bound_ps) / self.time_ps if self.time_ps else 0.0


def search(
    problem: StageProblem, budget_bytes: int, known: StageChoice | None = None
) -> StageChoice | None:
    """Fastest choices whose peak is at most the budget; None when no choices fit.

    `known` choices that fit, such as those of a smaller budget, only make it quicker.
    """
    if problem.floor_bytes > budget_bytes:
        return None
    run = _Run(problem, budget_bytes)
    if run.bound_ps >= _NEVER:
        return None
    least_ps = sum(chunk.least_ps for chunk in problem.chunks)
    if run.complete or run.bound_ps <= least_ps:
        # Mostly the answer: the fastest choices where memory is no limit, and elsewhere what an
        # exact bound allows. Then nearly every label is dropped at once.
        goal = _Goal(max(least_ps, run.bound_ps))
        found, left_ps = run.round(goal, WIDTHS[0])
        if found is not None and found.time_ps == goal.time_ps and left_ps == math.inf:
            return found
        known = _better(known, found)
    best, bound_ps = known, 0.0
    for width in _affordable(problem):
        found, left_ps = run.round(_Goal.of(best, budget_bytes), width)
        best = _better(best, found)
        if left_ps == math.inf:
            return best
        bound_ps = max(bound_ps, run.bound_ps, left_ps)
        if best is None:
            lean = leanest(problem)
            if lean.peak_bytes > budget_bytes:
                return None
            best = lean
    assert best is not None  # the leanest choices fit
    bound = min(best.time_ps, math.floor(bound_ps))
    return StageChoice(best.policies, best.time_ps, best.peak_bytes, best.runs, bound)


def _affordable(problem: StageProblem) -> tuple[int, ...]:
    longest = max(len(chunk.layers) for chunk in problem.chunks)
    wider = (width for width in WIDTHS[1:] if width * longest**2 <= MOST_WORK)
    return (WIDTHS[0], *wider)


def leanest(problem: StageProblem) -> StageChoice:
    """The choices with the lowest peak, whatever their time."""
    run = _Run(problem, None)
    for width in WIDTHS:
        found, left_ps = run.round(_Goal(), width)
        if left_ps == math.inf:
            break
    assert found is not None  # without a budget everything fits
    return found


def _better(one: StageChoice | None, other: StageChoice | None) -> StageChoice | None:
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda c: (c.time_ps, c.peak_bytes, c.runs))


_COLUMNS = ("time", "held", "forward", "backward", "runs", "first", "parent", "position", "option")


class _Labels:
    """Labels of all positions searched so far, in one growing table `[label, column]`."""

    def __init__(self) -> None:
        self.data = np.zeros((256, len(_COLUMNS)), np.int64)
        self.stops: dict[int, int] = {}
        self.size = 0

    def append(self, rows: Ints, position: int) -> None:
        while self.size + len(rows) > len(self.data):
            self.data = np.concatenate([self.data, np.zeros_like(self.data)])
        self.data[self.size : self.size + len(rows)] = rows
        self.size += len(rows)
        self.stops[position] = self.size

    def of(self, first: int, last: int) -> tuple[Ints, int]:
        """Labels of positions `first` .. `last`, and the index of the first one."""
        start = self.stops.get(last + 1, 0)
        return self.data[start : self.stops[first]], start


_TIME, _HELD, _FORWARD, _BACKWARD, _RUNS, _FIRST, _PARENT, _POSITION, _OPTION = range(9)
_GROUP_IDS = 1 << 20  # ids of groups lie above those of single choices


class _Run:
    """The rounds of one search: same problem, same budget, same multipliers."""

    def __init__(
        self, problem: StageProblem, budget_bytes: int | None, unpriced: bool = False
    ) -> None:
        self.problem = problem
        self.timed = budget_bytes is not None
        limit = np.full(len(problem.constant), _NO_LIMIT)
        self.limit = limit if budget_bytes is None else budget_bytes - problem.constant
        self.complete = problem.complete if self.timed and not unpriced else None
        self.price = np.zeros(len(limit))
        self.ids: dict[LayerPolicy, int] = {}
        self.chunk_bounds: list[float] = []
        if self.complete is None:
            if self.timed and not unpriced:
                self.price = _multipliers(problem, self.limit)
            self.chunk_bounds = [self._unsearched_bound(c) for c in range(len(problem.chunks))]

    @property
    def budget_price(self) -> float:
        """What the limits are worth at the multipliers."""
        return float(self.price @ self.limit) if self.timed else 0.0

    @property
    def bound_ps(self) -> int:
        """Lower bound on the time of any choices that fit."""
        if self.complete is not None:
            return self.complete.bound_ps(self.limit)
        value = sum(self.chunk_bounds) - self.budget_price
        return max(0, int(np.floor(value - _SLACK * abs(value))))

    def _prices(self, c: int) -> tuple[float, float, float]:
        """Prices of a byte of H, of M forward and of M backward of a chunk."""
        runs, forward = self.problem.running == c, self.problem.is_forward
        return (
            float(self.price @ self.problem.counts[:, c]),
            float(self.price[runs & forward].sum()),
            float(self.price[runs & ~forward].sum()),
        )

    def _unsearched_bound(self, c: int) -> float:
        chunk, price = self.problem.chunks[c], sum(self._prices(c))
        after = sum(u.time_ps * self.timed + price * u.held_bytes for u in chunk.after)
        return float(chunk.covering(price, self.timed)[-1]) + after

    def round(self, goal: _Goal, width: int) -> tuple[StageChoice | None, float]:
        """One pass: the best found, and what no label cut off for width can become faster than.

        The second is infinite where none was cut off, which proves the first.
        """
        combiner, left_ps = self.complete, math.inf
        if combiner is None:
            options, left_ps = self.options(goal, width)
            if not all(len(option.final) for option in options):
                return None, left_ps
            combiner = _Combiner(self.problem, options)
        found, also_left_ps = combiner.best(self.limit, self.price, goal, width)
        return found, min(left_ps, also_left_ps)

    def options(self, goal: _Goal, width: int) -> tuple[list[_Option], float]:
        """Labels of every chunk, up to one that has none; and as in `round`."""
        options: list[_Option] = []
        left_ps = math.inf
        for c in range(len(self.problem.chunks)):
            filters = _Filters(self, c, goal.time_ps, width)
            labels, final = self._search_chunk(c, filters)
            if filters.left < math.inf:
                cut_ps = filters.left - self.budget_price
                left_ps = min(left_ps, cut_ps - _SLACK * max(abs(filters.left), abs(cut_ps)))
            options.append(_Option(labels, final, self.ids))
            if not len(final):
                break
            if filters.left == math.inf:
                self.chunk_bounds[c] = max(
                    self.chunk_bounds[c], float(self._priced(final, c).min())
                )
        return options, left_ps

    def _priced(self, rows: Ints, c: int) -> Floats:
        held, forward, backward = self._prices(c)
        priced: Floats = (
            rows[:, _TIME]
            + held * rows[:, _HELD]
            + forward * rows[:, _FORWARD]
            + backward * rows[:, _BACKWARD]
        )
        return priced

    def _search_chunk(self, c: int, filters: _Filters) -> tuple[_Labels, Ints]:
        """Labels of one chunk from its last position to its first; final ones are returned."""
        chunk = self.problem.chunks[c]
        labels = _Labels()
        rows = np.zeros((1, len(_COLUMNS)), np.int64)
        rows[:, _FIRST] = rows[:, _PARENT] = -1
        rows[:, _POSITION] = len(chunk.layers)
        for unit in reversed(chunk.after):
            rows = self._prepend_unit(rows, unit)
        labels.append(rows, len(chunk.layers))
        for position in reversed(range(len(chunk.layers))):
            rows = np.concatenate(
                [self._alone(chunk, labels, position), self._together(c, labels, position)]
            )
            rows[:, _POSITION] = position
            labels.append(filters(rows, position), position)
        final, start = labels.of(0, 0)
        final = final.copy()
        final[:, _PARENT] = start + np.arange(len(final))
        for unit in reversed(chunk.before):
            final = self._prepend_unit(final, unit, chunk.output_gradient_bytes)
        return labels, final

    def _prepend_unit(self, rows: Ints, unit: Unit, output_gradient_bytes: int = 0) -> Ints:
        held = np.int64(unit.held_bytes)
        rows = rows.copy()
        rows[:, _TIME] += unit.time_ps * self.timed
        rows[:, _HELD] += held
        backward = unit.backward_transient_bytes + output_gradient_bytes
        rows[:, _FORWARD] = held + np.maximum(rows[:, _FORWARD], unit.forward_transient_bytes)
        rows[:, _BACKWARD] = held + np.maximum(rows[:, _BACKWARD], backward)
        return rows

    def _alone(self, chunk: ChunkProblem, labels: _Labels, position: int) -> Ints:
        """Every choice of one layer before every label of the next position."""
        single = chunk.singles[position]
        later, start = labels.of(position + 1, position + 1)
        pick = np.repeat(np.arange(len(single.policies)), len(later))
        ids = np.array([self._id(policy) for policy in single.policies], np.int64)
        last = position + 1 == len(chunk.layers)
        gradient = chunk.output_gradient_bytes * (1 - single.keeps[pick] * last)
        return _prepend(
            np.tile(later, (len(single.policies), 1)),
            np.tile(np.arange(start, start + len(later)), len(single.policies)),
            (single.held[pick], single.forward[pick], single.backward[pick] + gradient),
            single.time[pick] * self.timed,
            ids[pick],
        )

    def _together(self, c: int, labels: _Labels, position: int) -> Ints:
        """Every checkpoint of two or more layers before the labels where it ends."""
        chunk = self.problem.chunks[c]
        group = chunk.groups[position]
        # Mostly the longer the higher, so this spares looking at what can never fit.
        reach = group.held_bytes + group.backward_transient_bytes
        own = (self.problem.running == c) & ~self.problem.is_forward
        fitting = np.flatnonzero(reach <= self.limit[own].max(initial=0))
        most = int(fitting[-1]) + 1 if len(fitting) else 0
        if most < 2:
            return np.zeros((0, len(_COLUMNS)), np.int64)
        later, start = labels.of(position + 2, position + most)
        pick = later[:, _POSITION] - position - 1
        not_last = later[:, _POSITION] < len(chunk.layers)
        backward = group.backward_transient_bytes[pick] + chunk.output_gradient_bytes * not_last
        return _prepend(
            later.copy(),
            np.arange(start, start + len(later)),
            (group.held_bytes[pick], group.forward_transient_bytes[pick], backward),
            (group.forward_ps + group.backward_ps)[pick] * self.timed,
            _GROUP_IDS + pick + 1,
        )

    def _id(self, policy: LayerPolicy) -> int:
        return self.ids.setdefault(policy, len(self.ids))

    def _may_win(self, priced: Floats, upper_ps: int | None) -> NDArray[np.bool_]:
        """Whether the bound leaves room for a time of at most `upper_ps`."""
        if upper_ps is None:
            return np.ones(len(priced), np.bool_)
        ceiling = upper_ps + self.budget_price
        allowed: NDArray[np.bool_] = priced <= ceiling + _SLACK * max(abs(ceiling), upper_ps)
        return allowed


def _time_ps(chunk: ChunkProblem, policies: Sequence[LayerPolicy]) -> int:
    """Time of one microbatch through a chunk under the given policies."""
    time = sum(unit.time_ps for unit in (*chunk.before, *chunk.after))
    position = 0
    while position < len(policies):
        policy = policies[position]
        if policy.group > 1:
            group = chunk.groups[position]
            index = policy.group - 1
            time += int(group.forward_ps[index] + group.backward_ps[index])
        else:
            single = chunk.singles[position]
            time += int(single.time[single.policies.index(policy)])
        position += policy.group
    return time


def _prepend(
    rows: Ints, parents: Ints, costs: tuple[Ints, Ints, Ints], time: Ints, ids: Ints
) -> Ints:
    """Put one unit before each row, in place; `costs` is held, forward and backward transient."""
    held, forward, backward = costs
    rows[:, _TIME] += time
    rows[:, _HELD] += held
    rows[:, _FORWARD] = held + np.maximum(rows[:, _FORWARD], forward)
    rows[:, _BACKWARD] = held + np.maximum(rows[:, _BACKWARD], backward)
    rows[:, _RUNS] += rows[:, _FIRST] != ids
    rows[:, _FIRST] = rows[:, _OPTION] = ids
    rows[:, _PARENT] = parents
    return rows


@dataclass(frozen=True, slots=True)
class _Combined:
    """Labels of the first few chunks together."""

    time: Ints
    runs: Ints
    load: Ints
    """`[label, moment]` bytes."""
    trail: Ints
    """`[label, chunk]` index of the chunk's own label."""

    @classmethod
    def empty(cls, moments: int) -> _Combined:
        one = np.zeros(1, np.int64)
        return cls(one, one, np.zeros((1, moments), np.int64), np.zeros((1, 0), np.int64))

    @classmethod
    def joined(cls, parts: Sequence[_Combined]) -> _Combined:
        return cls(
            np.concatenate([part.time for part in parts]),
            np.concatenate([part.runs for part in parts]),
            np.concatenate([part.load for part in parts]),
            np.concatenate([part.trail for part in parts]),
        )

    def blocks(self, factor: int, most: int = 1 << 18) -> Iterator[_Combined]:
        """Slices that, times `factor`, are not much more than `most` labels."""
        step = max(1, most // factor)
        for start in range(0, len(self.time), step):
            yield self.pick(np.arange(start, min(start + step, len(self.time))))

    def pick(self, which: NDArray[Any]) -> _Combined:
        return _Combined(self.time[which], self.runs[which], self.load[which], self.trail[which])

    def times(self, final: Ints, load: Ints) -> _Combined:
        """Every label with every label of the next chunk."""
        left = np.repeat(np.arange(len(self.time)), len(final))
        right = np.tile(np.arange(len(final)), len(self.time))
        return _Combined(
            self.time[left] + final[right, _TIME],
            self.runs[left] + final[right, _RUNS],
            self.load[left] + load[right],
            np.column_stack([self.trail[left], right]),
        )

    def thinned(
        self, moments: NDArray[np.intp], bound: Ints, price: Floats, width: int
    ) -> tuple[_Combined, float]:
        """Without labels dominated at `moments`, at most `width`; and the least bound cut off."""
        dims = np.column_stack([self.time, self.load[:, moments]])
        kept = _front(dims, self.runs, np.zeros(len(self.time), np.int64))
        if len(kept) <= width:
            return self.pick(kept), math.inf
        priced = self.time[kept] + self.load[kept] @ price
        order = kept[np.lexsort((priced, bound[kept]))]
        return self.pick(order[:width]), float(bound[order[width]])


@dataclass(frozen=True, slots=True)
class _Goal:
    """What is still worth finding: no slower than `time_ps`, and if as slow then leaner."""

    time_ps: int | None = None
    spare_bytes: int = 0
    """By how much the peak of equally fast choices must stay below the budget."""

    @classmethod
    def of(cls, known: StageChoice | None, budget_bytes: int) -> _Goal:
        """As good as known choices, or better."""
        return cls() if known is None else cls(known.time_ps, budget_bytes - known.peak_bytes)


@dataclass(frozen=True, slots=True)
class _Option:
    """What one chunk may be: its final labels, and what they stand for."""

    labels: _Labels
    final: Ints
    ids: dict[LayerPolicy, int]

    def policies(self, index: int) -> tuple[LayerPolicy, ...]:
        """Of one final label."""
        names = {number: policy for policy, number in self.ids.items()}
        found: list[LayerPolicy] = []
        row = int(self.final[index, _PARENT])
        while self.labels.data[row, _PARENT] >= 0:
            option = int(self.labels.data[row, _OPTION])
            if option >= _GROUP_IDS:
                size = option - _GROUP_IDS
                found += [LayerPolicy("full", group=size)] * size
            else:
                found.append(names[option])
            row = int(self.labels.data[row, _PARENT])
        return tuple(found)


class _Combiner:
    """Picks one label per chunk.

    Of the chunks not yet picked, the least time whose load fits at one moment is known exactly: a
    front of two dimensions. It bounds what a label can still become far closer than prices do.
    """

    def __init__(self, problem: StageProblem, options: Sequence[_Option]) -> None:
        self.problem, self.options = problem, options
        self.times = [option.final[:, _TIME] for option in options]
        self.loads = [self._load(c, option.final) for c, option in enumerate(options)]
        none = np.zeros((1, len(problem.constant)), np.int64)
        least = [load.min(axis=0, keepdims=True) for load in reversed(self.loads)]
        self.least = np.concatenate([none, *least]).cumsum(axis=0)[::-1]
        """`[chunk, moment]` least load of that chunk and the later ones."""
        self.fronts: dict[tuple[int, int], tuple[Ints, Ints]] = {}

    def _load(self, c: int, final: Ints) -> Ints:
        """`[label, moment]` bytes that a chunk puts on every moment."""
        own = self.problem.running == c
        load = final[:, [_HELD]] * self.problem.counts[:, c]
        load[:, own & self.problem.is_forward] += final[:, [_FORWARD]]
        load[:, own & ~self.problem.is_forward] += final[:, [_BACKWARD]]
        return np.asarray(load, np.int64)

    def bound_ps(self, limit: Ints) -> int:
        """Lower bound on the time of any labels that fit; `_NEVER` where none do."""
        if not np.all(self.least[0] <= limit):
            return int(_NEVER)
        least = [self._least_ps(k, 0, limit[[k]]) for k in self._tightest(limit)]
        return max((int(bound[0]) for bound in least), default=0)

    def _least_ps(self, moment: int, c: int, room: Ints) -> Ints:
        """Least time of chunks c and later that put at most `room` on a moment."""
        load, time = self._front(moment, c)
        index = np.searchsorted(load, room, side="right") - 1
        return np.where(index >= 0, time[index], _NEVER)

    def _front(self, moment: int, c: int) -> tuple[Ints, Ints]:
        """Loads, ascending, and the least time of chunks c and later at each."""
        if c == len(self.options):
            return np.zeros(1, np.int64), np.zeros(1, np.int64)
        if (moment, c) not in self.fronts:
            load, time = _plane_front(self.loads[c][:, moment], self.times[c])
            later_load, later_time = self._front(moment, c + 1)
            self.fronts[moment, c] = _coarser(
                *_plane_front(
                    (load[:, None] + later_load).ravel(), (time[:, None] + later_time).ravel()
                )
            )
        return self.fronts[moment, c]

    @cached_property
    def _priced(self) -> tuple[Floats, Floats]:
        """Some prices of a byte, and `[moment, price]` the least time plus priced load."""
        saved = sum(float(time.max() - time.min()) for time in self.times)
        loads = sum(load.max(axis=0) - load.min(axis=0) for load in self.loads)
        scale = saved / max(float(np.max(loads, initial=0)), 1.0)
        prices: Floats = scale * np.exp2(np.arange(-4.0, 8.0))
        pairs = zip(self.times, self.loads, strict=True)
        least = [(t[:, None, None] + load[..., None] * prices).min(axis=0) for t, load in pairs]
        return prices, np.asarray(sum(least), np.float64)

    def _tightest(self, limit: Ints, most: int = 3) -> list[int]:
        """The moments that cost the most time, roughly."""
        prices, least = self._priced
        cost = (least - limit[:, None] * prices).max(axis=1)
        return [int(k) for k in np.argsort(-cost, kind="stable")[:most]]

    def best(
        self, limit: Ints, price: Floats, goal: _Goal, width: int
    ) -> tuple[StageChoice | None, float]:
        """The best labels that fit and reach the goal; and as in `_Run.round`."""
        tightest = self._tightest(limit)
        rest_price = [
            float((time + load @ price).min())
            for time, load in zip(self.times, self.loads, strict=True)
        ]
        ceiling = math.inf if goal.time_ps is None else goal.time_ps + float(price @ limit)
        ceiling += _SLACK * max(abs(ceiling), goal.time_ps or 0)
        table = _Combined.empty(len(limit))
        left_ps = math.inf
        for c, final in enumerate(option.final for option in self.options):
            parts, bounds = [], []
            for block in table.blocks(len(final)):
                part = block.times(final, self.loads[c])
                priced = part.time + part.load @ price + sum(rest_price[c + 1 :])
                part = part.pick(
                    np.all(part.load + self.least[c + 1] <= limit, axis=1) & (priced <= ceiling)
                )
                keep, bound = self._may_reach(goal, part, c + 1, limit, tightest)
                parts.append(part.pick(keep))
                bounds.append(bound[keep])
            table, bound = _Combined.joined(parts), np.concatenate(bounds)
            if c + 1 < len(self.options) and len(table.time) > WIDTHS[0]:
                table, cut_ps = table.thinned(self._decided(c), bound, price, width)
                left_ps = min(left_ps, cut_ps)
            if not len(table.time):
                return None, left_ps
        peak = np.maximum(
            (table.load + self.problem.constant).max(axis=1, initial=0), self.problem.floor_bytes
        )
        # Of equals, what all stages agree on: the slowest chunk first. They then wait less.
        spent = [time[index] for time, index in zip(self.times, table.trail.T, strict=True)]
        best = np.lexsort((*reversed([-t for t in spent]), table.runs, peak, table.time))[0]
        return self._choice(table.trail[best].tolist(), int(peak[best])), left_ps

    def _may_reach(
        self, goal: _Goal, table: _Combined, c: int, limit: Ints, tightest: Sequence[int]
    ) -> tuple[NDArray[np.bool_], Ints]:
        """Whether labels may become what the goal asks, and the least time they may get."""
        best, leaner = table.time, table.time
        for k in tightest:
            room = limit[k] - table.load[:, k]
            best = np.maximum(best, table.time + self._least_ps(k, c, room))
            lower = self._least_ps(k, c, room - goal.spare_bytes)
            leaner = np.maximum(leaner, table.time + lower)
        if goal.time_ps is None:
            return np.ones(len(best), np.bool_), best
        return (best < goal.time_ps) | (leaner <= goal.time_ps), best

    def _decided(self, c: int) -> NDArray[np.intp]:
        """One of each set of moments that are equal as far as chunks 0 .. c go."""
        problem = self.problem
        runs = np.where(problem.running <= c, problem.running, -1)
        rows = np.column_stack([problem.counts[:, : c + 1], runs, problem.is_forward & (runs >= 0)])
        return np.unique(rows, axis=0, return_index=True)[1]

    def _choice(self, chosen: Sequence[int], peak_bytes: int) -> StageChoice:
        pairs = list(zip(self.options, chosen, strict=True))
        policies = tuple(option.policies(index) for option, index in pairs)
        runs = sum(int(option.final[index, _RUNS]) for option, index in pairs)
        chunks = self.problem.chunks
        time = sum(_time_ps(chunk, p) for chunk, p in zip(chunks, policies, strict=True))
        return StageChoice(policies, time, peak_bytes, runs, time)


def _plane_front(load: Ints, time: Ints) -> tuple[Ints, Ints]:
    """Loads, ascending, each with a lower time than all before; what is no better is dropped."""
    order = np.lexsort((time, load))
    load, time = load[order], time[order]
    better = np.ones(len(time), np.bool_)
    better[1:] = time[1:] < np.minimum.accumulate(time)[:-1]
    return load[better], time[better]


def _coarser(load: Ints, time: Ints, most: int = 1024) -> tuple[Ints, Ints]:
    """At most so many points, none above the front they stand for."""
    if len(load) <= most:
        return load, time
    starts = np.arange(most) * len(load) // most
    return load[starts], np.append(time[starts[1:] - 1], time[-1])


class _Filters:
    """Drops the labels of one chunk that cannot be part of the answer."""

    def __init__(self, run: _Run, c: int, upper_ps: int | None, width: int) -> None:
        problem = run.problem
        self.run, self.c, self.upper_ps, self.width = run, c, upper_ps, width
        self.left = math.inf  # least time and priced bytes of the labels cut off
        chunk = problem.chunks[c]
        held, forward, backward = run._prices(c)
        self.before_price = chunk.covering(held + forward + backward, run.timed)
        self.others_price = sum(b for i, b in enumerate(run.chunk_bounds) if i != c)
        self.least_held = chunk.least_held
        self.counts = problem.counts[:, c]
        self.own = problem.running == c
        least = np.array([other.least_total for other in problem.chunks], np.int64)
        least_others = problem.counts @ least - self.counts * least[c]
        room = run.limit - least_others - np.where(self.own, 0, least[problem.running])
        # Per (microbatches in flight, column of M if this chunk runs else 0) the least room.
        column = np.where(self.own, np.where(problem.is_forward, _FORWARD, _BACKWARD), 0)
        self.rooms: dict[tuple[int, int], int] = {}
        for *key, bytes_left in zip(self.counts, column, room, strict=True):
            pair = (int(key[0]), int(key[1]))
            self.rooms[pair] = min(int(bytes_left), self.rooms.get(pair, int(_NO_LIMIT)))

    def __call__(self, rows: Ints, position: int) -> Ints:
        """Keep what fits, may win, and is not dominated; at most `width` labels."""
        rows = rows[self._fits(rows, position)]
        price = self.run._priced(rows, self.c) + self.before_price[position] + self.others_price
        may_win = self.run._may_win(price, self.upper_ps)
        rows, price = rows[may_win], price[may_win]
        kept = _front(self._dims(rows), rows[:, _RUNS], rows[:, _FIRST])
        if len(kept) > self.width:
            chosen = _spread(price[kept], rows[kept, _HELD], self.width)
            self.left = min(self.left, float(np.delete(price[kept], chosen).min()))
            kept = kept[chosen]
        return rows[kept]

    def _fits(self, rows: Ints, position: int) -> NDArray[np.bool_]:
        """At every moment, with the least that the layers before and other chunks can hold."""
        before = self.least_held[position]
        fits = np.ones(len(rows), np.bool_)
        for (count, column), room in self.rooms.items():
            highest = rows[:, column] + before if column else 0
            fits &= count * (rows[:, _HELD] + before) + highest <= room
        return fits

    def _dims(self, rows: Ints) -> Ints:
        """What a label must not be worse in: time, H where it waits, count * H + M where it runs.

        Not M itself: a label that holds less may run higher by what its other microbatches in
        flight save. Of several counts the least is the strictest.
        """
        columns = [rows[:, _TIME]]
        if self.counts.any():
            columns.append(rows[:, _HELD])
        for forward, column in ((True, _FORWARD), (False, _BACKWARD)):
            mine = self.own & (self.run.problem.is_forward == forward)
            if mine.any():
                columns.append(self.counts[mine].min() * rows[:, _HELD] + rows[:, column])
        return np.column_stack(columns)


def _spread(price: Floats, held: Ints, width: int) -> NDArray[np.intp]:
    """At most `width` labels: half the cheapest, half the cheapest of equal ranges of held bytes.

    The cheapest alone would not do: along a mixture of two choices the price stands still, so
    they may all hold too much or too little for what is to come.
    """
    half = width // 2
    step = max(1, -(-int(held.max() - held.min() + 1) // max(half, 1)))
    ranges = (held - held.min()) // step
    order = np.lexsort((price, ranges))
    first = order[np.unique(ranges[order], return_index=True)[1]]
    return np.union1d(np.argsort(price, kind="stable")[: width - half], first[:half])


def _front(dims: Ints, runs: Ints, first: Ints, block: int = 256) -> NDArray[np.intp]:
    """Indices of the labels that no other makes superfluous.

    Column 0 of `dims` is the time. A label makes another superfluous when it is nowhere worse and
    either faster, or sure to end with no more runs: its runs may grow by one against the other's
    where their first choices differ.
    """
    order = np.lexsort((runs, *dims.T[::-1]))
    runs, first = runs[order].astype(np.int32), first[order].astype(np.int32)
    # Only the order matters, and ranks of two bytes are compared four times as fast.
    narrow = np.int16 if len(order) < 1 << 15 else np.int32
    ranks = np.empty((dims.shape[1], len(order)), narrow)
    for rank, column in zip(ranks, dims[order].T, strict=True):
        rank[:] = np.unique(column, return_inverse=True)[1]
    kept = np.zeros(0, np.intp)
    for start in range(0, len(order), block):
        fresh = np.arange(start, min(start + block, len(order)))
        fresh = fresh[~_dominated(ranks, runs, first, kept, fresh).any(axis=0)]
        inside = _dominated(ranks, runs, first, fresh, fresh)
        inside &= fresh[:, None] < fresh[None, :]
        # A dominated label's dominator may itself be dominated, by one that dominates both.
        kept = np.concatenate([kept, fresh[~inside.any(axis=0)]])
    return order[kept]


def _dominated(
    ranks: NDArray[Any],
    runs: NDArray[Any],
    first: NDArray[Any],
    by: NDArray[np.intp],
    what: NDArray[np.intp],
) -> NDArray[np.bool_]:
    """`[by, what]` whether the one makes the other superfluous; `ranks` is `[column, label]`."""
    result: NDArray[np.bool_] = (ranks[0, by][:, None] < ranks[0, what]) | (
        runs[by][:, None] + (first[by][:, None] != first[what]) <= runs[what]
    )
    for rank in ranks[1:]:
        result &= rank[by][:, None] <= rank[what]
    return result


def _multipliers(problem: StageProblem, limit: Ints) -> Floats:
    """Price of a byte at every moment, in picoseconds: duals of a linear relaxation.

    Legend: x[c, i, o] share of layer class i of chunk c that takes option o; s[k] bytes missing.
    Minimise the time, bytes missing being dearer than any choice.
    """
    columns, classes = _relaxed_columns(problem)
    if not columns:
        return np.zeros(len(limit))
    time = np.array([column[0] for column in columns], np.float64)
    held = np.array([column[1] for column in columns], np.float64)
    chunk = np.array([column[2] for column in columns])
    owner = np.array([column[3] for column in columns])
    room = limit - problem.counts @ _fixed_held(problem) - _fixed_reach(problem)
    scale_bytes, scale_time = max(float(held.max()), 1.0), max(float(time.max()), 1.0)
    weight = problem.counts[:, chunk] + (problem.running[:, None] == chunk)
    # [Constraint] every layer of a class takes some option
    shares = (owner == np.arange(len(classes))[:, None]).astype(np.float64)
    # [Constraint] at every moment the bytes held fit, or are missing
    moments = np.hstack([weight * held / scale_bytes, -np.eye(len(limit))])
    found = linprog(
        np.concatenate([time / scale_time, np.full(len(limit), 1e3)]),
        A_ub=moments,
        b_ub=room / scale_bytes,
        A_eq=np.hstack([shares, np.zeros((len(classes), len(limit)))]),
        b_eq=np.array(classes, np.float64),
        method="highs",
    )
    if found.status != 0:  # a bound without prices is still valid
        return np.zeros(len(limit))
    prices: Floats = np.maximum(-found.ineqlin.marginals, 0.0) * scale_time / scale_bytes
    return prices


def _fixed_held(problem: StageProblem) -> Ints:
    return np.array(
        [sum(u.held_bytes for u in (*c.before, *c.after)) for c in problem.chunks], np.int64
    )


def _fixed_reach(problem: StageProblem) -> Ints:
    """What the running chunk reaches besides its layers' held bytes, at least."""
    held, reach = _fixed_held(problem), []
    for c, forward in zip(problem.running, problem.is_forward, strict=True):
        chunk = problem.chunks[c]
        if chunk.after:
            unit = chunk.after[-1]
            tail = unit.forward_transient_bytes if forward else unit.backward_transient_bytes
        elif chunk.singles:
            last = chunk.singles[-1]
            tail = int((last.forward if forward else last.backward).min())
        else:
            tail = 0
        reach.append(int(held[c]) + tail)
    return np.array(reach, np.int64)


def _relaxed_columns(
    problem: StageProblem,
) -> tuple[list[tuple[int, float, int, int]], list[int]]:
    """(time, held, chunk, class) of every option per layer, and the layers in every class."""
    columns: list[tuple[int, float, int, int]] = []
    classes: list[int] = []
    for c, chunk in enumerate(problem.chunks):
        seen: dict[Any, int] = {}
        for position, key in enumerate(chunk.signature):
            if key in seen:
                classes[seen[key]] += 1
                continue
            seen[key] = len(classes)
            single = chunk.singles[position]
            pairs = zip(single.time.tolist(), single.held.tolist(), strict=True)
            columns += [(time, held, c, len(classes)) for time, held in pairs]
            group = chunk.groups[position]
            if (size := len(group.held_bytes)) > 1:
                time = int(group.forward_ps[0] + group.backward_ps[0])
                columns.append((time, group.held_bytes[-1] / size, c, len(classes)))
            classes.append(1)
    return columns, classes
