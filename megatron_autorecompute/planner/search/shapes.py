"""Searches layers per stage and micro-batch sizes for the shortest step.

Steps are bounded without a search, each time closer than before; the lowest ones are solved until
none that is left can be shorter.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
        profile, layout = problem.profile, problem.layout
        least = [_least_ps(self._table, layer) for layer in range(layout.num_layers)]
        depths = [0] * layout.mtp_num_layers
        self._before: Ints = np.array([0, *least, *depths], np.int64).cumsum()
        """What all decoder layers before each layer take at least."""
        self._kinds = [profile.kind_of(layer).name for layer in range(profile.num_layers)]
        self._known: dict[object, Floats] = {}

    def without_budget_ms(self, layout: Layout) -> float:
        """A bound from the busiest stage's decoder layers, without a budget."""
        own = (
            sum(int(self._before[c.layers[-1] + 1] - self._before[c.layers[0]]) for c in stage)
            for stage in ([c for c in stage if c.layers] for stage in layout.stages)
        )
        less_ms = min([0.0, *(stage.residual_ms for stage in self.problem.profile.stages)])
        each_ms = max(own) / PS_PER_MS + less_ms
        return self.problem.schedule.num_microbatches * max(0.0, each_ms) * (1 - SLACK)

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
        chunks, measured = problem.layout.stages[stage], bool(problem.profile.stages)
        key = stage, *(self._alike(chunk.layers, measured) for chunk in chunks)
        if key not in self._known:
            fitting = problem.stages.stage(stage).plans(problem.budgets[stage])
            weights, which = np.unique(self._paths[:, :, stage], axis=0, return_inverse=True)
            bounds = [math.inf if fitting is None else fitting.bound(each) for each in weights]
            self._known[key] = np.array(bounds)[which.ravel()]
        return self._known[key]

    def _alike(self, layers: tuple[int, ...], measured: bool) -> object:
        """Differs between layers of one chunk that cost differently."""
        last = self.problem.layout.num_layers - 1
        ends = layers[-1:] == (last,), layers[:1] == (last + 1,)
        return ends, layers if measured else tuple(self._kinds[layer] for layer in layers)


def _least_ps(table: CostTable, layer: int) -> int:
    """The least time of a layer, also as one of several in a measured checkpoint."""
    times = [table.layer(layer, choice).time_ps for choice in table.choices(layer)]
    for record in table.profile.kind_of(layer).choices:
        if record.policy.group > 1:
            whole_ms = record.forward_ms + record.backward_ms
            times.append(int(whole_ms * PS_PER_MS / record.policy.group))
    return min(times)


class _Search:
    """The search of one question; arguments as of `search_shapes`."""

    def __init__(self, problems: Sequence[Problem], *, layouts: bool) -> None:
        self.problems, self.layouts = problems, layouts
        self.sizes = len(problems) > 1 or not layouts
        """Whether micro-batch sizes are searched."""
        self.best: dict[int, tuple[Problem, Solution]] = {}
        """The shortest of each problem's layouts, by its number."""
        self.bounds_ms = [math.inf]
        for number, problem in enumerate(problems):
            self._solve(number, problem)
        self.asked = self.best[0][1] if 0 in self.best else None
        if layouts:
            self._search_layouts()

    @property
    def limit_ms(self) -> float:
        """The shortest step so far."""
        return min((own.cost.step_ms for _, own in self.best.values()), default=math.inf)

    def _search_layouts(self) -> None:
        """Solve the layout with the least bound until none that is left can be shorter."""
        left: list[tuple[float, int, int, Layout, Problem | None]] = []
        order, least = itertools.count(), list(map(LeastSteps, self.problems))
        for number, own in enumerate(self.problems):
            for layout in all_layouts(own.layout, _PARTITIONS):
                if layout != own.layout:
                    bound_ms = least[number].without_budget_ms(layout)
                    left.append((bound_ms, next(order), number, layout, None))
        heapq.heapify(left)
        tries = max(1, _LAYERS_SOLVED // self.problems[0].layout.num_layers)
        while left:
            bound_ms, at, number, layout, problem = heapq.heappop(left)
            limit_ms = self.limit_ms
            if bound_ms >= limit_ms or (not tries and math.isfinite(limit_ms)):
                self.bounds_ms.append(bound_ms)
                return
            if problem is None:  # a closer bound is to be had
                problem = replace(self.problems[number], layout=layout)
                bound_ms = max(bound_ms, least[number].step_ms(problem))
                heapq.heappush(left, (bound_ms, at, number, layout, problem))
                continue
            tries -= tries > 0
            self._solve(number, problem)

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
        notes = [self._of_size(number) for number in range(len(self.problems))]
        if asked is not None and _is_unsure(problem, solution, first, asked):
            less = 1 - solution.cost.step_ms / asked.cost.step_ms
            notes.append(gave_way(f"{self._named(first)}, as asked,", self._named(problem), less))
            problem, solution = first, asked
        evidence = StepEvidence.of(solution.cost.step_ms, min(self.bounds_ms))
        searched = ["micro-batch sizes"] * self.sizes + ["layouts"] * self.layouts
        others = ["no other sizes"] * self.sizes + ["no layers per stage"] * self.layouts
        notes.append(proof_of_all(" and ".join(searched), " and ".join(others), evidence))
        if self.layouts and first.layout.num_chunks > 1:
            notes[-1] += f" {INTERLEAVED}"
        flags = {FLAG: str(problem.profile.parallelism.micro_batch_size)} if self.sizes else {}
        if all(problem is not own for own in self.problems):
            flags |= layout_flags(problem.layout, pattern_of_job(problem.profile.model.facts))
        return SearchResult(problem, solution, flags, tuple(notes), evidence)

    def _of_size(self, number: int) -> str:
        """What the search has of one micro-batch size."""
        problem = self.problems[number]
        size, calls = problem.profile.parallelism.micro_batch_size, problem.schedule
        said = f"Micro-batch size {size}, {calls.num_microbatches} microbatches"
        if number not in self.best:
            less = f", or in less than {self.limit_ms:.1f} ms" if self.layouts else ""
            return f"{said}: does not fit{less}."
        chosen, solution = self.best[number]
        said += f": {solution.cost.step_ms:.1f} ms a step"
        if self.layouts:
            said += f" with layers per stage {layers_per_stage(chosen.layout)}"
        if number or self.asked is None or self.asked is solution:
            return f"{said}."
        return f"{said}, {self.asked.cost.step_ms:.1f} ms as asked."

    def _named(self, problem: Problem) -> str:
        size = f"Micro-batch size {problem.profile.parallelism.micro_batch_size}"
        layers = f" with layers per stage {layers_per_stage(problem.layout)}"
        return f"{size}{layers * self.layouts}"


def _is_unsure(problem: Problem, best: Solution, asked: Problem, known: Solution) -> bool:
    """Whether the best is another one than what was asked for, and not surely shorter."""
    if problem is asked:
        return False
    own, others = StepErrors(problem.costs, best.policy), StepErrors(asked.costs, known.policy)
    return not own.surely_shorter(others)


def proof_of_all(searched: str, others: str, evidence: StepEvidence) -> str:
    """What is proven of the step of all that was searched, in the words of docs/plan.md."""
    proven = nearness(evidence.gap or 0)
    by_more = " by more" if evidence.gap else ""
    return f"Proven {proven} of all {searched} searched: {others} make a shorter one{by_more}."
