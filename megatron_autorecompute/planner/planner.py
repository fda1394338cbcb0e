"""The fastest recompute policy that fits each stage's memory, and what surrounds that answer.

Stages are independent given the schedule: each is given the choices with the least busy time under
its own budget, found exactly by `stage_search`. Every event of the replay can only start earlier
when an event takes less time, so no stage is worth slowing down. Of equally fast splits of a
stage's time over its chunks `chunk_splits` looks for one with a shorter bubble, without a proof.

The budget is bytes that torch may allocate, and is met by the high end of every uncertain figure.
This module does not measure, nor does it know devices: what lies outside torch is the caller's
to subtract.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Literal

import numpy as np

from megatron_autorecompute.errors import InfeasibleError, PolicyError, ProfileError
from megatron_autorecompute.megatron_fields import (
    RUNS_FOREVER,
    has_linear_bias,
    runs_forever,
)
from megatron_autorecompute.planner.arrays import Ints
from megatron_autorecompute.planner.chunk_splits import put_together, rearranged
from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.planner.peak_memory import (
    StageBase,
    check_figures,
    check_layout,
    stage_base,
    stage_moments,
)
from megatron_autorecompute.planner.policy_cost import PolicyCost, evaluate
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.planner.stage_search.problem import (
    ChunkProblem,
    OnlyChoices,
    StageChoice,
    chunk_problem,
    stage_problem,
)
from megatron_autorecompute.planner.stage_search.search import Effort, StageSearch
from megatron_autorecompute.planner.unit_costs import PS_PER_MS, CostTable
from megatron_autorecompute.policy import FULL, LayerPolicy, MegatronStrategy, RecomputePolicy
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.units import gib

MOST_MODULES = 9
"""Megatron has no more. Of a profile with more, only the recorded sets are looked at."""
Budget = int | Sequence[int]
Percentile = float | None | Literal["stated"]


NOTHING_BINDS = "nothing: every layer has its fastest choice"


@dataclass(frozen=True, slots=True)
class StageEvidence:
    """Why a stage's choices are the best ones."""

    stage: int
    budget_bytes: int
    objective_ms: float
    """Forward plus backward of one microbatch through the stage, the figure minimised."""
    bound_ms: float | None
    """No choices that fit the budget are faster; None where nobody has worked out a bound."""
    gap: float | None
    """(objective - bound) / objective; 0 is proven optimal, None is not known."""
    peak_high_bytes: int
    """What was kept within the budget."""
    binding: str
    """The moment whose memory keeps the stage from a faster choice, or that nothing does."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A policy, what it costs, and the proof per stage."""

    policy: RecomputePolicy
    cost: PolicyCost
    evidence: tuple[StageEvidence, ...]


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One point of time against budget."""

    budget_bytes: int
    step_ms: float
    peak_high_bytes: int
    policy: RecomputePolicy


@dataclass(frozen=True, slots=True)
class ManualStrategy:
    """One of Megatron's own settings in the same model."""

    name: str
    """As `RecomputePolicy.parse` reads it: megatron:block/4, ..."""
    policy: RecomputePolicy | None
    cost: PolicyCost | None
    """None where Megatron refuses the setting or the profile lacks a record; see refused."""
    fits: bool
    refused: str = ""


