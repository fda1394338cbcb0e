from dataclasses import replace

import pytest

from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.planner.cost.unit_costs import CostTable
from megatron_autorecompute.policy import LayerPolicy
from megatron_autorecompute.profile import BytesAt, ChoiceRecord, Imbalance
from tests.planner.uniform_profiles import FULL, NONE, uniform_profile


def test_a_group_at_size_one_costs_what_full_was_measured_at():
    table = CostTable(uniform_profile(4, NONE, FULL))
    costs = table.checkpoints(range(4))
    sizes = FULL.held_bytes, FULL.forward_transient_bytes, FULL.backward_transient_bytes
    assert tuple(costs[:3, 0]) == sizes


def test_a_group_reaches_its_members_none_bytes_and_what_full_keeps_besides():
    unit = CostTable(uniform_profile(4, NONE, FULL)).checkpoint((1, 2, 3))
    besides = (4 + 130) - (100 + 30)
    assert unit.held_bytes == 4
    assert unit.held_bytes + unit.backward_transient_bytes == 3 * 100 + 30 + besides
    assert unit.forward_transient_bytes == 20 + 4  # a later member's input is alive too
    assert unit.time_ps == 3 * 40 * 10**9


def test_a_measured_group_wins_over_the_formula():
    measured = ChoiceRecord("full/2", 5, 6, 7, 19.0, 58.0)
    table = CostTable(uniform_profile(4, NONE, FULL, measured))
    unit = table.checkpoint((0, 1))
    assert (unit.held_bytes, unit.backward_transient_bytes) == (5, 7)
    assert unit.time_ps == 77 * 10**9
    assert table.checkpoint((0, 1, 2)).held_bytes == 4


def test_mtp_depths_cannot_be_in_a_group():
    table = CostTable(uniform_profile(2, NONE, FULL, mtp=1))
    assert table.checkpoints((0, 1, 2)).shape[1] == 2
    with pytest.raises(ProfileError, match="layer 2 is an MTP depth"):
        table.checkpoint((1, 2))


def test_bytes_measured_at_a_percentile_are_not_multiplied_by_the_stated_factor():
    measured = replace(NONE, percentiles=(BytesAt(99.0, 90, 9, 27),))
    base = uniform_profile(1, measured, FULL)
    kind = replace(base.kinds[0], imbalance=(Imbalance(99.0, 1.5),))
    table = CostTable(replace(base, kinds=(kind,)), 99.0)
    assert table.record(0, LayerPolicy()).held_bytes == 90
    assert table.record(0, LayerPolicy("full")).held_bytes == 6
