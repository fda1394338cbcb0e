"""The policy with the shortest step under every stage's budget, from each stage's own optimum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_autorecompute.planner.arrays import Ints
from megatron_autorecompute.planner.chunk_splits import put_together, with_exchanges
from megatron_autorecompute.planner.policy_cost import PolicyCost, PolicyCosts
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
    costs: PolicyCosts,
    searches: Sequence[StageSearch],
    budgets: Sequence[int],
    choices: Sequence[StageChoice],
    others: Sequence[RecomputePolicy] = (),
) -> FastestStep:
    """The shortest step found, never longer than with any of the others, and a bound on it.

    Args:
        table: what every choice costs, at the high end of every uncertain figure.
        costs: of policies, in the layout and schedule that are planned.
        searches: of every stage.
        budgets: bytes, of every stage.
        choices: of every stage those of the least busy time that fit.
        others: policies that fit and are made of what may be chosen, such as Megatron's own.
    """
    layout, schedule = costs.layout, costs.schedule
    all_stages = _Stages(table, costs, budgets)
    busy = put_together(layout, [choice.policies for choice in choices])
    exchanged = with_exchanges(table, layout, schedule, busy, budgets)
    stages = all_stages.stages(searches, choices)
    search = StepSearch(schedule, stages)
    policies = {all_stages.combination(policy, stages): policy for policy in (exchanged, *others)}
    if aligned := search.aligned():
        splits = [own.found[option].split for own, option in zip(stages, aligned, strict=True)]
        start = put_together(layout, splits)
        start = with_exchanges(table, layout, schedule, start, budgets)
        policies.setdefault(all_stages.combination(start, stages), start)
    found = search.shortest(list(policies))
    policy = policies.get(found.chosen)
    if policy is None:
        pairs = zip(stages, found.chosen, strict=True)
        policy = put_together(layout, [own.found[option].split for own, option in pairs])
    cost = costs.of(policy)
    if found.bound == found.step:
        return FastestStep(policy, cost, cost.step_ms)
    if policy != exchanged:
        policy = with_exchanges(table, layout, schedule, policy, budgets)
        cost = costs.of(policy)
    bound_ms = found.bound * stages[0].unit / PS_PER_MS
    return FastestStep(policy, cost, min(bound_ms, cost.step_ms))


class _Stages:
    """Policies as the choices of stages."""

    def __init__(self, table: CostTable, costs: PolicyCosts, budgets: Sequence[int]) -> None:
        self.table, self.costs, self.budgets = table, costs, budgets
        self.layout, self.schedule = costs.layout, costs.schedule

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
            yield own.add(split, own_ps, self.costs.of(policy).stages[stage].peak_high_bytes, runs)


def _runs(policies: Sequence[object]) -> int:
    """Of equal choices in a row."""
    return sum(1 for i, one in enumerate(policies) if i == 0 or one != policies[i - 1])
