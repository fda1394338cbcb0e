"""The recompute policy with the shortest step that fits each stage's memory, and what surrounds it.

`search.step` finds it, from the choices with the lowest peaks and the best of Megatron's own
settings that fits, and proves a bound on it.

The budget is bytes that torch may allocate, and is met by the high end of every uncertain figure.
The caller must subtract from the device's memory what lies outside torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
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
from megatron_autorecompute.planner.cost.arrays import Ints
from megatron_autorecompute.planner.cost.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.peak_memory import (
    StageBase,
    check_figures,
    check_layout,
    for_schedule,
    stage_base,
    stage_moments,
    stage_peak,
)
from megatron_autorecompute.planner.cost.policy_cost import PolicyCost, PolicyCosts
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.stage_times import residual_times
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, CostTable
from megatron_autorecompute.planner.search.budget_curve import BudgetCurve, ParetoPoint
from megatron_autorecompute.planner.search.offload import OffloadSearch
from megatron_autorecompute.planner.search.replay import Replay
from megatron_autorecompute.planner.search.stage import Stage, Tables, true_peak
from megatron_autorecompute.planner.search.stage_problem import (
    OnlyChoices,
    Split,
    StageChoice,
    chunk_problem,
    put_together,
    stage_problem,
)
from megatron_autorecompute.planner.search.step import StepSearch
from megatron_autorecompute.policy import (
    FULL,
    NONE,
    WHOLE,
    LayerPolicy,
    MegatronStrategy,
    RecomputePolicy,
)
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.units import gib, gib_needed

MOST_MODULES = 9
"""Megatron has no more modules. If a profile has more, only its recorded sets are tried."""
Budget = int | Sequence[int]
Percentile = float | None | Literal["stated"]


NOTHING_BINDS = "nothing: every layer has its fastest choice"


@dataclass(frozen=True, slots=True)
class StageEvidence:
    """How busy a stage is, and how much less busy any choices that fit could make it."""

    stage: int
    budget_bytes: int
    objective_ms: float
    """Forward plus backward of one microbatch through the stage."""
    bound_ms: float | None
    """No choices that fit the budget take less; None where nobody has worked out a bound."""
    gap: float | None
    """(objective - bound) / objective; 0 is proven to be the least, None is not known. A stage is
    busier than it could be where that makes the step shorter."""
    peak_high_bytes: int
    """High end of the predicted peak; it is within the budget."""
    binding: str
    """The moment whose bytes rule out a faster choice, or NOTHING_BINDS."""


@dataclass(frozen=True, slots=True)
class StepEvidence:
    """How far a plan's step is from the shortest one."""

    bound_ms: float | None
    """No choices that fit make a shorter step; None where nobody has worked out a bound."""
    gap: float | None
    """(step - bound) / step; 0 is proven optimal, None is not known."""

    @classmethod
    def of(cls, step_ms: float, bound_ms: float | None) -> StepEvidence:
        """What a bound says of a step; one that is none, or above the step, says it is proven."""
        if bound_ms is None:
            return cls(None, None)
        if not 0 <= bound_ms <= step_ms:
            bound_ms = step_ms
        return cls(bound_ms, (step_ms - bound_ms) / step_ms if step_ms else 0.0)


@dataclass(frozen=True, slots=True)
class Solution:
    """A policy, what it costs, and what is proven of its step and of its stages."""

    policy: RecomputePolicy
    cost: PolicyCost
    evidence: tuple[StageEvidence, ...]
    step_evidence: StepEvidence


@dataclass(frozen=True, slots=True)
class _Found:
    """A policy that fits, and how much shorter a step can still be."""

    policy: RecomputePolicy
    cost: PolicyCost
    bound_ms: float


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found for some budgets."""

    budgets: tuple[int, ...]
    found: _Found

    def fits(self, budgets: Sequence[int]) -> bool:
        """Whether it fits other budgets."""
        stages = self.found.cost.stages
        return _covers(budgets, [stage.peak_high_bytes for stage in stages])


def _covers(budgets: Sequence[int], others: Sequence[int]) -> bool:
    return all(own >= other for own, other in zip(budgets, others, strict=True))


@dataclass(frozen=True, slots=True)
class ManualStrategy:
    """One of Megatron's own settings in the same model."""

    name: str
    """As `RecomputePolicy.parse` reads it: megatron:block/4, ..."""
    policy: RecomputePolicy | None
    cost: PolicyCost | None
    """None if Megatron refuses the setting or the profile lacks a record; see `refused`."""
    fits: bool
    refused: str = ""


