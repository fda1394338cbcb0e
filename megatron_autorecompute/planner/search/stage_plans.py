"""Plans of one stage: a plan for each of its chunks, which together fit every moment.

A small linear program over plans of chunks and moments prices the stage's bytes. At these prices
every plan of a chunk costs something beyond the bound. Combinations whose costs add up to more than
the best known plan's are dropped. A stage with one long chunk is searched again at these prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_autorecompute.planner.cost import Bools, Floats, Ints
from megatron_autorecompute.planner.search.chunk_plans import SLACK, Plans, Priced, Pruned, Walk
from megatron_autorecompute.planner.search.stage_problem import (
    BACKWARD,
    FORWARD,
    HELD,
    Split,
    StageProblem,
)

_PRICINGS = 8
"""Programs until prices stand; half as many or twice as many change no answer."""
_TOLERANCE = 1e-7
"""The relative tolerance of linear programs."""
_ITERATIONS = 20_000
"""Of simplex; more go in a circle. Programs that do not are solved with up to 11,000."""
_WIDTHS = (90, 270, 810, 2430, 7290)
"""Plans of a long chunk that are kept at a place, in rounds."""
WORK, LEAST_WORK = 320_000, 54_000
"""Places times width of the widest round: of all stages together, and of each at least."""
_AGAIN = 8
"""Plans that are taken over from a round."""
_COARSE, _FINE = (40, 150), (500, 500)
"""Points of fronts of one chunk, and of several."""
_WIDTH = 200
"""Combinations that are kept of the chunks so far."""
_FINALS = 24
"""Combinations that are kept of the whole stage."""
_NEAR = 1e-4
"""A bound so near is good enough."""


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """Plans of a stage, those of the least weighted time first."""

    rows: Ints
    """`[plan, chunk]` of the chunk's plans."""
    bound: float
    """Nothing that fits has a lower weighted time."""
    whole: bool
    """Whether nothing was left out that is as good as was asked for."""


