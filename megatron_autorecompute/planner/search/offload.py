"""The shortest step where layers may also offload.

Copies couple what the searches of stages keep apart: a backward waits for its own copies, and
memory is free only when they have ended. So two simpler problems are solved exactly, and plans
between them are searched:

- *Relaxed*: copies take no time. Offload is then a choice like any other, and the exact search
  finds the shortest step. No policy has a shorter step with its waits.
- *Mixed*: a stage takes at least what it computes, and at least what it copies back, so at least
  any mixture of the two. The exact search finds the least mixture.
- The plans of both, and the plan without offload, are replayed with their copies. Then they are
  changed: spread over the layers of a chunk, made leaner where copies under way took too much, and
  improved one layer after another.

The larger of both bounds is what is proven.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from megatron_autorecompute.planner.cost.offloaded_step import MOST_EVENTS, host_link
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
from megatron_autorecompute.planner.search.copy_bounds import copy_bounds_ms, mixed
from megatron_autorecompute.planner.search.evidence import proven
from megatron_autorecompute.planner.search.offload_settings import (
    fastest_setting,
    fastest_whole,
    host_over,
    may_offload,
    settings_of_modules,
    settings_of_whole_layers,
)
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.shortest import shortest
from megatron_autorecompute.planner.search.shrunk import Less, shrunk
from megatron_autorecompute.planner.search.solution import Solution
from megatron_autorecompute.planner.search.stage_problem import OnlyChoices, put_together
from megatron_autorecompute.policy import WHOLE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.units import gib

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
        return replace(self.problem, profile=mixed(self.problem.profile, self.link, share))

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
            own = [i for i in chunk if i in kind.layers and layers[i].group == 1]
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
        nearest = [] if self.found is None else [self.found[0]]
        for start in dict.fromkeys((*nearest, *starts)):
            self._climb(start, bound_ms)
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
                    if policy.layers[i].offload
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

    def _climb(self, policy: RecomputePolicy, bound_ms: float) -> None:
        """Change one thing after another for as long as that makes a policy better."""
        cost, better = self._try(policy), True
        while cost is not None and better and not self._is_bound(bound_ms):
            better = False
            for other in self._neighbours(policy):
                changed = self._try(other)
                if changed is not None and self._key(changed) < self._key(cost):
                    policy, cost, better = other, changed, True
                    break

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

    def _neighbours(self, policy: RecomputePolicy) -> Iterator[RecomputePolicy]:
        """The policy with another choice at one layer, or with the choices of two layers of a kind
        exchanged.

        Changes that differ only in where they are come in turn, as most are alike: each at the
        first of its places, then each at the last, in the middle, and so on; less work at a layer
        first.
        """
        alike: dict[tuple[object, ...], list[dict[int, LayerPolicy]]] = {}
        for kind in self.problem.profile.kinds:
            own = [i for i in kind.layers if policy.layers[i].group == 1]
            for index in own:
                choice = policy.layers[index]
                for other in self._choices(index):
                    if other != choice:
                        alike.setdefault((kind.name, choice, other), []).append({index: other})
            for first, second in itertools.combinations(own, 2):
                one, two = policy.layers[first], policy.layers[second]
                if one != two and (one.offload or two.offload):
                    change = {first: two, second: one}
                    alike.setdefault((kind.name, one, two, "exchanged"), []).append(change)
        for turn in itertools.zip_longest(*map(_spread, alike.values())):
            yield from (_with(policy, change) for change in turn if change is not None)

    def _choices(self, layer: int) -> Sequence[LayerPolicy]:
        kind = self.problem.profile.kind_of(layer)
        records = sorted(kind.choices, key=lambda record: record.forward_ms + record.backward_ms)
        singles = (record.policy for record in records if record.policy.group == 1)
        single = (choice for choice in singles if choice != WHOLE)
        return [choice for choice in single if self.problem.allows(layer, choice)]


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


_Change = TypeVar("_Change")


def _spread(changes: list[_Change]) -> Iterator[_Change]:
    """All, the first, the last and the middle ones first."""
    taken, size = set[int](), len(changes)
    parts = 1
    while len(taken) < size:
        for part in range(parts + 1):
            at = part * (size - 1) // parts
            if at not in taken:
                taken.add(at)
                yield changes[at]
        parts *= 2
