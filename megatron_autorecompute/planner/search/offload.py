"""The shortest step where layers may also offload.

Copies couple what the searches of stages keep apart: a backward waits for its own copies, and
memory is free only when they have ended. So two simpler problems are solved exactly, and plans
between them are searched:

- *Relaxed*: copies take no time. Offload is then a choice like any other, and the exact search
  finds the shortest step. No policy has a shorter step with its waits.
- *Mixed*: a stage takes at least what it computes, and at least what it copies back, so at least
  any mixture of the two. The exact search finds the least mixture.
- The plans of both, and the plan without offload, are replayed with their copies. Then they are
  changed: spread over the layers of a chunk, and made leaner where copies under way took too much.

The larger of both bounds is what is proven. Copies back run one after the other; for each
microbatch and chunk one group of each name may be missing from them: the last group stays on the
device where the backward follows the forward at once, and the backward itself makes a copy that was
not begun in time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from megatron_autorecompute.planner.cost.copies import MOST_EVENTS, host_link
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
from megatron_autorecompute.planner.cost.stage_times import least_times, residual_times
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.manual import (
    fastest_setting,
    fastest_whole,
    host_over,
    may_offload,
    settings_of_modules,
    settings_of_whole_layers,
)
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.shortest import shortest
from megatron_autorecompute.planner.search.solution import Solution, proven
from megatron_autorecompute.planner.search.stage import Less, shrunk
from megatron_autorecompute.planner.search.stage_problem import OnlyChoices, put_together
from megatron_autorecompute.policy import WHOLE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord, HostLink, LayerKind, Profile
from megatron_autorecompute.units import gib
from megatron_autorecompute.work_order import contains

SHARES = (0.75, 0.5, 0.25)
"""The shares of computing in the mixtures that are tried; copies have the rest."""
WITH_OFFLOAD = "With offload"
"""How the sentence begins that says what offload gains."""
_REPAIRS = 5
"""Searches of leaner choices from one start: each costs up to three replays."""
_LESS = 32
"""Replays in which copies are left out that a found policy does not need."""
_WORK = 1 << 17
"""Events that a search replays."""
_REPLAYS = (24, 160)
"""The number of replays, at least and at most."""


class OffloadSearch:
    """The search of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.link = problem, host_link(problem.profile)

    @cached_property
    def relaxed(self) -> Problem:
        """The problem as if copies took no time."""
        return self._mixed(1.0)

    def _mixed(self, share: float) -> Problem:
        return replace(self.problem, profile=without_copies(self.problem.profile, self.link, share))

    def solve(self) -> Solution | None:
        """The best policy found under every stage's budget, and what is proven of it; None if
        nothing fits, even if copies took no time.

        It is never slower than any setting of Megatron's that fits, those that offload included.
        """
        without = without_offload(self.problem)
        plain = None if without is None else shortest(without)
        whole = fastest_whole(self.problem)
        found = self._by_groups(plain, whole)
        if whole is not None:
            found = self._or_whole(found, whole)
        plain_ms = math.inf if plain is None else plain.cost.step_ms
        return found and replace(found, without_offload_ms=plain_ms)

    def _or_whole(self, found: Solution | None, whole: RecomputePolicy) -> Solution:
        """What was found, or layers that leave as a whole if their step is shorter."""
        whole_ms = self.problem.cost(whole).step_ms
        if found is None:
            return proven(self.problem, whole, whole_ms, [whole])
        best = found.policy if found.cost.step_ms <= whole_ms else whole
        bound_ms = min(whole_ms, found.step_evidence.bound_ms or 0.0)
        return proven(self.problem, best, bound_ms, [whole])

    def _by_groups(self, plain: Solution | None, whole: RecomputePolicy | None) -> Solution | None:
        """The best where layers offload otherwise than as a whole, or not at all."""
        if not may_offload(self.problem, only_modules=True):
            return plain
        relaxed = shortest(self.relaxed)
        if relaxed is None:
            return None
        others = [] if whole is None else [whole]
        known = [*([] if plain is None else [plain.policy]), *others]
        bound_ms = relaxed.step_evidence.bound_ms or 0.0
        for policy in known:
            if self.problem.cost(policy).step_ms <= bound_ms:
                return proven(self.problem, policy, bound_ms, others)
        own = fastest_setting(self.problem, settings_of_modules(self.problem))
        known += [] if own is None else [own]
        starts = [*known, relaxed.policy]
        for share in SHARES:
            policy, bounds = self._start(share)
            starts.append(policy)
            bound_ms = max(bound_ms, *bounds)
        best = _Replays(self).best(starts, bound_ms)
        return None if best is None else proven(self.problem, best, bound_ms, others)

    def _start(self, share: float) -> tuple[RecomputePolicy, list[float]]:
        """The least busy choices in a mixture, and its bounds on the step in ms."""
        problem = self._mixed(share)
        choices = [
            stage.fastest(budget)
            for stage, budget in zip(problem.stages.all, problem.budgets, strict=True)
        ]
        found = [choice for choice in choices if choice is not None]
        policy = put_together(problem.layout, [own.policies for own in found])
        return policy, copy_bounds_ms(self.problem, share, [own.bound_ps for own in found])


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
    fitting = [found for found in costs if host_over(problem, found[1]) == 0]
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


