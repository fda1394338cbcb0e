"""`solve`: the policy with the shortest step that fits each stage's memory.

Where both the device and the host may decide the step, it takes at least what either clock alone
takes. The exact search finds the least of each. Each plan is replayed with both clocks, and the
larger bound is proven. A mixture of both could bound more where the best plan of each clock is
decided by the other one; that was so in none of 276 random problems.

Copies to host memory couple what the searches of stages keep apart. So the problem is solved as if
they took no time, which bounds all, and again with a share of their time as the layers' own. What
is found is spread over the layers of a chunk, and replayed with its copies.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

from megatron_autorecompute.errors import InfeasibleError, OptionError
from megatron_autorecompute.planner.cost.copies import host_link
from megatron_autorecompute.planner.cost.two_clocks import knows_host, of_clock
from megatron_autorecompute.planner.search.manual import (
    fastest_that_fits,
    fits,
    has_room,
    may_offload,
    settings_of_modules,
    settings_of_whole_layers,
)
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import Solution, proven
from megatron_autorecompute.planner.search.stage import Less, shrunk
from megatron_autorecompute.planner.search.stage_problem import put_together
from megatron_autorecompute.planner.search.step import shortest
from megatron_autorecompute.policy import WHOLE, RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord, LayerKind
from megatron_autorecompute.units import gib, gib_needed
from megatron_autorecompute.work_order import contains

_PRICES = (0.01, 3.0)
"""Shares of a copy's time that count as the layer's own: what may stay does; and fewer copies."""
_TRIES = 5
"""Budgets that are tried; the plan of each is replayed up to twice."""
NEAR = 0.001
"""A step within this share of its bound is not searched further: it is below what is measured."""


def solve(problem: Problem) -> Solution:
    """Find the policy with the shortest step whose peak fits every stage, and prove it.

    Returns: the policy (one choice per layer), its cost (milliseconds and bytes, by stage), the
    proven distance of its step from the shortest one, and the least busy time of each stage.

    Raises: InfeasibleError if not even the leanest choices fit; it names the tightest stage.
    OptionError for anything else than a `Problem`.
    """
    if not isinstance(problem, Problem):
        raise OptionError(
            f"solve got {problem!r:.80}, and takes a Problem. Make one of a profile: "
            "Problem(profile, layout, schedule, budget)."
        )
    solution = try_solve(problem)
    if solution is None:
        raise _infeasible(problem)
    return solution


def try_solve(problem: Problem) -> Solution | None:
    """The solution, or None if nothing fits; for searches that try many problems."""
    if may_offload(problem):
        return shortest_with_offload(problem)
    search = shortest_of_clocks if knows_host(problem.profile) else shortest
    return search(problem)


def _infeasible(problem: Problem) -> InfeasibleError:
    leanest, budgets = problem.stages.leanest, problem.budgets
    over = [choice.peak_bytes - budget for choice, budget in zip(leanest, budgets, strict=True)]
    tightest = max(range(len(over)), key=over.__getitem__)
    budget, need = gib(budgets[tightest]), leanest[tightest].peak_bytes
    if over[tightest] <= 0:
        return InfeasibleError(
            f"The leanest choices fit the budget of {budget} GiB on stage {tightest} only if "
            "copies to host memory took no time; with activations that are to leave or are back "
            "early, and with host memory as it is, no policy was found that fits. Raise the "
            "budget, or host_link.host_bytes if that is what lacks."
        )
    lean = RecomputePolicy(leanest[tightest].policies[0])
    return InfeasibleError(
        f"Stage {tightest} needs {gib_needed(need)} GiB even with its leanest choices "
        f"({lean.format() or 'no layers'}{', …' * (problem.layout.num_chunks > 1)}); the budget "
        f"is {budget} GiB. Raise the budget, or change the model's split."
    )


def shortest_of_clocks(problem: Problem) -> Solution | None:
    """The best policy found under the problem's budgets, and what is proven of it; None if nothing
    fits."""
    found, bound_ms = list[RecomputePolicy](), 0.0
    for host in (False, True):
        solution = shortest(_on(problem, host))
        if solution is None:
            return None
        found.append(solution.policy)
        bound_ms = max(bound_ms, solution.step_evidence.bound_ms or 0.0)
        best = min(found, key=lambda own: problem.cost(own).step_ms)
        decides = problem.cost(solution.policy).is_host_bound == host
        if decides or problem.cost(best).step_ms <= (1 + NEAR) * bound_ms:
            break
    return proven(problem, best, bound_ms)


def deciding(problem: Problem) -> Problem:
    """The problem of the clock that decides where memory is free."""
    fastest = put_together(problem.layout, [own.policies for own in problem.stages.fastest])
    return _on(problem, problem.cost(fastest).is_host_bound)


def _on(problem: Problem, host: bool) -> Problem:
    """The problem of one clock, the device's or the host's."""
    return replace(problem, profile=of_clock(problem.profile, host))


def shortest_with_offload(problem: Problem) -> Solution | None:
    """The best policy found under every stage's budget, and what is proven of it; None if nothing
    fits, even if copies took no time.

    It is never slower than any setting of Megatron's that fits, those that offload included.
    """
    without = without_offload(problem)
    plain = None if without is None else shortest(without)
    relaxed = plain
    # The fastest setting of whole layers is exact, and the other bounds do not know it. It is that
    # of the fewest: where more leave, each must have left sooner, and is asked for later.
    whole = (policy for policy in settings_of_whole_layers(problem) if fits(problem, policy))
    others = [*itertools.islice(whole, 1)]
    known = others if plain is None else [*others, plain.policy]
    bounds = [problem.cost(policy).step_ms for policy in others]
    if may_offload(problem, only_modules=True):
        relaxed = shortest(without_copies(problem))
    if relaxed is not None:
        bounds.append(relaxed.step_evidence.bound_ms or 0.0)
        if relaxed is not plain and all(problem.cost(own).step_ms > bounds[-1] for own in known):
            known = [*known, *_by_modules(problem, relaxed.policy)]
    if not known:
        return None
    best = min(known, key=partial(_longer, problem))
    found = proven(problem, best, min(bounds, default=None))
    plain_ms = math.inf if plain is None else plain.cost.step_ms
    return replace(found, without_offload_ms=plain_ms)


def _longer(problem: Problem, policy: RecomputePolicy) -> tuple[float, int]:
    """What is to be the least: the step, then what is in host memory."""
    cost = problem.cost(policy)
    step_ms = cost.step_ms if has_room(problem, policy) else math.inf
    return step_ms, sum(stage.host_bytes for stage in cost.stages)


def _by_modules(problem: Problem, relaxed: RecomputePolicy) -> list[RecomputePolicy]:
    """The best policies that fit of which no layer leaves as a whole."""
    found = [fastest_that_fits(problem, settings_of_modules(problem))]
    found += [_with_dear_copies(problem, price) for price in _PRICES]
    found += [own for own in spreads(problem, relaxed) if fits(problem, own)]
    return [own for own in found if own is not None and has_room(problem, own)]


def _with_dear_copies(problem: Problem, price: float) -> RecomputePolicy | None:
    """The best policy found that truly fits, where a copy is made only for what it gains."""
    stages = without_copies(problem, price).stages.all
    first = [stage.fastest(budget) for stage, budget in zip(stages, problem.budgets, strict=True)]

    def search(less: Less) -> RecomputePolicy | None:
        choices = [
            stage.fastest(max(0, own.peak_bytes - fewer)) if own else None
            for stage, own, fewer in zip(stages, first, less, strict=True)
        ]
        found = [choice.policies for choice in choices if choice is not None]
        if len(found) < len(stages):
            return None
        policies = spreads(problem, put_together(problem.layout, found))
        return min(policies, key=lambda own: (max(0, *over(own)), longer(own)))

    def over(policy: RecomputePolicy) -> list[int]:
        pairs = zip(problem.cost(policy).stages, problem.budgets, strict=True)
        return [own.peak_high_bytes - budget for own, budget in pairs]

    longer = partial(_longer, problem)
    best: RecomputePolicy | None = shrunk(search, over, longer, len(stages), _TRIES)[0]
    return best


def without_offload(problem: Problem) -> Problem | None:
    """The problem if no layer offloaded; None where some layers can do nothing else."""
    plain = [
        {
            record.policy
            for record in kind.choices
            if not record.policy.offload
            and record.policy.group == 1
            and (problem.only.choices is None or record.policy in problem.only.choices)
        }
        for kind in problem.profile.kinds
    ]
    if not all(plain):
        return None
    only = replace(problem.only, choices=frozenset().union(*plain))
    return replace(problem, allowed=only.texts())


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


def without_copies(problem: Problem, price: float = 0.0) -> Problem:
    """The problem without copies; a share of the time of each copy back counts as the layer's. No
    choice takes less than one whose work it contains."""
    profile, link = problem.profile, host_link(problem.profile)

    def priced_ms(record: ChoiceRecord) -> float:
        copied_ms = record.host_bytes / (link.to_device_gb_per_s * 1e6)
        return record.forward_ms + record.backward_ms + price * copied_ms

    def changed(record: ChoiceRecord, kind: LayerKind) -> ChoiceRecord:
        if not record.policy.offload:
            return record
        below = [own for own in kind.choices if contains(record.policy, own.policy)]
        both_ms = max(map(priced_ms, [record, *below]))
        return replace(record, backward_ms=both_ms - record.forward_ms, offload_groups=())

    kinds = (replace(k, choices=tuple(changed(r, k) for r in k.choices)) for k in profile.kinds)
    return replace(problem, profile=replace(profile, kinds=tuple(kinds)))
