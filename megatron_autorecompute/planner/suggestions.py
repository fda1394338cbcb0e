"""What else could be changed: layers per stage, micro-batch size, and what would make a plan fit.

Each search reuses `solve` for every candidate, so the policies inside are exact; what a candidate
changes besides is stated with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_autorecompute.errors import InfeasibleError, PipelineError, PolicyError, ProfileError
from megatron_autorecompute.planner.layout import Chunk, Layout
from megatron_autorecompute.planner.planner import Budget, Planner, Solution
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.planner.unit_costs import PS_PER_MS, CostTable
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

_NEAREST_LAYOUTS = 12  # tried for an error message, which is to come within seconds


@dataclass(frozen=True, slots=True)
class Alternative:
    """One candidate, solved."""

    planner: Planner
    solution: Solution
    megatron_flags: Mapping[str, str]
    """What to put in Megatron's flags to have it."""
    note: str
    """What it gains, one sentence."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something that would make an infeasible plan fit."""

    text: str
    step_ms: float
    """Predicted time of the step with it."""


def search_layout(planner: Planner, budget: Budget) -> Alternative:
    """The contiguous layers per stage with the fastest step, the planner's own layout included.

    One chunk per stage: every partition, exact for `sum t_s + (m - 1) max t_s` (see
    `formulas.one_forward_one_backward_ms`). Several chunks: every pair of
    num_layers_in_first/last_pipeline_stage that Megatron takes, by replay. Static bytes of stages
    that were not measured are added up from the profile's per-kind figures.
    Raises: InfeasibleError when no layout fits; ProfileError without per-kind static bytes.
    """
    best = planner.attempt(budget)
    now = None if best is None else best.cost.step_ms
    layouts = _uneven_layouts(planner) if planner.layout.num_chunks > 1 else None
    if layouts is None:
        found = _best_partition(planner, budget)
        layouts = iter([] if found is None else [found])
    chosen = planner
    for layout in layouts:
        if best is not None and _least_ms(planner, layout) >= best.cost.step_ms:
            continue
        candidate = _with(planner, layout=layout)
        solution = candidate.attempt(budget)
        if solution and (best is None or solution.cost.step_ms < best.cost.step_ms):
            chosen, best = candidate, solution
    if best is None:
        planner.solve(budget)  # raises with the reason
        raise AssertionError("an infeasible layout was solved")
    return Alternative(
        chosen, best, _layout_flags(planner, chosen), _layout_note(chosen, best, now)
    )


def _least_ms(planner: Planner, layout: Layout) -> float:
    """The busiest stage's time without recompute: no step of this layout is faster."""
    table = CostTable(planner.profile)
    stages = [[layer for chunk in stage for layer in chunk.layers] for stage in layout.stages]
    busiest = max(sum(_fastest_ps(table, layer) for layer in layers) for layers in stages)
    return planner.schedule.num_microbatches * busiest / PS_PER_MS


def _fastest_ps(table: CostTable, layer: int) -> int:
    return min(table.layer(layer, choice).time_ps for choice in table.choices(layer))


def _layout_note(chosen: Planner, best: Solution, now_ms: float | None) -> str:
    layers = _layers_per_stage(chosen.layout)
    if now_ms is None:
        return f"Layers per stage {layers}: fits where the asked layout does not."
    gain = 100 * (now_ms - best.cost.step_ms) / now_ms
    return (
        f"Layers per stage {layers}: {best.cost.step_ms:.1f} ms a step against {now_ms:.1f} ms "
        f"with the asked layout, {gain:.2f}% less."
    )


def _with(
    planner: Planner,
    *,
    profile: Profile | None = None,
    layout: Layout | None = None,
    schedule: Schedule | None = None,
) -> Planner:
    return Planner(
        profile or planner.profile,
        layout or planner.layout,
        schedule or planner.schedule,
        percentile=planner.percentile,
        allowed=planner.allowed,
    )


