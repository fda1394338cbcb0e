"""Which layers recompute ahead: marks on found choices that make the step shorter.

A recompute that begins early takes bytes and never makes a step longer. So every chunk begins early
as many layers as fit, the last ones first, and then drops the marks that the step does not need.
Choices that hold less leave more room for marks. So choices for a ladder of smaller budgets are
tried on each stage; the ladder does not depend on the budget.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_autorecompute.planner.cost.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.cost.layout import Chunk
from megatron_autorecompute.planner.cost.peak_memory import stage_base, stage_moments, stage_peak
from megatron_autorecompute.planner.cost.stage_times import least_times, residual_times
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.evidence import proven
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import Solution, StageEvidence
from megatron_autorecompute.planner.search.stage_problem import put_together
from megatron_autorecompute.policy import NONE, RecomputePolicy

_RUNGS = 8
"""The number of rungs of the ladder; layers that begin early fill what lies between two."""


def with_early(problem: Problem, found: Solution) -> Solution:
    """The solution, or a policy with layers that recompute ahead if its step is shorter; with a
    bound on all such."""
    bases = dict.fromkeys([found.policy, *_ladder(problem)])
    plans = [found.policy, *(_all_that_fit(problem, base) for base in bases)]
    best = _without_needless(problem, _stage_by_stage(problem, plans))
    shorter = problem.costs.step_ms(best) < problem.costs.step_ms(found.policy)
    best = best if shorter else found.policy
    return proven(problem, best, _bound_ms(problem, found.evidence))


def begun_early(problem: Problem, policy: RecomputePolicy) -> RecomputePolicy:
    """A policy that fits, with the layers that recompute ahead for the shortest step, no more."""
    return _without_needless(problem, _all_that_fit(problem, policy))


def _all_that_fit(problem: Problem, policy: RecomputePolicy) -> RecomputePolicy:
    for stage, chunks in enumerate(problem.layout.stages):
        for chunk in reversed(chunks):
            for unit in _units(problem, policy, chunk):
                more = _marked(policy, [unit])
                if not _fits(problem, stage, more):
                    break
                policy = more
    return policy


def _stage_by_stage(problem: Problem, plans: Sequence[RecomputePolicy]) -> RecomputePolicy:
    """The shortest of some plans, whose stages take over those of others while it gets shorter."""
    step_ms = problem.costs.step_ms
    best, before = min(plans, key=step_ms), math.inf
    while step_ms(best) < before:
        before = step_ms(best)
        for chunks in problem.layout.stages:
            own = [layer for chunk in chunks for layer in chunk.layers]
            best = min((_with(best, plan, own) for plan in (best, *plans)), key=step_ms)
    return best


def _with(policy: RecomputePolicy, other: RecomputePolicy, layers: list[int]) -> RecomputePolicy:
    """A policy whose choices of some layers are another's."""
    choices = list(policy.layers)
    for layer in layers:
        choices[layer] = other.layers[layer]
    return RecomputePolicy(tuple(choices))


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
