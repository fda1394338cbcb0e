import math

from hypothesis import assume, example, given
from hypothesis import strategies as st

from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.search.neighbours import neighbours
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import NONE, RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord
from tests.planner.uniform_profiles import uniform_profile


@given(st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 0.5), st.integers(1, 9))
@example(0.1, 0.0, 0.0, 4)
def test_a_neighbour_whose_step_differs_by_less_than_errors_is_a_tie(
    more_ms, none_spread_ms, full_spread_ms, microbatches
):
    """Of four equal layers on one stage one changes: one record less, another more, each time."""
    profile = uniform_profile(
        4,
        ChoiceRecord("none", 0, 0, 0, 10.0, 20.0, none_spread_ms),
        ChoiceRecord("full", 0, 0, 0, 10.0, 20.0 + more_ms, full_spread_ms),
    )
    problem = Problem(profile, Layout.from_flags(4, 1), Schedule(1, 1, microbatches), 1 << 40)
    (full,) = neighbours(problem, RecomputePolicy((NONE,) * 4), 2)
    error_ms = 1.4826 * math.hypot(none_spread_ms, full_spread_ms)
    assume(abs(more_ms - 1.6449 * error_ms) > 1e-3)
    assert full.tie == (more_ms < 1.6449 * error_ms)
