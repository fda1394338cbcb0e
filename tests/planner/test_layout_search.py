from dataclasses import replace

import pytest

from megatron_autorecompute.errors import InfeasibleError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.shapes import search_shapes
from megatron_autorecompute.planner.search.solve import solve
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerKind,
    StageRecord,
    StaticBytes,
)
from tests.planner.asked import layout_of, shortest_of_all, uneven
from tests.planner.random_profiles import problem_of_uneven_stages
from tests.planner.uniform_profiles import NONE, uniform_profile


def search_layout(problem):
    return search_shapes([problem], layouts=True)


@pytest.mark.parametrize("budget", [350, 500, 900])
def test_no_layout_of_a_small_model_has_a_shorter_step_than_the_searched_one(budget):
    profile, stages = uneven()
    asked = Problem(profile, layout_of((2, 2, 3)), Schedule(stages, 1, 6), budget)
    found = search_layout(asked)
    assert found.solution.cost.step_ms == shortest_of_all(asked)
    assert "Of 15 layouts that were solved none has a shorter step." in found.notes[0]


@pytest.mark.long
def test_in_random_problems_none_has_a_shorter_step_either():
    """Forwards differ, layers are of several kinds, depths follow, stages were measured."""
    shorter = infeasible = measured = 0
    for seed in range(16):
        profile, layout, schedule, budget = problem_of_uneven_stages(seed)
        asked = Problem(profile, layout, schedule, budget)
        best = shortest_of_all(asked)
        if best is None:
            infeasible += 1
            with pytest.raises(InfeasibleError):
                search_layout(asked)
            continue
        found = search_layout(asked)
        assert found.solution.cost.step_ms == pytest.approx(best, rel=1e-12), seed
        shorter += found.problem.layout != layout
        measured += bool(profile.stages)
    assert shorter > 5
    assert infeasible
    assert measured


def test_a_found_layout_is_given_as_flags_that_mean_it():
    profile, stages = uneven()
    asked = Problem(profile, layout_of((2, 2, 3)), Schedule(stages, 1, 6))
    found = search_layout(asked.at(900))
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
    assert read == found.problem.layout != asked.layout


def test_interleaved_layouts_are_searched_by_first_and_last_stage():
    profile, _ = uneven(12, head_ms=60.0)
    asked = Problem(profile, Layout.from_flags(12, 3, 2), Schedule(3, 2, 6))
    found = search_layout(asked.at(3000))
    shortest = shortest_of_all(asked.at(3000))
    assert found.solution.cost.step_ms == shortest < solve(asked.at(3000)).cost.step_ms
    assert set(found.megatron_flags) == {
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--num-virtual-stages-per-pipeline-rank",
    }


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
        asked = Problem(profile, layout_of(sizes), Schedule(3, 1, 6))
        try:
            found.append(search_layout(asked.at(130)).solution.cost.step_ms)
        except InfeasibleError:
            found.append(None)
    assert found[0] is not None
    assert found == [found[0]] * 3


def test_a_layout_that_is_best_only_inside_the_noise_gives_way_to_the_asked_one():
    profile, stages = uneven(head_ms=13.0)
    asked = Problem(profile, layout_of((2, 3, 2)), Schedule(stages, 1, 12))
    # Layers err alike on any stage, which cancels; the head's error tells which stage is slowest.
    noisy_head = replace(profile.head, spread_ms=30.0)
    noisy = replace(asked, profile=replace(profile, head=noisy_head))
    noisy = noisy.at(900)
    sure, unsure = search_layout(asked.at(900)), search_layout(noisy)
    assert sure.solution.cost.step_ms < unsure.solution.cost.step_ms
    assert unsure.problem is noisy
    assert not unsure.megatron_flags
    assert "as asked, is taken: " in unsure.notes[1]


def test_a_layout_that_takes_as_long_by_the_times_is_not_said_to_take_less():
    """One microbatch takes as long on any layout, but a stage of three layers reruns one."""
    full = ChoiceRecord("full", 4, 20, 30, 10.0, 20.0001, 0.5)
    asked = Problem(uniform_profile(4, NONE, full), layout_of((1, 3)), Schedule(2, 1, 1))
    notes = search_layout(asked.at(260)).notes
    assert "with layers per stage [2, 2], 120.0 ms as asked." in notes[0]
    assert " as long " in notes[1]
