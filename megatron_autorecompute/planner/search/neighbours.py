"""Policies that differ from a given policy at a single layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
from megatron_autorecompute.planner.cost.step_interval import ties
from megatron_autorecompute.planner.search.manual import settings_of_whole_layers
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import FULL, NONE, WHOLE, LayerPolicy, RecomputePolicy


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What another choice at one layer would change, the rest of the policy unchanged."""

    choice: str
    """The other choice."""
    step_ms: float
    """Added time of the step."""
    stage_busy_ms: float
    """Added busy time of the layer's stage in a step."""
    peak_bytes: int
    """Added bytes of the stage's peak, high end."""
    fits: bool
    """Whether the stage then stays within its budget."""
    tie: bool
    """Whether the difference of both steps is within the profile's errors."""


def neighbours(problem: Problem, policy: RecomputePolicy, layer: int) -> list[Neighbour]:
    """The neighbours at one layer.

    Raises: as `changed_at`.
    """
    (found,) = neighbours_at(problem, policy, [layer])
    return found


def neighbours_at(
    problem: Problem, policy: RecomputePolicy, layers: Iterable[int]
) -> Iterator[list[Neighbour]]:
    """The neighbours at each of some layers: their steps are replayed together.

    Raises: as `changed_at`.
    """
    changed = {layer: changed_at(problem, policy, layer) for layer in layers}
    others = [other for of_layer in changed.values() for _, other in of_layer]
    problem.costs.replay(others)
    tied, now = ties(problem.costs, policy, others), problem.cost(policy)
    for layer, of_layer in changed.items():
        stage = problem.layout.stage_of(layer)
        yield [
            _neighbour(str(choice), now, problem.cost(other), stage, problem.budgets, next(tied))
            for choice, other in of_layer
        ]


def _neighbour(
    choice: str, now: PolicyCost, then: PolicyCost, stage: int, budgets: Sequence[int], tie: bool
) -> Neighbour:
    was, own = now.stages[stage], then.stages[stage]
    return Neighbour(
        choice,
        then.step_ms - now.step_ms,
        own.busy_ms - was.busy_ms,
        own.peak_high_bytes - was.peak_high_bytes,
        own.peak_high_bytes <= budgets[stage],
        tie,
    )


def changed_at(
    problem: Problem, policy: RecomputePolicy, layer: int
) -> list[tuple[LayerPolicy, RecomputePolicy]]:
    """Every other choice of one layer, with the policy in which only that layer changes.

    Where layers leave as a whole, Megatron's `cpu_offloading` with the number that changes it. If
    the layer is in a group, it leaves the group, and each other member gets its own checkpoint.
    Raises: PolicyError for a layer that does not exist.
    """
    if not 0 <= layer < len(policy.layers):
        raise PolicyError(
            f"Layer {layer} does not exist: layers are 0 to {len(policy.layers) - 1}."
        )
    number = policy.layers.count(WHOLE)
    if number:  # the first ones leave: this layer is the first that stays, or the last that leaves
        others = settings_of_whole_layers(problem)
        fewer, more = others[layer - 1 : layer] if layer else (), others[layer : layer + 1]
        return [(NONE, one) for one in fewer] if layer < number else [(WHOLE, one) for one in more]
    alone = list(policy.layers)
    for index in _group_members(problem.layout, policy, layer):
        alone[index] = FULL
    found = []
    for choice in problem.table.choices(layer):
        changed = RecomputePolicy((*alone[:layer], choice, *alone[layer + 1 :]))
        if changed != policy:
            found.append((choice, changed))
    return found


def _group_members(layout: Layout, policy: RecomputePolicy, layer: int) -> list[int]:
    for layers in layout.chunk_layers():
        for run in policy.chunk_runs(layers) if layer in layers else ():
            position = layers.index(layer) - run.start
            if 0 <= position < run.count and run.policy.group > 1:
                first = run.start + position - position % run.policy.group
                return list(layers[first : first + run.policy.group])
    return []
