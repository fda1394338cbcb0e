"""Megatron's own settings in the same model, and the fastest of them that fits.

Those that offload, `offload[…]` on all layers alike and `cpu_offloading/N`, are few, and each that
could be the fastest is replayed with its copies. `cpu_offloading/N` are the only policies in which
layers leave as a whole. Megatron takes them on one pipeline stage, without recompute, for the first
layers and not for all. So the best of them is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.megatron_fields import RUNS_FOREVER, has_linear_bias, runs_forever
from megatron_autorecompute.planner.cost.arrays import Ints
from megatron_autorecompute.planner.cost.copies import host_link
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
from megatron_autorecompute.planner.cost.stage_times import residual_times, times_of
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, CostTable
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import NONE, WHOLE, MegatronStrategy, RecomputePolicy

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
    return all(
        problem.costs.peak_alone(stage, policy).bytes <= budget
        for stage, budget in enumerate(problem.budgets)
    )


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


def may_offload(problem: Problem, *, only_modules: bool = False) -> bool:
    """Whether a layer may offload; or may otherwise than as a whole."""
    return any(
        record.offload_groups
        and not (only_modules and record.policy == WHOLE)
        and problem.allows(kind.layers[0], record.policy)
        for kind in problem.profile.kinds
        if kind.layers
        for record in kind.choices
    )


def settings_of_modules(problem: Problem) -> tuple[RecomputePolicy, ...]:
    """The settings that offload modules and may be used, each once."""
    kinds = problem.profile.kinds
    choices = [c for k in kinds for c in (*(record.policy for record in k.choices), *k.equals)]
    sets = dict.fromkeys(c.offload for c in choices if c.offload and c != WHOLE)
    plain = [one for one in manual_settings(problem) if not one.recompute_num_layers]
    found = dict[RecomputePolicy, None]()
    for setting, offload in itertools.product(plain, sets):
        try:
            policy = problem.table.recorded(
                manual_policy(problem, replace(setting, offload=offload))
            )
            if problem.may_be(policy):
                _busy_ms(problem, policy)
                found[policy] = None
        except (PolicyError, ProfileError):
            continue  # a layer has no record of it
    return tuple(found)


def settings_of_whole_layers(problem: Problem) -> tuple[RecomputePolicy, ...]:
    """`cpu_offloading/N`, of the fewest layers first; none on several stages, with an encoder
    or MTP depths, or where a layer has no record."""
    profile = problem.profile
    recorded = all(
        kind.record(choice) is not None and problem.allows(kind.layers[0], choice)
        for kind in profile.kinds
        if kind.layers
        for choice in (NONE, WHOLE)
    )
    blocks = profile.model.mtp_num_layers or profile.model.encoder_layers
    if not recorded or problem.layout.num_stages > 1 or blocks:
        return ()
    return tuple(
        MegatronStrategy("cpu_offloading", (), number).policy(profile.num_layers)
        for number in range(1, profile.num_layers)
    )


def fastest_of_modules(problem: Problem) -> RecomputePolicy | None:
    """Megatron's fastest setting that offloads modules and fits; None where none does."""
    best: RecomputePolicy | None = None
    for policy in settings_of_modules(problem):
        shorter = best is None or _busy_ms(problem, policy) < problem.cost(best).step_ms
        if not shorter or not may_fit(problem, policy):
            continue
        cost = problem.cost(policy)
        shorter = best is None or cost.step_ms < problem.cost(best).step_ms
        if shorter and fits(problem, cost) and has_room(problem, policy):
            best = policy
    return best


def fastest_whole(problem: Problem) -> RecomputePolicy | None:
    """Megatron's fastest `cpu_offloading/N` that fits; None where none does. It is that of the
    fewest layers: where more leave, each must have left sooner, and is asked for later."""
    for policy in settings_of_whole_layers(problem):
        if may_fit(problem, policy) and fits(problem, problem.cost(policy)):
            return policy if has_room(problem, policy) else None
    return None


def has_room(problem: Problem, policy: RecomputePolicy) -> bool:
    """Whether a device's copies have room in host memory, on every stage."""
    most = host_link(problem.profile).host_bytes
    return all(own.host_bytes <= most for own in problem.cost(policy).stages)


def _busy_ms(problem: Problem, policy: RecomputePolicy) -> float:
    """What the busiest stage computes in a step."""
    table, layout = problem.table, problem.layout
    busy = times_of(table.units(layout, policy)).plus(residual_times(table, layout)).busy
    return problem.schedule.num_microbatches * float(busy.max()) / PS_PER_MS
