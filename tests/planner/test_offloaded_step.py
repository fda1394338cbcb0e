from dataclasses import replace

import pytest

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.planner.cost.copies import MOST_EVENTS
from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.policy_cost import evaluate
from megatron_autorecompute.planner.cost.schedule import Schedule
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
    assert moved.stages[0].host_bytes == 2 * 4 * 60  # in the first step, in which all leave


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


WHOLE = OffloadGroup("cpu_offloading", 100, 100, 1.0, 0.0, 1.0)
LEFT = ChoiceRecord(
    "none+offload[cpu_offloading]", 0, 110, 130, 10.0, 20.0, offload_groups=(WHOLE,)
)


@pytest.mark.parametrize(("number", "layers"), [(3, 8), (6, 8), (7, 8)])
def test_of_whole_layers_as_many_are_there_at_once_as_do_not_leave(number, layers):
    """As Transformer Engine says of its default: (num_layers - num_offloaded_layers) * T."""
    profile = replace(uniform_profile(layers, NONE, LEFT), host_link=FAST)
    text = f"megatron:cpu_offloading/{number}"
    policy = RecomputePolicy.parse(text, num_layers=layers)
    pipeline = Layout.from_flags(layers, 1), Schedule(1, 1, 3)
    cost = evaluate(profile, *pipeline, policy)
    plain = evaluate(profile, *pipeline, RecomputePolicy.parse("none", num_layers=layers))
    assert cost.stages[0].peak.bytes == (layers - number) * 100 + 30
    assert cost.stages[0].host_bytes == number * 100
    assert (cost.step_ms, cost.stall_ms) == (plain.step_ms, 0)
    # One copy of 250 ms takes longer than all computing: 3 microbatches, all out and back.
    slow = HostLink(100 / 250e6, 100 / 250e6, 1 << 40)
    late = evaluate(replace(profile, host_link=slow), *pipeline, policy)
    assert late.step_ms > 3 * 2 * number * 250
    # A layer that waits until another has left counts as begun; one that comes back counts once.
    assert late.stages[0].peak.bytes == (layers - number + 1) * 100 + 10
    assert late.step_ms == pytest.approx(plain.step_ms + late.stall_ms)
    for wrong, sizes in ((f"none*1,{policy.layers[0]}*1,none*6", 1), (text, 2)):
        other = RecomputePolicy.parse(wrong, num_layers=layers)
        with pytest.raises(PolicyError, match=r"first layers of a model|several pipeline stages"):
            evaluate(profile, Layout.from_flags(layers, sizes), Schedule(sizes, 1, 3), other)


def test_long_steps_repeat():
    most = MOST_EVENTS // 4
    policy = "none+offload[core_attn]"
    steps = [cost_of(SLOW, policy, m, 2, 2).step_ms for m in (most - 2, most, 2 * most)]
    assert steps[2] - steps[1] == pytest.approx((steps[1] - steps[0]) * most / 2)


def test_a_profile_without_a_link_is_refused():
    with pytest.raises(ProfileError, match="the profile has no host_link"):
        cost_of(None, "none+offload[core_attn]")
