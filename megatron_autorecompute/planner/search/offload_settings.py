"""Megatron's own settings that offload: `offload[…]` on all layers alike, and `cpu_offloading/N`.

There are few, and each that could be the fastest is replayed with its copies. `cpu_offloading/N`
are the only policies in which layers leave as a whole. Megatron takes them on one pipeline stage,
without recompute, for the first layers and not for all. So the best of them is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.planner.cost.copies import copy_ps
from megatron_autorecompute.planner.cost.offloaded_step import host_link
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
from megatron_autorecompute.planner.cost.stage_times import residual_times, times_of
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.manual import (
    fits,
    manual_policy,
    manual_settings,
    may_fit,
)
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import NONE, WHOLE, MegatronStrategy, RecomputePolicy


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
                _least_ms(problem, policy)
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


def fastest_setting(
    problem: Problem, policies: Sequence[RecomputePolicy]
) -> RecomputePolicy | None:
    """The policy with the shortest step that fits, of some; None where none does."""
    best: tuple[RecomputePolicy, PolicyCost] | None = None
    for policy in policies:
        if best is not None and _least_ms(problem, policy) >= best[1].step_ms:
            continue
        if not may_fit(problem, policy):
            continue
        cost = problem.cost(policy)
        fitting = fits(problem, cost) and not host_over(problem, cost)
        if fitting and (best is None or cost.step_ms < best[1].step_ms):
            best = policy, cost
    return None if best is None else best[0]


def fastest_whole(problem: Problem) -> RecomputePolicy | None:
    """Megatron's fastest `cpu_offloading/N` that fits; None where none does."""
    return fastest_setting(problem, settings_of_whole_layers(problem))


def host_over(problem: Problem, cost: PolicyCost) -> int:
    """Bytes beyond what a device's copies may take of host memory, on all stages."""
    most = host_link(problem.profile).host_bytes
    return sum(max(0, own.host_bytes - most) for own in cost.stages)


def _least_ms(problem: Problem, policy: RecomputePolicy) -> float:
    """What its step does not take less than: what a stage computes, and all copies of whole
    layers, which share a stream."""
    layout, m = problem.layout, problem.schedule.num_microbatches
    table, link = problem.table, host_link(problem.profile)
    residual = residual_times(table, layout)
    busy_ps, copied_ps = times_of(table.units(layout, policy)).plus(residual).busy.max(), 0
    for layer in range(policy.layers.count(WHOLE)):
        record = table.record(layer, WHOLE)
        for group in () if record is None else record.offload_groups:
            copied_ps += copy_ps(group.host_bytes, link.to_host_gb_per_s)
            copied_ps += copy_ps(group.host_bytes, link.to_device_gb_per_s)
    return m * max(int(busy_ps), copied_ps) / PS_PER_MS
