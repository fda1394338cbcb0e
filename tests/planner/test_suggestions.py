import itertools
from dataclasses import replace

import pytest

from megatron_autorecompute.errors import InfeasibleError, PipelineError
from megatron_autorecompute.planner.formulas import one_forward_one_backward_ms
from megatron_autorecompute.planner.layout import Chunk, Layout
from megatron_autorecompute.planner.planner import Planner
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.planner.suggestions import (
    cheapest_changes,
    explained,
    same_samples,
    search_layout,
    search_micro_batch,
)
from megatron_autorecompute.profile import (
    BytesAt,
    ChoiceRecord,
    LayerKind,
    ScheduleOverhead,
    StageRecord,
    StaticBytes,
)
from tests.planner.random_profiles import problem_of_many


def uneven(num_layers=7, stages=3, head_ms=25.0):
    profile, _, _, _ = problem_of_many(num_layers)
    head = ChoiceRecord("none", 40, 9, 50, head_ms, 2 * head_ms)
    return replace(profile, head=head), stages


def partitions(num_layers, stages):
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_layers)))


def layout_of(sizes):
    chunks, start = [], 0
    for stage, size in enumerate(sizes):
        layers = tuple(range(start, start + size))
        chunks.append((Chunk(layers, embedding=stage == 0, head=stage == len(sizes) - 1),))
        start += size
    return Layout(tuple(chunks))


@pytest.mark.parametrize("budget", [350, 500, 900])
def test_the_searched_layout_is_the_best_of_all_partitions(budget):
    profile, stages = uneven()
    schedule = Schedule(stages, 1, 6)
    best = None
    for sizes in partitions(7, stages):
        try:
            solution = Planner(profile, layout_of(sizes), schedule).solve(budget)
        except InfeasibleError:
            continue
        times = [stage.busy_ms / 6 for stage in solution.cost.stages]
        formula = one_forward_one_backward_ms(times, 6)
        best = formula if best is None else min(best, formula)
    asked = Planner(profile, layout_of((2, 2, 3)), schedule)
    found = search_layout(asked, budget)
    times = [stage.busy_ms / 6 for stage in found.solution.cost.stages]
    assert one_forward_one_backward_ms(times, 6) == pytest.approx(best)
    assert "ms a step against" in found.note or "fits where" in found.note


def test_a_found_layout_is_given_as_flags_that_mean_it():
    profile, stages = uneven()
    asked = Planner(profile, layout_of((2, 2, 3)), Schedule(stages, 1, 6))
    found = search_layout(asked, 900)
    flags = dict(found.megatron_flags)
    if "--pipeline-model-parallel-layout" in flags:
        read = Layout.parse(flags["--pipeline-model-parallel-layout"], stages)
    else:
        read = Layout.from_flags(
            7,
            stages,
            num_layers_in_first_pipeline_stage=int(flags["--decoder-first-pipeline-num-layers"]),
            num_layers_in_last_pipeline_stage=int(flags["--decoder-last-pipeline-num-layers"]),
        )
    assert read == found.planner.layout != asked.layout


def test_interleaved_layouts_are_searched_by_first_and_last_stage():
    profile, _ = uneven(12, head_ms=60.0)
    asked = Planner(profile, Layout.from_flags(12, 3, 2), Schedule(3, 2, 6))
    found = search_layout(asked, 3000)
    assert found.solution.cost.step_ms < asked.solve(3000).cost.step_ms
    assert set(found.megatron_flags) == {
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
    }


