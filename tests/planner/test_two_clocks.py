"""Steps of a host and a device: of groups, and how far a measured one may be from the true one."""

import random
from dataclasses import replace

import pytest

from megatron_autorecompute.planner.cost.layout import Layout
from megatron_autorecompute.planner.cost.policy_cost import PolicyCosts, evaluate
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.step_interval import COVERAGE, StepErrors
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord, HostTimes, in_order
from tests.planner.known_truth import measured_record
from tests.planner.uniform_profiles import FULL, NONE, uniform_profile

LAYERS, MICROBATCHES = 8, 3
FORWARD_MS, BACKWARD_MS, ONCE_MS = 10.0, 20.0, 2.0
"""Of a layer, and what a checkpoint of it takes the host."""


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


@pytest.mark.parametrize("text", ["full", "full/2", "full/4"])
def test_a_host_launches_a_checkpoint_of_layers_as_those_of_its_layers(text):
    launched_ms = LAYERS * (2 * FORWARD_MS + BACKWARD_MS + ONCE_MS)
    last_ms = 0.1 * 4 * (2 * FORWARD_MS + BACKWARD_MS)  # of kernels, behind the last launch
    assert step_ms(text, 0.1) == pytest.approx(MICROBATCHES * launched_ms, abs=last_ms)


def test_a_device_runs_the_kernels_of_a_group_as_those_of_its_layers():
    assert step_ms("full/4", 10.0) == pytest.approx(step_ms("full", 10.0), rel=0.01)


BINDS = {"device": (0.3, 0.7), "mixed": (0.9, 1.1), "host": (1.5, 3.0)}
"""What launches take, in what kernels take."""
PROFILES, KERNELS = 400, 100


class Job:
    """A job of true times on both clocks, and a profile of it that errs by noise, and by how fast
    host and device happened to be."""

    def __init__(self, seed, binds):
        self._rng = random.Random(f"{seed} {binds}")
        self._launches, self.microbatches = (
            self._rng.uniform(*BINDS[binds]),
            self._rng.randint(1, 4),
        )
        self.records = {text: self._record(text) for text in ("none", "selective[mlp]", "full")}
        self.head, layers = self._record("none"), self._rng.randint(3, 8)
        texts = self._rng.choices(list(self.records), k=layers)
        self.policy = RecomputePolicy(tuple(map(LayerPolicy.parse, texts)))

    def _record(self, text):
        again = {"none": 0.0, "selective[mlp]": 0.4, "full": 1.0}[text]
        forward_ms, backward_ms = 10.0, 20.0 + 10.0 * again
        host = HostTimes(1.5 * self._launches * forward_ms, 0.8 * self._launches * backward_ms)
        return ChoiceRecord(text, 1, 1, 1, forward_ms, backward_ms, host=host)

    def step_ms(self):
        """By launching kernel after kernel."""
        units = [*(self.records[str(choice)] for choice in self.policy.layers), self.head]
        forward = [(unit.forward_ms, unit.host.forward_ms) for unit in units]
        backward = [(unit.backward_ms, unit.host.backward_ms) for unit in reversed(units)]
        host_ms = device_ms = 0.0
        for own_ms, launches_ms in (forward + backward) * self.microbatches:
            for _ in range(KERNELS):
                host_ms += launches_ms / KERNELS
                device_ms = max(device_ms, host_ms) + own_ms / KERNELS
        return max(host_ms, device_ms)

    def interval(self):
        """Of the step, from twelve runs of every record on each clock."""
        noise, error = self._rng.uniform(0.005, 0.03), self._rng.uniform(0, 0.01)
        fast = [self._rng.gauss(1, error) for _ in ("device", "host")]

        def seen(record):
            on_host = record.host.forward_ms, record.host.backward_ms
            clocks = [(record.forward_ms, record.backward_ms), on_host]
            device, host = (
                measured_record(
                    self._rng,
                    replace(record, forward_ms=by * forward_ms, backward_ms=by * backward_ms),
                    noise,
                    12,
                )
                for by, (forward_ms, backward_ms) in zip(fast, clocks, strict=True)
            )
            times = HostTimes(host.forward_ms, host.backward_ms, host.spread_ms)
            return replace(device, host=times)

        layers, records = len(self.policy.layers), [*map(seen, self.records.values())]
        profile = uniform_profile(layers, *in_order(records, [12] * 3), head=seen(self.head))
        profile = replace(profile, times_error=error, host_times_error=error)
        schedule = Schedule(1, 1, self.microbatches)
        costs = PolicyCosts(profile, Layout.from_flags(layers, 1), schedule)
        return StepErrors(costs, self.policy).interval()


@pytest.mark.long
@pytest.mark.parametrize("binds", BINDS)
def test_intervals_hold_the_step_of_both_clocks_in_as_many_profiles_as_they_say(binds):
    held, wide = 0, []
    for seed in range(PROFILES):
        job = Job(seed, binds)
        found, true_ms = job.interval(), job.step_ms()
        held += found.low_ms <= true_ms <= found.high_ms
        wide.append((found.high_ms - found.low_ms) / true_ms)
    assert held >= COVERAGE * PROFILES
    assert max(wide) < 0.2
