"""The policy with the shortest step under every stage's budget, from each stage's own optimum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_autorecompute.planner.arrays import Ints
from megatron_autorecompute.planner.chunk_splits import put_together, with_exchanges
from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.planner.policy_cost import PolicyCost, evaluate
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.planner.stage_search.problem import StageChoice
from megatron_autorecompute.planner.stage_search.search import StageSearch
from megatron_autorecompute.planner.stage_times import residual_times
from megatron_autorecompute.planner.step_search.one_by_one import Combination
from megatron_autorecompute.planner.step_search.search import StepSearch
from megatron_autorecompute.planner.step_search.stage_options import StageOptions
from megatron_autorecompute.planner.step_time import step_unit
from megatron_autorecompute.planner.unit_costs import PS_PER_MS, CostTable
from megatron_autorecompute.policy import RecomputePolicy


@dataclass(frozen=True, slots=True)
class FastestStep:
    """A policy that fits, and how much shorter a step can still be."""

    policy: RecomputePolicy
    cost: PolicyCost
    bound_ms: float
    """No choices that fit make a shorter step; that of the cost where it is proven to be it."""


def fastest_step(
    table: CostTable,
    layout: Layout,
    schedule: Schedule,
    searches: Sequence[StageSearch],
    budgets: Sequence[int],
    choices: Sequence[StageChoice],
    others: Sequence[RecomputePolicy] = (),
) -> FastestStep:
    """The shortest step found, never longer than with any of the others, and a bound on it.

    Args:
        table: what every choice costs.
        layout: which stage and chunk holds which layers.
        schedule: the order of events.
        searches: of every stage.
        budgets: bytes, of every stage.
        choices: of every stage those of the least busy time that fit.
        others: policies that fit and are made of what may be chosen, such as Megatron's own.
    """
    answer = _Answer(table, layout, schedule, budgets)
    busy = put_together(layout, [choice.policies for choice in choices])
    exchanged = with_exchanges(table.profile, layout, schedule, busy, budgets, table.percentile)
    stages = answer.stages(searches, choices)
    search = StepSearch(schedule, stages)
    policies = {answer.combination(policy, stages): policy for policy in (exchanged, *others)}
    if aligned := search.aligned():
        splits = [own.found[option].split for own, option in zip(stages, aligned, strict=True)]
        start = put_together(layout, splits)
        start = with_exchanges(table.profile, layout, schedule, start, budgets, table.percentile)
        policies.setdefault(answer.combination(start, stages), start)
    found = search.shortest(list(policies))
    policy = policies.get(found.chosen)
    if policy is None:
        pairs = zip(stages, found.chosen, strict=True)
        policy = put_together(layout, [own.found[option].split for own, option in pairs])
    cost = answer.cost(policy)
    if found.bound == found.step:
        return FastestStep(policy, cost, cost.step_ms)
    if policy != exchanged:
        policy = with_exchanges(table.profile, layout, schedule, policy, budgets, table.percentile)
        cost = answer.cost(policy)
    bound_ms = found.bound * stages[0].unit / PS_PER_MS
    return FastestStep(policy, cost, min(bound_ms, cost.step_ms))


class _Answer:
    """What policies cost, each worked out once."""

    def __init__(
        self, table: CostTable, layout: Layout, schedule: Schedule, budgets: Sequence[int]
    ) -> None:
        self.table, self.layout, self.schedule, self.budgets = table, layout, schedule, budgets
        self._costs: dict[RecomputePolicy, PolicyCost] = {}

    def cost(self, policy: RecomputePolicy) -> PolicyCost:
        """Of a policy."""
        if policy not in self._costs:
            self._costs[policy] = evaluate(
                self.table.profile,
                self.layout,
                self.schedule,
                policy,
                percentile=self.table.percentile,
            )
        return self._costs[policy]

    def stages(
        self, searches: Sequence[StageSearch], choices: Sequence[StageChoice]
    ) -> list[StageOptions]:
        """Every stage with its optimum."""
        residual = residual_times(self.table, self.layout)
        residuals = np.stack([residual.forward, residual.backward])
        busy_ps = sum(choice.time_ps for choice in choices) + int(np.maximum(residuals, 0).sum())
        unit = step_unit(self.schedule, float(busy_ps))
        return [
            StageOptions(search, budget, residuals[:, stage], unit, choice)
            for stage, (search, budget, choice) in enumerate(
                zip(searches, self.budgets, choices, strict=True)
            )
        ]

    def combination(self, policy: RecomputePolicy, stages: Sequence[StageOptions]) -> Combination:
        """The numbers of the choices that a policy is made of, which are added where they lack."""
        return tuple(self._numbers(policy, stages))

    def _numbers(self, policy: RecomputePolicy, stages: Sequence[StageOptions]) -> Iterator[int]:
        for stage, (own, chunks) in enumerate(zip(stages, self.layout.stages, strict=True)):
            split = tuple(tuple(policy.layers[i] for i in chunk.layers) for chunk in chunks)
            if split == own.busy.policies:
                yield 0
                continue
            units = [self.table.chunk_units(chunk, policy) for chunk in chunks]
            own_ps: Ints = np.array(
                [
                    [sum(unit.forward_ps for unit in one) for one in units],
                    [sum(unit.backward_ps for unit in one) for one in units],
                ],
                np.int64,
            )
            runs = sum(_runs(policies) for policies in split)
            yield own.add(split, own_ps, self.cost(policy).stages[stage].peak_high_bytes, runs)


def _runs(policies: Sequence[object]) -> int:
    """Of equal choices in a row."""
    return sum(1 for i, one in enumerate(policies) if i == 0 or one != policies[i - 1])
