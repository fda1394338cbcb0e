"""The critical path is a path of the schedule, and as long as the step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.step_time import critical_paths, finished
from tests.planner.random_schedules import schedules


def draw_times(schedule, rng, most):
    shape = (schedule.num_stages, schedule.num_chunks)
    return [
        np.array([rng.randint(0, most) for _ in range(shape[0] * shape[1])], np.int64).reshape(
            shape
        )
        for _ in range(2)
    ]


def length(path, forward, backward):
    return int((path[0] * forward + path[1] * backward).sum())


@settings(max_examples=80, deadline=None)
@given(
    schedules(),
    st.integers(0, 60),
    st.sampled_from([1, 2, 10, 1000, 10**6]),
    st.randoms(use_true_random=False),
)
def test_it_is_as_long_as_the_step_and_with_other_times_no_longer(schedule, groups, most, rng):
    schedule = replace(
        schedule,
        num_microbatches=schedule.num_microbatches + groups * schedule.group_size,
    )
    times = draw_times(schedule, rng, most)
    paths = critical_paths(schedule, *times)
    others = [draw_times(schedule, rng, most) for _ in range(3)]
    for path in paths:
        assert length(path, *times) == finished(schedule, *times).max()
        for other in others:
            assert length(path, *other) <= finished(schedule, *other).max()


@pytest.mark.parametrize(("p", "v"), [(1, 1), (4, 1), (4, 3)])
def test_any_number_of_microbatches_takes_no_longer(p, v):
    schedule = Schedule(p, v, 10**9)
    forward, backward = np.full((p, v), 1000), np.full((p, v), 2000)
    backward[-1] += 1
    for path in critical_paths(schedule, forward, backward):
        assert length(path, forward, backward) == finished(schedule, forward, backward).max()
        assert path.sum() >= 2 * v * 10**9