def _uneven_layouts(planner: Planner) -> Iterator[Layout]:
    model, shape = planner.profile.model, planner.layout
    for first in range(shape.num_chunks, model.num_layers, shape.num_chunks):
        for last in range(shape.num_chunks, model.num_layers - first + 1, shape.num_chunks):
            try:
                yield Layout.from_flags(
                    model.num_layers,
                    shape.num_stages,
                    shape.num_chunks,
                    mtp_num_layers=model.mtp_num_layers,
                    num_layers_in_first_pipeline_stage=first,
                    num_layers_in_last_pipeline_stage=last,
                )
            except PipelineError:  # layers in between do not divide: no layout of Megatron's
                continue


def _layout_flags(asked: Planner, chosen: Planner) -> dict[str, str]:
    """Megatron's flags that give the layout, read back to be sure."""
    if chosen is asked:
        return {}
    layout, model = chosen.layout, chosen.profile.model
    first, *_, last = _layers_per_stage(layout)
    last -= model.mtp_num_layers
    try:
        same = layout == Layout.from_flags(
            model.num_layers,
            layout.num_stages,
            layout.num_chunks,
            mtp_num_layers=model.mtp_num_layers,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
        )
    except PipelineError:
        same = False
    if same:
        return {
            "--decoder-first-pipeline-num-layers": str(first),
            "--decoder-last-pipeline-num-layers": str(last),
        }
    return {"--pipeline-model-parallel-layout": _layout_text(layout)}


def _layout_text(layout: Layout) -> str:
    decoder = range(layout.num_layers)
    rows = []
    for layers in layout.chunk_layers():
        count = sum(layer in decoder for layer in layers)
        rows.append(f"t*{count}" * (count > 1) + "t" * (count == 1) + "m" * (len(layers) - count))
    return f"E{'|'.join(rows)}L"


def _best_partition(planner: Planner, budget: Budget) -> Layout | None:
    """Best contiguous layers per stage for one chunk each; None when no partition fits."""
    times = _StageTimes(planner, budget)
    p, m = planner.layout.num_stages, planner.schedule.num_microbatches
    best: tuple[int, list[int]] | None = None
    for slowest in times.values():
        found = _least_sum(times, slowest, p)
        if found is None:
            continue
        if best is not None and (m - 1) * slowest + times.least_sum >= best[0]:
            break
        total = found[0] + (m - 1) * slowest
        if best is None or total < best[0]:
            best = (total, found[1])
    return None if best is None else times.layout(best[1])


