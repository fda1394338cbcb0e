"""Megatron's own settings in the same model, and the fastest of them that fits.

Those that offload, `offload[…]` on all layers alike and `cpu_offloading/N`, are few, and each that
could be the fastest is replayed with its copies. `cpu_offloading/N` are the only policies in which
layers leave as a whole. Megatron takes them on one pipeline stage, without recompute, for the first
layers and not for all. So the best of them is exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.megatron_fields import RUNS_FOREVER, has_linear_bias, runs_forever
from megatron_autorecompute.planner.cost.copies import host_link
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
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
    """The fastest of `manual_settings` that fits the problem's budgets; None when none does."""
    names: dict[RecomputePolicy, str] = {}
    for setting, policy in usable(problem, manual_settings(problem)):
        names.setdefault(policy, str(setting))
    best = fastest_that_fits(problem, names)
    return None if best is None else ManualStrategy(names[best], best, problem.cost(best))


def fastest_that_fits(
    problem: Problem, policies: Iterable[RecomputePolicy]
) -> RecomputePolicy | None:
    """The fastest of some policies that fits; None when none does.

    All are replayed without waits for copies and for the host, which only make a step longer. Then
    costs of those are worked out that may be the fastest.
    """
    costs, own = problem.costs, list(policies)
    costs.replay(own)
    best: RecomputePolicy | None = None
    for policy in sorted(own, key=costs.step_ms):
        least_ms = math.inf if best is None else problem.cost(best).step_ms
        if costs.step_ms(policy) >= least_ms:
            break
        if fits(problem, policy) and problem.cost(policy).step_ms < least_ms:
            best = policy
    return best


def fits(problem: Problem, policy: RecomputePolicy) -> bool:
    """Whether the high end of every stage's peak is within its budget, and host memory has room for
    a device's copies."""
    costs = problem.costs
    if any(costs.peak_alone(s, policy).bytes > own for s, own in enumerate(problem.budgets)):
        return False  # a quicker test, without bytes of copies under way
    pairs = zip(costs.of(policy).stages, problem.budgets, strict=True)
    within = all(own.peak_high_bytes <= budget for own, budget in pairs)
    return within and has_room(problem, policy)


def usable(
    problem: Problem, settings: Iterable[MegatronStrategy]
) -> Iterator[tuple[MegatronStrategy, RecomputePolicy]]:
    """The settings that Megatron does not refuse and of which every layer has a record, and their
    policies."""
    for setting in settings:
        try:
            policy = manual_policy(problem, setting)
            problem.costs.units(policy)
        except (PolicyError, ProfileError):
            continue
        yield setting, policy


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
        policy = problem.table.what_runs(policy.layers[0])
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
    settings = (replace(one, offload=own) for one, own in itertools.product(plain, sets))
    policies = (problem.table.recorded(own) for _, own in usable(problem, settings))
    return tuple(dict.fromkeys(filter(problem.may_be, policies)))


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


def has_room(problem: Problem, policy: RecomputePolicy) -> bool:
    """Whether a device's copies have room in host memory, on every stage."""
    if not policy.offloads:
        return True
    most = host_link(problem.profile).host_bytes
    return all(own.host_bytes <= most for own in problem.cost(policy).stages)
