import tracemalloc
from dataclasses import replace

import pytest

from megatron_autorecompute.errors import InfeasibleError
from megatron_autorecompute.planner import suggestions
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import solve, try_solve
from megatron_autorecompute.planner.suggestions import cheapest_changes, explained
from megatron_autorecompute.profile import (
    BytesAt,
    ChoiceRecord,
    LayerKind,
    ScheduleOverhead,
    StageRecord,
    StaticBytes,
)
from tests.planner.asked import layout_of, with_micro_batch
from tests.planner.random_profiles import problem_of_many


def test_an_infeasible_plan_is_given_changes_that_would_fit_cheapest_first():
    profile, layout, schedule, _ = problem_of_many()
    kinds = tuple(replace(kind, static=StaticBytes(100)) for kind in profile.kinds)
    profile = with_micro_batch(replace(profile, kinds=kinds), 4, 1.0)
    problem = Problem(profile, layout, schedule)
    need = problem.stages.leanest[0].peak_bytes
    changes = cheapest_changes(problem.at(need - 1))
    assert [c.step_ms for c in changes] == sorted(c.step_ms for c in changes)
    texts = " ".join(change.text for change in changes)
    assert "micro-batch size 2 instead of 4" in texts
    with pytest.raises(InfeasibleError) as caught:
        solve(problem.at(need - 1))
    assert "Each of these alone would fit" in str(explained(caught.value, problem.at(need - 1)))
    assert "More pipeline stages" in str(explained(caught.value, problem.at(1)))


def test_another_layout_is_proposed_where_it_takes_layers_from_the_stage_that_is_too_full():
    profile, _, _, _ = problem_of_many(12)
    problem = Problem(profile, layout_of((6, 3, 3)), Schedule(3, 1, 6))
    need = problem.stages.leanest[0].peak_bytes
    (text,) = [c.text for c in cheapest_changes(problem.at(need - 1)) if "layout" in c.text]
    flags = text.removeprefix("another layout: ").split()
    first, last = (int(value) for value in flags[1::2])
    assert first < 6
    layout = Layout.from_flags(
        12, 3, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last
    )
    assert try_solve(Problem(profile, layout, problem.schedule).at(need - 1))


def test_another_layout_of_a_hybrid_is_proposed_as_its_pattern():
    profile, _, _, _ = problem_of_many(6)
    job = {"config": {"hybrid_layer_pattern": "M-M-M-"}}
    profile = replace(profile, model=replace(profile.model, facts={"job": job}))
    problem = Problem(profile, layout_of((4, 1, 1)), Schedule(3, 1, 6))
    need = problem.stages.leanest[0].peak_bytes
    (text,) = [c.text for c in cheapest_changes(problem.at(need - 1)) if "layout" in c.text]
    assert text.split()[:3] == ["another", "layout:", "--hybrid-layer-pattern"]
    assert text.replace("|", "").endswith("M-M-M-")


def test_a_smaller_micro_batch_scales_all_that_scales_and_percentiles_too():
    profile, layout, schedule, _ = problem_of_many(1)
    at = (BytesAt(99.0, 100, 0, 0),)
    none = ChoiceRecord("none", 90, 0, 0, 1.0, 2.0, percentiles=at)
    full = replace(none, choice="full", backward_ms=3.0)
    kind = LayerKind("moe", (0,), (none, full), static=StaticBytes())
    shape = replace(profile.parallelism, micro_batch_size=2)
    stage = StageRecord((0,), StaticBytes(10), overhead=ScheduleOverhead(1000, 1000))
    profile = replace(profile, kinds=(kind,), parallelism=shape, stages=(stage,))
    problem = Problem(profile, layout, schedule, percentile=99.0)
    assert problem.stages.leanest[0].peak_bytes == 10 + 1000 + 100

    def proposed(budget):
        texts = [change.text for change in cheapest_changes(problem.at(budget))]
        return any("micro-batch size 1 instead of 2" in text for text in texts)

    assert proposed(10 + 500 + 50)
    assert not proposed(10 + 500 + 50 - 1)


def test_full_as_a_choice_is_proposed_with_what_is_allowed_and_nothing_else():
    profile, layout, schedule, _ = problem_of_many()

    def proposals(allowed):
        problem = Problem(profile, layout, schedule, allowed=allowed)
        changes = cheapest_changes(problem.at(problem.stages.leanest[0].peak_bytes - 1))
        return [change for change in changes if "full recompute" in change.text]

    assert proposals(["none", "full"]) == []  # it may be used, and is not enough
    (change,) = proposals(["none", "selective[mlp]"])
    wider = Problem(profile, layout, schedule, allowed=["none", "selective[mlp]", "full"])
    budget = Problem(profile, layout, schedule, allowed=["none", "selective[mlp]"])
    assert change.step_ms == solve(wider.at(budget.stages.leanest[0].peak_bytes - 1)).cost.step_ms


@pytest.mark.long
def test_a_plan_of_a_thousand_layers_that_does_not_fit_takes_little_memory(monkeypatch):
    """Not that of all pairs of numbers for the ends, which were gigabytes of layouts."""
    monkeypatch.setattr(suggestions, "try_solve", lambda problem: None)
    profile, _, _, _ = problem_of_many(1020)
    problem = Problem(profile, Layout.from_flags(1020, 4), Schedule(4, 1, 4))
    tracemalloc.start()
    try:
        assert cheapest_changes(problem.at(1)) == ()
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
