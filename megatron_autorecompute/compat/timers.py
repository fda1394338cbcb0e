"""Megatron's own timers (megatron/core/timers.py), all of them for one step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FORWARD, BACKWARD, OPTIMIZER = "forward-compute", "backward-compute", "optimizer"
"""Megatron's names for the timers that are read."""
MOST_TIMERS_LEVEL = 2
"""The `--timing-log-level` at which all of Megatron's timers run."""


@contextmanager
def running(timers: Any | None) -> Iterator[dict[str, float]]:
    """Surround a step and run Megatron's timers of every level in it.

    The level is raised for this step only, because timers of level 2 synchronise at every
    microbatch.

    timers: Megatron's `Timers`, or None if the job has none.

    Yields:
        A dict, empty during the step; afterwards ms by name of each timer above that ran. Timers
        read the clock of the day; where that was set meanwhile, so that one says more than the step
        took, its figure is left out.
    """
    took_ms: dict[str, float] = {}
    if timers is None:
        yield took_ms
        return
    level, timers._log_level = timers._log_level, MOST_TIMERS_LEVEL
    before_s = {name: timer.active_time() for name, timer in timers._timers.items()}
    begin_s = time.perf_counter()
    try:
        yield took_ms
        step_s = time.perf_counter() - begin_s
        for name in (FORWARD, BACKWARD, OPTIMIZER):
            timer = timers._timers.get(name)
            ran_s = 0.0 if timer is None else timer.active_time() - before_s.get(name, 0.0)
            if 0 < ran_s <= step_s:
                took_ms[name] = ran_s * 1e3
    finally:
        timers._log_level = level
        # Megatron uses an existing timer at every level; it would go on synchronising.
        for name in set(timers._timers) - set(before_s):
            del timers._timers[name], timers._log_levels[name]
