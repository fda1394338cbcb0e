"""Plans of single stages against HiGHS, where no checkpoint is around several layers."""

import pytest

from benchmarks import milp
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.problem import Problem
from tests.planner.random_profiles import drawn


def test_of_single_layers_choices_highs_finds_the_same_optimum(monkeypatch):
    monkeypatch.setattr(milp, "MIB", 1)  # the bytes of these problems are few
    optimal = 0
    for seed in range(60):
        profile, layout, schedule, budget = drawn(seed)
        kinds = profile.kinds
        singles = {c.choice for kind in kinds for c in kind.choices if c.policy.group == 1}
        problem = Problem(profile, layout, schedule, allowed=singles)
        for stage, own in enumerate(problem.stages.all):
            found = problem.stages.stage(stage).fastest(budget)
            answer = milp.solved(own.problem, budget, 60.0)
            if found is not None:
                assert answer.objective_ms == pytest.approx(found.time_ps / PS_PER_MS), seed
                optimal += 1
            elif own.problem.floor_bytes <= budget:
                assert answer.status == "infeasible", seed
    assert optimal > 40