def spread(problem: Problem, policy: RecomputePolicy, *, late: bool) -> RecomputePolicy:
    """Layers that offload between others of their kind, so that copies have time."""
    layers = list(policy.layers)
    for chunk in problem.layout.chunk_layers():
        for kind in problem.profile.kinds:
            movable = (i for i in chunk if layers[i].group == 1 and layers[i] != WHOLE)
            own = [i for i in movable if i in kind.layers]
            choices = sorted((layers[i] for i in own), key=lambda choice: not choice.offload)
            moved = sum(bool(choice.offload) for choice in choices)
            for index, choice in zip(own, _evenly(choices, moved, late=late), strict=True):
                layers[index] = choice
    return RecomputePolicy(tuple(layers))


class _Replays:
    """The search of one solve."""

    def __init__(self, search: OffloadSearch) -> None:
        self.search, self.problem = search, search.problem
        schedule = self.problem.schedule
        events = 2 * schedule.num_microbatches * schedule.num_chunks * schedule.num_stages
        least, most = _REPLAYS
        self.left = min(most, max(least, _WORK // min(events, MOST_EVENTS)))
        self.tried: set[RecomputePolicy] = set()
        self.found: tuple[RecomputePolicy, PolicyCost] | None = None
        """The policy with the fewest bytes too many and, among those, the shortest step."""

    def best(self, starts: Sequence[RecomputePolicy], bound_ms: float) -> RecomputePolicy | None:
        """The best that fits, from the starts on."""
        for start in starts:
            self._try(start)
        for start in starts:
            if not self._is_bound(bound_ms):
                self._improve(start)
        for start in starts:
            self._repair(start)
        self._keep_what_may_stay()
        return self.found[0] if self.found and not self._over(self.found[1]) else None

    def _keep_what_may_stay(self) -> None:
        """Leave out copies that neither time nor bytes need, of many layers at once and then of
        fewer."""
        self.left += _LESS
        layers = range(self.problem.profile.num_layers)
        size = len(layers)
        while size and self.found is not None:
            for first in layers[::size]:
                policy, cost = self.found
                changes = {
                    i: replace(policy.layers[i], offload=())
                    for i in layers[first : first + size]
                    if policy.layers[i].offload and policy.layers[i] != WHOLE
                }
                if not changes or not self._may(changes):
                    continue
                plain = _with(policy, changes)
                kept = self._try(plain)
                if kept is not None and self._key(kept) <= self._key(cost):
                    self.found = plain, kept
            size //= 2

    def _may(self, changes: dict[int, LayerPolicy]) -> bool:
        kind_of = self.problem.profile.kind_of
        return all(
            self.problem.allows(layer, choice) and kind_of(layer).record(choice) is not None
            for layer, choice in changes.items()
        )

    def _is_bound(self, bound_ms: float) -> bool:
        return self.found is not None and self._key(self.found[1]) <= (0, bound_ms)

    def _key(self, cost: PolicyCost) -> tuple[int, float]:
        return self._over(cost), cost.step_ms

    def _try(self, policy: RecomputePolicy) -> PolicyCost | None:
        """Its cost; it is the best from now on if it is better. None where no more is replayed."""
        if policy not in self.tried:
            if self.left <= 0:
                return None
            self.left -= 1
            self.tried.add(policy)
        cost = self.problem.cost(policy)
        if self.found is None or self._key(cost) < self._key(self.found[1]):
            self.found = policy, cost
        return cost

    def _over(self, cost: PolicyCost) -> int:
        """Bytes beyond the budgets, on devices and in host memory."""
        return sum(max(0, own) for own in self._over_each(cost)) + host_over(self.problem, cost)

    def _over_each(self, cost: PolicyCost) -> list[int]:
        """Bytes beyond every stage's budget, negative where it fits."""
        pairs = zip(cost.stages, self.problem.budgets, strict=True)
        return [own.peak_high_bytes - budget for own, budget in pairs]

    def _improve(self, policy: RecomputePolicy) -> None:
        for late in (False, True):
            self._try(spread(self.problem, policy, late=late))

    def _repair(self, start: RecomputePolicy) -> None:
        """Leaner choices where bytes of copies under way exceed the budgets."""
        alone = self.search.relaxed.cost(start).stages
        most = [
            min(own.peak_high_bytes, budget)
            for own, budget in zip(alone, self.problem.budgets, strict=True)
        ]

        def leaner(less: Less) -> PolicyCost | None:
            policy = self._chosen(most, less) if any(less) else start
            if policy is None:
                return None
            self._improve(policy)
            return self._try(policy)

        shrunk(leaner, self._over_each, lambda own: own.step_ms, len(most), _REPAIRS)

    def _chosen(self, most: Sequence[int], less: Less) -> RecomputePolicy | None:
        """The least busy choices with so many bytes less, as if copies took no time."""
        relaxed = self.search.relaxed
        choices = [
            stage.fastest(max(0, budget - own))
            for stage, budget, own in zip(relaxed.stages.all, most, less, strict=True)
        ]
        found = [choice.policies for choice in choices if choice is not None]
        return put_together(self.problem.layout, found) if len(found) == len(most) else None


def _with(policy: RecomputePolicy, changes: dict[int, LayerPolicy]) -> RecomputePolicy:
    layers = (changes.get(i, choice) for i, choice in enumerate(policy.layers))
    return RecomputePolicy(tuple(layers))


def _evenly(choices: list[LayerPolicy], moved: int, *, late: bool) -> Iterator[LayerPolicy]:
    """The first `moved` of some choices at even distances among the others, each at the begin or at
    the end of its share."""
    first, others, total = iter(choices[:moved]), iter(choices[moved:]), len(choices)

    def before(i: int) -> int:
        return i * moved // total if late else -(-i * moved // total)

    for i in range(total):
        yield next(first) if before(i + 1) > before(i) else next(others)


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
