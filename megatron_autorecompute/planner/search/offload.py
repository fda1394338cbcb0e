"""The shortest step where layers may also offload.

Copies couple what the searches of stages keep apart: a backward waits for its own copies, and
memory is free only when they have ended. So a simpler problem is solved exactly, for some mixtures,
and replayed with its copies:

- A stage takes at least what it computes, and at least what it copies back, so at least any mixture
  of the two. The exact search finds the least mixture. If it is all computing, no policy has a
  shorter step with its waits; if nearly all, what may stay stays.
- What is found is spread over the layers of a chunk. Where copies under way take too much, the
  budget is lowered until the true peak fits (`stage.shrunk`).

The largest bound is what is proven. Copies back run one after the other; for each microbatch and
chunk one group of each name may be missing from them: the last group stays on the device where the
backward follows the forward at once, and the backward itself makes a copy that was not begun in
time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from megatron_autorecompute.planner.cost.copies import host_link
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
from megatron_autorecompute.planner.cost.stage_times import least_times, residual_times
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.manual import (
    fastest_that_fits,
    fastest_whole,
    fits,
    has_room,
    may_offload,
    settings_of_modules,
    settings_of_whole_layers,
)
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import Solution, proven
from megatron_autorecompute.planner.search.stage import Less, shrunk
from megatron_autorecompute.planner.search.stage_problem import OnlyChoices, put_together
from megatron_autorecompute.planner.search.step import shortest
from megatron_autorecompute.policy import WHOLE, RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord, HostLink, LayerKind, Profile
from megatron_autorecompute.units import gib
from megatron_autorecompute.work_order import contains

SHARES = (0.99, 0.5, 0.25)
"""The shares of computing in the mixtures that are tried; copies have the rest."""
WITH_OFFLOAD = "With offload"
"""How the sentence begins that says what offload gains."""
_TRIES = 5
"""Budgets that are tried for one mixture; the plan of each is replayed up to twice."""


def shortest_with_offload(problem: Problem) -> Solution | None:
    """The best policy found under every stage's budget, and what is proven of it; None if nothing
    fits, even if copies took no time.

    It is never slower than any setting of Megatron's that fits, those that offload included.
    """
    without = without_offload(problem)
    plain = None if without is None else shortest(without)
    whole = fastest_whole(problem)
    others = [] if whole is None else [whole]
    known = others if plain is None else [*others, plain.policy]
    if may_offload(problem, only_modules=True):
        bound_ms, known = _by_modules(problem, known)
    else:
        bound_ms = None if plain is None else plain.step_evidence.bound_ms
    if not known:
        return None
    # The fastest setting of whole layers is exact, and the other bounds do not know it.
    bounds = [problem.cost(policy).step_ms for policy in others]
    bounds += [] if bound_ms is None else [bound_ms]
    best = min(known, key=partial(_longer, problem))
    found = proven(problem, best, min(bounds, default=None), others)
    plain_ms = math.inf if plain is None else plain.cost.step_ms
    return replace(found, without_offload_ms=plain_ms)


def _longer(problem: Problem, policy: RecomputePolicy) -> tuple[float, int]:
    """What is to be the least: the step, then what is in host memory."""
    cost = problem.cost(policy)
    step_ms = cost.step_ms if has_room(problem, policy) else math.inf
    return step_ms, sum(stage.host_bytes for stage in cost.stages)


def _by_modules(
    problem: Problem, known: Sequence[RecomputePolicy]
) -> tuple[float | None, list[RecomputePolicy]]:
    """A bound in ms on policies of which no layer leaves as a whole, and the best that fit."""
    relaxed = shortest(mixed(problem, 1.0))
    if relaxed is None:
        return None, [*known]
    bound_ms = relaxed.step_evidence.bound_ms or 0.0
    if any(problem.cost(policy).step_ms <= bound_ms for policy in known):
        return bound_ms, [*known]
    own = fastest_that_fits(problem, settings_of_modules(problem))
    found = [*known, *([] if own is None else [own])]
    found += [policy for policy in spreads(problem, relaxed.policy) if fits(problem, policy)]
    for share in SHARES:
        policy, bounds = _least_mixture(problem, share)
        found += [] if policy is None else [policy]
        bound_ms = max(bound_ms, *bounds)
    return bound_ms, found


def _least_mixture(
    problem: Problem, share: float
) -> tuple[RecomputePolicy | None, Sequence[float]]:
    """The best policy of the least mixtures that truly fits, and bounds on the step in ms."""
    stages = mixed(problem, share).stages.all
    first = [stage.fastest(budget) for stage, budget in zip(stages, problem.budgets, strict=True)]
    least = [choice for choice in first if choice is not None]

    def search(less: Less) -> RecomputePolicy | None:
        budgets = [max(0, own.peak_bytes - fewer) for own, fewer in zip(least, less, strict=True)]
        choices = [stage.fastest(budget) for stage, budget in zip(stages, budgets, strict=True)]
        found = [choice for choice in choices if choice is not None]
        if len(found) < len(stages):
            return None
        policy = put_together(problem.layout, [choice.policies for choice in found])
        return min(spreads(problem, policy), key=lambda own: (max(0, *over(own)), longer(own)))

    def over(policy: RecomputePolicy) -> list[int]:
        pairs = zip(problem.cost(policy).stages, problem.budgets, strict=True)
        return [own.peak_high_bytes - budget for own, budget in pairs]

    def longer(policy: RecomputePolicy) -> tuple[float, int]:
        return _longer(problem, policy)

    best: RecomputePolicy | None = shrunk(search, over, longer, len(stages), _TRIES)[0]
    fitting = best is not None and has_room(problem, best)
    bounds = copy_bounds_ms(problem, share, [choice.bound_ps for choice in least])
    return best if fitting else None, bounds


def without_offload(problem: Problem) -> Problem | None:
    """The problem if no layer offloaded; None where some layers can do nothing else."""
    kinds = [{record.policy for record in kind.choices} for kind in problem.profile.kinds]
    if problem.only is not None and not problem.only.every:
        kinds = [{c for c in choices if c in problem.only.choices} for choices in kinds]
    plain = [{c for c in choices if not c.offload and c.group == 1} for choices in kinds]
    if not all(plain):
        return None
    given = problem.only
    groups = given is None or given.groups or given.every
    only = OnlyChoices(frozenset().union(*plain), groups, given is not None and given.ahead)
    return replace(problem, allowed=only.texts())


def leanest_whole(problem: Problem) -> tuple[RecomputePolicy, PolicyCost] | None:
    """Megatron's `cpu_offloading/N` with the lowest peak that host memory has room for."""
    costs = ((one, problem.cost(one)) for one in settings_of_whole_layers(problem))
    fitting = [found for found in costs if has_room(problem, found[0])]
    return min(fitting, key=lambda found: found[1].peak_high_bytes, default=None)