class _StageTimes:
    """Least time of every (stage, first layer, number of layers) that can matter."""

    def __init__(self, planner: Planner, budget: Budget) -> None:
        self.planner = planner
        self.budgets = planner.budgets(budget)
        self.num_layers = planner.profile.model.num_layers
        self.known: dict[tuple[object, ...], int | None] = {}
        table = CostTable(planner.profile)
        fastest = [_fastest_ps(table, i) for i in range(planner.profile.num_layers)]
        self.least_sum = sum(fastest)
        self.before = [sum(fastest[:i]) for i in range(self.num_layers + 1)]
        self.most = self._most(planner.attempt(budget))

    def _most(self, asked: Solution | None) -> int | None:
        """A stage slower than this makes the step slower than the asked layout's."""
        others = self.planner.schedule.num_microbatches - 1
        if asked is None or others == 0:
            return None
        times = [round(evidence.objective_ms * PS_PER_MS) for evidence in asked.evidence]
        return (sum(times) + others * max(times) - self.least_sum) // others

    def of(self, stage: int, start: int, size: int) -> int | None:
        """Time in picoseconds; None when nothing fits or it is too slow to matter."""
        if self.most is not None and self.before[start + size] - self.before[start] > self.most:
            return None
        profile = self.planner.profile
        names = tuple(profile.kind_of(i).name for i in range(start, start + size))
        # A stage as it was measured is not what the same number of other layers adds up to.
        stages = profile.stages if len(profile.stages) == self.planner.layout.num_stages else ()
        own = tuple(range(start, start + size))
        key = (stage, names, bool(stages) and tuple(sorted(stages[stage].layers)) == own)
        if key not in self.known:
            layout = self._with_stage(stage, start, size)
            choice = _with(self.planner, layout=layout).choose(stage, self.budgets[stage])
            self.known[key] = None if choice is None else choice.time_ps
        return self.known[key]

    def _with_stage(self, stage: int, start: int, size: int) -> Layout:
        """Any layout with these layers on this stage; the rest is put on its neighbours."""
        p = self.planner.layout.num_stages
        sizes = [0] * p
        sizes[stage] = size
        if stage > 0:
            sizes[0] += start
        if stage < p - 1:
            sizes[-1] += self.num_layers - start - size
        return self.layout(sizes)

    def layout(self, sizes: Sequence[int]) -> Layout:
        """One chunk per stage with so many decoder layers, MTP depths on the last."""
        mtp = self.planner.profile.model.mtp_num_layers
        chunks, start = [], 0
        for stage, size in enumerate(sizes):
            last = stage == len(sizes) - 1
            stop = start + size + mtp * last
            chunks.append((Chunk(tuple(range(start, stop)), embedding=stage == 0, head=last),))
            start = stop
        return Layout(tuple(chunks), mtp_num_layers=mtp)

    def ranges(self, stage: int) -> Iterator[tuple[int, int]]:
        """(first layer, number of layers) that a stage may have."""
        p = self.planner.layout.num_stages
        starts = [0] if stage == 0 else range(self.num_layers + 1)
        for start in starts:
            sizes = range(self.num_layers - start + 1)
            for size in [self.num_layers - start] if stage == p - 1 else sizes:
                yield start, size

    def values(self) -> list[int]:
        """Distinct stage times, ascending."""
        p = self.planner.layout.num_stages
        found = {self.of(stage, *where) for stage in range(p) for where in self.ranges(stage)}
        return sorted(value for value in found if value is not None)


def _least_sum(times: _StageTimes, slowest: int, p: int) -> tuple[int, list[int]] | None:
    """Least sum of stage times of a partition whose stages all take at most `slowest`."""
    reached: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for stage in range(p):
        following: dict[int, tuple[int, list[int]]] = {}
        for start, size in times.ranges(stage):
            time = times.of(stage, start, size) if start in reached else None
            if time is None or time > slowest:
                continue
            total = reached[start][0] + time
            if start + size not in following or total < following[start + size][0]:
                following[start + size] = (total, [*reached[start][1], size])
        reached = following
    return reached.get(times.num_layers)


def search_micro_batch(
    planners: Sequence[Planner], budget: Budget
) -> tuple[Alternative, tuple[str, ...]]:
    """The micro-batch size with the fastest step, from one planner per profile.

    The first planner is the one asked for; every planner's schedule must run the same number of
    samples per step (see `same_samples`). Returns the best and one sentence for each.
    Raises: InfeasibleError when none fits.
    """
    solved = [(planner, planner.attempt(budget)) for planner in planners]
    fitting = [(planner, s) for planner, s in solved if s is not None]
    if not fitting:
        planners[0].solve(budget)  # raises with the reason
    planner, solution = min(fitting, key=lambda pair: pair[1].cost.step_ms)
    notes = tuple(_micro_batch_note(p, s) for p, s in solved)
    size = planner.profile.parallelism.micro_batch_size
    return Alternative(planner, solution, {"--micro-batch-size": str(size)}, notes[0]), notes


def _micro_batch_note(planner: Planner, solution: Solution | None) -> str:
    size, m = planner.profile.parallelism.micro_batch_size, planner.schedule.num_microbatches
    result = "does not fit" if solution is None else f"{solution.cost.step_ms:.1f} ms a step"
    return f"Micro-batch size {size}, {m} microbatches: {result}."


