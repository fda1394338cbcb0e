"""Single changes that would make an infeasible plan fit.

For each change the policy is solved exactly. The effect of the change on bytes and times is not
measured: they are scaled or added up.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from megatron_autorecompute.errors import InfeasibleError, PipelineError, PolicyError, ProfileError
from megatron_autorecompute.planner.cost.hybrid_pattern import pattern_of_job
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.layout_flags import (
    FIELDS,
    layers_per_stage,
    layout_flags,
    uneven_layout,
    uneven_sizes,
)
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import try_solve
from megatron_autorecompute.policy import FULL, NONE
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerBytes,
    LayerKind,
    Profile,
    ScheduleOverhead,
    StageRecord,
    StaticBytes,
)

_NEAREST_LAYOUTS = 12  # tried for an error message, which should take seconds
_MOST_WORK = _NEAREST_LAYOUTS * 512 * 16
"""Limit on layouts x layers x choices that are tried: fewer layouts for larger models."""
_SAME_GPUS, _TWICE_GPUS = 2, 1
"""Factor on the microbatches of a data-parallel rank in a step of the same samples, where the model
is divided among twice as many ranks."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change that would make an infeasible plan fit."""

    text: str
    step_ms: float
    """Predicted time of the step with it."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """The job's or Megatron's settings that make it, by name; none for another choice."""


def cheapest_changes(problem: Problem, most: int = 3) -> tuple[Change, ...]:
    """Up to three changes, each alone, with which a plan fits; the fastest step first.

    For a smaller micro-batch, bytes and times of activations are scaled with it. For twice the
    tensor parallelism they and the static bytes are halved. Both are estimates; a profile at that
    size is better. For twice the stages and for another layout, static bytes are added up from the
    kinds. Twice the stages or the tensor parallelism are on the same GPUs, where the half of the
    data-parallel ranks is left to share a step's samples and the optimizer's state, or else on
    twice the GPUs. If a kind has no record of full, it is assumed to hold one boundary tensor and
    to run forward twice.
    """
    found: list[Change] = []
    for proposal in (_smaller_micro_batch, _full_recompute, _other_layout, _more_stages, _more_tp):
        try:
            changes = (_solved(*proposed) for proposed in proposal(problem))
            found += itertools.islice(filter(None, changes), 1)
        except (InfeasibleError, PipelineError, ProfileError, PolicyError):
            continue  # this change does not fit, or the profile does not say
    return tuple(sorted(found, key=lambda change: change.step_ms)[:most])


def _solved(text: str, changed: Problem, settings: Mapping[str, object]) -> Change | None:
    solution = try_solve(changed)
    return Change(text, solution.cost.step_ms, settings) if solution else None


Proposals = Iterator[tuple[str, Problem, Mapping[str, object]]]
"""What changes, the problem with it, and the settings that make it; the first that fits counts."""


def _smaller_micro_batch(problem: Problem) -> Proposals:
    size = problem.profile.parallelism.micro_batch_size
    for smaller in sorted((d for d in range(1, size) if size % d == 0), reverse=True):
        profile = _scaled(problem.profile, smaller / size, static=1.0, state=1.0)
        schedule = _repeated(problem.schedule, size // smaller)
        text = f"micro-batch size {smaller} instead of {size} (scaled, not measured)"
        changed = replace(problem, profile=profile, schedule=schedule)
        yield text, changed, {"micro_batch_size": smaller}


def _full_recompute(problem: Problem) -> Proposals:
    profile = problem.profile
    lacking = [k for k in profile.kinds if k.record(FULL) is None and k.record(NONE)]
    only = problem.only and problem.only.and_also(FULL)
    if not lacking and only == problem.only:
        return
    kinds = tuple(
        _with_full(kind, profile.boundary_bytes) if kind in lacking else kind
        for kind in profile.kinds
    )
    allowed = None if only is None else only.texts()
    wider = replace(problem, profile=replace(profile, kinds=kinds), allowed=allowed)
    names = ", ".join(kind.name for kind in lacking) or "all kinds"
    yield f"full recompute as a choice for {names}", wider, {}


def _with_full(kind: LayerKind, boundary_bytes: int) -> LayerKind:
    none = kind.record(NONE)
    if none is None:
        return kind
    highest = max(none.forward_transient_bytes, none.backward_transient_bytes)
    singles = [r for r in kind.choices if r.policy.granularity != "full"]
    slowest_ms = max(record.forward_ms + record.backward_ms for record in singles)
    full = ChoiceRecord(
        choice=str(FULL),
        held_bytes=boundary_bytes,
        forward_transient_bytes=none.forward_transient_bytes + none.held_bytes,
        backward_transient_bytes=none.held_bytes + highest,
        forward_ms=none.forward_ms,
        # At least as slow as every choice that it contains.
        backward_ms=max(none.forward_ms + none.backward_ms, slowest_ms - none.forward_ms),
        source="assumed",
    )
    return replace(kind, choices=(*kind.choices, full))


def _other_layout(problem: Problem) -> Proposals:
    """The nearest layouts; `search_layout` finds the fastest one, and takes longer."""
    if problem.layout.num_stages == 1 or problem.profile.model.encoder_layers:
        return
    profile = problem.profile
    work = profile.num_layers * max(len(kind.choices) for kind in profile.kinds)
    for layout in itertools.islice(_nearest(problem.layout), 1 + _MOST_WORK // work):
        if layout != problem.layout:
            flags = layout_flags(layout, pattern_of_job(profile.model.facts))
            text = " ".join(f"{name} {value}" for name, value in flags.items())
            settings = {FIELDS[name]: value for name, value in flags.items()}
            changed = replace(problem, layout=layout, known=())
            yield f"another layout: {text}", changed, settings


def _nearest(asked: Layout) -> Iterator[Layout]:
    """The layouts by the flags for uneven stages that move the fewest layers, nearest first."""
    first, *between, last = layers_per_stage(asked)

    def moved(sizes: tuple[int, int, int]) -> int:
        at_first, middle, at_last = sizes
        ends = abs(at_first - first) + abs(at_last + asked.mtp_num_layers - last)
        return ends + sum(abs(middle - size) for size in between)

    for at_first, _, at_last in heapq.nsmallest(_NEAREST_LAYOUTS, uneven_sizes(asked), key=moved):
        layout = uneven_layout(asked, at_first, at_last)
        if layout is not None:
            yield layout


def _more_stages(problem: Problem) -> Proposals:
    model, layout = problem.profile.model, problem.layout
    if model.encoder_layers:
        return
    stages = 2 * layout.num_stages
    wider = Layout.from_flags(
        model.num_layers, stages, layout.num_chunks, mtp_num_layers=model.mtp_num_layers
    )
    times = _times_microbatches(problem)
    schedule = replace(_repeated(problem.schedule, times), num_stages=stages)
    moved = replace(
        problem,
        profile=_scaled(problem.profile, 1.0, static=1.0, state=times),
        layout=wider,
        schedule=replace(schedule, microbatch_group_size=None),
        budget=max(problem.budgets),
        known=(),
    )
    text = f"{stages} pipeline stages instead of {stages // 2}{_where(times)}"
    yield text, moved, {"pipeline_model_parallel_size": stages, **_gpus(problem, times)}


def _more_tp(problem: Problem) -> Proposals:
    times = _times_microbatches(problem)
    profile = _scaled(problem.profile, 0.5, static=0.5, state=0.5 * times)
    changed = replace(problem, profile=profile, schedule=_repeated(problem.schedule, times))
    size = 2 * problem.profile.parallelism.tensor_parallel
    where = _where(times)
    text = f"tensor parallelism {size} instead of {size // 2}{where} (halved, not measured)"
    yield text, changed, {"tensor_model_parallel_size": size, **_gpus(problem, times)}


def _times_microbatches(problem: Problem) -> int:
    """The factor on microbatches: for the same GPUs if they hold the model an even number of times,
    else for twice the GPUs."""
    shape, num_gpus = problem.profile.parallelism, problem.profile.num_gpus
    stages = problem.layout.num_stages
    holders = (
        shape.tensor_parallel * shape.context_parallel * stages,
        shape.expert_parallel * shape.expert_tensor_parallel * stages,
    )
    if num_gpus is None or any(num_gpus % (2 * ranks) for ranks in holders):
        return _TWICE_GPUS
    return _SAME_GPUS


def _where(times: int) -> str:
    return " on the same GPUs" if times == _SAME_GPUS else " on twice the GPUs"


def _gpus(problem: Problem, times: int) -> dict[str, object]:
    """The setting for twice the GPUs, if they are known and it takes them."""
    num_gpus = problem.profile.num_gpus
    return {} if num_gpus is None or times == _SAME_GPUS else {"num_gpus": 2 * num_gpus}


def _repeated(schedule: Schedule, times: int) -> Schedule:
    return replace(schedule, num_microbatches=schedule.num_microbatches * times)


def _scaled(profile: Profile, factor: float, static: float, state: float) -> Profile:
    """All activation bytes and times times `factor`, the optimizer's state times `state`, other
    static bytes times `static`."""

    def size(old: int) -> int:
        return round(old * factor)

    def record(old: ChoiceRecord) -> ChoiceRecord:
        points = (LayerBytes.of(point).each(size).into(point) for point in old.percentiles)
        return replace(
            LayerBytes.of(old).each(size).into(old),
            percentiles=tuple(points),
            forward_ms=old.forward_ms * factor,
            backward_ms=old.backward_ms * factor,
            spread_ms=old.spread_ms * factor,
            uncertainty_bytes=size(old.uncertainty_bytes),
            source="scaled",
        )

    def scale(old: StaticBytes) -> StaticBytes:
        return StaticBytes(
            round(old.parameter_bytes * static),
            round(old.gradient_bytes * static),
            round(old.optimizer_state_bytes * state),
            round(old.buffer_bytes * static),
            {name: round(size_bytes * static) for name, size_bytes in old.shared.items()},
        )

    def kind(old: LayerKind) -> LayerKind:
        return replace(old, static=old.static and scale(old.static))

    def stage(old: StageRecord) -> StageRecord:
        overhead = old.overhead and ScheduleOverhead(
            size(old.overhead.forward_bytes), size(old.overhead.backward_bytes)
        )
        others = old.others_bytes or 0
        return replace(
            old,
            static=scale(old.static),
            optimizer_step_peak_bytes=round(old.optimizer_step_peak_bytes * static),
            overhead=overhead,
            residual_bytes=others + size(old.residual_bytes - others),
            uncertainty_bytes=size(old.uncertainty_bytes),
            residual_ms=old.residual_ms * factor,
        )

    scaled = profile.each_record(record)
    return replace(
        scaled,
        kinds=tuple(map(kind, scaled.kinds)),
        boundary_bytes=size(profile.boundary_bytes),
        deferred=profile.deferred
        and replace(profile.deferred, each_bytes=size(profile.deferred.each_bytes)),
        stages=tuple(map(stage, profile.stages)),
        embedding_static=profile.embedding_static and scale(profile.embedding_static),
        head_static=profile.head_static and scale(profile.head_static),
        measured_step=None,
    )


def explained(
    error: InfeasibleError,
    problem: Problem,
    command: Callable[[Change], str | None] = lambda _: None,
) -> InfeasibleError:
    """The error, with changes that would make the plan fit added to its message, and below each the
    command that plans it, if `command` knows one."""
    changes = cheapest_changes(problem)
    if not changes:
        return InfeasibleError(f"{error} No change this program knows would make it fit.")
    lines = [f"{error} Each of these alone would fit:"]
    for change in changes:
        lines.append(f"  - {change.text}: {change.step_ms:.0f} ms a step")
        if (typed := command(change)) is not None:
            lines.append(f"    {typed}")
    return InfeasibleError("\n".join(lines))