def bought(problem: Problem, solution: Solution) -> str:
    """The sentence that says what offload gains at these budgets."""
    cost, plain_ms, link = solution.cost, solution.without_offload_ms, host_link(problem.profile)
    if plain_ms is None or not any(stage.host_bytes for stage in cost.stages):
        return f"{WITH_OFFLOAD} nothing faster was found at these budgets: the plan has none."
    host = gib(max(stage.host_bytes for stage in cost.stages))
    return (
        f"{WITH_OFFLOAD} the step takes {cost.step_ms:,.1f} ms, of which it waits "
        f"{cost.stall_ms:,.1f} ms for copies, and takes {host} GiB of host memory per device; "
        "without it "
        f"{'nothing fits' if math.isinf(plain_ms) else f'{plain_ms:,.1f} ms'}, at these "
        f"budgets, with {link.to_host_gb_per_s:g} GB/s to host memory and "
        f"{link.to_device_gb_per_s:g} GB/s back."
    )


def spreads(problem: Problem, policy: RecomputePolicy) -> list[RecomputePolicy]:
    """The policy, and that with its layers that offload at even distances among others of their
    kind in a chunk, so that copies have time."""
    layers = list(policy.layers)
    for chunk in problem.layout.chunk_layers():
        for kind in problem.profile.kinds:
            movable = (i for i in chunk if layers[i].group == 1 and layers[i] != WHOLE)
            own = [i for i in movable if i in kind.layers]
            moved = iter([layers[i] for i in own if layers[i].offload])
            others = iter([layers[i] for i in own if not layers[i].offload])
            number = sum(bool(layers[i].offload) for i in own)
            for at, index in enumerate(own):
                is_moved = (at + 1) * number // len(own) > at * number // len(own)
                layers[index] = next(moved if is_moved else others)
    return [policy, RecomputePolicy(tuple(layers))]


