"""Which layers recompute ahead, in choices that are found: those that make the step shorter.

A recompute that begins early takes bytes and never makes a step longer. So every chunk begins early
as many layers as fit, the last ones first, and lets go of what the step does not need. Choices that
hold less leave more room for that: rungs of a ladder of budgets are tried, the same whatever the
budget is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from megatron_autorecompute.planner.cost.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.cost.peak_memory import stage_base, stage_moments, stage_peak
from megatron_autorecompute.planner.cost.stage_times import least_times, residual_times
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.evidence import proven
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import Solution, StageEvidence
from megatron_autorecompute.planner.search.stage_problem import put_together
from megatron_autorecompute.policy import NONE, RecomputePolicy

_RUNGS = 8
"""Of the ladder; what lies between two is filled with layers that begin early."""


def with_early(problem: Problem, found: Solution) -> Solution:
    """The solution, or a policy with layers that recompute ahead if its step is shorter; with a
    bound on all such."""
    bases = dict.fromkeys([found.policy, *_ladder(problem)])
    plans = [found.policy, *(begun_early(problem, base) for base in bases)]
    best = min(plans, key=problem.costs.step_ms)
    return proven(problem, best, _bound_ms(problem, found.evidence))


def begun_early(problem: Problem, policy: RecomputePolicy) -> RecomputePolicy:
    """A policy that fits, with the layers that recompute ahead for the shortest step, no more."""
    chunks = [c for chunks in problem.layout.stages for c in reversed(chunks)]
    marks = [_units(problem, policy, chunk.layers) * (not chunk.head) for chunk in chunks]
    stages = [s for s, own in enumerate(problem.layout.stages) for _ in own]
    for number, stage in enumerate(stages):
        for unit in marks[number]:
            more = _marked(policy, [unit])
            if not _fits(problem, stage, more):
                break
            policy = more
    most = problem.costs.step_ms(policy)
    for own in marks:
        policy = _without_needless(problem, policy, own, most)
    return policy


def _without_needless(
    problem: Problem, policy: RecomputePolicy, units: list[range], most_ms: float
) -> RecomputePolicy:
    """With the fewest of a chunk's units begun early whose step is no longer."""
    begun = [unit for unit in units if policy.layers[unit[0]].ahead]
    few, enough = -1, len(begun)
    while enough - few > 1:
        some = (few + enough) // 2
        if problem.costs.step_ms(_marked(policy, begun[some:], ahead=False)) <= most_ms:
            enough = some
        else:
            few = some
    return _marked(policy, begun[enough:], ahead=False)


def _units(problem: Problem, policy: RecomputePolicy, layers: tuple[int, ...]) -> list[range]:
    """The layers of each full checkpoint of a chunk that can begin early, the last one first."""
    found = []
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


def _fits(problem: Problem, stage: int, policy: RecomputePolicy) -> bool:
    chunks = problem.layout.stages[stage]
    columns = [ChunkColumns(c, problem.table.chunk_units(c, policy)) for c in chunks]
    base = stage_base(problem.profile, problem.layout, stage, "high")
    moments = stage_moments(problem.profile, problem.schedule, stage)
    return stage_peak(base, stage, columns, moments).bytes <= problem.budgets[stage]


def _ladder(problem: Problem) -> Iterator[RecomputePolicy]:
    """Choices of all stages at budgets from the least to where nothing binds, if they fit."""
    stages, most = problem.stages, max(problem.budgets)
    low = max(choice.peak_bytes for choice in stages.leanest)
    high = max(max(choice.peak_bytes for choice in stages.fastest), low)
    yield put_together(problem.layout, [choice.policies for choice in stages.leanest])
    for rung in range(1, _RUNGS):
        budget = low + (high - low) * rung // _RUNGS
        found = [stage.fastest(budget) for stage in stages.all]
        splits = [choice.policies for choice in found if choice is not None]
        if budget <= most and len(splits) == len(found):
            policy = put_together(problem.layout, splits)
            if all(_fits(problem, stage, policy) for stage in range(len(found))):
                yield policy


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