def same_samples(schedule: Schedule, asked: Profile, other: Profile) -> Schedule:
    """The schedule with as many samples per step at the other profile's micro-batch size.

    Raises: PipelineError when the samples do not divide.
    """
    samples = schedule.num_microbatches * asked.parallelism.micro_batch_size
    size = other.parallelism.micro_batch_size
    if samples % size:
        raise PipelineError(
            f"{samples} samples a step cannot be cut into micro-batches of {size}. Leave out that "
            "size or change --num-microbatches."
        )
    return replace(schedule, num_microbatches=samples // size)


def cheapest_changes(planner: Planner, budget: Budget, most: int = 3) -> tuple[Change, ...]:
    """Up to three changes, each alone, with which a plan fits; the fastest step first.

    A smaller micro-batch scales bytes and times of activations with it; twice the tensor
    parallelism halves them and the static bytes; both are estimates that a profile at that size
    would replace. Twice the stages and another layout add static bytes up from the kinds.
    A full record that is missing is taken to hold one boundary tensor and to run forward twice.
    """
    found: list[Change] = []
    for attempt in (_smaller_micro_batch, _full_recompute, _other_layout, _more_stages, _more_tp):
        try:
            change = attempt(planner, budget)
        except (InfeasibleError, PipelineError, ProfileError, PolicyError):
            continue  # this change does not fit, or the profile does not say
        if change is not None:
            found.append(change)
    return tuple(sorted(found, key=lambda change: change.step_ms)[:most])


def _smaller_micro_batch(planner: Planner, budget: Budget) -> Change | None:
    size = planner.profile.parallelism.micro_batch_size
    for smaller in sorted((d for d in range(1, size) if size % d == 0), reverse=True):
        schedule = replace(
            planner.schedule, num_microbatches=planner.schedule.num_microbatches * size // smaller
        )
        profile = _scaled(planner.profile, smaller / size, static=1.0)
        solution = _with(planner, profile=profile, schedule=schedule).attempt(budget)
        if solution:
            text = f"micro-batch size {smaller} instead of {size} (scaled, not measured)"
            return Change(text, solution.cost.step_ms)
    return None


def _full_recompute(planner: Planner, budget: Budget) -> Change | None:
    profile = planner.profile
    lacking = [k for k in profile.kinds if k.record(str(FULL)) is None and k.record(str(NONE))]
    allowed = planner.allowed
    if allowed is not None and str(FULL) not in allowed:
        allowed = (*allowed, str(FULL))
    if not lacking and allowed == planner.allowed:
        return None
    kinds = tuple(
        _with_full(kind, profile.boundary_bytes) if kind in lacking else kind
        for kind in profile.kinds
    )
    wider = Planner(
        replace(profile, kinds=kinds),
        planner.layout,
        planner.schedule,
        percentile=planner.percentile,
        allowed=allowed,
    )
    solution = wider.solve(budget)
    names = ", ".join(kind.name for kind in lacking) or "all kinds"
    return Change(f"full recompute as a choice for {names}", solution.cost.step_ms)


def _with_full(kind: LayerKind, boundary_bytes: int) -> LayerKind:
    none = kind.record(str(NONE))
    if none is None:
        return kind
    highest = max(none.forward_transient_bytes, none.backward_transient_bytes)
    singles = [r for r in kind.choices if not r.choice.startswith(str(FULL))]
    slowest_ms = max(record.forward_ms + record.backward_ms for record in singles)
    full = ChoiceRecord(
        choice=str(FULL),
        held_bytes=boundary_bytes,
        forward_transient_bytes=none.forward_transient_bytes + none.held_bytes,
        backward_transient_bytes=none.held_bytes + highest,
        forward_ms=none.forward_ms,
        # Or as slow as what it contains was measured to be.
        backward_ms=max(none.forward_ms + none.backward_ms, slowest_ms - none.forward_ms),
        source="assumed",
    )
    return replace(kind, choices=(*kind.choices, full))


def _other_layout(planner: Planner, budget: Budget) -> Change | None:
    """The nearest layout that fits; the fastest of all is `search_layout`'s, and takes longer."""
    if planner.layout.num_stages == 1:
        return None
    asked = _layers_per_stage(planner.layout)

    def moved(layout: Layout) -> int:
        pairs = zip(_layers_per_stage(layout), asked, strict=True)
        return sum(abs(size - other) for size, other in pairs)

    for layout in sorted(_uneven_layouts(planner), key=moved)[:_NEAREST_LAYOUTS]:
        candidate = _with(planner, layout=layout)
        solution = candidate.attempt(budget)
        if solution and layout != planner.layout:
            flags = _layout_flags(planner, candidate)
            text = " ".join(f"{name} {value}" for name, value in flags.items())
            return Change(f"another layout: {text}", solution.cost.step_ms)
    return None


def _layers_per_stage(layout: Layout) -> list[int]:
    return [sum(len(chunk.layers) for chunk in stage) for stage in layout.stages]


def _more_stages(planner: Planner, budget: Budget) -> Change | None:
    model, layout = planner.profile.model, planner.layout
    stages = 2 * layout.num_stages
    wider = Layout.from_flags(
        model.num_layers, stages, layout.num_chunks, mtp_num_layers=model.mtp_num_layers
    )
    schedule = replace(planner.schedule, num_stages=stages, microbatch_group_size=None)
    budgets = max(planner.budgets(budget))
    solution = _with(planner, layout=wider, schedule=schedule).solve(budgets)
    return Change(f"{stages} pipeline stages instead of {stages // 2}", solution.cost.step_ms)


def _more_tp(planner: Planner, budget: Budget) -> Change | None:
    profile = _scaled(planner.profile, 0.5, static=0.5)
    solution = _with(planner, profile=profile).solve(budget)
    size = planner.profile.parallelism.tensor_parallel
    text = f"tensor parallelism {2 * size} instead of {size} (halved, not measured)"
    return Change(text, solution.cost.step_ms)


def _scaled(profile: Profile, factor: float, static: float) -> Profile:
    """All activation bytes and times times `factor`, static bytes times `static`."""

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
            round(old.optimizer_state_bytes * static),
            round(old.buffer_bytes * static),
        )

    def kind(old: LayerKind) -> LayerKind:
        choices = tuple(map(record, old.choices))
        return replace(old, choices=choices, static=old.static and scale(old.static))

    def stage(old: StageRecord) -> StageRecord:
        overhead = old.overhead and ScheduleOverhead(
            size(old.overhead.forward_bytes), size(old.overhead.backward_bytes)
        )
        return replace(
            old,
            static=scale(old.static),
            optimizer_step_peak_bytes=round(old.optimizer_step_peak_bytes * static),
            overhead=overhead,
            residual_bytes=size(old.residual_bytes),
            uncertainty_bytes=size(old.uncertainty_bytes),
            residual_ms=old.residual_ms * factor,
        )

    return replace(
        profile,
        kinds=tuple(map(kind, profile.kinds)),
        embedding=record(profile.embedding),
        head=record(profile.head),
        final_norm=profile.final_norm and record(profile.final_norm),
        boundary_bytes=size(profile.boundary_bytes),
        stages=tuple(map(stage, profile.stages)),
        embedding_static=profile.embedding_static and scale(profile.embedding_static),
        head_static=profile.head_static and scale(profile.head_static),
    )


def explained(error: InfeasibleError, planner: Planner, budget: Budget) -> InfeasibleError:
    """The same error with the changes that would fit."""
    changes = cheapest_changes(planner, budget)
    if not changes:
        return InfeasibleError(f"{error} No change this program knows would make it fit.")
    lines = "".join(f"\n  - {c.text}: {c.step_ms:.0f} ms a step" for c in changes)
    return InfeasibleError(f"{error} Each of these alone would fit:{lines}")
