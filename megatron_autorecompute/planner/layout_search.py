"""Searches the number of layers per stage for the fastest step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.layout import Chunk, Layout
from megatron_autorecompute.planner.planner import Budget, Planner, Solution
from megatron_autorecompute.planner.unit_costs import PS_PER_MS, CostTable


@dataclass(frozen=True, slots=True)
class SearchResult:
    """One candidate, solved."""

    planner: Planner
    solution: Solution
    megatron_flags: Mapping[str, str]
    """Megatron's flags that give it, name to value."""
    note: str
    """One sentence on what it gains."""


def search_layout(planner: Planner, budget: Budget) -> SearchResult:
    """The contiguous layers per stage with the fastest step, the planner's own layout included.

    One chunk per stage: every partition, exact for `sum t_s + (m - 1) max t_s` of busy times (see
    `formulas.one_forward_one_backward_ms`); how forwards and backwards share these is looked at in
    the one partition that is best by it. Several chunks: every pair of
    num_layers_in_first/last_pipeline_stage that Megatron takes, by replay. Static bytes of stages
    that were not measured are added up from the profile's per-kind figures.
    Raises: InfeasibleError when no layout fits; ProfileError without per-kind static bytes.
    """
    best = planner.try_solve(budget)
    now = None if best is None else best.cost.step_ms
    layouts = uneven_layouts(planner) if planner.layout.num_chunks > 1 else None
    if layouts is None:
        found = _best_partition(planner, budget)
        layouts = iter([] if found is None else [found])
    chosen = planner
    for layout in layouts:
        if best is not None and _least_ms(planner, layout) >= best.cost.step_ms:
            continue
        candidate = planner.replaced(layout=layout)
        solution = candidate.try_solve(budget)
        if solution and (best is None or solution.cost.step_ms < best.cost.step_ms):
            chosen, best = candidate, solution
    if best is None:
        planner.solve(budget)  # raises with the reason
        raise AssertionError("an infeasible layout was solved")
    return SearchResult(
        chosen, best, layout_flags(planner, chosen), _layout_note(chosen, best, now)
    )


def _least_ms(planner: Planner, layout: Layout) -> float:
    """Time of the busiest stage without recompute: a lower bound on the step of this layout."""
    table = CostTable(planner.profile)
    stages = [[layer for chunk in stage for layer in chunk.layers] for stage in layout.stages]
    busiest = max(sum(_fastest_ps(table, layer) for layer in layers) for layers in stages)
    return planner.schedule.num_microbatches * busiest / PS_PER_MS


def _fastest_ps(table: CostTable, layer: int) -> int:
    return min(table.layer(layer, choice).time_ps for choice in table.choices(layer))


def _layout_note(chosen: Planner, best: Solution, now_ms: float | None) -> str:
    layers = layers_per_stage(chosen.layout)
    if now_ms is None:
        return f"Layers per stage {layers}: fits where the asked layout does not."
    gain = 100 * (now_ms - best.cost.step_ms) / now_ms
    return (
        f"Layers per stage {layers}: {best.cost.step_ms:.1f} ms a step against {now_ms:.1f} ms "
        f"with the asked layout, {gain:.2f}% less."
    )


def uneven_layouts(planner: Planner) -> Iterator[Layout]:
    """Every layout with as many stages that num_layers_in_first/last_pipeline_stage can give."""
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
            except PipelineError:  # layers in between do not divide: Megatron refuses it
                continue


def layout_flags(asked: Planner, chosen: Planner) -> dict[str, str]:
    """Megatron's flags that give the chosen layout; parsed again as a check."""
    if chosen is asked:
        return {}
    layout, model = chosen.layout, chosen.profile.model
    first, *_, last = layers_per_stage(layout)
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
    """Least time of every (stage, first layer, number of layers) that can be part of the best."""

    def __init__(self, planner: Planner, budget: Budget) -> None:
        self.planner = planner
        self.budgets = planner.budgets(budget)
        self.num_layers = planner.profile.model.num_layers
        self.known: dict[tuple[object, ...], int | None] = {}
        table = CostTable(planner.profile)
        fastest = [_fastest_ps(table, i) for i in range(planner.profile.num_layers)]
        self.least_sum = sum(fastest)
        self.before = [sum(fastest[:i]) for i in range(self.num_layers + 1)]
        self.most = self._most(planner.try_solve(budget))

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
        # A measured stage differs from the sum over as many other layers.
        stages = profile.stages if len(profile.stages) == self.planner.layout.num_stages else ()
        own = tuple(range(start, start + size))
        key = (stage, names, bool(stages) and tuple(sorted(stages[stage].layers)) == own)
        if key not in self.known:
            layout = self._with_stage(stage, start, size)
            choice = self.planner.replaced(layout=layout).choose(stage, self.budgets[stage])
            self.known[key] = None if choice is None else choice.time_ps
        return self.known[key]

    def _with_stage(self, stage: int, start: int, size: int) -> Layout:
        """Some layout with these layers on this stage; its neighbours get the other layers."""
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


def layers_per_stage(layout: Layout) -> list[int]:
    """How many layers each stage has, all its chunks together."""
    return [sum(len(chunk.layers) for chunk in stage) for stage in layout.stages]
