from dataclasses import replace

import pytest

from megatron_autorecompute.errors import InfeasibleError, PipelineError
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.shapes import same_samples, search_shapes
from megatron_autorecompute.planner.search.solve import solve
from tests.planner.asked import shortest_of_all, with_micro_batch
from tests.planner.random_profiles import problem_of_many, problem_of_uneven_stages


def test_the_searched_micro_batch_has_the_fastest_step():
    profile, layout, schedule, _ = problem_of_many()
    problems = []
    for size, speedup in ((1, 1.0), (2, 1.3), (4, 1.4)):
        bigger = with_micro_batch(profile, size, speedup)
        problems.append(Problem(bigger, layout, replace(schedule, num_microbatches=8 // size)))
    best = search_shapes([own.at(1500) for own in problems], layouts=False)
    steps = []
    for problem in problems:
        try:
            steps.append(solve(problem.at(1500)).cost.step_ms)
        except InfeasibleError:
            steps.append(float("inf"))
    assert best.solution.cost.step_ms == min(steps)
    assert len(best.notes) == 3
    with pytest.raises(InfeasibleError):
        search_shapes([own.at(10) for own in problems], layouts=False)


def test_no_size_with_any_layers_per_stage_has_a_shorter_step_than_the_searched_one():
    sizes, moved = set(), 0
    for seed in (2, 7, 9, 10, 13):
        profile, layout, schedule, budget = problem_of_uneven_stages(seed)
        one = replace(profile, parallelism=replace(profile.parallelism, micro_batch_size=1))
        schedule = replace(schedule, num_microbatches=4 * schedule.num_microbatches)
        problems = [
            Problem(other, layout, same_samples(schedule, one, other))
            for other in (with_micro_batch(one, size, 1 + 0.1 * size) for size in (2, 1, 4))
        ]
        steps = [shortest_of_all(problem.at(budget)) for problem in problems]
        found = search_shapes([own.at(budget) for own in problems], layouts=True)
        shortest = min(step for step in steps if step is not None)
        assert found.solution.cost.step_ms == pytest.approx(shortest, rel=1e-12), seed
        sizes.add(found.megatron_flags["--micro-batch-size"])
        moved += found.problem.layout != layout
    assert len(sizes) > 1
    assert moved


def test_a_size_that_is_best_only_inside_the_noise_gives_way_to_the_asked_one():
    profile, layout, schedule, _ = problem_of_many()
    found = []
    for spread_ms in (0.0, 3.0):
        noisy = tuple(
            replace(k, choices=tuple(replace(r, spread_ms=spread_ms) for r in k.choices))
            for k in profile.kinds
        )
        asked = replace(profile, kinds=noisy)
        twice = with_micro_batch(asked, 2 * profile.parallelism.micro_batch_size, 2.1)
        problems = [Problem(p, layout, same_samples(schedule, asked, p)) for p in (asked, twice)]
        found.append(search_shapes([own.at(10**6) for own in problems], layouts=False))
    sure, unsure = found
    assert sure.megatron_flags == {"--micro-batch-size": "4"}
    assert unsure.megatron_flags == {"--micro-batch-size": "2"}
    assert "Micro-batch size 2, as asked, is taken: Micro-batch size 4 takes" in unsure.notes[-1]


def test_another_micro_batch_runs_as_many_samples():
    profile, _, _, _ = problem_of_many()
    one, two, three = (with_micro_batch(profile, size, 1.0) for size in (1, 2, 3))
    assert same_samples(Schedule(1, 1, 8), two, one).num_microbatches == 16
    with pytest.raises(PipelineError, match="16 samples a step cannot be cut"):
        same_samples(Schedule(1, 1, 8), two, three)
