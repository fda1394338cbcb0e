"""What checkpoints around several layers take where a host launches them."""

from dataclasses import replace

import pytest

from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.policy_cost import evaluate
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.policy import RecomputePolicy
from megatron_autorecompute.profile import HostTimes
from tests.planner.uniform_profiles import FULL, NONE, uniform_profile

LAYERS, MICROBATCHES = 8, 3
FORWARD_MS, BACKWARD_MS, ONCE_MS = 10.0, 20.0, 2.0
"""Of a layer, and what a checkpoint takes the host however many layers are in it."""


def step_ms(text, device_scale):
    """Predicted, where the device takes so many times what these layers' kernels take."""
    none = replace(NONE, host=HostTimes(FORWARD_MS, BACKWARD_MS))
    full = replace(FULL, host=HostTimes(FORWARD_MS + ONCE_MS, FORWARD_MS + BACKWARD_MS))
    records = [
        replace(r, forward_ms=device_scale * r.forward_ms, backward_ms=device_scale * r.backward_ms)
        for r in (none, full)
    ]
    profile = uniform_profile(LAYERS, *records)
    policy = RecomputePolicy.parse(text, num_layers=LAYERS)
    layout, schedule = Layout.from_flags(LAYERS, 1), Schedule(1, 1, MICROBATCHES)
    return evaluate(profile, layout, schedule, policy).step_ms


@pytest.mark.parametrize(("text", "checkpoints"), [("full", 8), ("full/2", 4), ("full/4", 2)])
def test_a_host_launches_what_a_checkpoint_takes_once_for_all_its_layers(text, checkpoints):
    launched_ms = LAYERS * (2 * FORWARD_MS + BACKWARD_MS) + checkpoints * ONCE_MS
    last_ms = 0.1 * (FORWARD_MS + BACKWARD_MS)  # of kernels, which run on behind the last launch
    took_ms = step_ms(text, 0.1)
    assert took_ms == pytest.approx(MICROBATCHES * launched_ms, abs=last_ms)


def test_a_device_runs_the_kernels_of_a_group_as_those_of_its_layers():
    assert step_ms("full/4", 10.0) == pytest.approx(step_ms("full", 10.0), rel=0.01)