class Planner:
    """Solves one profile, layout and schedule for any number of budgets.

    Args:
        profile: what every choice costs.
        layout: which stage and chunk holds which layers.
        schedule: the order of forwards and backwards.
        percentile: of imbalance to budget for, in percent. None takes the records as they are:
            measured ones at their maximum. "stated" is `Profile.stated_percentile`.
        allowed: the choices that may be used, or their texts; `full/N` stands for all groups. None
            allows every recorded choice.

    Raises: ProfileError if profile, layout and schedule do not belong together; PolicyError if a
    text of `allowed` is not a choice.
    """

    def __init__(
        self,
        profile: Profile,
        layout: Layout,
        schedule: Schedule,
        *,
        percentile: Percentile = "stated",
        allowed: OnlyChoices | Iterable[str] | None = None,
    ) -> None:
        check_layout(profile, layout, schedule)
        check_figures(profile, layout, schedule)
        profile = for_schedule(profile, schedule)
        self.profile, self.layout, self.schedule = profile, layout, schedule
        self.percentile = profile.stated_percentile if percentile == "stated" else percentile
        if allowed is not None and not isinstance(allowed, OnlyChoices):
            allowed = OnlyChoices.parse(allowed)
        self.only = allowed
        self.table = CostTable(profile, self.percentile, "high")
        """Of what choices cost, as budgets are met."""
        self.costs = PolicyCosts(profile, layout, schedule, self.percentile)
        self._tables = Tables()
        self._searches: dict[int, Stage] = {}
        self._chosen: dict[tuple[int, int], StageChoice | None] = {}
        self._known: list[_Known] = []
        self._bases: dict[int, StageBase] = {}

    def replaced(
        self,
        *,
        profile: Profile | None = None,
        layout: Layout | None = None,
        schedule: Schedule | None = None,
        allowed: OnlyChoices | None = None,
    ) -> Planner:
        """A planner with another profile, layout, schedule or restriction, and the same other
        arguments."""
        return Planner(
            profile or self.profile,
            layout or self.layout,
            schedule or self.schedule,
            percentile=self.percentile,
            allowed=allowed or self.only,
        )

    @property
    def allowed(self) -> tuple[str, ...] | None:
        """Texts of the choices that may be used; None allows every recorded choice."""
        return None if self.only is None else self.only.texts()

    def allows(self, layer: int, choice: LayerPolicy) -> bool:
        """Whether a layer may have a choice."""
        return self.only is None or self.only.allow(self.table, layer, choice)

    @cached_property
    def offload(self) -> OffloadSearch | None:
        """The search where layers may offload; None where no choice that may be used does."""
        recorded = ((kind, record) for kind in self.profile.kinds for record in kind.choices)
        may = any(
            record.offload_groups and self.allows(kind.layers[0], record.policy)
            for kind, record in recorded
            if kind.layers
        )
        return OffloadSearch(self) if may else None

    @cached_property
    def searches(self) -> tuple[Stage, ...]:
        """The search of every stage."""
        return tuple(self.search(stage) for stage in range(self.layout.num_stages))

    def search(self, stage: int) -> Stage:
        """The search of one stage."""
        if stage not in self._searches:
            self._searches[stage] = self._search(stage)
        return self._searches[stage]

    def _search(self, stage: int) -> Stage:
        base, own = self._base(stage), self.layout.stages[stage]
        moments = stage_moments(self.profile, self.schedule, stage)
        chunks = [chunk_problem(self.table, chunk, base, self.only) for chunk in own]
        problem = stage_problem(chunks, moments, base, true_peak(self.table, own, base, moments))
        return Stage(problem, self._tables, self.layout.num_stages)

    def _base(self, stage: int) -> StageBase:
        if stage not in self._bases:
            self._bases[stage] = stage_base(self.profile, self.layout, stage, "high")
        return self._bases[stage]

    @cached_property
    def leanest(self) -> tuple[StageChoice, ...]:
        """Per stage, the choices with the lowest peak."""
        return tuple(search.leanest for search in self.searches)

    @cached_property
    def fastest(self) -> tuple[StageChoice, ...]:
        """Per stage, the fastest choices without a memory limit."""
        found = (search.fastest(1 << 60) for search in self.searches)
        return tuple(choice for choice in found if choice is not None)

    def choose(self, stage: int, budget_bytes: int) -> StageChoice | None:
        """Best choices of one stage; None when none fit. The same whatever was asked before."""
        asked = stage, budget_bytes
        if asked not in self._chosen:
            self._chosen[asked] = self.searches[stage].fastest(budget_bytes)
        return self._chosen[asked]

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
        """As `solve`, but returns None if nothing fits; for searches that try many problems."""
        budgets = self.budgets(budget)
        if self.offload is not None:
            return self.offload.solve(budgets)
        pairs = zip(self.leanest, budgets, strict=True)
        if any(choice.peak_bytes > budget for choice, budget in pairs):
            return None
        found = self._searched(budgets)
        for known in self._known:
            # A plan is never slower than one that is known to fit, and no shorter than a bound.
            if known.fits(budgets) and known.found.cost.step_ms < found.cost.step_ms:
                found = replace(known.found, bound_ms=found.bound_ms)
            if _covers(known.budgets, budgets):
                found = replace(found, bound_ms=max(found.bound_ms, known.found.bound_ms))
        bound_ms = min(found.bound_ms, found.cost.step_ms)
        return self.proven(found.policy, found.cost, budgets, bound_ms)

    def _searched(self, budgets: Sequence[int]) -> _Found:
        """What the search finds, the same whatever was asked before."""
        for known in self._known:
            if known.budgets == tuple(budgets):
                return known.found
        for stage, budget in enumerate(budgets):
            # Again if it was asked before others, so that the plan is the same.
            self._chosen[stage, budget] = self.searches[stage].fastest(budget)
        search = StepSearch(self._replay, self.searches, budgets)
        least_busy = [self.choose(stage, budget) for stage, budget in enumerate(budgets)]
        search.start([choice.policies for choice in least_busy if choice is not None])
        search.start([choice.policies for choice in self.leanest])
        if not search.begin():
            manual = self.best_manual(budgets)
            simple = None if manual is None or manual.policy is None else manual.policy
            simple = simple and self.table.without_dead_work(simple)
            if simple is not None and self.may_be(simple):
                search.start(self._splits(simple))
            search.go_on()
        shortest = search.answer()
        policy = put_together(self.layout, shortest.splits)
        cost = self.evaluate(policy)
        over = [
            own.peak_high_bytes - budget for own, budget in zip(cost.stages, budgets, strict=True)
        ]
        if max(over) > 0:
            raise AssertionError(f"a plan was found that exceeds its budgets by {over} bytes")
        bound_ms = cost.step_ms if shortest.proven else shortest.bound_ps / PS_PER_MS
        found = _Found(policy, cost, min(bound_ms, cost.step_ms))
        self._known.append(_Known(tuple(budgets), found))
        return found

    def _splits(self, policy: RecomputePolicy) -> list[Split]:
        """Of an allowed policy; recorded choices are in place of inert ones that equal them."""
        own = [self._recorded(layer, choice) for layer, choice in enumerate(policy.layers)]
        return [
            tuple(tuple(own[layer] for layer in chunk.layers) for chunk in chunks)
            for chunks in self.layout.stages
        ]

    def _recorded(self, layer: int, choice: LayerPolicy) -> LayerPolicy:
        alike = (c for c in self.table.choices(layer) if choice in self.table.names(layer, c))
        return choice if choice.group > 1 else next(alike)

    @cached_property
    def _replay(self) -> Replay:
        own = residual_times(self.table, self.layout)
        residual = np.stack([own.forward, own.backward])
        most_ps = sum(choice.time_ps for choice in self.leanest) * 4.0
        return Replay(self.schedule, residual, most_ps + float(np.maximum(residual, 0).sum()))

    def proven(
        self,
        policy: RecomputePolicy,
        cost: PolicyCost,
        budgets: Sequence[int],
        bound_ms: float | None,
    ) -> Solution:
        """A policy that fits, with what is proven of its step and of its stages."""
        evidence = []
        whole = None if self.offload is None else self.offload.fastest_whole(budgets)
        for stage, budget_bytes in enumerate(budgets):
            choice = self.choose(stage, budget_bytes)
            bounds_ps = [] if choice is None else [choice.bound_ps]
            if whole is not None:
                bounds_ps.append(self._busy_ps(stage, whole[0]))
            least_ps = min(bounds_ps)
            evidence.append(self._evidence(stage, budget_bytes, least_ps, policy, cost))
        step_evidence = StepEvidence.of(cost.step_ms, bound_ms)
        return Solution(policy, cost, tuple(evidence), step_evidence)

    def may_be(self, policy: RecomputePolicy | None) -> bool:
        """Whether a policy is made of what is allowed."""
        return policy is not None and all(
            self.allows(layer, choice) for layer, choice in enumerate(policy.layers)
        )

    def instead(self, policy: RecomputePolicy, fastest: Solution) -> Solution:
        """A policy in place of the fastest one under the same budgets, which it fits."""
        budgets = [own.budget_bytes for own in fastest.evidence]
        bound_ms = fastest.step_evidence.bound_ms
        return self.proven(policy, self.evaluate(policy), budgets, bound_ms)

    def evaluate(self, policy: RecomputePolicy) -> PolicyCost:
        """Cost of any policy in the same model."""
        return self.costs.of(policy)

    def pareto(
        self,
        points: int = 64,
        progress: Callable[[float], None] = lambda _: None,
        curve: BudgetCurve | None = None,
    ) -> tuple[ParetoPoint, ...]:
        """Step time against budget, from the largest useful budget down to the least that fits.

        Points are each stage's choices of the least busy time, whose step is not searched further:
        `solve` is as fast or faster, mostly in a schedule with several chunks per stage.
        Calls `progress` with the share of the budgets that are done. What a `curve` finds, it keeps
        for further budgets.

        Where layers may offload, budgets are those at which the best of some replayed policies
        changes, and `solve` is as fast or faster.
        """
        if self.offload is not None:
            return tuple(
                ParetoPoint(peak_bytes, step_ms, peak_bytes, policy)
                for peak_bytes, step_ms, policy in self.offload.curve(points, progress)
            )
        return (curve or BudgetCurve(self)).points(points, progress)

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

    def _evidence(
        self,
        stage: int,
        budget: int,
        bound_ps: int,
        policy: RecomputePolicy,
        cost: PolicyCost,
    ) -> StageEvidence:
        time_ps = self._busy_ps(stage, policy)
        free = time_ps <= self.searches[stage].least_ps
        return StageEvidence(
            stage,
            budget,
            time_ps / PS_PER_MS,
            bound_ps / PS_PER_MS,
            (time_ps - bound_ps) / time_ps if time_ps else 0.0,
            cost.stages[stage].peak_high_bytes,
            NOTHING_BINDS if free else cost.stages[stage].peak.moment,
        )

    def _busy_ps(self, stage: int, policy: RecomputePolicy) -> int:
        chunks = self.layout.stages[stage]
        units = (unit for chunk in chunks for unit in self.table.chunk_units(chunk, policy))
        return sum(unit.time_ps for unit in units)

    def _infeasible(self, budgets: Sequence[int]) -> InfeasibleError:
        needs = [choice.peak_bytes for choice in self.leanest]
        tightest = max(range(len(needs)), key=lambda stage: needs[stage] - budgets[stage])
        if needs[tightest] <= budgets[tightest]:
            return InfeasibleError(
                f"The leanest choices fit the budget of {gib(budgets[tightest])} GiB on stage "
                f"{tightest} only if copies to host memory took no time; with activations that are "
                "to leave or are back early, and with host memory as it is, no policy was found "
                "that fits. Raise the budget, or host_link.host_bytes if that is what lacks."
            )
        lean, need = RecomputePolicy(self.leanest[tightest].policies[0]), needs[tightest]
        whole = None if self.offload is None else self.offload.leanest_whole()
        if whole is not None and whole[1].peak_high_bytes < need:
            lean, need = whole[0], whole[1].peak_high_bytes
        return InfeasibleError(
            f"Stage {tightest} needs {gib_needed(need)} GiB even with its leanest "
            f"choices ({lean.format() or 'no layers'}{', …' * (self.layout.num_chunks > 1)}); the "
            f"budget is {gib(budgets[tightest])} GiB. Raise the budget, or change the model's "
            "split."
        )

    def manual_strategies(self, budget: Budget) -> tuple[ManualStrategy, ...]:
        """Every setting Megatron itself offers, with its cost in this model.

        The settings are none; selective with every set of modules that some kind has records of,
        except sets whose backward never ends in Megatron; block/N and uniform/N for every N up to
        the longest chunk, counted afresh in every chunk as in `TransformerBlock`.
        """
        budgets = self.budgets(budget)
        return tuple(self._manual(setting, budgets) for setting in self.manual_settings())

    def best_manual(self, budget: Budget) -> ManualStrategy | None:
        """The fastest of `manual_strategies` that fits; None when none does.

        Equal settings are evaluated once. A setting is skipped if in every chunk its forward and
        its backward take at least as long as those of a setting that fits, because then its step
        takes at least as long.
        """
        budgets = self.budgets(budget)
        fitting: list[tuple[MegatronStrategy, Ints]] = []
        for setting, times in self._manual_times:
            slower = any((times >= faster).all() for _, faster in fitting)
            if not slower and self.may_fit(self.manual_policy(setting), budgets):
                fitting.append((setting, times))
        found = [self._manual(setting, budgets) for setting, _ in fitting]
        steps = [(manual.cost.step_ms, manual) for manual in found if manual.cost is not None]
        return min(steps, key=itemgetter(0))[1] if steps else None

    def may_fit(self, policy: RecomputePolicy, budgets: Sequence[int]) -> bool:
        """Whether the high end of every stage's peak is within its budget, without bytes of copies
        that are under way."""
        for stage, (chunks, budget) in enumerate(zip(self.layout.stages, budgets, strict=True)):
            columns = [ChunkColumns(c, self.table.chunk_units(c, policy)) for c in chunks]
            moments = stage_moments(self.profile, self.schedule, stage)
            if stage_peak(self._base(stage), stage, columns, moments).bytes > budget:
                return False
        return True

    @cached_property
    def _manual_times(self) -> list[tuple[MegatronStrategy, Ints]]:
        """Settings that differ in effect, each with forward and backward times of every chunk; the
        least busy first."""
        chunks = [c for stage in self.layout.stages for c in stage]
        seen, found = set(), []
        for setting in self.manual_settings():
            try:
                policy = self.manual_policy(setting)
                runs = policy.runs()
                if runs in seen:
                    continue
                seen.add(runs)
                times = [self.table.chunk_times_ps(chunk, policy) for chunk in chunks]
            except (PolicyError, ProfileError):
                continue  # `manual_strategies` says why
            found.append((setting, np.array(times, np.int64)))
        return sorted(found, key=lambda pair: int(pair[1].sum()))

    def manual_settings(self) -> list[MegatronStrategy]:
        """The settings of `manual_strategies`, including those that Megatron may refuse."""
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
        most = max(*map(len, self._counted_chunks), self.table.depth_layers)
        numbers = range(1, most + 1)
        return [
            MegatronStrategy("none"),
            *(MegatronStrategy("selective", chosen) for chosen in sets),
            *(MegatronStrategy("block", (), n) for n in numbers),
            *(MegatronStrategy("uniform", (), n) for n in numbers),
        ]

    @cached_property
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
        """One of Megatron's own settings as a policy; raises PolicyError if Megatron refuses it."""
        chunks, depth = self._counted_chunks, self.table.depth_layers
        policy = setting.policy(self.profile.num_layers, chunks, depth)
        if setting.modules:
            choices = enumerate(policy.layers)
            policy = RecomputePolicy(tuple(self.table.what_runs(*pair) for pair in choices))
        if any(
            runs_forever(c, has_linear_bias(self.profile))
            for c in {run.policy for run in policy.runs()}
        ):
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
        percentile: of routing imbalance that layers with experts are planned for, in percent.
            "stated" takes percentile 99 if the profile states imbalance; None takes the records as
            they are.
        allowed: texts of the choices that may be used, such as "none" and "selective[core_attn]";
            `full/N` stands for checkpoints around several layers. None allows every choice that
            the profile has.

    Returns: the policy (one choice per layer), its cost (milliseconds and bytes, by stage), how far
    its step can be from the shortest one at most, and how busy its stages could be at least.

    Raises:
        InfeasibleError: not even the leanest choices fit; it names the tightest stage.
        ProfileError: profile, layout and schedule do not belong together, or a record is missing.
        PolicyError: a text of `allowed` is not a choice, or the number of budgets is wrong.
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
    """Every other choice of one layer, with the policy in which only that layer changes.

    Where layers leave as a whole, Megatron's `cpu_offloading` with the number that changes it. If
    the layer is in a group, it leaves the group, and each other member gets its own checkpoint.
    Raises: PolicyError for a layer that does not exist.
    """
    if not 0 <= layer < len(policy.layers):
        raise PolicyError(
            f"Layer {layer} does not exist: layers are 0 to {len(policy.layers) - 1}."
        )
    number = policy.layers.count(WHOLE)
    if number:  # the first ones leave: this layer is the first that stays, or the last that leaves
        others = planner.offload.settings.of_whole_layers if planner.offload else ()
        fewer, more = others[layer - 1 : layer] if layer else (), others[layer : layer + 1]
        return [(NONE, one) for one in fewer] if layer < number else [(WHOLE, one) for one in more]
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