class Planner:
    """Solves one profile, layout and schedule for any number of budgets.

    Args:
        percentile: of imbalance to budget for, in percent. None takes the records as they are: of
            measured ones the most that was seen, of others what they were made for. "stated" is
            `Profile.stated_percentile`.
        allowed: the choices that may be used, or their texts, `full/N` standing for all groups;
            None allows every recorded one.
        effort: how much work a search may be.

    Raises: ProfileError where profile, layout and schedule do not belong together; PolicyError for
    a text of `allowed` that is no choice.
    """

    def __init__(
        self,
        profile: Profile,
        layout: Layout,
        schedule: Schedule,
        *,
        percentile: Percentile = "stated",
        allowed: OnlyChoices | Iterable[str] | None = None,
        effort: Effort | None = None,
    ) -> None:
        check_layout(profile, layout, schedule)
        check_figures(profile, layout, schedule)
        self.profile, self.layout, self.schedule = profile, layout, schedule
        self.percentile = profile.stated_percentile if percentile == "stated" else percentile
        if allowed is not None and not isinstance(allowed, OnlyChoices):
            allowed = OnlyChoices.parse(allowed)
        self.only = allowed
        self._effort = effort
        self._table = CostTable(profile, self.percentile, "high")
        self._solved: dict[int, dict[int, StageChoice]] = {}

    def replaced(
        self,
        *,
        profile: Profile | None = None,
        layout: Layout | None = None,
        schedule: Schedule | None = None,
    ) -> Planner:
        """The same question of another profile, layout or schedule."""
        return Planner(
            profile or self.profile,
            layout or self.layout,
            schedule or self.schedule,
            percentile=self.percentile,
            allowed=self.only,
        )

    @property
    def allowed(self) -> tuple[str, ...] | None:
        """Texts of the choices that may be used; None allows every recorded one."""
        return None if self.only is None else self.only.texts()

    def allows(self, layer: int, choice: LayerPolicy) -> bool:
        """Whether a layer may have a choice."""
        return self.only is None or self.only.allow(self._table, layer, choice)

    @cached_property
    def searches(self) -> tuple[StageSearch, ...]:
        """The search of every stage."""
        return tuple(self._search(stage) for stage in range(self.layout.num_stages))

    def _search(self, stage: int) -> StageSearch:
        base = stage_base(self.profile, self.layout, stage, "high")
        chunks = [self._chunk(stage, c, base) for c in range(self.layout.num_chunks)]
        problem = stage_problem(chunks, stage_moments(self.profile, self.schedule, stage), base)
        return StageSearch(problem, self._effort)

    def _chunk(self, stage: int, index: int, base: StageBase) -> ChunkProblem:
        return chunk_problem(self._table, self.layout.stages[stage][index], base, self.only)

    @cached_property
    def leanest(self) -> tuple[StageChoice, ...]:
        """Per stage, the choices with the lowest peak."""
        return tuple(search.leanest for search in self.searches)

    @cached_property
    def fastest(self) -> tuple[StageChoice, ...]:
        """Per stage, the fastest choices when memory is no limit."""
        found = (search.fastest(1 << 60) for search in self.searches)
        return tuple(choice for choice in found if choice is not None)

    def choose(self, stage: int, budget_bytes: int) -> StageChoice | None:
        """Best choices of one stage; None when none fit."""
        solved = self._solved.setdefault(stage, {})
        below = solved.get(max((b for b in solved if b <= budget_bytes), default=-1))
        above = solved.get(min((b for b in solved if b >= budget_bytes), default=-1))
        # The optimum of a larger budget that fits this one is its optimum too; and where larger
        # and smaller budget are equally fast, so is every one between.
        if above is not None and above.gap == 0 and above.peak_bytes <= budget_bytes:
            return above
        if above is not None and below is not None and above.time_ps == below.time_ps:
            return below
        found = self.searches[stage].fastest(budget_bytes, below)
        if found is not None:
            solved[budget_bytes] = found
        return found

    def solve(self, budget: Budget) -> Solution:
        """Best policy under a budget in bytes, one for all stages or one each.

        Raises: InfeasibleError naming the tightest stage; PolicyError for another number of
        budgets.
        """
        solution = self.try_solve(budget)
        if solution is None:
            raise self._infeasible(self.budgets(budget))
        return solution

    def try_solve(self, budget: Budget) -> Solution | None:
        """As `solve`, but None where nothing fits: for searches that try many."""
        budgets = self.budgets(budget)
        choices: list[StageChoice] = []
        for stage, budget_bytes in enumerate(budgets):
            choice = self.choose(stage, budget_bytes)
            if choice is None:
                return None
            choices.append(choice)
        context = self.profile, self.layout, self.schedule
        policy = rearranged(*context, self._policy(choices), budgets, self.percentile)
        cost = self.evaluate(policy)
        manual = self.best_manual(budgets)
        if manual is not None and self._is_better(manual, cost):
            policy, cost = manual.policy or policy, manual.cost or cost
        evidence = tuple(
            self._evidence(stage, budgets[stage], choice, policy, cost)
            for stage, choice in enumerate(choices)
        )
        return Solution(policy, cost, evidence)

    def _is_better(self, manual: ManualStrategy, than: PolicyCost) -> bool:
        """Whether a setting of Megatron's takes less time, and is made of what is allowed."""
        if manual.policy is None or manual.cost is None:
            return False
        allowed = all(self.allows(*pair) for pair in enumerate(manual.policy.layers))
        return allowed and manual.cost.step_ms < than.step_ms * (1 - 1e-12)

    def evaluate(self, policy: RecomputePolicy) -> PolicyCost:
        """Cost of any policy in the same model."""
        return evaluate(
            self.profile, self.layout, self.schedule, policy, percentile=self.percentile
        )

    def pareto(
        self, points: int = 64, progress: Callable[[float], None] = lambda _: None
    ) -> tuple[ParetoPoint, ...]:
        """Time against budget, from the largest useful budget down to the least that fits.

        Splits over chunks are not rearranged here, so `solve` can be faster in a schedule with
        several chunks per stage.
        Calls `progress` with the share of the budgets that are done.
        """
        low = max(choice.peak_bytes for choice in self.leanest)
        high = max(max(choice.peak_bytes for choice in self.fastest), low)
        steps = max(points - 1, 1)
        budgets = [high - (high - low) * i // steps for i in range(points)]
        # Halving the steps: a budget between two solved ones is quicker than any other.
        stride, done = 1 << points.bit_length(), set[int]()
        while stride := stride // 2:
            for budget in budgets[::stride]:
                for stage in range(self.layout.num_stages):
                    self.choose(stage, budget)
                done.add(budget)
                progress(len(done) / points)
        curve = [self._point(min(budgets))]
        for budget in sorted(set(budgets))[1:]:
            point = self._point(budget)
            if point.step_ms > curve[-1].step_ms:
                # As fast on every stage, yet split over its chunks so that others wait longer.
                point = replace(curve[-1], budget_bytes=budget)
            curve.append(point)
        return tuple(reversed(curve))

    def _point(self, budget_bytes: int) -> ParetoPoint:
        choices = [self.choose(stage, budget_bytes) for stage in range(self.layout.num_stages)]
        found = [choice for choice in choices if choice is not None]
        policy = self._policy(found)
        peak_bytes = max(choice.peak_bytes for choice in found)
        return ParetoPoint(budget_bytes, self.evaluate(policy).step_ms, peak_bytes, policy)

    def budgets(self, budget: Budget) -> list[int]:
        """One budget per stage; raises PolicyError for another number of them."""
        stages = self.layout.num_stages
        if isinstance(budget, int):
            return [budget] * stages
        if len(budget) != stages:
            raise PolicyError(
                f"{len(budget)} budgets for {stages} stages. Give one for all or one for each."
            )
        return list(budget)

    def _policy(self, choices: Sequence[StageChoice]) -> RecomputePolicy:
        return put_together(self.layout, [choice.policies for choice in choices])

    def _evidence(
        self,
        stage: int,
        budget: int,
        choice: StageChoice,
        policy: RecomputePolicy,
        cost: PolicyCost,
    ) -> StageEvidence:
        chunks = self.layout.stages[stage]
        units = (unit for chunk in chunks for unit in self._table.chunk_units(chunk, policy))
        time_ps = sum(unit.time_ps for unit in units)
        free = time_ps <= self.fastest[stage].time_ps
        return StageEvidence(
            stage,
            budget,
            time_ps / PS_PER_MS,
            choice.bound_ps / PS_PER_MS,
            (time_ps - choice.bound_ps) / time_ps if time_ps else 0.0,
            cost.stages[stage].peak_high_bytes,
            NOTHING_BINDS if free else cost.stages[stage].peak.moment,
        )

    def _infeasible(self, budgets: Sequence[int]) -> InfeasibleError:
        needs = [choice.peak_bytes for choice in self.leanest]
        tightest = max(range(len(needs)), key=lambda stage: needs[stage] - budgets[stage])
        lean = RecomputePolicy(self.leanest[tightest].policies[0])
        return InfeasibleError(
            f"Stage {tightest} needs {gib(needs[tightest])} GiB even with its leanest "
            f"choices ({lean.format() or 'no layers'}{', …' * (self.layout.num_chunks > 1)}); the "
            f"budget is {gib(budgets[tightest])} GiB. Raise the budget, or change the model's "
            "split."
        )

    def manual_strategies(self, budget: Budget) -> tuple[ManualStrategy, ...]:
        """Every setting Megatron itself offers, with its cost in this model.

        none; selective with every set of recorded modules, those of all kinds together, that
        Megatron's own code returns from; block/N and uniform/N for every N up to the longest chunk,
        counted afresh in every chunk as `TransformerBlock` does.
        """
        budgets = self.budgets(budget)
        return tuple(self._manual(setting, budgets) for setting in self.manual_settings())

    def best_manual(self, budget: Budget) -> ManualStrategy | None:
        """The fastest of `manual_strategies` that fits; None when none does.

        Settings that come to the same are evaluated once, and none that takes as long as one that
        fits in the forward and in the backward of every chunk: its step takes as long, too.
        """
        budgets = self.budgets(budget)
        fitting: list[tuple[float, ManualStrategy, Ints]] = []
        for setting, times in sorted(self._manual_times(), key=lambda pair: int(pair[1].sum())):
            if any((times >= faster).all() for _, _, faster in fitting):
                continue
            found = self._manual(setting, budgets)
            if found.fits and found.cost is not None:
                fitting.append((found.cost.step_ms, found, times))
        return min(fitting, key=itemgetter(0))[1] if fitting else None

    def _manual_times(self) -> Iterator[tuple[MegatronStrategy, Ints]]:
        """Unlike settings, and forward and backward of every chunk."""
        chunks, seen = [c for stage in self.layout.stages for c in stage], set()
        for setting in self.manual_settings():
            try:
                policy = self.manual_policy(setting)
                units = tuple(self._table.chunk_units(chunk, policy) for chunk in chunks)
            except (PolicyError, ProfileError):
                continue  # `manual_strategies` says why
            if units not in seen:
                seen.add(units)
                times = [
                    (sum(u.forward_ps for u in c), sum(u.backward_ps for u in c)) for c in units
                ]
                yield setting, np.array(times, np.int64)

    def manual_settings(self) -> list[MegatronStrategy]:
        """The settings of `manual_strategies`, some of which Megatron may refuse."""
        recorded = dict.fromkeys(
            choice
            for kind in self.profile.kinds
            for choice in (*(record.policy for record in kind.choices), *kind.equals)
        )
        modules = sorted({module for choice in recorded for module in choice.modules})
        sizes = range(1, len(modules) + 1) if len(modules) <= MOST_MODULES else ()
        sets = dict.fromkeys(choice.modules for choice in recorded if choice.modules)
        for size in sizes:
            sets |= dict.fromkeys(itertools.combinations(modules, size))
        numbers = range(1, max(map(len, self._counted_chunks())) + 1)
        return [
            MegatronStrategy("none"),
            *(MegatronStrategy("selective", chosen) for chosen in sets),
            *(MegatronStrategy("block", (), n) for n in numbers),
            *(MegatronStrategy("uniform", (), n) for n in numbers),
        ]

    def _counted_chunks(self) -> tuple[tuple[int, ...], ...]:
        return self.layout.counted_chunks(self.profile.model.encoder_layers)

    def _manual(self, setting: MegatronStrategy, budgets: Sequence[int]) -> ManualStrategy:
        name = str(setting)
        try:
            policy = self.manual_policy(setting)
            cost = self.evaluate(policy)
        except (PolicyError, ProfileError) as error:
            return ManualStrategy(name, None, None, False, str(error))
        pairs = zip(cost.stages, budgets, strict=True)
        return ManualStrategy(name, policy, cost, all(s.peak_high_bytes <= b for s, b in pairs))

    def manual_policy(self, setting: MegatronStrategy) -> RecomputePolicy:
        """One of Megatron's own settings in this layout; raises PolicyError where it refuses it."""
        policy = setting.policy(self.profile.num_layers, self._counted_chunks())
        choices = enumerate(policy.layers)
        policy = RecomputePolicy(tuple(self._table.what_runs(*pair) for pair in choices))
        if any(runs_forever(c, has_linear_bias(self.profile)) for c in set(policy.layers)):
            raise PolicyError(f"{setting}: {RUNS_FOREVER}.")
        return policy


def solve(
    profile: Profile,
    layout: Layout,
    schedule: Schedule,
    budget: Budget,
    *,
    percentile: Percentile = "stated",
    allowed: OnlyChoices | Iterable[str] | None = None,
) -> Solution:
    """The policy with the shortest step whose peak fits every stage, and the proof.

    Args:
        profile: what every choice costs on every kind of layer.
        layout: which stage and chunk holds which layers; of the profile's model.
        schedule: the order of forwards and backwards; of as many stages and chunks as the layout.
        budget: bytes that torch may allocate on a device, one number for all stages or one each.
        percentile: of uneven routing that layers with experts are planned for, in percent.
            "stated" is what the profile says, None its records as they are.
        allowed: texts of the only choices that may be used, such as "none" and
            "selective[core_attn]", `full/N` standing for checkpoints around several layers; None
            allows all that the profile has.

    Returns: the policy (one choice per layer), its cost (milliseconds and bytes, by stage), and per
    stage how far from the optimum it can be at most.

    Raises:
        InfeasibleError: not even the leanest choices fit; it names the tightest stage.
        ProfileError: profile, layout and schedule do not belong together, or a record lacks.
        PolicyError: a text of `allowed` is no choice, or there is another number of budgets.
    """
    planner = Planner(profile, layout, schedule, percentile=percentile, allowed=allowed)
    return planner.solve(budget)


def neighbours(
    planner: Planner, policy: RecomputePolicy, layer: int
) -> list[tuple[LayerPolicy, PolicyCost]]:
    """What each other choice at one layer would cost, the rest of the policy unchanged.

    Raises: as `changed_at`.
    """
    changed = changed_at(planner, policy, layer)
    return [(choice, planner.evaluate(other)) for choice, other in changed]


def changed_at(
    planner: Planner, policy: RecomputePolicy, layer: int
) -> list[tuple[LayerPolicy, RecomputePolicy]]:
    """Every other choice of one layer, with the policy that has it and is else the same.

    A layer inside a group leaves it; the other members then get checkpoints of their own.
    Raises: PolicyError for a layer that does not exist.
    """
    if not 0 <= layer < len(policy.layers):
        raise PolicyError(
            f"Layer {layer} does not exist: layers are 0 to {len(policy.layers) - 1}."
        )
    table = CostTable(planner.profile)
    alone = list(policy.layers)
    for index in _group_members(planner.layout, policy, layer):
        alone[index] = FULL
    found = []
    for choice in table.choices(layer):
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
