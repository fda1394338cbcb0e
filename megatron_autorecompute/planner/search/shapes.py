"""Searches layers per stage and micro-batch sizes for the shortest step.

Steps are bounded without a search, each time closer than before; the lowest ones are solved until
none that is left can be shorter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from megatron_autorecompute.errors import PipelineError, ProfileError
from megatron_autorecompute.planner.cost import Floats, Ints
from megatron_autorecompute.planner.cost.hybrid_pattern import pattern_of_job
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.layout_flags import (
    FIRST,
    LAST,
    all_layouts,
    layers_per_stage,
    layout_flags,
)
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.stage_times import residual_times
from megatron_autorecompute.planner.cost.step_interval import StepErrors
from megatron_autorecompute.planner.cost.step_time import one_path_each
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, CostTable
from megatron_autorecompute.planner.search.chunk_plans import SLACK
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solution import (
    Solution,
    StepEvidence,
    gave_way,
    nearness,
)
from megatron_autorecompute.planner.search.solve import solve, try_solve
from megatron_autorecompute.profile import Profile

FLAG = "--micro-batch-size"
INTERLEAVED = (
    f"Interleaved, only layouts that {FIRST} and {LAST} can say are searched; others are not "
    "offered."
)
_PARTITIONS = 2000
"""Up to which all are looked at."""
_SHOWN = 5e-5
"""A smaller share is 0.00% in the note."""
_LAYERS_SOLVED = 1 << 10
"""The most layers of all solved layouts together; the others have looser bounds."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The plan of the layout and micro-batch size with the shortest step."""

    problem: Problem
    solution: Solution
    megatron_flags: Mapping[str, str]
    """Megatron's flags that give it, name to value."""
    notes: tuple[str, ...]
    """Sentences on what it gains; the last one says what is proven."""
    evidence: StepEvidence
    """How far its step is from the shortest one of all that were searched."""


def search_shapes(problems: Sequence[Problem], *, layouts: bool) -> SearchResult:
    """The shortest step of some problems, or of all their layouts.

    One chunk per stage: all partitions of the decoder layers, if they are few; MTP depths stay with
    the loss. Otherwise all that the numbers of layers of the first and the last stage can give, see
    `all_layouts`; no others are searched. Static bytes of stages that were not measured are added
    up from the profile's per-kind figures.

    Args:
        problems: one for each micro-batch size, all of as many samples per step (see
            `same_samples`); the first one is what was asked for.
        layouts: whether the layers per stage of every problem are searched.

    Raises: InfeasibleError when nothing is found that fits; ProfileError without per-kind static
    bytes, or for a model with a tower or an encoder on several stages.
    """
    if layouts:
        _check_encoder(problems[0])
    found = _Search(problems, layouts=layouts)
    found.run()
    if not found.best:
        solve(problems[0])  # raises with the reason
        raise AssertionError("an infeasible problem was solved")
    return found.result()


