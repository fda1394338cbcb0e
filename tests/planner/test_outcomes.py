"""Many policies at once come to what each comes to by itself, and ties among neighbours."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.outcomes import Outcomes
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.search.neighbours import changed_at, neighbours
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.planner.search.solve import try_solve
from megatron_autorecompute.policy import FULL, NONE, RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord
from tests.planner.random_profiles import drawn
from tests.planner.uniform_profiles import uniform_profile


def random_planner(seed):
    profile, layout, schedule, budget = drawn(seed)
    slower = tuple(replace(s, residual_ms=1.5, uncertainty_bytes=2) for s in profile.stages)
    return Problem(replace(profile, stages=slower), layout, schedule), budget


@pytest.mark.parametrize("seed", range(40))
def test_outcomes_are_those_of_evaluating_each_policy(seed):
    problem, budget = random_planner(seed)
    solution = try_solve(problem.at(budget)) or try_solve(problem.at(1 << 40))
    policy = solution.policy
    others = [o for i in range(len(policy.layers)) for _, o in changed_at(problem, policy, i)]
    for other, outcome in zip(others, Outcomes(problem.costs).of(others), strict=True):
        cost = problem.cost(other)
        assert outcome.step_ms == pytest.approx(cost.step_ms)
        assert outcome.busy_ms == pytest.approx(tuple(s.busy_ms for s in cost.stages))
        assert outcome.peak_high_bytes == tuple(s.peak_high_bytes for s in cost.stages)


def test_changed_policies_are_those_that_neighbours_costs():
    problem, _ = random_planner(3)
    policy = try_solve(problem.at(1 << 40)).policy
    costed = [other.cost.step_ms for other in neighbours(problem, policy, 0)]
    changed = [other for _, other in changed_at(problem, policy, 0)]
    assert costed == [pytest.approx(o.step_ms) for o in Outcomes(problem.costs).of(changed)]


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
    assert full.is_tie == (more_ms < 1.6449 * error_ms)


def test_no_policies_have_no_outcomes_and_progress_ends_at_the_whole():
    problem, _ = random_planner(3)
    told = []
    assert Outcomes(problem.costs).of([], told.append) == []
    Outcomes(problem.costs).of([try_solve(problem.at(1 << 40)).policy] * 200, told.append)
    assert told[-1] == 1.0
    assert told == sorted(told)


def test_a_choice_without_a_record_is_refused():
    problem, _ = random_planner(3)
    unknown = RecomputePolicy.parse("selective[moe]", num_layers=problem.profile.num_layers)
    with pytest.raises(ProfileError, match="no record"):
        Outcomes(problem.costs).check(unknown)


def test_a_checkpoint_across_two_chunks_is_refused():
    problem = next(
        p for p, _ in map(random_planner, range(100)) if p.layout.num_stages == p.profile.num_layers
    )
    across = RecomputePolicy((replace(FULL, group=2),) * 2 * (problem.profile.num_layers // 2))
    with pytest.raises(PolicyError, match="cannot span"):
        Outcomes(problem.costs).check(across)
