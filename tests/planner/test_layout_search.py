import itertools
from dataclasses import replace

import pytest

from megatron_autorecompute.errors import InfeasibleError
from megatron_autorecompute.planner.formulas import one_forward_one_backward_ms
from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.planner.layout_search import search_layout
from megatron_autorecompute.planner.planner import Planner
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerKind,
    StageRecord,
    StaticBytes,
)
from tests.planner.asked import layout_of, uneven


def partitions(num_layers, stages):
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_layers)))


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
