"""The shortest step under every stage's budget, and a bound on it.

1. Every chunk has a table of plans (`chunk_plans`). Every stage has a program that finds its least
   busy plans, for given counts of its events (`stage_plans`).
2. One linear program over plans, paths and moments (`master`) prices time and bytes.
3. At these prices stages list their plans, which tightens the bound. Then each stage in turn gets
   the plan with the shortest replayed step, starting from the program's fractional times.
4. Stages exchange plans while the step gets shorter.

If little is left open, the program in integers finds the best of it. Budgets are met by the high
end of uncertain figures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from megatron_autorecompute.planner.cost import Floats, Ints
from megatron_autorecompute.planner.cost.stage_times import residual_times
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.ahead import with_early
from megatron_autorecompute.planner.search.chunk_plans import SLACK
from megatron_autorecompute.planner.search.manual import best_manual, fits
from megatron_autorecompute.planner.search.master import Master, Replay
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import Solution, proven
from megatron_autorecompute.planner.search.stage import Stage
from megatron_autorecompute.planner.search.stage_plans import StagePlans
from megatron_autorecompute.planner.search.stage_problem import HELD, Split, put_together
from megatron_autorecompute.policy import RecomputePolicy

Chosen = list[tuple[int, ...]]
"""The plans of every stage's chunks."""
_RELAXATIONS, _LEAST_RELAXATIONS = 26 * 256**2, 14
"""The relaxations of a program times its chunks squared, and the least of them; most programs of
up to 128 chunks need fewer. With half as many of 512 chunks a step is 0.2% longer, with a quarter
of 128 chunks 0.1%."""
_FIRST, _AGAIN = 28, 4
"""The most relaxations before the first round, so that rounds begin at other prices, and the least
after it. With half or twice as many at first the step of Llama 3.1 405B is 0.1% longer."""
_ROUNDS = 2
"""With one the bound of Llama 3.1 405B's step is 0.1% lower."""
_EVENTS = 1 << 25
"""Replayed in exchanges."""
CHUNKS = 12
"""The most chunks of all stages with which all plans that may be better are listed."""
_SMALL = 256
"""Chunks of all stages up to which more is tried."""
_NEARNESS = 0.3
"""The weight of plans' nearness to the fractional times, against their price. Without it
interleaved steps are up to 0.1% longer; with a second one one step is 0.05% shorter."""
_SLOPES = (2.0, 16.0)
"""The slopes of weights that rise from chunk to chunk. Without them an interleaved step was 0.8%
longer."""
_EXCHANGED = 64
"""Exchanges of two chunks that are tried at once. Without exchanges 2 of 16 interleaved steps are
longer, one by 0.1%."""
_LEFT = 2000
"""The most plans that may be better of which the integer program takes one for each chunk."""
_PROGRAMS = 60
"""Ends the few programs whose paths have no end in sight; half as many or twice as many change no
answer of 60 random problems, nor do the next one's."""
_NODES = 20_000
_TOLERANCE = 1e-7
"""The solver's tolerance, as a share of the step."""


