"""The fastest recompute policy that fits each stage's memory, and what surrounds that answer.

Stages are independent given the schedule: each is given the choices with the least busy time under
its own budget, found exactly by `stage_search`. Every event of the replay can only start earlier
when an event takes less time, so no stage is worth slowing down. Of equally fast splits of a
stage's time over its chunks `rearrange` looks for one with a shorter bubble, without a proof.

The budget is bytes that torch may allocate, and is met by the high end of every uncertain figure.
This module does not measure, nor does it know devices: what lies outside torch is the caller's
to subtract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_autorecompute.cost_model import (
    PS_PER_MS,
    CostTable,
    PolicyCost,
    StageBase,
    check_layout,
    chunk_times_ms,
    evaluate,
    stage_base,
    stage_loads,
)
from megatron_autorecompute.errors import InfeasibleError, PolicyError, ProfileError
from megatron_autorecompute.pipeline import Layout, Schedule, replay_ms
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import Profile
from megatron_autorecompute.rearrange import put_together, rearranged
from megatron_autorecompute.stage_search import (
    ChunkProblem,
    StageChoice,
    StageProblem,
    chunk_problem,
    leanest,
    search,
    stage_problem,
)

Budget = int | Sequence[int]
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class StageEvidence:
    """Why a stage's choices are the best ones."""

    stage: int
    budget_bytes: int
    objective_ms: float
    """Forward plus backward of one microbatch through the stage, the figure minimised."""
    bound_ms: float
    """No choices that fit the budget are faster."""
    gap: float
    """(objective - bound) / objective; 0 is proven optimal."""
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
        percentile: MoE imbalance to budget for, in percent; None is the measured routing.
        allowed: texts of the choices that may be used, `full/N` standing for all groups; None
            allows every recorded one.

    Raises: ProfileError where profile, layout and schedule do not belong together.
    """

    def __init__(
        self,
        profile: Profile,
        layout: Layout,
        schedule: Schedule,
        *,
        percentile: float | None = None,
        allowed: Iterable[str] | None = None,
    ) -> None:
        check_layout(profile, layout, schedule)
        self.profile, self.layout, self.schedule = profile, layout, schedule
        self.percentile = percentile
        self.allowed = None if allowed is None else tuple(sorted(allowed))
        self._table = CostTable(profile, percentile, "high")
        self._solved: dict[int, dict[int, StageChoice]] = {}

    @cached_property
    def problems(self) -> tuple[StageProblem, ...]:
        """The search problem of every stage."""
        return tuple(self._problem(stage) for stage in range(self.layout.num_stages))

    def _problem(self, stage: int) -> StageProblem:
        base = stage_base(self.profile, self.layout, stage, "high")
        chunks = [self._chunk(stage, c, base) for c in range(self.layout.num_chunks)]
        return stage_problem(chunks, stage_loads(self.profile, self.schedule, stage), base)

    def _chunk(self, stage: int, index: int, base: StageBase) -> ChunkProblem:
        allowed = None if self.allowed is None else frozenset(self.allowed)
        return chunk_problem(self._table, self.layout.stages[stage][index], base, allowed)

    @cached_property
    def leanest(self) -> tuple[StageChoice, ...]:
        """Per stage, the choices with the lowest peak."""
        return tuple(leanest(problem) for problem in self.problems)

    @cached_property
    def fastest(self) -> tuple[StageChoice, ...]:
        """Per stage, the fastest choices when memory is no limit."""
        found = (search(problem, 1 << 60) for problem in self.problems)
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
        found = search(self.problems[stage], budget_bytes, below)
        if found is not None:
            solved[budget_bytes] = found
        return found

    def solve(self, budget: Budget) -> Solution:
        """Best policy under a budget in bytes, one for all stages or one each.

        Raises: InfeasibleError naming the tightest stage.
        """
        solution = self.attempt(budget)
        if solution is None:
            raise self._infeasible(self.budgets(budget))
        return solution

    def attempt(self, budget: Budget) -> Solution | None:
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
        evidence = tuple(
            self._evidence(stage, budgets[stage], choice, cost)
            for stage, choice in enumerate(choices)
        )
        return Solution(policy, cost, evidence)

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
        return ParetoPoint(
            budget_bytes,
            self._step_ms(found),
            max(choice.peak_bytes for choice in found),
            self._policy(found),
        )

    def _step_ms(self, choices: Sequence[StageChoice]) -> float:
        policy = self._policy(choices)
        table = CostTable(self.profile)
        units = [[table.chunk_units(c, policy) for c in chunks] for chunks in self.layout.stages]
        return replay_ms(self.schedule, *chunk_times_ms(units)).total_ms

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
        self, stage: int, budget: int, choice: StageChoice, cost: PolicyCost
    ) -> StageEvidence:
        free = choice.time_ps <= self.fastest[stage].time_ps
        binding = "nothing: every layer has its fastest choice"
        if not free:
            binding = cost.stages[stage].peak.moment
        return StageEvidence(
            stage,
            budget,
            choice.time_ps / PS_PER_MS,
            choice.bound_ps / PS_PER_MS,
            choice.gap,
            cost.stages[stage].peak_high_bytes,
            binding,
        )

    def _infeasible(self, budgets: Sequence[int]) -> InfeasibleError:
        needs = [choice.peak_bytes for choice in self.leanest]
        tightest = max(range(len(needs)), key=lambda stage: needs[stage] - budgets[stage])
        lean = RecomputePolicy(self.leanest[tightest].policies[0])
        return InfeasibleError(
            f"Stage {tightest} needs {needs[tightest] / GIB:.2f} GiB even with its leanest "
            f"choices ({lean.format() or 'no layers'}{', …' * (self.layout.num_chunks > 1)}); the "
            f"budget is {budgets[tightest] / GIB:.2f} GiB. Raise the budget, or change the model's "
            "split."
        )

    def manual_strategies(self, budget: Budget) -> tuple[ManualStrategy, ...]:
        """Every setting Megatron itself offers, with its cost in this model.

        none; selective with each recorded set of modules; block/N and uniform/N for every N up to
        the longest chunk, counted afresh in every chunk as `TransformerBlock` does.
        """
        budgets = self.budgets(budget)
        return tuple(self._manual(name, budgets) for name in self._manual_names())

    def _manual_names(self) -> list[str]:
        kinds = self.profile.kinds
        recorded = dict.fromkeys(
            choice for kind in kinds for choice in (*(r.choice for r in kind.choices), *kind.inert)
        )
        longest = max(len(layers) for layers in self._counted_in())
        names = ["megatron:none"]
        names += [f"megatron:{choice}" for choice in recorded if choice.startswith("selective")]
        names += [f"megatron:block/{n}" for n in range(1, longest + 1)]
        return names + [f"megatron:uniform/{n}" for n in range(1, longest + 1)]

    def _counted_in(self) -> list[list[int]]:
        """The layers Megatron counts in: of every chunk, MTP depths apart, an encoder by itself."""
        model = self.profile.model
        parts = [range(model.encoder_layers, model.num_layers)]
        if model.encoder_layers:
            parts.insert(0, range(model.encoder_layers))
        return [[i for i in c if i in part] for part in parts for c in self.layout.chunk_layers()]

    def _manual(self, name: str, budgets: Sequence[int]) -> ManualStrategy:
        try:
            policy = RecomputePolicy.parse(
                name, num_layers=self.profile.num_layers, layout=self._counted_in()
            )
            cost = self.evaluate(policy)
        except (PolicyError, ProfileError) as error:
            return ManualStrategy(name, None, None, False, str(error))
        pairs = zip(cost.stages, budgets, strict=True)
        return ManualStrategy(name, policy, cost, all(s.peak_high_bytes <= b for s, b in pairs))


def solve(
    profile: Profile,
    layout: Layout,
    schedule: Schedule,
    budget: Budget,
    *,
    percentile: float | None = None,
    allowed: Iterable[str] | None = None,
) -> Solution:
    """Best policy under a budget in bytes; see `Planner`.

    Raises: InfeasibleError, ProfileError.
    """
    planner = Planner(profile, layout, schedule, percentile=percentile, allowed=allowed)
    return planner.solve(budget)


def manual_strategies(
    profile: Profile,
    layout: Layout,
    schedule: Schedule,
    budget: Budget,
    *,
    percentile: float | None = None,
) -> tuple[ManualStrategy, ...]:
    """Megatron's own settings in the same model; see `Planner.manual_strategies`."""
    return Planner(profile, layout, schedule, percentile=percentile).manual_strategies(budget)


def best_manual(strategies: Iterable[ManualStrategy]) -> ManualStrategy | None:
    """The fastest that fits; the first one where several are equal; None when none fits."""
    fitting = [s for s in strategies if s.fits and s.cost is not None]
    return min(fitting, key=lambda s: s.cost.step_ms if s.cost else 0.0, default=None)


def neighbours(
    planner: Planner, policy: RecomputePolicy, layer: int
) -> list[tuple[LayerPolicy, PolicyCost]]:
    """What each other choice at one layer would cost, the rest of the policy unchanged.

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
        alone[index] = LayerPolicy("full")
    found = []
    for choice in table.choices(layer):
        changed = RecomputePolicy((*alone[:layer], choice, *alone[layer + 1 :]))
        if changed != policy:
            found.append((choice, planner.evaluate(changed)))
    return found


def _group_members(layout: Layout, policy: RecomputePolicy, layer: int) -> list[int]:
    for layers in layout.chunk_layers():
        for run in policy.chunk_runs(layers) if layer in layers else ():
            position = layers.index(layer) - run.start
            if 0 <= position < run.count and run.policy.group > 1:
                first = run.start + position - position % run.policy.group
                return list(layers[first : first + run.policy.group])
    return []