class StagePlans:
    """What one stage may do under its budget, in bytes. Stages with equal chunks share the plans of
    these; the lean choices fit, and `work` is the stage's share of `WORK`."""

    def __init__(
        self,
        problem: StageProblem,
        budget: int,
        plans: Sequence[Plans],
        lean: Split,
        work: int = WORK,
    ) -> None:
        self.problem, self.budget, self.plans, self.work = problem, budget, plans, work
        self.room: Ints = budget - problem.constant
        self.chunks = range(len(plans))
        own = [known.add(policies) for known, policies in zip(plans, lean, strict=True)]
        self.lean: tuple[int, ...] = tuple(own)
        self.fits = self._fitting()
        """The plans of each chunk that may fit beside the leanest ones of the others."""
        self._known: dict[bytes, Listed] = {}
        """What was listed, by weights whose largest is 1."""

    def _fitting(self) -> list[Ints]:
        loads = [self.loads(c, self.plans[c].rows) for c in self.chunks]
        least = [own.min(axis=0) for own in loads]
        rest = self.room - sum(least)
        return [
            np.flatnonzero((own <= rest + low).all(axis=1))
            for own, low in zip(loads, least, strict=True)
        ]

    def loads(self, c: int, rows: Ints) -> Ints:
        """Bytes of a chunk's plans at every moment, `[plan, moment]`."""
        problem = self.problem
        found = np.multiply.outer(rows[:, HELD], problem.counts[:, c])
        runs = problem.running == c
        highest = np.where(problem.is_forward, rows[:, FORWARD, None], rows[:, BACKWARD, None])
        found[:, runs] += highest[:, runs]
        return found

    def admit(self, rows: Sequence[int]) -> None:
        """Let the stage use plans of chunks that fit together."""
        for c, row in enumerate(rows):
            self.fits[c] = np.union1d(self.fits[c], [row])
            self._program.put(0, c, row)

    def needs(self, rows: Ints) -> Ints:
        """Bytes of whole plans at every moment, `[plan, moment]`."""
        parts = (self.loads(c, self.plans[c].rows[rows[:, c]]) for c in self.chunks)
        found: Ints = sum(parts, np.zeros((len(rows), len(self.room)), np.int64))
        return found

    def fit(self, rows: Ints) -> Bools:
        """Which whole plans fit."""
        found: Bools = np.all(self.needs(rows) <= self.room, axis=1)
        return found

    def peaks(self, rows: Ints) -> Ints:
        """The highest moment of whole plans."""
        own = (self.needs(rows) + self.problem.constant).max(axis=1, initial=0)
        found: Ints = np.maximum(own, self.problem.floor_bytes)
        return found

    def times(self, rows: Ints) -> Ints:
        """`[direction, chunk, plan]`"""
        own = [self.plans[c].rows[rows[:, c], :HELD] for c in self.chunks]
        return np.stack(own).transpose(2, 0, 1)

    def choices(self, rows: Sequence[int]) -> Split:
        """The choices of a whole plan."""
        return tuple(known.policies(row) for known, row in zip(self.plans, rows, strict=True))

    # --- prices -----------------------------------------------------------------------------------

    def prices(self, weights: Floats, price: Floats) -> Floats:
        """What a plan's figures cost, `[chunk, column]`, at a price of a byte at each moment."""
        problem = self.problem
        found = np.zeros((len(self.chunks), 5))
        found[:, :HELD] = weights.T
        found[:, HELD] = price @ problem.counts
        for c in self.chunks:
            runs = problem.running == c
            found[c, FORWARD] = price[runs & problem.is_forward].sum()
            found[c, BACKWARD] = price[runs & ~problem.is_forward].sum()
        return found

    @cached_property
    def _program(self) -> Program:
        """The linear program of this stage alone, where the lean plan takes about 1."""
        lean = self.times(np.array([self.lean]))
        found = Program([self], np.zeros((2, 1, len(self.chunks)), np.int64), float(lean.sum()))
        for c, row in enumerate(self.lean):
            found.put(0, c, row)
        return found

    def _priced(self, weights: Floats) -> Floats:
        """A price of a byte at each moment, from a linear program over plans of chunks."""
        scale = float(weights.max()) or 1.0
        price, path, known = np.zeros(len(self.room)), weights / scale, self._open()
        for c, rows in enumerate(known):  # the fastest ones first
            cost = self.plans[c].rows[rows, :HELD] @ path[:, c]
            self._program.put(0, c, int(rows[cost.argmin()]))
        self._program.forget(range(len(self._program.paths)))
        self._program.know([path[:, None]])
        for _ in range(_PRICINGS):
            found = self._program.mixture()
            if found is None:
                break
            price = found.price[0]
            prices = self.prices(path, price)
            if not self.grow(self._program, 0, known, prices, found.duals[0]):
                break
        return price * scale

    def _open(self) -> list[Ints]:
        """What is mixed: of a single chunk also plans that do not fit, as it has none to fit to."""
        if len(self.plans) > 1:
            return self.fits
        return [np.arange(len(self.plans[0].rows))]

    def grow(
        self, program: Program, stage: int, known: Sequence[Ints], prices: Floats, duals: Floats
    ) -> bool:
        """Whether chunks know cheaper plans than those that a program mixes, which get in.

        The stage is the program's number of this one. Prices are of a plan's figures,
        `[chunk, column]`; duals are what the mixture of each chunk costs.
        """
        more = False
        for c, rows in enumerate(known):
            own = self.plans[c].rows[rows] @ prices[c]
            if own.min() < duals[c] - _TOLERANCE * abs(duals[c]):
                more |= program.put(stage, c, int(rows[own.argmin()]))
        return more

    def bounds(self, prices: Floats) -> Floats:
        """The least cost of any plan of each chunk that may fit."""
        found = np.zeros(len(self.chunks))
        for c, known in enumerate(self.plans):
            if known.table.complete:
                found[c] = (known.rows[self.fits[c]] @ prices[c]).min()
            else:
                found[c] = Priced(known.table.units, prices[c]).after()[0]
        return found

    # --- the plans of the least weighted time -----------------------------------------------------

    def listed(self, weights: Floats) -> Listed:
        """Plans of about the least weighted time, and a bound on that of all.

        weights: how often each event counts, `[direction, chunk]`.
        """
        scale = float(weights.max()) or 1.0
        key = (weights / scale).tobytes()
        if key not in self._known:
            found = self._listed(weights)
            self._known[key] = replace(found, bound=found.bound / scale)
        return replace(self._known[key], bound=self._known[key].bound * scale)

    def _listed(self, weights: Floats) -> Listed:
        price = self._priced(weights)
        if len(self.plans) == 1 and not self.plans[0].table.complete:
            return self._again(weights, price)
        return self._summed(weights, price)

    def weighted(self, weights: Floats, rows: Ints) -> Floats:
        """The weighted time of whole plans."""
        found: Floats = np.einsum("dcp,dc->p", self.times(rows).astype(np.float64), weights)
        return found

    def _again(self, weights: Floats, price: Floats) -> Listed:
        """Plans of the only chunk, built at the prices, wider each time until they are the best."""
        known, paid = self.plans[0], float(price @ self.room)
        units, base = known.table.units, self.base(self.prices(weights, price), price)
        priced = Priced(units, self.prices(weights, price)[0])
        best = self._best(weights)
        bound, whole = base, best <= base
        for width in _WIDTHS:
            if best <= bound * (1 + _NEAR) or width * units.places > self.work:
                break
            pruned = Pruned(priced, weights[:, 0], best + paid, width)
            self._take(self._of(Walk(units, pruned, forward=known.table.forward), weights))
            best = self._best(weights)
            whole = pruned.complete
            bound = best if whole else max(bound, min(best, (pruned.left - paid) * (1 - SLACK)))
        fits = self.fits[0]
        own = self.weighted(weights, fits[:, None])
        order = np.lexsort((self.peaks(fits[:, None]), own))[:_FINALS]
        return Listed(fits[order][:, None], min(bound, best), whole)

    def _best(self, weights: Floats) -> float:
        return float(self.weighted(weights, self.fits[0][:, None]).min())

    def _take(self, rows: Sequence[int]) -> None:
        """Let the only chunk have those of some plans that fit."""
        own = np.array(rows, np.int64).reshape(-1, 1)
        self.fits[0] = np.union1d(self.fits[0], own[self.fit(own), 0])

    def _of(self, walk: Walk, weights: Floats) -> list[int]:
        """The best plans of a walk that fit, known from now on."""
        fits = np.flatnonzero((self.loads(0, walk.rows) <= self.room).all(axis=1))
        time = walk.rows[fits, :HELD] @ weights[:, 0]
        order = np.lexsort((walk.rows[fits, BACKWARD], time))[:_AGAIN]
        return [self.plans[0].add(walk.policies(int(row))) for row in fits[order]]

    def _summed(self, weights: Floats, price: Floats) -> Listed:
        costs = [self.plans[c].rows[self.fits[c], :HELD] @ weights[:, c] for c in self.chunks]
        rows, cut = self.cheapest(costs, price)
        best = float(self.weighted(weights, rows).min())
        if not all(known.table.complete for known in self.plans):
            return Listed(rows, min(best, self.base(self.prices(weights, price), price)), False)
        return Listed(rows, min(best, cut), cut == np.inf)

    def cheapest(self, costs: Sequence[Floats], price: Floats) -> tuple[Ints, float]:
        """Plans that fit and cost the least, `[plan, chunk]`, and no more than is left out costs.

        Costs are those of the plans that may fit, by chunk. The price of a byte at each moment
        tells where bytes are short.
        """
        rows, cut = np.array([self.lean]), np.inf
        best = before = float(self._cost(costs, rows).min())
        prices = self.prices(np.zeros((2, len(self.plans))), price)
        priced = [
            cost + known.rows[fits] @ own
            for cost, known, fits, own in zip(costs, self.plans, self.fits, prices, strict=True)
        ]
        spare = [own - own.min() for own in priced]
        base = sum(float(own.min()) for own in priced) - float(price @ self.room)
        for points, kept in ((_COARSE, _WIDTH // 8), *[(_FINE, _WIDTH)] * 3):
            most = best + SLACK * (abs(best) + float(price @ self.room))
            picks = [np.flatnonzero(own <= most - base) for own in spare]
            sums = _Sums(self, costs, price, picks, points)
            found, cut = sums.within(most, kept)
            if not len(found):
                cut = np.inf
                break
            rows, before = found, best
            best = min(best, float(self._cost(costs, rows).min()))
            if kept == _WIDTH and (cut == np.inf or best >= before * (1 - SLACK)):
                break
        order = np.lexsort((self.peaks(rows), self._cost(costs, rows)))
        return rows[order[:_FINALS]], cut

    def _cost(self, costs: Sequence[Floats], rows: Ints) -> Floats:
        """The cost of whole plans."""
        found = np.zeros(len(rows))
        for c, own in enumerate(costs):
            found += own[np.searchsorted(self.fits[c], rows[:, c])]
        return found

    def base(self, prices: Floats, price: Floats) -> float:
        """What prices alone say that no plan takes less than."""
        least, paid = self.bounds(prices), float(price @ self.room)
        return float(least.sum()) - paid - SLACK * (float(np.abs(least).sum()) + abs(paid))


class _Front:
    """The least cost of some chunks together, by their bytes at one moment; both sorted."""

    def __init__(self, loads: Ints, costs: Floats, points: int) -> None:
        order = np.lexsort((costs, loads))
        least = np.minimum.accumulate(costs[order])
        first = order[np.append(True, np.diff(least) < 0)] if len(order) else order
        self.loads, self.costs = loads[first], costs[first]
        step = -(-len(first) // points)
        if step > 1:  # none is higher than it is
            ends = np.minimum(np.arange(step - 1, len(first) + step - 1, step), len(first) - 1)
            self.loads, self.costs = self.loads[::step], self.costs[ends]

    def beside(self, other: _Front, points: int) -> _Front:
        """The combination of this one and another one."""
        loads = (self.loads[:, None] + other.loads).ravel()
        return _Front(loads, (self.costs[:, None] + other.costs).ravel(), points)

    def least(self, room: Ints) -> Floats:
        """The least cost with no more bytes than this; infinite if there is none."""
        at = np.searchsorted(self.loads, room, side="right") - 1
        return np.where(at < 0, np.inf, self.costs[at])


class _Sums:
    """Plans of all chunks together, chunk after chunk.

    At the moment that is priced the highest, what the remaining chunks take is known exactly for
    the bytes that are left; at all others their bytes have a price.

    Picks are the plans that are looked at, by chunk; points are those of fronts of one chunk, and
    of several.
    """

    def __init__(
        self,
        stage: StagePlans,
        costs: Sequence[Floats],
        price: Floats,
        picks: Sequence[Ints],
        points: tuple[int, int],
    ) -> None:
        self.stage, self.moment = stage, int((price * stage.room).argmax())
        others = price.copy()
        others[self.moment] = 0
        self.paid = float(others @ stage.room)
        self.rows = [fits[own] for fits, own in zip(stage.fits, picks, strict=True)]
        figures = [known.rows[own] for known, own in zip(stage.plans, self.rows, strict=True)]
        prices = stage.prices(np.zeros((2, len(costs))), others)
        self.costs = [
            cost[own] + rows @ bytes_
            for cost, own, rows, bytes_ in zip(costs, picks, figures, prices, strict=True)
        ]
        self.loads = [stage.loads(c, own) for c, own in enumerate(figures)]
        one, many = points
        self.fronts = [_Front(np.zeros(1, np.int64), np.zeros(1), 1)]
        for load, cost in zip(self.loads[:0:-1], self.costs[:0:-1], strict=True):
            own_front = _Front(load[:, self.moment], cost, one)
            self.fronts.append(own_front.beside(self.fronts[-1], many))
        self.fronts.reverse()
        """Of the chunks after each."""

    def within(self, most: float, width: int) -> tuple[Ints, float]:
        """Those that fit and cost no more, and no more than what is left out costs.

        Of the chunks so far `width` are kept, of whole plans four times as many.
        """
        stage, cut = self.stage, np.inf
        rows, total = np.zeros((1, 0), np.int64), np.zeros(1)
        load = np.zeros((1, len(stage.room)), np.int64)
        if not all(map(len, self.rows)):
            return np.zeros((0, len(self.rows)), np.int64), np.inf
        least = np.array([own.min(axis=0) for own in self.loads])
        after = least[::-1].cumsum(axis=0)[::-1] - least
        for c, (own, cost) in enumerate(zip(self.loads, self.costs, strict=True)):
            sums = total[:, None] + cost
            left = stage.room[self.moment] - load[:, self.moment, None] - own[:, self.moment]
            least_of_all = sums + self.fronts[c].least(left) - self.paid
            a, b = np.nonzero(least_of_all <= most)
            most_kept = width * (4 if c + 1 == len(self.costs) else 1)
            room = stage.room - after[c]
            at, dropped = _first_fitting(least_of_all[a, b], load, own, (a, b), room, most_kept)
            cut, a, b = min(cut, dropped), a[at], b[at]
            rows = np.column_stack([rows[a], self.rows[c][b]])
            load, total = load[a] + own[b], sums[a, b]
        return rows, cut - SLACK * (abs(cut) + abs(self.paid)) if cut < np.inf else cut


def _first_fitting(
    costs: Floats, load: Ints, own: Ints, pairs: tuple[Ints, Ints], room: Ints, width: int
) -> tuple[Ints, float]:
    """The cheapest pairs of plans, of the chunks so far and of the next one, that fit, up to a
    width; and the least that any that is left out costs."""
    (a, b), left, found = pairs, np.arange(len(costs)), np.zeros(0, np.int64)
    while len(left):
        most = min(4 * width, len(left))
        left = left[np.argpartition(costs[left], most - 1)]
        some, left = left[:most], left[most:]
        some = some[np.argsort(costs[some], kind="stable")]
        fit = (load[a[some]] + own[b[some]] <= room).all(axis=1)
        found = np.concatenate([found, some[fit]])
        if len(found) > width:
            return found[:width], float(costs[found[width]])
    return found, np.inf


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """The mixture of plans with the shortest step."""

    step: float
    """The step in ps."""
    shares: Floats
    """The shares of paths."""
    price: list[Floats]
    """The price of a byte at each moment, by stage."""
    duals: list[Floats]
    """What the mixture of each chunk costs at these prices, by stage."""
    times: Floats
    """Its times without residuals, `[direction, stage, chunk]`."""


class Program:
    """Plans of chunks whose longest path is to be the shortest, within every stage's budget.

    HiGHS goes on from its last answer as plans and paths come and paths go. Its first column is the
    step, and its rows are chunks, of each of which one plan is mixed, then moments, then paths.

    Args:
        stages: the stages whose plans are mixed.
        residual: in ps, added to the time of every event, `[direction, stage, chunk]`.
        scale: about the length of a step, in ps.
    """

    def __init__(self, stages: Sequence[StagePlans], residual: Ints, scale: float) -> None:
        from highspy import Highs  # 0.1 s to import

        self.stages, self.residual, self.scale = stages, residual, max(1.0, scale)
        self.paths: list[Ints | Floats] = []
        """How often each event is on them, `[direction, stage, chunk]`."""
        self.chunks = [(s, c) for s, stage in enumerate(stages) for c in stage.chunks]
        self._numbers = {chunk: number for number, chunk in enumerate(self.chunks)}
        self._plans: dict[tuple[int, int], None] = {}
        """The number of a chunk and that of its plan, in the order of columns."""
        self._of, self._times = np.zeros(0, np.int64), np.zeros((0, HELD))
        """Of columns: the number of the chunk, and times `[column, direction]`."""
        rooms = [stage.room / stage.budget for stage in stages]
        self._ends = np.cumsum([len(self.chunks), *map(len, rooms)])
        most = np.concatenate([np.ones(len(self.chunks)), *rooms])
        least = np.where(np.arange(len(most)) < len(self.chunks), most, -np.inf)
        nothing = np.zeros(0, np.int32), np.zeros(0)
        self._highs = Highs()  # type: ignore[no-untyped-call]
        # Devex prices take up to a tenth less time than HiGHS' own choice.
        self._set(output_flag=False, threads=1, simplex_dual_edge_weight_strategy=1)
        self._set(simplex_iteration_limit=_ITERATIONS)
        self._highs.addCol(1.0, 0.0, np.inf, 0, *nothing)
        self._highs.addRows(len(most), least, most, 0, np.zeros(len(most), np.int32), *nothing)

    def _set(self, **options: float) -> None:
        for option, value in options.items():
            self._highs.setOptionValue(option, value)

    def put(self, stage: int, chunk: int, row: int) -> bool:
        """Mix one more plan of a chunk; whether it was not mixed before."""
        number = len(self._plans)
        self._plans[self._numbers[stage, chunk], int(row)] = None
        return len(self._plans) > number

    def know(self, paths: Sequence[Ints | Floats]) -> int:
        """Add paths that are not known; how many."""
        self._add_columns()
        known, number = {path.tobytes() for path in self.paths}, len(self.paths)
        stage, chunk = np.array(self.chunks)[self._of].T
        columns = np.arange(len(self._of) + 1, dtype=np.int32)
        for path in paths:
            if path.tobytes() not in known:
                known.add(path.tobytes())
                self.paths.append(path)
                lengths = (path[:, stage, chunk].T * self._times).sum(axis=1) / self.scale
                room = -float((path * self.residual).sum()) / self.scale
                self._highs.addRow(-np.inf, room, len(columns), columns, np.append(-1.0, lengths))
        return len(self.paths) - number

    def forget(self, paths: Sequence[int]) -> None:
        """Drop paths, by their numbers."""
        rows = np.array([self._ends[-1] + path for path in paths], np.int32)
        self._highs.deleteRows(len(rows), rows)
        self.paths = [path for number, path in enumerate(self.paths) if number not in paths]

    def _add_columns(self) -> None:
        new = list(self._plans)[len(self._of) :]
        paths = np.array(self.paths, np.float64).reshape(-1, *self.residual.shape) / self.scale
        found = [self._times]
        for number, row in new:
            s, c = self.chunks[number]
            plan, own = self.stages[s].plans[c].rows[[row]], self.stages[s]
            load, times = own.loads(c, plan)[0] / own.budget, plan[:, :HELD].astype(np.float64)
            values = np.concatenate([[1.0], load, paths[:, :, s, c] @ times[0]])
            parts = (number, 1), (self._ends[s], len(load)), (self._ends[-1], len(paths))
            rows = np.concatenate(
                [first + np.arange(size, dtype=np.int32) for first, size in parts]
            )
            there = np.flatnonzero(values)
            self._highs.addCol(0.0, 0.0, np.inf, len(there), rows[there], values[there])
            found.append(times)
        self._of = np.array([number for number, _ in self._plans], np.int64)
        self._times = np.concatenate(found)

    def _solve(self) -> Floats | None:
        """Every plan's share; None where the solver gives none."""
        from highspy import HighsModelStatus

        self._add_columns()
        self._highs.run()
        if self._highs.getModelStatus() != HighsModelStatus.kOptimal:
            return None
        return np.array(self._highs.getSolution().col_value)[1:]

    def mixture(self) -> Mixture | None:
        """The best mixture; None where the solver gives none."""
        mixed = self._solve()
        if mixed is None:
            self._highs.clearSolver()
            mixed = self._solve()
        if mixed is None:
            return None
        found, scale = np.array(self._highs.getSolution().row_dual), self.scale
        of_chunks, duals = found[: len(self.chunks)], np.maximum(-found, 0)
        shares = duals[self._ends[-1] :]
        shares = shares / shares.sum() if shares.any() else np.eye(1, len(shares))[0]
        moments = zip(self.stages, self._ends, self._ends[1:], strict=False)
        price = [duals[first:end] * scale / stage.budget for stage, first, end in moments]
        ends = np.cumsum([len(stage.plans) for stage in self.stages])[:-1]
        times = np.zeros((len(self.chunks), HELD))
        np.add.at(times, self._of, mixed[:, None] * self._times)
        step = self._highs.getInfo().objective_function_value * scale
        own = np.split(of_chunks * scale, ends)
        return Mixture(step, shares, price, own, times.T.reshape(self.residual.shape))

    def whole(self, nodes: int) -> tuple[float, list[list[int]]] | None:
        """A bound in ps on what one plan for each chunk takes, and the best ones, `[stage][chunk]`;
        None if the solver needs more than so many nodes. From then on plans are not mixed."""
        self._add_columns()
        columns = np.arange(1, len(self._of) + 1, dtype=np.int32)
        self._highs.changeColsIntegrality(len(columns), columns, np.ones(len(columns), np.uint8))
        self._set(mip_rel_gap=1e-9, mip_abs_gap=0.0, mip_max_nodes=nodes)
        shares = self._solve()
        if shares is None:
            return None
        pairs = zip(self._plans, shares.tolist(), strict=True)
        picked = dict(plan for plan, share in pairs if share > 0.5)
        rows = [
            [picked[self._numbers[s, c]] for c in own.chunks] for s, own in enumerate(self.stages)
        ]
        return self._highs.getInfo().mip_dual_bound * self.scale, rows
