"""Which layers recompute ahead: marks on found choices that make the step shorter.

A recompute that begins early takes bytes and never makes a step longer. Choices that hold less
leave more room for that. So rungs of a ladder of budgets give each stage's choices, and at each of
some levels of memory every rung begins early as many layers as fit, the last ones first. Stages
take over each other's rungs while the step gets shorter. Rungs and levels are the same whatever the
budget is, and a level goes on from what the one below found: so with more memory no step is longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_autorecompute.planner.cost import Ints
from megatron_autorecompute.planner.cost.layout import Chunk
from megatron_autorecompute.planner.cost.stage_times import least_times, residual_times, times_of
from megatron_autorecompute.planner.cost.step_time import finished
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import Solution, proven
from megatron_autorecompute.planner.search.stage_problem import StageChoice, put_together
from megatron_autorecompute.policy import NONE, RecomputePolicy

_LEVEL, _LEVELS_A_RUNG = 1.01, 2
"""So much more memory has each level, from the least to where nothing binds."""

_STARTS = 2
"""The starts with one rung for all stages, beside what the level below found."""


def with_early(problem: Problem, found: Solution) -> Solution:
    """The solution, or a policy with layers that recompute ahead if its step is shorter; with a
    bound on all such."""
    best = _Levels(problem).shortest()
    shorter = problem.costs.step_ms(best) < problem.costs.step_ms(found.policy)
    best = _without_needless(problem, best) if shorter else found.policy
    return proven(problem, best, _bound_ms(problem))


@dataclass(frozen=True, slots=True)
class _Rung:
    """Choices of one stage; one more of its units begins early in each policy."""

    policies: list[RecomputePolicy]
    peaks: Ints
    times: Ints
    """`[policy, forward or backward or ahead, chunk]`, ps."""

    def most(self, budget: int) -> int:
        """The last policy that fits; -1 if none does."""
        return max(np.flatnonzero(self.peaks <= budget).tolist(), default=-1)


class _Levels:
    """Looks for the shortest step at one level of memory after the other."""

    def __init__(self, problem: Problem) -> None:
        self._problem, stages = problem, problem.stages
        self._residual = residual_times(problem.table, problem.layout)
        low = max(choice.peak_bytes for choice in stages.leanest)
        high = max(max(choice.peak_bytes for choice in stages.fastest), low)
        self._levels = [low]
        while (level := 1 + int(self._levels[-1] * _LEVEL)) <= min(max(problem.budgets), high):
            self._levels.append(level)
        self._ladder = [self._rungs(stages.leanest)]
        for level in self._levels[::_LEVELS_A_RUNG]:
            found = [stage.fastest(level) for stage in stages.all]
            self._ladder.append(self._rungs([choice for choice in found if choice is not None]))

    def shortest(self) -> RecomputePolicy:
        """The best found at the highest level within the budgets."""
        count = self._problem.layout.num_stages
        chosen, before = np.zeros((1, count), np.intp), np.zeros(0, np.intp)
        for number, level in enumerate(self._levels):
            ladder = self._ladder[: number // _LEVELS_A_RUNG + 2]
            budgets = [min(level, own) for own in self._problem.budgets]
            most = np.array([list(map(_Rung.most, rungs, budgets)) for rungs in ladder])
            if not np.array_equal(most, before):
                chosen, before = self._descended(chosen, most), most
        layers = list(self._ladder[0][0].policies[0].layers)
        for stage, rung in enumerate(chosen[0]):
            policy = self._ladder[rung][stage].policies[most[rung, stage]]
            for chunk in self._problem.layout.stages[stage]:
                for layer in chunk.layers:
                    layers[layer] = policy.layers[layer]
        return RecomputePolicy(tuple(layers))

    def _rungs(self, choices: Sequence[StageChoice]) -> list[_Rung]:
        policy = put_together(self._problem.layout, [choice.policies for choice in choices])
        return [self._rung(stage, policy) for stage in range(len(choices))]

    def _rung(self, stage: int, policy: RecomputePolicy) -> _Rung:
        problem, chunks = self._problem, self._problem.layout.stages[stage]
        units = [unit for c in reversed(chunks) for unit in _units(problem, policy, c)]
        marked = (_marked(policy, units[:count]) for count in range(len(units) + 1))
        policies, peaks, times = list(marked), list[int](), list[Ints]()
        rest = np.stack([self._residual.forward[stage], self._residual.backward[stage]])
        for each in policies:
            peaks.append(problem.costs.peak_alone(stage, each).bytes)
            found = times_of([[problem.table.chunk_units(chunk, each) for chunk in chunks]])
            both = np.maximum(np.concatenate([found.forward, found.backward]) + rest, 0)
            ahead = both[1:] * 0 if found.ahead is None else np.minimum(found.ahead, both[1:])
            times.append(np.concatenate([both, ahead]))
        return _Rung(policies, np.array(peaks), np.stack(times))

    def _descended(self, before: Ints, most: Ints) -> Ints:
        """The best rung of each stage, `[1, stage]`: from those of before, or from one for all,
        one stage after the other."""
        times = np.array(
            [
                [rung.times[max(at, 0)] for rung, at in zip(rungs, row, strict=True)]
                for rungs, row in zip(self._ladder, most, strict=False)
            ]
        )
        alike = np.flatnonzero((most >= 0).all(axis=1))
        chosen = np.concatenate([before, np.repeat(alike[:, None], most.shape[1], axis=1)])
        steps = self._steps(times, chosen)
        first = np.unique([0, *np.argsort(steps, kind="stable")[:_STARTS]])
        chosen, steps, are_better = chosen[first], steps[first], True
        while are_better:
            were = steps
            for stage in range(most.shape[1]):
                rungs = np.flatnonzero(most[:, stage] >= 0)
                tried = np.repeat(chosen[:, None], len(rungs), axis=1)
                tried[:, :, stage] = rungs
                found = self._steps(times, tried)
                best = found.argmin(axis=1)
                better = found.min(axis=1) < steps
                chosen[better, stage] = rungs[best[better]]
                steps = np.minimum(steps, found.min(axis=1))
            are_better = bool((steps < were).any())
        best_of_all: Ints = chosen[[steps.argmin()]]
        return best_of_all

    def _steps(self, times: Ints, chosen: Ints) -> Ints:
        """The steps of rungs `[..., stage]`, in ps."""
        own = times[chosen, np.arange(chosen.shape[-1])].reshape(-1, *times.shape[1:])
        forward, backward, ahead = np.moveaxis(own, (2, 0), (0, -1))
        found: Ints = finished(self._problem.schedule, forward, backward, ahead).max(axis=0)
        steps: Ints = found.reshape(chosen.shape[:-1])
        return steps


def _without_needless(problem: Problem, policy: RecomputePolicy) -> RecomputePolicy:
    """The policy with the fewest units of every chunk begun early whose step is no longer."""
    most_ms = problem.costs.step_ms(policy)
    for chunk in (chunk for chunks in problem.layout.stages for chunk in reversed(chunks)):
        units = _units(problem, policy, chunk)
        begun = [unit for unit in units if policy.layers[unit[0]].ahead]
        few, enough = -1, len(begun)
        while enough - few > 1:
            some = (few + enough) // 2
            fewer = _marked(policy, begun[some:], ahead=False)
            shown = problem.costs.step_ms(fewer) <= most_ms
            few, enough = (few, some) if shown else (some, enough)
        policy = _marked(policy, begun[enough:], ahead=False)
    return policy


def _units(problem: Problem, policy: RecomputePolicy, chunk: Chunk) -> list[range]:
    """The layers of each full checkpoint of a chunk that can begin early, the last one first."""
    layers, found = () if chunk.head else chunk.layers, []
    for run in policy.chunk_runs(layers):
        size, choice = run.policy.group, run.policy
        if choice.granularity == "full" and not choice.inner:
            first = layers[run.start]
            found += [range(at, at + size) for at in range(first, first + run.count, size)]
    decoder, record = problem.profile.model.num_layers, problem.table.record
    found = [unit for unit in found if unit[0] < decoder]
    return [unit for unit in reversed(found) if all(record(at, NONE) for at in unit)]


def _marked(policy: RecomputePolicy, units: Iterable[range], ahead: bool = True) -> RecomputePolicy:
    layers = list(policy.layers)
    for layer in itertools.chain.from_iterable(units):
        layers[layer] = replace(layers[layer], ahead=ahead)
    return RecomputePolicy(tuple(layers))


def _bound_ms(problem: Problem) -> float:
    """No choices that fit make a shorter step, whatever begins early.

    A stage is busy with all its microbatches, recompute included. Its first forward waits for those
    of the stages before, and after its last backward their backwards follow, which need a gradient.
    """
    residual, table = residual_times(problem.table, problem.layout), problem.table
    least = [[least_times(table, chunk) for chunk in own] for own in problem.layout.stages]
    first = np.array([own[0] for own in least], np.int64)
    first += np.stack([residual.forward[:, 0], residual.backward[:, 0]], axis=1)
    around = np.maximum(first, 0).sum(axis=1)
    before = np.cumsum(around) - around
    added = (residual.forward + residual.backward).sum(axis=1)
    pairs = zip(problem.stages.all, problem.budgets, strict=True)
    busy = [choice.bound_ps if (choice := own.fastest(size)) else 0 for own, size in pairs]
    found = before + problem.schedule.num_microbatches * (added + np.array(busy, np.int64))
    return float(found.max()) / PS_PER_MS
