"""CUDA graphs: their memory pool and everything else, each at its most."""

from dataclasses import replace

import pytest

from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import solve
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerBytes,
    ScheduleOverhead,
    StageRecord,
    StaticBytes,
)
from tests.planner.uniform_profiles import FULL, NONE, peak_of, uniform_profile

HEAD = ChoiceRecord("none", 7, 0, 80, 1.0, 1.0)
STATIC = StaticBytes(parameter_bytes=1000)


def with_stages(profile, optimizer, *layers):
    stages = [StageRecord(own, STATIC, optimizer, ScheduleOverhead(0, 0)) for own in layers]
    return replace(profile, stages=tuple(stages))


def test_the_optimizer_step_counts_on_top_of_a_graph_of_the_iteration():
    eager = with_stages(uniform_profile(4, NONE, FULL), 250, (0, 1), (2, 3))
    graph = replace(eager, graph_of_iteration=True)
    layout, schedule = Layout.from_flags(4, 2), Schedule(2, 1, 8)
    for stage, held in ((0, 400), (1, 200)):
        before, after = (peak_of(p, layout, schedule, "none", stage) for p in (eager, graph))
        assert before.bytes == 1000 + max(held + 30, 250)
        assert after.bytes == 1000 + held + 30 + 250
        assert after.breakdown.graph_bytes == 250
        assert after.breakdown.total_bytes == after.bytes


def test_what_a_plan_with_a_graph_of_the_iteration_needs_is_within_the_budget():
    eager = with_stages(uniform_profile(4, NONE, FULL), 150, (0, 1, 2, 3))
    layout, schedule = Layout.from_flags(4, 1), Schedule(1, 1, 8)
    for profile, text in (
        (eager, "none*4"),
        (replace(eager, graph_of_iteration=True), "full/2*2,none*2"),
    ):
        solution = solve(Problem(profile, layout, schedule).at(1000 + 430))
        assert solution.policy.format() == text
        assert solution.cost.peak_high_bytes <= 1430


# Held, forward and backward transient; and of each what is in the graph.
GRAPH = replace(NONE, graph=LayerBytes(60, 5, 20))
LEAN = ChoiceRecord(
    "selective[mlp]", 70, 10, 40, 10.0, 25.0, graph=LayerBytes(60, 5, 20)
)  # recomputes outside the graph
INSIDE = ChoiceRecord("selective[core_attn]", 80, 10, 45, 10.0, 26.0, graph=LayerBytes(40, 5, 35))


@pytest.mark.parametrize(
    ("stage", "in_flight", "head"), [(0, 2, 0), (1, 1, 80)], ids=["first", "last"]
)
def test_the_pool_of_layers_and_the_rest_are_each_at_their_most(stage, in_flight, head):
    profile = with_stages(uniform_profile(4, GRAPH, LEAN, INSIDE, head=HEAD), 90, (0, 1), (2, 3))
    layout, schedule = Layout.from_flags(4, 2), Schedule(2, 1, 8)
    # By hand: two layers, `in_flight` microbatches; the head holds 7 and needs 80 in its backward.
    pool = in_flight * 2 * 60 + 20
    rest = in_flight * 2 * 40 + max(10, head and 7 + head)
    peak = peak_of(profile, layout, schedule, "none", stage)
    assert peak.bytes == 1000 + pool + max(rest, 90)
    assert peak.pool_bytes == pool
    assert peak.breakdown.total_bytes == peak.bytes
    mixed = peak_of(profile, layout, schedule, "selective[mlp]*2,selective[core_attn]*2", stage)
    pool = in_flight * 2 * (60, 40)[stage] + (20, 35)[stage]
    rest = in_flight * 2 * (10, 40)[stage] + max((20, 10)[stage], head and 7 + head)
    assert mixed.bytes == 1000 + pool + max(rest, 90)


def test_a_large_optimizer_step_cannot_use_the_pool():
    profile = with_stages(uniform_profile(2, GRAPH), 500, (0, 1))
    peak = peak_of(profile, Layout.from_flags(2, 1), Schedule(1, 1, 4), "none")
    assert peak.bytes == 1000 + 500 + 2 * 60 + 20
    assert peak.moment == "stage 0, optimizer step"
    assert peak.breakdown.graph_bytes == 2 * 60 + 20


@pytest.mark.parametrize("stages", [1, 2])
def test_plans_are_the_fastest_of_all_that_fit(stages):
    profile = uniform_profile(4, GRAPH, LEAN, INSIDE, head=HEAD)
    layout, schedule = Layout.from_flags(4, stages), Schedule(stages, 1, 6)
    parts = [tuple(layer for chunk in own for layer in chunk.layers) for own in layout.stages]
    profile = with_stages(profile, 90, *parts)
    problem = Problem(profile, layout, schedule)
    choices = ("none", "selective[mlp]", "selective[core_attn]")
    every = [
        ",".join([a, b, c, d]) for a in choices for b in choices for c in choices for d in choices
    ]
    costs = [problem.cost(RecomputePolicy.parse(text, num_layers=4)) for text in every]
    least = max(choice.peak_bytes for choice in problem.stages.leanest)
    peaks = sorted({cost.peak_high_bytes for cost in costs if cost.peak_high_bytes >= least})
    for budget in peaks[:: max(1, len(peaks) // 6)]:
        best = min(cost.step_ms for cost in costs if cost.peak_high_bytes <= budget)
        solution = solve(problem.at(budget))
        assert solution.cost.peak_high_bytes <= budget
        assert solution.cost.step_ms == pytest.approx(best, rel=0.02)
        assert solution.step_evidence.bound_ms <= best * (1 + 1e-9)
