"""Which layers recompute ahead: marks on found choices that make the step shorter.

A recompute that begins early takes bytes and never makes a step longer. Choices that hold less
leave more room for that. So rungs of a ladder of smaller budgets give each stage's choices, and
every rung begins early as many layers as fit, the last ones first. Stages take over each other's
rungs while the step gets shorter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_autorecompute.planner.cost import Ints
from megatron_autorecompute.planner.cost.layout import Chunk
from megatron_autorecompute.planner.cost.stage_times import least_times, residual_times, times_of
from megatron_autorecompute.planner.cost.step_time import finished, step_unit
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import Solution, StageEvidence, proven
from megatron_autorecompute.planner.search.stage_problem import put_together
from megatron_autorecompute.policy import NONE, RecomputePolicy

_RUNG = 1.02
"""So much more memory has each rung, from the least to where nothing binds."""
_STARTS = 8
"""The starts with one rung for all stages."""


def with_early(problem: Problem, found: Solution) -> Solution:
    """The solution, or a policy with layers that recompute ahead if its step is shorter; with a
    bound on all such."""
    ladder = [_begun(problem, policy) for policy in (*_rungs(problem), found.policy)]
    best = _put_together(problem, ladder, _descended(problem, ladder))
    shorter = problem.costs.step_ms(best) < problem.costs.step_ms(found.policy)
    best = _without_needless(problem, best) if shorter else found.policy
    return proven(problem, best, _bound_ms(problem, found.evidence))


def _rungs(problem: Problem) -> Iterator[RecomputePolicy]:
    """The least busy choices of all stages with less and more memory, within the budgets."""
    stages, layout = problem.stages, problem.layout
    yield put_together(layout, [choice.policies for choice in stages.leanest])
    level = max(choice.peak_bytes for choice in stages.leanest)
    high = max(choice.peak_bytes for choice in stages.fastest)
    while level <= min(max(problem.budgets), high):
        pairs = zip(stages.all, problem.budgets, strict=True)
        found = [stage.fastest(min(level, budget)) for stage, budget in pairs]
        yield put_together(layout, [choice.policies for choice in found if choice is not None])
        level = 1 + int(level * _RUNG)


def _begun(problem: Problem, policy: RecomputePolicy) -> RecomputePolicy:
    """The policy with as many units begun early on each stage as fit, the last ones first."""
    for stage, budget in enumerate(problem.budgets):
        chunks = reversed(problem.layout.stages[stage])
        units = [unit for chunk in chunks for unit in _units(problem, policy, chunk)]
        tries = [_marked(policy, units[:count]) for count in range(len(units) + 1)]
        fitting = [one for one in tries if problem.costs.peak_alone(stage, one).bytes <= budget]
        policy = fitting[-1]
    return policy


def _descended(problem: Problem, ladder: Sequence[RecomputePolicy]) -> Ints:
    """The best rung of each stage, `[stage]`: from one for all, one stage after the other."""
    residual = residual_times(problem.table, problem.layout)
    found = [times_of(problem.costs.units(policy)).plus(residual) for policy in ladder]
    nothing = np.zeros_like(residual.forward)
    ahead = (nothing if own.ahead is None else own.ahead for own in found)
    times = np.stack([np.stack([*own.both, a]) for own, a in zip(found, ahead, strict=True)])
    unit = step_unit(problem.schedule, float(times[:, :2].sum(axis=(1, 3)).max(axis=0).sum()))
    rungs, stages = np.arange(len(ladder)), np.arange(problem.layout.num_stages)

    def steps(chosen: Ints) -> Ints:
        """The steps of rungs `[..., stage]`, in the unit."""
        own = times[chosen, :, stages].reshape(-1, len(stages), *times.shape[1::2])
        ends = finished(problem.schedule, *np.moveaxis(own, (2, 0), (0, -1)) // unit).max(axis=0)
        return np.asarray(ends.reshape(chosen.shape[:-1]))

    alike = np.repeat(rungs[:, None], len(stages), axis=1)
    chosen = alike[np.argsort(steps(alike), kind="stable")[:_STARTS]]
    ends, are_better = steps(chosen), True
    while are_better:
        before = ends
        for stage in stages:
            tried = np.repeat(chosen[:, None], len(rungs), axis=1)
            tried[:, :, stage] = rungs
            of_rungs = steps(tried)
            ends = of_rungs.min(axis=1)
            chosen = tried[np.arange(len(chosen)), of_rungs.argmin(axis=1)]
        are_better = bool((ends < before).any())
    best: Ints = chosen[ends.argmin()]
    return best


def _put_together(problem: Problem, ladder: list[RecomputePolicy], chosen: Ints) -> RecomputePolicy:
    """The policy in which every stage has its own rung."""
    layers = list(ladder[0].layers)
    for chunks, rung in zip(problem.layout.stages, chosen.tolist(), strict=True):
        for layer in itertools.chain.from_iterable(chunk.layers for chunk in chunks):
            layers[layer] = ladder[rung].layers[layer]
    return RecomputePolicy(tuple(layers))


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


def _bound_ms(problem: Problem, evidence: tuple[StageEvidence, ...]) -> float:
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
    m = problem.schedule.num_microbatches
    return max(
        float(before[own.stage] + m * added[own.stage]) / PS_PER_MS + m * (own.bound_ms or 0.0)
        for own in evidence
    )
