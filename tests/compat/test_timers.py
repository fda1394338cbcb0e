"""Megatron's own timers around a measuring step."""

import time

import pytest

from megatron_autorecompute.compat.timers import BACKWARD, FORWARD, running

pytestmark = [pytest.mark.any_version, pytest.mark.usefixtures("one_rank")]


@pytest.mark.parametrize("set_by_s", [44_507, -44_507])
def test_a_clock_that_is_set_while_a_timer_runs_is_no_time_of_the_step(monkeypatch, set_by_s):
    from megatron.core.timers import Timers

    timers, of_the_day, ahead_s = Timers(0, "minmax"), time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: of_the_day() + ahead_s[0])
    with running(timers) as took_ms:
        for name in (FORWARD, BACKWARD):
            timers(name, log_level=2).start()
            time.sleep(0.01)
            ahead_s[0] += set_by_s if name == BACKWARD else 0
            timers(name).stop()
    assert set(took_ms) == {FORWARD}
    assert 10 <= took_ms[FORWARD] < 10_000
