"""Plans of a running job whose budget is small."""

from types import SimpleNamespace

import pytest

from megatron_autorecompute.errors import InfeasibleError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord
from megatron_autorecompute.runtime.auto_options import AutoOptions
from megatron_autorecompute.runtime.decisions import Decisions
from tests.planner.uniform_profiles import NONE, uniform_profile

# What a checkpoint keeps is much beside what its rerun needs: longer ones need less.
PROFILE = uniform_profile(8, NONE, ChoiceRecord("full", 40, 20, 130, 10, 30), boundary_bytes=40)


def decisions(said, **options):
    shard = SimpleNamespace(
        layout=Layout.from_flags(8, 4),
        schedule=lambda microbatches: Schedule(4, 1, microbatches),
        leanest=lambda: RecomputePolicy.parse("full", num_layers=8),
    )
    job = SimpleNamespace(
        shape=None, without_cuda=False, num_microbatches=lambda: 8, say=said.append
    )
    return Decisions(shard, None, AutoOptions(recompute_choices="all", **options), job)


def least(**options):
    """The least that each stage can need, and what it needs with every layer at full."""
    own = decisions([], **options)
    lowest = [choice.peak_bytes for choice in own.problem(PROFILE).stages.leanest]
    return lowest, own.lean_peaks(PROFILE)


def test_a_budget_that_only_longer_checkpoints_keep_is_kept():
    lowest, of_full = least()
    assert lowest[0] < of_full[0]
    said = []
    plan = decisions(said).solved(PROFILE, lowest)
    assert plan.budget_bytes == tuple(lowest)
    assert "full/2" in plan.policy.format()
    assert not said


def test_a_budget_that_nothing_keeps_is_raised_to_the_leanest_choices_and_said():
    lowest, of_full = least()
    said = []
    plan = decisions(said).solved(PROFILE, [lowest[0] - 1, *of_full[1:]])
    assert plan.budget_bytes == tuple(of_full)
    (line,) = said
    assert "OVER BUDGET: stage 0" in line


def test_a_plan_alone_is_not_made_over_budget():
    lowest, _ = least()
    with pytest.raises(InfeasibleError, match="Stage 0 needs"):
        decisions([], recompute_plan_only=True).solved(PROFILE, [size - 1 for size in lowest])
