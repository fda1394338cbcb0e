"""The shortest step where layers may also offload.

Copies couple what stages' searches keep apart: a backward waits for its own copies, and memory is
free only when they have ended. So two things are solved exactly, and what lies between is searched:

- *Relaxed*: copies take no time. Offload is then a choice like any other, and the exact search
  finds the shortest step; no policy has a shorter one with its waits.
- *Mixed*: a stage takes at least what it computes, and at least what it copies back, so at least
  any mixture of the two, whose least the exact search finds, too.
- What these find, and what is found without offload, is replayed with its copies: spread over the
  layers of a chunk, leaner where copies under way took too much, one layer changed after another.

The larger of both bounds is what is proven.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from megatron_autorecompute.planner.cost.offloaded_step import MOST_EVENTS, host_link
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost
from megatron_autorecompute.planner.search.copy_bounds import CopyBounds, mixed
from megatron_autorecompute.planner.search.offload_settings import Found, OffloadSettings
from megatron_autorecompute.planner.search.stage_problem import OnlyChoices, put_together
from megatron_autorecompute.policy import WHOLE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.units import gib

if TYPE_CHECKING:
    from megatron_autorecompute.planner.search.solve import Planner, Solution

SHARES = (0.75, 0.5, 0.25)
"""Of computing in the mixtures that are tried; copies have the rest."""
WITH_OFFLOAD = "With offload"
"""How the sentence begins that says what offload gains."""
_REPAIRS = (1, 2, 4, 8)
"""How many times what is too much is taken off what was needed without copies, in turn."""
_POINTS = 24
_LESS = 32
"""Replays in which copies are left out that a found policy does not need."""
_WORK = 1 << 17
"""Events that a search replays."""
_REPLAYS = (24, 160)
"""At least and at most, whatever they cost."""


class OffloadSearch:
    """Searches one planner's problem, for any number of budgets."""

    def __init__(self, planner: Planner) -> None:
        self.planner, self.link = planner, host_link(planner.profile)
        self.settings = OffloadSettings(planner, self.link)
        self._bounds = CopyBounds(planner.profile, planner.layout, planner.schedule, self.link)

    @cached_property
    def relaxed(self) -> Planner:
        """A planner for which copies take no time."""
        return self.planner.replaced(profile=mixed(self.planner.profile, self.link, 1.0))

    @cached_property
    def without(self) -> Planner | None:
        """A planner without offload; None where some layers can do nothing else."""
        only = self.planner.only
        kinds = [{record.policy for record in kind.choices} for kind in self.planner.profile.kinds]
        if only is not None:
            kinds = [{c for c in choices if c in only.choices} for choices in kinds]
        plain = [{c for c in choices if not c.offload and c.group == 1} for choices in kinds]
        if not all(plain):
            return None
        groups = only is None or only.groups
        return self.planner.replaced(allowed=OnlyChoices(frozenset().union(*plain), groups))

    @cached_property
    def _mixed(self) -> dict[float, Planner]:
        profile = self.planner.profile
        return {
            share: self.planner.replaced(profile=mixed(profile, self.link, share))
            for share in SHARES
        }

    def solve(self, budgets: Sequence[int]) -> Solution | None:
        """The best policy found under every stage's budget, and what is proven of it; None if
        nothing fits, even if copies took no time.

        It is never slower than any setting of Megatron's that fits, those that offload included.
        """
        whole = self.fastest_whole(budgets)
        found = self._solved_by_groups(budgets, whole) if self._has_groups else self._plain(budgets)
        if whole is None:
            return found
        policy, cost = whole
        bounds_ms = [cost.step_ms]
        if found is not None:
            bounds_ms.append(found.step_evidence.bound_ms or 0.0)
            if found.cost.step_ms <= cost.step_ms:
                policy, cost = found.policy, found.cost
        return self.planner.proven(policy, cost, budgets, min(bounds_ms))

    def fastest_whole(self, budgets: Sequence[int]) -> Found | None:
        """Megatron's fastest `cpu_offloading/N` that fits; None where none does."""
        return self.settings.fastest(self.settings.of_whole_layers, budgets)

    def leanest_whole(self) -> Found | None:
        """Megatron's `cpu_offloading/N` with the lowest peak that host memory has room for."""
        costs = ((one, self.planner.evaluate(one)) for one in self.settings.of_whole_layers)
        fitting = [found for found in costs if self.host_over(found[1]) == 0]
        return min(fitting, key=lambda found: found[1].peak_high_bytes, default=None)

    def _plain(self, budgets: Sequence[int]) -> Solution | None:
        return None if self.without is None else self.without.try_solve(budgets)

    @cached_property
    def _has_groups(self) -> bool:
        """Whether a layer may offload otherwise than as a whole."""
        kinds = [kind for kind in self.planner.profile.kinds if kind.layers]
        return any(
            record.offload_groups
            and record.policy != WHOLE
            and self.planner.allows(kind.layers[0], record.policy)
            for kind in kinds
            for record in kind.choices
        )

    def _solved_by_groups(self, budgets: Sequence[int], whole: Found | None) -> Solution | None:
        relaxed = self.relaxed.try_solve(budgets)
        if relaxed is None:
            return None
        plain = self._plain(budgets)
        bound_ms = relaxed.step_evidence.bound_ms or 0.0
        known = [] if plain is None else [(plain.policy, plain.cost)]
        for policy, cost in [*known, *([] if whole is None else [whole])]:
            if cost.step_ms <= bound_ms:
                return self.planner.proven(policy, cost, budgets, bound_ms)
        own = self.settings.fastest(self.settings.of_modules, budgets)
        known += [] if own is None else [own]
        starts = [*(policy for policy, _ in known), relaxed.policy]
        for share, planner in self._mixed.items():
            choices = [planner.choose(stage, budget) for stage, budget in enumerate(budgets)]
            found = [choice for choice in choices if choice is not None]
            starts.append(put_together(self.planner.layout, [own.policies for own in found]))
            bounds = self._bounds.of(share, [own.bound_ps for own in found])
            bound_ms = max(bound_ms, *bounds)
        best = _Replays(self, budgets).best(starts, bound_ms)
        if best is None:
            return None
        policy, cost = best
        return self.planner.proven(policy, cost, budgets, min(bound_ms, cost.step_ms))

    def bought(self, cost: PolicyCost, budgets: Sequence[int]) -> str:
        """The sentence that says what offload gains at these budgets."""
        plain = self._plain(budgets)
        host = gib(max(stage.host_bytes for stage in cost.stages))
        if not any(stage.host_bytes for stage in cost.stages):
            return f"{WITH_OFFLOAD} nothing faster was found at these budgets: the plan has none."
        return (
            f"{WITH_OFFLOAD} the step takes {cost.step_ms:,.1f} ms, of which it waits "
            f"{cost.stall_ms:,.1f} ms for copies, and takes {host} GiB of host memory per device; "
            "without it "
            f"{'nothing fits' if plain is None else f'{plain.cost.step_ms:,.1f} ms'}, at these "
            f"budgets, with {self.link.to_host_gb_per_s:g} GB/s to host memory and "
            f"{self.link.to_device_gb_per_s:g} GB/s back."
        )

    def curve(
        self, points: int, progress: Callable[[float], None]
    ) -> list[tuple[int, float, RecomputePolicy]]:
        """Peak, milliseconds and policy, highest peak first: of policies that are found without
        offload or where copies take no time, replayed with their copies."""
        relaxed = self.relaxed.pareto(min(points, _POINTS), lambda share: progress(share / 2))
        plain = () if self.without is None else self.without.pareto(points)
        policies = dict.fromkeys(point.policy for point in (*relaxed, *plain))
        spread = [self.spread(policy, late=late) for policy in policies for late in (False, True)]
        replayed = []
        spread += self.settings.of_whole_layers + self.settings.of_modules
        for number, policy in enumerate(dict.fromkeys((*policies, *spread))):
            cost = self.planner.evaluate(policy)
            if self.host_over(cost) == 0:
                replayed.append((cost.peak_high_bytes, cost.step_ms, policy))
            progress(0.5 + 0.5 * (number + 1) / (len(policies) + len(spread)))
        curve = list[tuple[int, float, RecomputePolicy]]()
        for point in sorted(replayed, key=lambda point: point[:2]):
            if not curve or point[1] < curve[-1][1]:
                curve.append(point)
        return curve[::-1]

    def host_over(self, cost: PolicyCost) -> int:
        """Bytes beyond what a device's copies may take of host memory, on all stages."""
        return sum(max(0, own.host_bytes - self.link.host_bytes) for own in cost.stages)

    def spread(self, policy: RecomputePolicy, *, late: bool) -> RecomputePolicy:
        """Layers that offload between others of their kind, so that copies have time."""
        layers = list(policy.layers)
        for chunk in self.planner.layout.chunk_layers():
            for kind in self.planner.profile.kinds:
                own = [i for i in chunk if i in kind.layers and layers[i].group == 1]
                choices = sorted((layers[i] for i in own), key=lambda choice: not choice.offload)
                moved = sum(bool(choice.offload) for choice in choices)
                for index, choice in zip(own, _evenly(choices, moved, late=late), strict=True):
                    layers[index] = choice
        return RecomputePolicy(tuple(layers))


