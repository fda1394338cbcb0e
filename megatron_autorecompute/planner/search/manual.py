"""Megatron's own settings in the same model, and the fastest of them that fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.megatron_fields import RUNS_FOREVER, has_linear_bias, runs_forever
from megatron_autorecompute.planner.cost.arrays import Ints
from megatron_autorecompute.planner.cost.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.cost.peak_memory import stage_base, stage_moments, stage_peak
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
from megatron_autorecompute.planner.cost.stage_times import times_of
from megatron_autorecompute.planner.cost.unit_costs import CostTable
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import MegatronStrategy, RecomputePolicy

MOST_MODULES = 9
"""Megatron has no more modules. If a profile has more, only its recorded sets are tried."""


@dataclass(frozen=True, slots=True)
class ManualStrategy:
    """One of Megatron's own settings that fits."""

    name: str
    """The name as `RecomputePolicy.parse` reads it: megatron:block/4, ..."""
    policy: RecomputePolicy
    cost: PolicyCost


def best_manual(problem: Problem) -> ManualStrategy | None:
    """The fastest of `manual_settings` that fits the problem's budgets; None when none does.

    Equal settings are evaluated once. A setting is skipped if in every chunk its forward and
    its backward take at least as long as those of a setting that fits, because then its step
    takes at least as long.
    """
    fitting: list[tuple[ManualStrategy, Ints]] = []
    for setting, policy, times in _by_time(problem):
        slower = any((times >= faster).all() for _, faster in fitting)
        if not slower and may_fit(problem, policy):
            fitting.append((ManualStrategy(str(setting), policy, problem.cost(policy)), times))
    return min((own for own, _ in fitting), key=lambda own: own.cost.step_ms, default=None)


def fits(problem: Problem, cost: PolicyCost) -> bool:
    """Whether the high end of every stage's peak is within its budget."""
    pairs = zip(cost.stages, problem.budgets, strict=True)
    return all(own.peak_high_bytes <= budget for own, budget in pairs)


def may_fit(problem: Problem, policy: RecomputePolicy) -> bool:
    """Whether a policy may fit, by a quicker test without bytes of copies under way."""
    for stage, (chunks, budget) in enumerate(
        zip(problem.layout.stages, problem.budgets, strict=True)
    ):
        columns = [ChunkColumns(c, problem.table.chunk_units(c, policy)) for c in chunks]
        moments = stage_moments(problem.profile, problem.schedule, stage)
        base = stage_base(problem.profile, problem.layout, stage, "high")
        if stage_peak(base, stage, columns, moments).bytes > budget:
            return False
    return True


def _by_time(problem: Problem) -> Iterator[tuple[MegatronStrategy, RecomputePolicy, Ints]]:
    """Settings that differ in effect, each with forward and backward times of every chunk by every
    clock; the least busy first."""
    tables = [CostTable(p, problem.imbalance_percentile, "high") for p in problem.costs.clocks]
    seen, found = set(), []
    for setting, policy in manual_policies(problem):
        runs = policy.runs()
        if runs in seen:
            continue
        seen.add(runs)
        try:
            times = [times_of(table.units(problem.layout, policy)).both for table in tables]
        except (PolicyError, ProfileError):
            continue  # a layer has no record of it
        found.append((sum(int(own.sum()) for own in times), setting, policy, np.stack(times)))
    for _, setting, policy, own in sorted(found, key=itemgetter(0)):
        yield setting, policy, own


def manual_policies(problem: Problem) -> Iterator[tuple[MegatronStrategy, RecomputePolicy]]:
    """The settings that Megatron does not refuse, and their policies."""
    for setting in manual_settings(problem):
        try:
            yield setting, manual_policy(problem, setting)
        except PolicyError:
            continue


def manual_settings(problem: Problem) -> list[MegatronStrategy]:
    """Every setting Megatron itself offers, including those that it may refuse.

    These are none; selective with every set of modules that some kind has records of; block/N and
    uniform/N for every N up to the longest chunk, counted afresh in every chunk as in
    `TransformerBlock`.
    """
    recorded = dict.fromkeys(
        choice
        for kind in problem.profile.kinds
        for choice in (*(record.policy for record in kind.choices), *kind.equals)
    )
    modules = sorted({module for choice in recorded for module in choice.modules})
    sizes = range(1, len(modules) + 1) if len(modules) <= MOST_MODULES else ()
    sets = dict.fromkeys(choice.modules for choice in recorded if choice.modules)
    for size in sizes:
        sets |= dict.fromkeys(itertools.combinations(modules, size))
    numbers = range(1, max(*map(len, _counted(problem)), problem.table.depth_layers) + 1)
    return [
        MegatronStrategy("none"),
        *(MegatronStrategy("selective", chosen) for chosen in sets),
        *(MegatronStrategy("block", (), n) for n in numbers),
        *(MegatronStrategy("uniform", (), n) for n in numbers),
    ]


def manual_policy(problem: Problem, setting: MegatronStrategy) -> RecomputePolicy:
    """One of Megatron's own settings as a policy; raises PolicyError if Megatron refuses it, also
    where its backward would never end."""
    chunks, depth = _counted(problem), problem.table.depth_layers
    policy = setting.policy(problem.profile.num_layers, chunks, depth)
    if setting.modules:
        choices = enumerate(policy.layers)
        policy = RecomputePolicy(tuple(problem.table.what_runs(*pair) for pair in choices))
    bias = has_linear_bias(problem.profile)
    if any(runs_forever(choice, bias) for choice in {run.policy for run in policy.runs()}):
        raise PolicyError(f"{setting}: {RUNS_FOREVER}.")
    return policy


def _counted(problem: Problem) -> tuple[tuple[int, ...], ...]:
    return problem.layout.counted_chunks(problem.profile.model.encoder_layers)