def test_the_searched_micro_batch_has_the_fastest_step():
    profile, layout, schedule, _ = problem_of_many()
    planners = []
    for size, speedup in ((1, 1.0), (2, 1.3), (4, 1.4)):
        bigger = with_micro_batch(profile, size, speedup)
        planners.append(Planner(bigger, layout, replace(schedule, num_microbatches=8 // size)))
    best, notes = search_micro_batch(planners, 1500)
    steps = []
    for planner in planners:
        try:
            steps.append(planner.solve(1500).cost.step_ms)
        except InfeasibleError:
            steps.append(float("inf"))
    assert best.solution.cost.step_ms == min(steps)
    assert len(notes) == 3
    with pytest.raises(InfeasibleError):
        search_micro_batch(planners, 10)


def with_micro_batch(profile, size, speedup):
    def grown(r):
        return replace(
            r,
            held_bytes=r.held_bytes * size,
            forward_transient_bytes=r.forward_transient_bytes * size,
            backward_transient_bytes=r.backward_transient_bytes * size,
            forward_ms=r.forward_ms * size / speedup,
            backward_ms=r.backward_ms * size / speedup,
        )

    kinds = tuple(replace(k, choices=tuple(map(grown, k.choices))) for k in profile.kinds)
    shape = replace(profile.parallelism, micro_batch_size=size)
    return replace(profile, kinds=kinds, parallelism=shape)


def test_another_micro_batch_runs_as_many_samples():
    profile, _, _, _ = problem_of_many()
    one, two, three = (with_micro_batch(profile, size, 1.0) for size in (1, 2, 3))
    assert same_samples(Schedule(1, 1, 8), two, one).num_microbatches == 16
    with pytest.raises(PipelineError, match="16 samples a step cannot be cut"):
        same_samples(Schedule(1, 1, 8), two, three)


def test_an_infeasible_plan_is_given_changes_that_would_fit_cheapest_first():
    profile, layout, schedule, _ = problem_of_many()
    kinds = tuple(replace(kind, static=StaticBytes(100)) for kind in profile.kinds)
    profile = with_micro_batch(replace(profile, kinds=kinds), 4, 1.0)
    planner = Planner(profile, layout, schedule)
    need = planner.leanest[0].peak_bytes
    changes = cheapest_changes(planner, need - 1)
    assert [c.step_ms for c in changes] == sorted(c.step_ms for c in changes)
    texts = " ".join(change.text for change in changes)
    assert "micro-batch size 2 instead of 4" in texts
    assert "2 pipeline stages instead of 1" in texts
    assert "tensor parallelism 2 instead of 1" in texts
    with pytest.raises(InfeasibleError) as caught:
        planner.solve(need - 1)
    assert "Each of these alone would fit" in str(explained(caught.value, planner, need - 1))
    assert "No change" in str(explained(caught.value, planner, 1))


def test_another_layout_is_proposed_where_it_takes_layers_from_the_stage_that_is_too_full():
    profile, _, _, _ = problem_of_many(12)
    planner = Planner(profile, layout_of((6, 3, 3)), Schedule(3, 1, 6))
    need = planner.leanest[0].peak_bytes
    (text,) = [c.text for c in cheapest_changes(planner, need - 1, most=9) if "layout" in c.text]
    flags = text.removeprefix("another layout: ").split()
    first, last = (int(value) for value in flags[1::2])
    assert first < 6
    layout = Layout.from_flags(
        12, 3, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last
    )
    assert Planner(profile, layout, planner.schedule).attempt(need - 1)


def test_a_missing_full_record_is_proposed():
    profile, layout, schedule, _ = problem_of_many()
    kinds = tuple(
        replace(k, choices=tuple(c for c in k.choices if c.choice != "full")) for k in profile.kinds
    )
    planner = Planner(replace(profile, kinds=kinds), layout, schedule)
    changes = cheapest_changes(planner, planner.leanest[0].peak_bytes - 40, most=9)
    assert any("full recompute as a choice for k" in change.text for change in changes)


def test_a_smaller_micro_batch_scales_all_that_scales_and_percentiles_too():
    profile, layout, schedule, _ = problem_of_many(1)
    at = (BytesAt(99.0, 100, 0, 0),)
    none = ChoiceRecord("none", 90, 0, 0, 1.0, 2.0, percentiles=at)
    full = replace(none, choice="full", backward_ms=3.0)
    kind = LayerKind("moe", (0,), (none, full), static=StaticBytes())
    shape = replace(profile.parallelism, micro_batch_size=2)
    stage = StageRecord((0,), StaticBytes(10), overhead=ScheduleOverhead(1000, 1000))
    profile = replace(profile, kinds=(kind,), parallelism=shape, stages=(stage,))
    planner = Planner(profile, layout, schedule, percentile=99.0)
    assert planner.leanest[0].peak_bytes == 10 + 1000 + 100

    def proposed(budget):
        texts = [change.text for change in cheapest_changes(planner, budget, 9)]
        return any("micro-batch size 1 instead of 2" in text for text in texts)

    assert proposed(10 + 500 + 50)
    assert not proposed(10 + 500 + 50 - 1)


def test_full_as_a_choice_is_proposed_with_what_is_allowed_and_nothing_else():
    profile, layout, schedule, _ = problem_of_many()

    def proposals(allowed):
        planner = Planner(profile, layout, schedule, allowed=allowed)
        changes = cheapest_changes(planner, planner.leanest[0].peak_bytes - 1, 9)
        return [change for change in changes if "full recompute" in change.text]

    assert proposals(["none", "full"]) == []  # it may be used, and is not enough
    (change,) = proposals(["none", "selective[mlp]"])
    wider = Planner(profile, layout, schedule, allowed=["none", "selective[mlp]", "full"])
    budget = Planner(profile, layout, schedule, allowed=["none", "selective[mlp]"])
    assert change.step_ms == wider.solve(budget.leanest[0].peak_bytes - 1).cost.step_ms


def test_flags_are_given_that_megatron_takes_where_a_stage_has_no_layer():
    profile, _ = uneven(5, head_ms=100.0)
    asked = Planner(profile, layout_of((2, 1, 1, 1)), Schedule(4, 1, 8))
    found = search_layout(asked, 10**6)
    assert [len(chunks[0].layers) for chunks in found.planner.layout.stages][-1] == 0
    (text,) = found.megatron_flags.values()
    assert set(found.megatron_flags) == {"--pipeline-model-parallel-layout"}
    assert Layout.parse(text, 4) == found.planner.layout


def test_a_stage_as_it_was_measured_is_not_taken_for_one_of_other_layers():
    none, full = (
        ChoiceRecord(name, size, 0, 0, 1.0, ms)
        for name, size, ms in (("none", 10, 2.0), ("full", 1, 9.0))
    )
    profile, _ = uneven(4)
    kind = LayerKind("k", (0, 1, 2, 3), (none, full), static=StaticBytes(100))
    # Measured: stage 1 with layers 1 and 2 needs nothing besides; added up, a layer is 100 bytes.
    stages = tuple(StageRecord(layers, StaticBytes(0)) for layers in ((0,), (1, 2), (3,)))
    embedding = ChoiceRecord("none", 0, 0, 0, 3.0, 6.0)
    nothing = replace(embedding, forward_ms=0.0, backward_ms=0.0)
    profile = replace(profile, kinds=(kind,), stages=stages, embedding=embedding, head=nothing)
    found = []
    for sizes in ((1, 2, 1), (2, 1, 1), (1, 1, 2)):
        asked = Planner(profile, layout_of(sizes), Schedule(3, 1, 6))
        try:
            found.append(search_layout(asked, 130).solution.cost.step_ms)
        except InfeasibleError:
            found.append(None)
    assert found[0] is not None
    assert found == [found[0]] * 3
