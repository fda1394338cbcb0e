"""The device of virtual time keeps the rules by which a host and a GPU share a step."""

import statistics

import pytest
import torch

from tests.oracle_device import OPERATION_MS, QUEUE, Device, ratios


def products(count, size=64):
    def step():
        weight = torch.eye(size)
        found = weight
        for _ in range(count):
            found = found @ weight
        return found

    return step


@pytest.mark.parametrize("slowness", [3.0, 0.3])
def test_the_slower_of_host_and_device_decides(slowness):
    device = Device(0, "mixed")
    with device.running():
        device.binds(products(200), slowness)
        device.launched_ms = device.worked_ms = 0.0
        took_ms = device.step_ms(products(200))
    assert device.worked_ms == pytest.approx(slowness * device.launched_ms)
    assert took_ms == pytest.approx(max(device.worked_ms, device.launched_ms), rel=0.02)


def test_an_event_tells_when_the_device_comes_to_it_and_reading_a_value_waits_for_that():
    device = Device(1, "mixed")
    with device.running():
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(2 * 1_755_000)
        end.record()
        assert not end.query()
        assert device.host_ms < 1.0
        float(torch.ones(3).sum())
        assert end.query()
        assert device.host_ms > 2.0
    assert begin.elapsed_time(end) == pytest.approx(2.0 + OPERATION_MS, abs=OPERATION_MS)


def test_a_full_queue_holds_the_host_back():
    device = Device(2, "device")
    with device.running():
        torch.cuda._sleep(100 * 1_755_000)
        products(QUEUE // 2)()
        assert device.host_ms < 100.0
        products(QUEUE)()
        assert device.host_ms > 100.0


def test_a_seed_gives_the_same_noise_which_is_that_of_the_measured_steps():
    def steps():
        device = Device(3, "host")
        device.is_quiet = False
        with device.running():
            return [device.step_ms(products(20)) for _ in range(200)]

    found = steps()
    assert found == steps()
    seen = ratios("host")
    spread = statistics.stdev(found) / statistics.median(found)
    assert spread == pytest.approx(statistics.stdev(seen) / statistics.median(seen), rel=0.3)