class _Replays:
    """The search of one solve."""

    def __init__(self, search: OffloadSearch, budgets: Sequence[int]) -> None:
        self.search, self.budgets, self.planner = search, budgets, search.planner
        schedule = self.planner.schedule
        events = 2 * schedule.num_microbatches * schedule.num_chunks * schedule.num_stages
        least, most = _REPLAYS
        self.left = min(most, max(least, _WORK // min(events, MOST_EVENTS)))
        self.tried: set[RecomputePolicy] = set()
        self.found: tuple[RecomputePolicy, PolicyCost] | None = None
        """That needs the fewest bytes too many, and has the shortest step among those."""

    def best(
        self, starts: Sequence[RecomputePolicy], bound_ms: float
    ) -> tuple[RecomputePolicy, PolicyCost] | None:
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
        return self.found if self.found and not self._over(self.found[1]) else None

    def _keep_what_may_stay(self) -> None:
        """Leave out copies that neither time nor bytes need, of many layers at once and then of
        fewer."""
        self.left += _LESS
        layers = range(self.planner.profile.num_layers)
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
        kind_of = self.planner.profile.kind_of
        return all(
            self.planner.allows(layer, choice) and kind_of(layer).record(choice) is not None
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
        cost = self.planner.evaluate(policy)
        if self.found is None or self._key(cost) < self._key(self.found[1]):
            self.found = policy, cost
        return cost

    def _over(self, cost: PolicyCost) -> int:
        """Bytes beyond the budgets, on devices and in host memory."""
        pairs = zip(cost.stages, self.budgets, strict=True)
        over = sum(max(0, own.peak_high_bytes - budget) for own, budget in pairs)
        return over + self.search.host_over(cost)

    def _improve(self, policy: RecomputePolicy) -> None:
        for other in dict.fromkeys(
            (self.search.spread(policy, late=False), self.search.spread(policy, late=True))
        ):
            if other != policy:
                self._try(other)

    def _repair(self, policy: RecomputePolicy) -> None:
        """Leaner choices where bytes of copies under way exceed the budget, by more each time."""
        relaxed, budgets = self.search.relaxed, list(self.budgets)
        for factor in _REPAIRS:
            cost = self._try(policy)
            if cost is None or not self._over(cost):
                return
            free = relaxed.evaluate(policy)
            for stage, (own, alone) in enumerate(zip(cost.stages, free.stages, strict=True)):
                over = own.peak_high_bytes - self.budgets[stage]
                if over > 0:
                    budgets[stage] = min(budgets[stage], alone.peak_high_bytes) - factor * over
            choices = [
                relaxed.choose(stage, max(budget, 0)) for stage, budget in enumerate(budgets)
            ]
            found = [choice for choice in choices if choice is not None]
            if len(found) < len(budgets):
                return
            policy = put_together(self.planner.layout, [own.policies for own in found])
            self._improve(policy)
        self._try(policy)

    def _neighbours(self, policy: RecomputePolicy) -> Iterator[RecomputePolicy]:
        """The policy with another choice at one layer, or with the choices of two layers of a kind
        exchanged.

        Changes that differ only in where they are come in turn, as most are alike: each at the
        first of its places, then each at the last, in the middle, and so on; less work at a layer
        first.
        """
        alike: dict[tuple[object, ...], list[dict[int, LayerPolicy]]] = {}
        for kind in self.planner.profile.kinds:
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
        kind = self.planner.profile.kind_of(layer)
        records = sorted(kind.choices, key=lambda record: record.forward_ms + record.backward_ms)
        singles = (record.policy for record in records if record.policy.group == 1)
        single = (choice for choice in singles if choice != WHOLE)
        return [choice for choice in single if self.planner.allows(layer, choice)]


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
