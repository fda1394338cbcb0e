from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.peak_memory import stage_base
from megatron_autorecompute.planner.cost.policy_cost import evaluate
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.unit_costs import CostTable
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import (
    ScheduleOverhead,
    StageRecord,
    StaticBytes,
)
from tests.planner.moments import timeline
from tests.planner.random_profiles import drawn
from tests.planner.uniform_profiles import FULL, NONE, peak_of, uniform_profile


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_the_timeline_reaches_the_peak_and_never_exceeds_it(seed):
    profile, layout, schedule, _ = drawn(seed)
    fastest = tuple(CostTable(profile).choices(layer)[0] for layer in range(profile.num_layers))
    policy = RecomputePolicy(fastest)
    for stage in evaluate(profile, layout, schedule, policy).stages:
        moments = timeline(profile, layout, schedule, policy, stage.stage)
        highest = max(split.total_bytes for _, split in moments)
        assert highest <= stage.peak.bytes
        if "optimizer" not in stage.peak.moment:
            assert highest == stage.peak.bytes


def test_position_matters_an_early_full_layer_replays_when_later_layers_are_freed():
    profile = uniform_profile(4, NONE, FULL)
    layout, schedule = Layout.from_flags(4, 1), Schedule(1, 1, 1)
    early = peak_of(profile, layout, schedule, "full*1,none*3")
    late = peak_of(profile, layout, schedule, "none*3,full*1")
    assert early.bytes == 4 + 3 * 100 + 30
    assert late.bytes == 3 * 100 + 4 + 130
    assert early.moment == "stage 0, backward of layer 3, microbatch 0"


def test_the_first_stage_holds_one_more_microbatch_in_flight_than_the_next():
    profile = uniform_profile(8, NONE, FULL)
    layout, schedule = Layout.from_flags(8, 4), Schedule(4, 1, 8)
    policy = RecomputePolicy.parse("none", num_layers=8)
    in_flight = [
        stage.peak.breakdown.in_flight_bytes
        for stage in evaluate(profile, layout, schedule, policy).stages
    ]
    assert in_flight == [3 * 200, 2 * 200, 1 * 200, 0]


def test_a_measured_stage_record_is_used_only_for_its_own_layers():
    profile = uniform_profile(4, NONE, FULL)
    records = tuple(
        StageRecord(
            layers,
            StaticBytes(7),
            overhead=ScheduleOverhead(1, 2),
            residual_bytes=11,
            uncertainty_bytes=5,
        )
        for layers in ((0, 1), (2, 3))
    )
    profile = replace(profile, stages=records)
    measured = stage_base(profile, Layout.from_flags(4, 2), 0, "high")
    assert measured.measured
    assert (measured.static.total_bytes, measured.residual_bytes) == (7, 16)
    assert measured.constant_bytes("backward", 3) == 7 + 16 + 2 + 3 * profile.boundary_bytes
    other = Layout.from_flags(4, 2, num_layers_in_first_pipeline_stage=1)
    assert not stage_base(profile, other, 0).measured


def test_a_layout_without_static_bytes_is_refused_with_the_measured_layout():
    profile = uniform_profile(4, NONE, FULL)
    kinds = tuple(replace(kind, static=None) for kind in profile.kinds)
    with pytest.raises(ProfileError, match="no static bytes of k"):
        stage_base(replace(profile, kinds=kinds), Layout.from_flags(4, 2), 0)