class StepSearch:
    """The search of one problem under some budgets."""

    def __init__(self, replay: Replay, stages: Sequence[Stage], budgets: Sequence[int]) -> None:
        self.replay, self._searches, self.budgets = replay, stages, budgets
        pairs = list(zip(stages, budgets, strict=True))
        self.stages = [_plans(stage, budget, 0) for stage, budget in pairs]
        """The stages as if nothing ran side by side."""
        self.tight = [
            plain if stage.is_plain else _plans(stage, budget, stage.shrunk(budget)[1])
            for plain, (stage, budget) in zip(self.stages, pairs, strict=True)
        ]
        """With bytes added to events, so that what they list mostly fits truly."""
        self.options: list[dict[tuple[int, ...], None]] = [{} for _ in stages]
        """Plans of every stage that truly fit."""
        self.master = Master(replay, self.stages)
        self.several = len(self.master.chunks) > len(stages)
        self.best: tuple[int, Chosen] = (1 << 62, [])
        """The shortest step found, in ps, and its plans."""

    # --- plans of stages --------------------------------------------------------------------------

    def put(self, stage: int, rows: Ints | Sequence[Sequence[int]]) -> Chosen:
        """Know plans of a stage; those that truly fit, or do in another order of layers."""
        every = (self._truly(stage, tuple(row)) for row in np.asarray(rows, np.int64).tolist())
        found = [row for row in every if row is not None]
        self.options[stage] |= dict.fromkeys(found)
        return found

    def _truly(self, stage: int, row: tuple[int, ...]) -> tuple[int, ...] | None:
        """A plan, or the same with its layers in the order of what they hold; None where neither
        truly fits."""
        search, own = self._searches[stage], self.stages[stage]
        if search.is_plain:
            return row
        peak_bytes, split = search.arranged(own.choices(row))
        if peak_bytes > self.budgets[stage]:
            return None
        return tuple(plans.add(policies) for plans, policies in zip(own.plans, split, strict=True))

    def start(self, splits: Sequence[Split]) -> None:
        """Begin with choices that fit."""
        chosen = []
        for number, (stage, split) in enumerate(zip(self.stages, splits, strict=True)):
            pairs = zip(stage.plans, split, strict=True)
            rows = tuple(plans.add(policies) for plans, policies in pairs)
            stage.admit(rows)
            self.tight[number].admit(rows)
            self.put(number, [rows])
            chosen.append(rows)
        self._take(chosen)

    def _take(self, chosen: Chosen) -> None:
        """A whole plan: the best so far if it is shorter, and in the program."""
        times = self.master.times(chosen)
        step = self.replay.step(times)
        if step < self.best[0]:
            self.best = step, chosen
        self.master.cut(times, 0.0)
        for stage, rows in enumerate(chosen):
            self.master.put(stage, rows)

    def _listed(self, counts: Floats | Ints) -> float:
        """Let every stage list its plans where events count so often; what they bound the step to,
        in integers where counts are and stages know their least."""
        total, rest = sum_of(counts, self.replay.residual), 0.0
        for number, (stage, tight) in enumerate(zip(self.stages, self.tight, strict=True)):
            own = counts[:, number]
            found = stage.listed(own.astype(np.float64))
            listed = found if tight is stage else tight.listed(own.astype(np.float64))
            self.put(number, listed.rows)
            if found.whole and own.dtype == np.int64:
                times = np.moveaxis(stage.times(found.rows), -1, 0)
                total += min(sum_of(own, each) for each in times)
            else:
                rest += found.bound
        return total + rest - SLACK * abs(rest if counts.dtype == np.int64 else total + rest)

    def _first_of_all(self, weights: Floats) -> None:
        """Take the first of every stage's plans at some weights."""
        chosen: Chosen = []
        for number, tight in enumerate(self.tight):
            chosen += self.put(number, tight.listed(weights[:, number]).rows)[:1]
        if len(chosen) == len(self.tight):
            self._take(chosen)

    # --- the search -------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Try plans that need no program; whether the shortest is proven to be among them."""
        ones = np.ones(self.replay.residual.shape)
        self._first_of_all(ones)
        for slope in _SLOPES if self.several else ():
            self._first_of_all(ones * (np.arange(self.replay.schedule.num_chunks) + slope))
        return self._is_proven()

    def go_on(self) -> bool:
        """Search for a shorter step, and raise the bound; whether the best is proven."""
        small = len(self.master.chunks) <= _SMALL
        most = max(_LEAST_RELAXATIONS, _RELAXATIONS // len(self.master.chunks) ** 2)
        self.master.relax(min(most, _FIRST))
        events = _EVENTS
        for number in range(_ROUNDS if small else 1):
            if number:
                self._take(self.best[1])
                self.master.relax(max(most - _FIRST, _AGAIN))
            self._bound(self._listed(self.master.best_weights))
            for path in self.replay.paths(self.master.times(self.best[1])) if small else ():
                self._bound(self._listed(path.astype(np.float64)))
            self._round(small)
            events = self._exchange(events)
            if self._is_proven():
                return True
        return False

    def _is_proven(self) -> bool:
        """Whether the paths of the best step say that none is shorter.

        Of many chunks no single path does.
        """
        if self.master.bound > self.best[0] - 1:
            return True
        if self.several and len(self.master.chunks) > CHUNKS:
            return False
        for path in self.replay.paths(self.master.times(self.best[1])):
            self._bound(self._listed(path))
        return self.master.bound > self.best[0] - 1

    def _bound(self, bound: float) -> None:
        self.master.bound = max(self.master.bound, bound)

    def prove(self) -> None:
        """Solve the program in integers, of the plans that may make the best step shorter; replay,
        and add paths, until what is the best on all known paths has no longer one. Only where
        little is left."""
        tables = [plans.table for stage in self.stages for plans in stage.plans]
        if len(tables) > CHUNKS or not all(table.complete for table in tables):
            return
        program = self.master.left(self.best[0], _LEFT)
        if program is None:
            return
        for _ in range(_PROGRAMS):
            found = program.whole(_NODES)
            if found is None:
                return
            bound, rows = found
            self._bound(bound * (1 - _TOLERANCE))
            tried = [np.array([own]) for own in rows]
            fitting = [self.put(s, own[self.stages[s].fit(own)]) for s, own in enumerate(tried)]
            if not all(fitting):
                return
            chosen = [own[0] for own in fitting]
            times = self.master.times(chosen)
            step = self.replay.step(times)
            self.best = min(self.best, (step, chosen), key=lambda own: own[0])
            if self.best[0] <= bound * (1 + 1e-8) + 2:
                self._bound(float(self.best[0]))
                return
            if not program.know(self.replay.paths(times)):
                return

    def answer(self) -> tuple[list[Split], float, bool]:
        """The choices of the shortest step found, `[stage][chunk][position]`; a bound on all, in
        ps; and whether none is proven to be shorter."""
        chosen, shown = self.best[1], self.master.bound > self.best[0] - 1
        splits = [stage.choices(rows) for stage, rows in zip(self.stages, chosen, strict=True)]
        return splits, min(self.master.bound, float(self.best[0])), shown

    # --- rounding ---------------------------------------------------------------------------------

    def _round(self, small: bool) -> None:
        """Each stage in turn gets its best plan, starting from the fractional times."""
        stages = range(len(self.stages))
        if self.several and small:
            for stage in stages:
                self._know_near(stage)
        times, chosen, step = self.master.center[1], list[tuple[int, ...]](), 1 << 62
        for stage in stages:
            step, row, times = self._best_of(times, stage, self._by_nearness(stage))
            chosen.append(row)
        if step < self.best[0]:
            self.best = step, chosen

    def _know_near(self, stage: int) -> None:
        """Know a stage's plans that are nearest to the fractional times, and cheap."""
        tight, weights = self.tight[stage], self.master.best_weights
        assert self.master.last is not None
        price, target = self.master.last.price[stage], self.master.center[1][:, stage]
        mean = _NEARNESS * max(float(weights[:, stage].mean()), float(weights.mean()))
        costs = []
        for c, known in enumerate(tight.fits):
            own = tight.plans[c].rows[known, :HELD]
            over = own + self.replay.residual[:, stage, c] - target[:, c]
            far = np.maximum(over, 0).sum(axis=1) + 0.02 * own.sum(axis=1)
            costs.append(own @ weights[:, stage, c] + mean * far)
        self.put(stage, tight.cheapest(costs, price)[0])

    def _by_nearness(self, stage: int) -> Ints:
        """All known plans of a stage, those nearest to the fractional times first."""
        own = np.array(list(self.options[stage]), np.int64)
        times = self.stages[stage].times(own) + self.replay.residual[:, stage, :, None]
        over = np.maximum(times - self.master.center[1][:, stage, :, None], 0).sum(axis=(0, 1))
        order = np.argsort(over + 0.02 * times.sum(axis=(0, 1)), kind="stable")
        return own[order]

    def _best_of(self, times: Ints, stage: int, rows: Ints) -> tuple[int, tuple[int, ...], Ints]:
        """The shortest step with any of some plans in a stage, the plan, and the times."""
        rows = rows[: self.replay.candidates]
        many = np.repeat(times[..., None], len(rows), axis=-1)
        own = self.stages[stage].times(rows) + self.replay.residual[:, stage, :, None]
        many[:, stage] = np.maximum(own, 0)
        steps = self.replay.steps(many)
        best = int(steps.argmin())
        return int(steps[best]), tuple(rows[best].tolist()), many[..., best]

    def _exchange(self, events: int) -> int:
        """Other plans of stages, and exchanges of two chunks, while the step gets shorter; returns
        the events that are left."""
        before = 1 << 62
        while self.best[0] < before and events > 0:
            before = self.best[0]
            events = self._one_by_one(self._by_nearness, events)
            if self.several:
                events = self._one_by_one(self._swapped, events)
        return events

    def _one_by_one(self, options: Callable[[int], Ints], events: int) -> int:
        unchanged = 0
        for stage in itertools.cycle(range(len(self.stages))):
            if unchanged >= len(self.stages) or events <= 0:
                break
            unchanged += 1
            rows, chosen = options(stage), self.best[1]
            events -= self.replay.events * max(16, min(len(rows), self.replay.candidates))
            if not len(rows):
                continue
            step, row, _ = self._best_of(self.master.times(chosen), stage, rows)
            if step < self.best[0]:
                self.put(stage, [row])
                self.best = step, [*chosen[:stage], row, *chosen[stage + 1 :]]
                unchanged = 0
        return events

    def _swapped(self, stage: int) -> Ints:
        """A stage's plans with two chunks of one table exchanged, that fit."""
        own, plans = self.best[1][stage], self.stages[stage].plans
        found = []
        for a, b in itertools.combinations(range(len(own)), 2):
            if plans[a] is plans[b] and own[a] != own[b]:
                new = list(own)
                new[a], new[b] = own[b], own[a]
                found.append(new)
        rows = np.array(found, np.int64).reshape(-1, len(own))
        rows = rows[self.stages[stage].fit(rows)][:_EXCHANGED]
        return np.array(self.put(stage, rows), np.int64).reshape(-1, len(own))


def _plans(stage: Stage, budget: int, added: int) -> StagePlans:
    found = stage.plans(budget, added)
    assert found is not None  # the leanest choices fit
    return found


def sum_of(weights: Floats | Ints, times: Ints) -> float:
    """The sum of products, of any size; an int where the weights are."""
    products = zip(weights.ravel().tolist(), times.ravel().tolist(), strict=True)
    found: float = sum(w * t for w, t in products)
    return found


def shortest(problem: Problem) -> Solution | None:
    """The best policy under the problem's budgets; None if nothing fits."""
    pairs = zip(problem.stages.leanest, problem.budgets, strict=True)
    if any(choice.peak_bytes > budget for choice, budget in pairs):
        return None
    found = _searched(problem)
    return with_early(problem, found) if problem.may_begin_early else found


def _searched(problem: Problem) -> Solution:
    """The result of the search; it does not depend on earlier searches.

    It begins with the choices that are the least busy, those with the lowest peaks, and the best of
    Megatron's own settings that fits.
    """
    stages, budgets = problem.stages.all, problem.budgets
    least_busy = [own.afresh(budget) for own, budget in zip(stages, budgets, strict=True)]
    residual = residual_times(problem.table, problem.layout).both
    search = StepSearch(Replay(problem.schedule, residual), stages, budgets)
    search.start([choice.policies for choice in least_busy if choice is not None])
    search.start([choice.policies for choice in problem.stages.leanest])
    if not search.begin():
        manual = best_manual(problem)
        simple = manual and problem.table.without_dead_work(manual.policy)
        if simple and problem.may_be(simple):
            search.start(_splits(problem, simple))
        if not search.go_on():
            search.prove()
    splits, bound_ps, shown = search.answer()
    policy = put_together(problem.layout, splits)
    cost = problem.cost(policy)
    if not fits(problem, policy):
        raise AssertionError(f"a plan was found that exceeds its budgets: {policy.format()}")
    return proven(problem, policy, cost.step_ms if shown else bound_ps / PS_PER_MS)


def _splits(problem: Problem, policy: RecomputePolicy) -> list[Split]:
    own = problem.table.recorded(policy).layers
    return [
        tuple(tuple(own[layer] for layer in chunk.layers) for chunk in chunks)
        for chunks in problem.layout.stages
    ]