def mixed(problem: Problem, share: float) -> Problem:
    """The problem without copies, whose times are mixtures; as if copies took no time where all
    is computing."""
    return replace(
        problem, profile=without_copies(problem.profile, host_link(problem.profile), share)
    )


_ROUNDED_PS = 2
"""The time by which a unit's mixed time may be rounded up."""


def without_copies(profile: Profile, link: HostLink, share: float) -> Profile:
    """The profile without copies; times are the share of what is computed, and the rest of what is
    copied back. Where more recompute would then take less, its time is that of less, too."""

    def scaled(record: ChoiceRecord, least: float = 1.0) -> ChoiceRecord:
        copied_ms = (1 - share) * least * _back_ms(record.host_bytes, link)
        return replace(
            record,
            forward_ms=share * record.forward_ms,
            backward_ms=share * record.backward_ms + copied_ms,
            offload_groups=(),
        )

    def of_kind(kind: LayerKind) -> LayerKind:
        least = min([1.0, *(point.factor for point in kind.imbalance)])
        records = [scaled(record, least) for record in kind.choices]
        return replace(kind, choices=tuple(records if share == 1 else _lowered(records)))

    norm = profile.final_norm
    return replace(
        profile,
        kinds=tuple(map(of_kind, profile.kinds)),
        embedding=scaled(profile.embedding),
        head=scaled(profile.head),
        final_norm=None if norm is None else scaled(norm),
    )


def _lowered(records: Sequence[ChoiceRecord]) -> Iterator[ChoiceRecord]:
    """Times that are lowered until no choice takes longer than those that contain its work."""
    for record in records:
        above = [one for one in records if contains(one.policy, record.policy)]
        time_ms = record.forward_ms + record.backward_ms
        least_ms = min((one.forward_ms + one.backward_ms for one in above), default=time_ms)
        share = min(1.0, least_ms / time_ms) if time_ms else 1.0
        forward_ms, backward_ms = share * record.forward_ms, share * record.backward_ms
        yield replace(record, forward_ms=forward_ms, backward_ms=backward_ms)


def copy_bounds_ms(problem: Problem, share: float, least_ps: Sequence[int]) -> list[float]:
    """Milliseconds that a step takes at least, by every stage.

    Args:
        problem: with its copies.
        share: the share of computing in the mixture.
        least_ps: of every stage, what no choices that fit go below in the mixture, for one
            microbatch.
    """
    table, layout, m = problem.table, problem.layout, problem.schedule.num_microbatches
    residual = residual_times(table, layout).busy.tolist()
    ahead_ps, found = 0, list[float]()
    for stage, chunks in enumerate(layout.stages):
        rounded = _ROUNDED_PS * sum(len(chunk.layers) + 4 for chunk in chunks)
        each_ps = least_ps[stage] - rounded + share * min(0, residual[stage])
        skipped = (1 - share) * _skipped_ms(problem, stage)
        found.append((ahead_ps + m * each_ps) / PS_PER_MS - skipped)
        ahead_ps += sum(least_times(table, chunks[0]))
    return found


def _skipped_ms(problem: Problem, stage: int) -> float:
    """The most that all microbatches' copies may be less than their sum."""
    schedule = problem.schedule
    m, last = schedule.num_microbatches, stage == schedule.num_stages - 1
    times = m if last or schedule.num_chunks > 1 else 1
    chunks = [_longest_ms(problem, chunk.layers) for chunk in problem.layout.stages[stage]]
    return (times + 1) * sum(chunks)


def _longest_ms(problem: Problem, layers: Sequence[int]) -> float:
    """The longest copy of each name in a chunk, together."""
    longest: dict[str, float] = {}
    for layer in layers:
        for choice in problem.table.choices(layer):
            record = problem.table.record(layer, choice)
            for group in () if record is None else record.offload_groups:
                time_ms = _back_ms(group.host_bytes, host_link(problem.profile))
                longest[group.name] = max(time_ms, longest.get(group.name, 0.0))
    return sum(longest.values())


def _back_ms(host_bytes: int, link: HostLink) -> float:
    return host_bytes / (link.to_device_gb_per_s * 1e6)