def same_samples(schedule: Schedule, asked: Profile, other: Profile) -> Schedule:
    """The schedule with as many samples per step at the other profile's micro-batch size.

    Raises: PipelineError when the samples are not a multiple of the other micro-batch size.
    """
    samples = schedule.num_microbatches * asked.parallelism.micro_batch_size
    size = other.parallelism.micro_batch_size
    if samples % size:
        raise PipelineError(
            f"{samples} samples a step cannot be cut into micro-batches of {size}. Leave out that "
            "size or change --num-microbatches."
        )
    return replace(schedule, num_microbatches=samples // size)


def _check_encoder(problem: Problem) -> None:
    model = problem.profile.model
    if model.encoder_layers and problem.layout.num_stages > 1:
        raise ProfileError(
            f"Layouts of a model with a block in front of its decoder ({model.encoder_name}, "
            f"{model.encoder_layers} layers) are not searched. Give the decoder's layers per stage "
            "by Megatron's flags, and leave --search-layout out."
        )


class LeastSteps:
    """No choices that fit make a shorter step than is said here; infinite: nothing fits.

    Args:
        problem: the problem of any layout of as many stages and chunks.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self._table = problem, problem.table
        least = [_least_ps(self._table, layer) for layer in range(problem.layout.num_layers)]
        self._before: Ints = np.array([0, *least], np.int64).cumsum()
        """What all layers before each take at least."""
        self._residual_ps = [
            min(0, round(stage.residual_ms * PS_PER_MS)) for stage in problem.profile.stages
        ]
        self._known: dict[object, Floats] = {}
        self._runs: dict[tuple[int, ...], object] = {}

    def without_budget_ms(self, layout: Layout) -> float:
        """A bound from the busiest stage's decoder layers, without a budget."""
        last, busiest = layout.num_layers, 0
        for stage in layout.stages:
            ends = [(c.layers[0], c.layers[-1] + 1) for c in stage if c.layers]
            own = sum(int(self._before[min(b, last)] - self._before[min(a, last)]) for a, b in ends)
            busiest = max(busiest, own)
        own_ps = max(0, busiest + min(self._residual_ps, default=0))
        return self.problem.schedule.num_microbatches * own_ps / PS_PER_MS

    def step_ms(self, problem: Problem) -> float:
        """A bound from what the choices that fit take on paths, as prices of bytes tell."""
        residual = residual_times(self._table, problem.layout).both
        total = (self._paths * residual).sum(axis=(1, 2, 3))
        total += sum(self._of_stage(problem, stage) for stage in range(problem.layout.num_stages))
        return float(total.max()) * (1 - SLACK) / PS_PER_MS

    @cached_property
    def _paths(self) -> Floats:
        """A longest path for each stage that may be the slowest, `[path, direction, stage, chunk]`;
        of recompute that may begin early only what its own stage is busy with."""
        schedule, stages = self.problem.schedule, range(self.problem.layout.num_stages)
        shape = schedule.num_stages, schedule.num_chunks, schedule.num_stages
        slower = 2 * np.ones(shape, np.int64) + np.eye(len(stages), dtype=np.int64)[:, None]
        if not self.problem.may_begin_early:
            return np.array(one_path_each(schedule, slower, 2 * slower), np.float64)
        paths = np.zeros((len(stages), 2, *shape[:2]))
        paths[stages, :, stages] = schedule.num_microbatches
        return paths

    def _of_stage(self, problem: Problem, stage: int) -> Floats:
        """What a stage takes on each path; worked out once for stages with like layers."""
        key = stage, tuple(self._run(chunk.layers) for chunk in problem.layout.stages[stage])
        if key not in self._known:
            fitting = problem.stages.stage(stage).plans(problem.budgets[stage])
            own = self._paths[:, :, stage]
            weights, which = np.unique(own, axis=0, return_inverse=True)
            bounds = [math.inf if fitting is None else fitting.bound(each) for each in weights]
            self._known[key] = np.array(bounds)[which.ravel()]
        return self._known[key]

    def _run(self, layers: tuple[int, ...]) -> object:
        """Differs between layers of one chunk that cost differently."""
        if layers not in self._runs:
            profile, last = self.problem.profile, self.problem.layout.num_layers - 1
            kinds = (profile.kind_of(i).name for i in layers)
            ends = layers[-1:] == (last,), layers[:1] == (last + 1,)
            self._runs[layers] = tuple(kinds), ends, layers if profile.stages else None
        return self._runs[layers]


def _least_ps(table: CostTable, layer: int) -> int:
    """The least time of a layer, also as one of several in a measured checkpoint."""
    times = [table.layer(layer, choice).time_ps for choice in table.choices(layer)]
    for record in table.profile.kind_of(layer).choices:
        if record.policy.group > 1:
            whole_ms = record.forward_ms + record.backward_ms
            times.append(int(whole_ms * PS_PER_MS / record.policy.group))
    return min(times)


@dataclass(order=True, slots=True)
class _Candidate:
    """A layout that is not solved yet."""

    bound_ms: float
    number: int
    """Of the problem that it is a layout of."""
    sizes: list[int]
    layout: Layout = field(compare=False)
    problem: Problem | None = field(default=None, compare=False)
    """Whose step the bound is close to; None: a closer bound is to be had."""


class _Search:
    """The search of one question; arguments as of `search_shapes`."""

    def __init__(self, problems: Sequence[Problem], *, layouts: bool) -> None:
        self.problems, self.layouts = problems, layouts
        self.sizes = len(problems) > 1 or not layouts
        """Whether micro-batch sizes are searched."""
        self.best: dict[int, tuple[Problem, Solution]] = {}
        """The shortest of each problem's layouts, by its number."""
        self.asked: Solution | None = None
        self.bounds_ms = [math.inf]

    @property
    def limit_ms(self) -> float:
        """The shortest step so far."""
        return min((own.cost.step_ms for _, own in self.best.values()), default=math.inf)

    def run(self) -> None:
        """Solve until nothing that is left can be shorter."""
        for number, problem in enumerate(self.problems):
            self._solve(number, problem)
            self.asked = self.best[0][1] if 0 in self.best else None
        if not self.layouts:
            return
        least = list(map(LeastSteps, self.problems))
        left = [own for number, steps in enumerate(least) for own in _candidates(number, steps)]
        heapq.heapify(left)
        tries = max(1, _LAYERS_SOLVED // self.problems[0].layout.num_layers)
        while left:
            one = heapq.heappop(left)
            limit_ms = self.limit_ms
            if one.bound_ms >= limit_ms or (not tries and math.isfinite(limit_ms)):
                self.bounds_ms.append(one.bound_ms)
                return
            if one.problem is None:
                one.problem = replace(self.problems[one.number], layout=one.layout, known=())
                one.bound_ms = max(one.bound_ms, least[one.number].step_ms(one.problem))
                heapq.heappush(left, one)
                continue
            tries -= tries > 0
            self._solve(one.number, one.problem)

    def _solve(self, number: int, problem: Problem) -> None:
        solution = try_solve(problem)
        if solution is None:
            return
        self.bounds_ms.append(solution.step_evidence.bound_ms or 0.0)
        known = self.best.get(number)
        if known is None or solution.cost.step_ms < known[1].cost.step_ms:
            self.best[number] = problem, solution

    def result(self) -> SearchResult:
        """The shortest, or what was asked for where nothing is surely shorter; and why."""
        first, asked = self.problems[0], self.asked
        problem, solution = min(self.best.values(), key=lambda own: own[1].cost.step_ms)
        notes = [self._of_size(number) for number in range(len(self.problems)) if self.sizes]
        if asked is not None and _is_unsure(problem, solution, first, asked):
            less = 1 - solution.cost.step_ms / asked.cost.step_ms
            taken = f"{self._named(first)}, as asked,"
            notes.append(gave_way(taken, self._named(problem), less))
            problem, solution = first, asked
        elif not self.sizes:
            notes.append(_gain(problem, solution, asked))
        evidence = StepEvidence.of(solution.cost.step_ms, min(self.bounds_ms))
        notes.append(self._proof(evidence))
        return SearchResult(problem, solution, self._flags(problem), tuple(notes), evidence)

    def _flags(self, problem: Problem) -> dict[str, str]:
        shape = problem.profile.parallelism
        flags = {FLAG: str(shape.micro_batch_size)} if self.sizes else {}
        if all(problem is not own for own in self.problems):
            flags |= layout_flags(problem.layout, pattern_of_job(problem.profile.model.facts))
        return flags

    def _named(self, problem: Problem) -> str:
        size = f"Micro-batch size {problem.profile.parallelism.micro_batch_size}"
        layers = f"ayers per stage {layers_per_stage(problem.layout)}"
        if not self.sizes:
            return f"L{layers}"
        return f"{size} with l{layers}" if self.layouts else size

    def _of_size(self, number: int) -> str:
        """What the search has of one micro-batch size."""
        problem, result = self.problems[number], "does not fit"
        if number in self.best:
            chosen, solution = self.best[number]
            result = f"{solution.cost.step_ms:.1f} ms a step"
            if self.layouts:
                result += f" with layers per stage {layers_per_stage(chosen.layout)}"
        elif self.layouts:
            result = (
                f"no layers per stage are found that fit and take less than {self.limit_ms:.1f} ms"
            )
        size = problem.profile.parallelism.micro_batch_size
        calls = problem.schedule.num_microbatches
        return f"Micro-batch size {size}, {calls} microbatches: {result}."

    def _proof(self, evidence: StepEvidence) -> str:
        interleaved = self.layouts and self.problems[0].layout.num_chunks > 1
        searched = ["micro-batch sizes"] * self.sizes + ["layouts"] * self.layouts
        others = ["no other sizes"] * self.sizes
        if interleaved and not self.sizes:
            others.append(f"no others of {FIRST} and {LAST}")
        elif self.layouts:
            others.append("no layers per stage")
        proof = proof_of_all(" and ".join(searched), " and ".join(others), evidence)
        return f"{proof} {INTERLEAVED}" if interleaved else proof


def _candidates(number: int, least: LeastSteps) -> Iterator[_Candidate]:
    """All layouts of a problem but its own."""
    for layout in all_layouts(least.problem.layout, _PARTITIONS):
        if layout != least.problem.layout:
            bound_ms = least.without_budget_ms(layout)
            yield _Candidate(bound_ms, number, layers_per_stage(layout), layout)


def _is_unsure(problem: Problem, best: Solution, asked: Problem, known: Solution) -> bool:
    """Whether the best is another one than what was asked for, and not surely shorter."""
    if problem is asked:
        return False
    own, others = StepErrors(problem.costs, best.policy), StepErrors(asked.costs, known.policy)
    return not own.surely_shorter(others)


def _gain(chosen: Problem, best: Solution, asked: Solution | None) -> str:
    layers = layers_per_stage(chosen.layout)
    if asked is None:
        return f"Layers per stage {layers}: fits where the asked layout does not."
    if best is asked:
        return f"Layers per stage {layers}, as asked: no layout was found with a shorter step."
    now_ms = asked.cost.step_ms
    gain = (now_ms - best.cost.step_ms) / now_ms
    less = f"{gain:.2%} less" if gain >= _SHOWN else "hardly less"
    return (
        f"Layers per stage {layers}: {best.cost.step_ms:.1f} ms a step against {now_ms:.1f} ms "
        f"with the asked layout, {less}."
    )


def proof_of_all(searched: str, others: str, evidence: StepEvidence) -> str:
    """What is proven of the step of all that was searched, in the words of docs/plan.md."""
    proven = nearness(evidence.gap or 0)
    by_more = " by more" if evidence.gap else ""
    return f"Proven {proven} of all {searched} searched: {others} make a shorter one{by_more}."
