"""The step against its definition written out, and known cases."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_autorecompute.errors import PipelineError
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.step_time import finished, replay_ms
from tests.planner import posts_and_waits
from tests.planner.definitions import finish_by_plain_replay
from tests.planner.random_schedules import schedules, times


@settings(max_examples=100)
@given(schedules(), st.data())
def test_replay_equals_the_definition_written_out(schedule, data):
    both_ms = data.draw(times(schedule)), data.draw(times(schedule))
    both_ps = [np.rint(np.multiply(ms, 1e9)).astype(np.int64) for ms in both_ms]
    expected_ps = finish_by_plain_replay(schedule, *both_ps)
    assert finished(schedule, *both_ps).tolist() == expected_ps
    assert replay_ms(schedule, *both_ms) == pytest.approx(max(expected_ps) / 1e9)


@settings(max_examples=100)
@given(schedules(), st.data())
def test_a_recompute_begins_as_soon_as_its_stage_is_free(schedule, data):
    forward, backward, early = (
        np.rint(np.multiply(data.draw(times(schedule)), 1e9)).astype(np.int64) for _ in range(3)
    )
    backward = backward + early
    expected = finish_by_plain_replay(schedule, forward, backward, early)
    assert finished(schedule, forward, backward, early).tolist() == expected
    assert max(expected) <= finished(schedule, forward, backward).max()


@pytest.mark.parametrize(
    ("p", "v", "m"),
    [(2, 1, 4), (4, 1, 4), (8, 1, 16), (3, 2, 6), (4, 2, 4), (4, 2, 8), (4, 5, 8), (8, 2, 16)],
)
def test_replay_equals_what_megatron_posts_and_waits_for(p, v, m):
    rng = random.Random(f"{p} {v} {m}")
    for spread in (0, 10, 100, 400) * 5:
        forward, early, rest = (
            np.array([[1000 + rng.randint(-spread, spread) for _ in range(v)] for _ in range(p)])
            for _ in range(3)
        )
        early[-1, -1] = 0
        backward = early + 2 * rest
        expected = posts_and_waits.ends(p, v, m, forward, backward, early)
        found = finished(Schedule(p, v, m), forward, backward, early)
        assert found.max() == max(expected)


@settings(max_examples=40)
@given(
    schedules(),
    st.integers(20, 60),
    st.sampled_from([2, 10, 1000, 10**6]),
    st.randoms(use_true_random=False),
)
def test_a_long_step_is_replayed_as_if_every_period_were(schedule, groups, most, rng):
    # Few different times, so that stages are nearly as slow as each other and settle late.
    many = schedule.num_microbatches + groups * schedule.group_size
    schedule = replace(schedule, num_microbatches=many)
    forward, backward = (
        np.array([[rng.randint(0, most) for _ in range(schedule.num_chunks)] for _ in stages])
        for stages in [range(schedule.num_stages)] * 2
    )
    expected = finish_by_plain_replay(schedule, forward, backward)
    assert finished(schedule, forward, backward).tolist() == expected
    early = backward // 3
    expected = finish_by_plain_replay(schedule, forward, backward, early)
    assert finished(schedule, forward, backward, early).tolist() == expected


@pytest.mark.parametrize(("p", "v"), [(4, 1), (8, 1), (4, 2), (8, 2)])
def test_what_waits_of_equal_stages_hide_is_known(p, v):
    """(p - 1) R of a step with one chunk: all recompute but that of the microbatch that a stage
    runs at the steady state's rate. With several, stages wait in the cool-down until what they
    sent is received, and R / v is left. R = F, B = 2 F."""
    schedule = Schedule(p, v, 4 * p)
    forward, backward = [[1.0] * v] * p, [[3.0] * v] * p
    early = [[1.0] * v] * (p - 1) + [[1.0] * (v - 1) + [0.0]]
    saved = replay_ms(schedule, forward, backward) - replay_ms(schedule, forward, backward, early)
    assert saved == (p - 1 if v == 1 else 1)


@pytest.mark.parametrize("microbatches", [10**4, 10**8])
@pytest.mark.parametrize(("p", "v"), [(1, 1), (4, 1), (4, 3)])
def test_any_number_of_microbatches_takes_no_longer(p, v, microbatches):
    # The last stage is hardly busier than the others, so that they wait for it only in the end.
    forward, backward = [[1.0] * v] * p, [[2.0] * v] * (p - 1) + [[2.0001] * v]
    step_ms = replay_ms(Schedule(p, v, microbatches), forward, backward)
    busy_ms = microbatches * v * 3.0001
    assert busy_ms <= step_ms * (1 + 1e-12) <= busy_ms + 4 * p * 3.0001


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 5), (2, 1), (4, 3), (4, 16), (64, 128)])
def test_equal_stages_take_m_plus_p_minus_1_slots(p, m):
    assert replay_ms(Schedule(p, 1, m), [[1.25]] * p, [[2.5]] * p) == (m + p - 1) * 3.75


@pytest.mark.parametrize(
    ("p", "v", "m"), [(2, 2, 2), (2, 3, 8), (4, 2, 16), (8, 4, 8), (16, 8, 64)]
)
def test_interleaved_bubble_is_p_minus_1_over_v_times_m(p, v, m):
    step_ms = replay_ms(Schedule(p, v, m), [[1.0] * v] * p, [[2.0] * v] * p)
    ideal = 3.0 * v * m
    assert step_ms == pytest.approx(ideal * (1 + (p - 1) / (v * m)))


REFUSED = [
    (lambda: replay_ms(Schedule(2, 1, 2), [[1.0]], [[1.0]] * 2), "forward_ms must have 2 stages"),
    (lambda: replay_ms(Schedule(1, 1, 2), [[1.0]], [[-1.0]]), "backward_ms must be finite"),
    (lambda: replay_ms(Schedule(1, 1, 2), [[math.nan]], [[1.0]]), "forward_ms must be finite"),
]


@pytest.mark.parametrize(("ask", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_times_of_another_shape_and_impossible_ones_are_refused(ask, message):
    with pytest.raises(PipelineError, match=message):
        ask()
