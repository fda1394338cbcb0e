from dataclasses import replace

import pytest

from megatron_autorecompute.errors import ProfileError
from megatron_autorecompute.planner.layout import Layout
from megatron_autorecompute.planner.offloaded_step import MOST_EVENTS
from megatron_autorecompute.planner.policy_cost import evaluate
from megatron_autorecompute.planner.schedule import Schedule
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord, HostLink, OffloadGroup
from tests.planner.uniform_profiles import uniform_profile

NONE = ChoiceRecord("none", 100, 10, 30, 10.0, 20.0)
GROUP = OffloadGroup("core_attn", 60, 60, 1.0, 0.0, 1.0)
MOVED = ChoiceRecord("none+offload[core_attn]", 40, 70, 90, 10.0, 20.0, offload_groups=(GROUP,))
FAST, SLOW = HostLink(1e6, 1e6, 1 << 40), HostLink(60 / 25e6, 60 / 25e6, 1 << 40)
"""60 bytes at once; in 25 ms."""


def cost_of(link, text, m=6, p=2, layers=8):
    profile = replace(uniform_profile(layers, NONE, MOVED), host_link=link)
    policy = RecomputePolicy.parse(text, num_layers=layers)
    return evaluate(profile, Layout.from_flags(layers, p), Schedule(p, 1, m), policy)


def test_with_a_fast_link_the_step_is_as_long_and_bytes_are_gone():
    kept, moved = cost_of(FAST, "none"), cost_of(FAST, "none+offload[core_attn]")
    assert (moved.step_ms, moved.stall_ms) == (kept.step_ms, 0)
    # Two microbatches of four layers are in flight on stage 0; the last group of the first
    # microbatch stays, and that of the next one is back early.
    assert kept.stages[0].peak.bytes == 2 * 4 * 100 + 30
    split = moved.stages[0].peak.breakdown
    assert moved.stages[0].peak.bytes == split.total_bytes
    assert split.in_flight_bytes + split.running_bytes <= 2 * 4 * 40
    assert split.copy_bytes in (0, 60, 120)
    assert moved.stages[0].host_bytes == (2 * 4 - 1) * 60


def test_a_slow_link_delays_backwards_and_the_stages_that_wait_for_them():
    fast, slow = (cost_of(link, "none+offload[core_attn]") for link in (FAST, SLOW))
    assert slow.step_ms == pytest.approx(fast.step_ms + slow.stall_ms)
    assert slow.stall_ms > 0
    assert slow.stages[0].stall_ms > 0
    assert slow.stages[0].peak.bytes > fast.stages[0].peak.bytes
    spread = cost_of(SLOW, "none+offload[core_attn],none,none+offload[core_attn],none*5", p=1)
    # Layer 2's group stays; layer 0's copy of 25 ms begins when layer 2's backward ends, and
    # layer 1's takes 20.
    assert spread.stall_ms == pytest.approx(6 * 5)


def test_long_steps_repeat():
    most = MOST_EVENTS // 4
    policy = "none+offload[core_attn]"
    steps = [cost_of(SLOW, policy, m, 2, 2).step_ms for m in (most - 2, most, 2 * most)]
    assert steps[2] - steps[1] == pytest.approx((steps[1] - steps[0]) * most / 2)


def test_a_profile_without_a_link_is_refused():
    with pytest.raises(ProfileError, match="the profile has no host_link"):
        cost_of(None, "none+offload[core_attn]")
