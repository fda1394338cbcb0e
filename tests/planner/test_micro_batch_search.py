from dataclasses import replace

import pytest

from megatron_autorecompute.errors import InfeasibleError, PipelineError
from megatron_autorecompute.planner.micro_batch_search import same_samples, search_micro_batch
from megatron_autorecompute.planner.planner import Planner
from megatron_autorecompute.planner.schedule import Schedule
from tests.planner.asked import with_micro_batch
from tests.planner.random_profiles import problem_of_many


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


def test_another_micro_batch_runs_as_many_samples():
    profile, _, _, _ = problem_of_many()
    one, two, three = (with_micro_batch(profile, size, 1.0) for size in (1, 2, 3))
    assert same_samples(Schedule(1, 1, 8), two, one).num_microbatches == 16
    with pytest.raises(PipelineError, match="16 samples a step cannot be cut"):
        same_samples(Schedule(1, 1, 8), two, three)
