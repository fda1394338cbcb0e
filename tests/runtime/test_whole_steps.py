"""What whole steps take beyond their layers."""

from dataclasses import replace

import pytest

from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import RankStep
from megatron_autorecompute.runtime.measuring import WholeStep, residuals_ms
from tests.planner.uniform_profiles import FULL, NONE, uniform_profile


def step_that_took(compute_ms, policy):
    seen = RankStep(0, 0, compute_ms, 0.0)
    return WholeStep(1, policy_of(policy), 2, seen)


@pytest.mark.parametrize(("more_ms", "found_ms"), [(6.0, 3.0), (-6.0, 0.0)])
def test_the_rest_of_a_step_is_what_two_policies_take_beyond_their_layers_and_not_negative(
    more_ms, found_ms
):
    profile = uniform_profile(2, replace(NONE, forward_ms=10.0, backward_ms=20.0), FULL)
    problem = Problem(profile, Layout.from_flags(2, 1), Schedule(1, 1, 2))
    steps = [
        step_that_took(problem.cost(policy_of(text)).step_ms + more_ms + late_ms, text)
        for text in ("none", "full")
        for late_ms in (0.0, 0.0, 0.0, 500.0)
    ]
    assert residuals_ms(problem, [steps]) == pytest.approx((found_ms,))


def policy_of(text):
    return RecomputePolicy.parse(text, num_layers=2)
