"""Collects what was measured of one choice on one kind of layer, and makes a record of it.

Bytes are the most that was seen. A time is the lower quartile: what disturbs a step makes it
longer, so the upper half of its runs says little of the layer. On an H100 the lower quartile of 12
steps that took turns strays by 0.1 to 2.1%, the median of 3 by 0.5 to 12% (docs/gpu-evidence.md).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_autorecompute.policy import NONE, LayerPolicy
from megatron_autorecompute.profile import BytesAt, ChoiceRecord, HostTimes

TURNS, SAMPLES = 4, 12
"""Turns in which a choice is timed, and the least samples of it on a rank."""
PERCENTILES = (50.0, 90.0, 95.0, 99.0, 100.0)
"""The percentiles of microbatches at which the bytes of layers with experts are recorded."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The time of one layer in one pass."""

    turn: int
    """The turn of the reading. Readings of one turn come from consecutive steps under one policy.
    """
    step: int
    """The rank's timed step that the reading is of."""
    ms: float
    """Time on the device."""
    host_ms: float | None = None
    """What the host took to launch it; None if its clock was not read."""
    is_ahead: bool = False
    """Whether it was launched before the device came to it, so that `ms` has no wait in it."""


_POLISHED = 8
"""Rounds of the polish; it moves little after the third."""
Timed = Sequence[tuple[int, float]]
"""(turn, ms)"""


@dataclass(frozen=True, slots=True)
class Quartile:
    """A time, and the spread of the runs behind it."""

    ms: float
    """The lower quartile of all runs."""
    spread_ms: float = 0.0
    """Within turns: half the interquartile range of runs, each less its turn's quartile."""
    turn_spread_ms: float = 0.0
    """Between turns: the standard deviation of their quartiles."""

    @classmethod
    def of(cls, timed: Timed) -> Quartile:
        """The quartile and spreads of at least one run."""
        turns: dict[int, list[float]] = defaultdict(list)
        for turn, ms in timed:
            turns[turn].append(ms)
        quartiles = {turn: lower_quartile(values) for turn, values in turns.items()}
        beyond = [ms - quartiles[turn] for turn, ms in timed]
        between = statistics.stdev(quartiles.values()) if len(quartiles) > 1 else 0.0
        return cls(lower_quartile([ms for _, ms in timed]), _half_middle_half(beyond), between)


def lower_quartile(values: Sequence[float]) -> float:
    """The lower quartile of at least one value."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def of_device(readings: Sequence[Reading]) -> Timed:
    """Times of readings that no launch held up; of a layer that itself waits for the device, such
    as one that reads how many tokens its experts got, there are none, and then of all."""
    ahead = [reading for reading in readings if reading.is_ahead]
    return [(reading.turn, reading.ms) for reading in ahead or readings]


def of_host(readings: Sequence[Reading]) -> Timed:
    """Times by the host's clock, where it was read."""
    return [(one.turn, one.host_ms) for one in readings if one.host_ms is not None]


@dataclass(slots=True)
class Samples:
    """Measurements of one (place, choice), with an entry for every layer and microbatch.

    A level is the most bytes alive that belong to the layer: held and transient together.
    """

    held_bytes: list[int] = field(default_factory=list)
    """Held bytes without the place's input."""
    input_bytes: list[int] = field(default_factory=list)
    """Size of the place's input, 0 if nothing keeps it. An input that another stage sent has no
    entry, because the schedule keeps it in any case."""
    forward_level_bytes: list[int] = field(default_factory=list)
    backward_level_bytes: list[int] = field(default_factory=list)
    """Levels of layers whose output's gradient no schedule keeps."""
    kept_level_bytes: list[int] = field(default_factory=list)
    """Levels in backward, with the gradient of the layer's output alive to the end."""
    forward: list[Reading] = field(default_factory=list)
    backward: list[Reading] = field(default_factory=list)

    def add(self, other: Samples) -> None:
        """Append the entries of another rank."""
        for name in self.__slots__:
            getattr(self, name).extend(getattr(other, name))

    def complete(self, timed: bool = True) -> bool:
        """Whether there is enough for a record; timed: whether its times are its own."""
        counted = self.held_bytes and self.forward_level_bytes and self._backward_levels
        return bool(counted and (not timed or (self.forward and self.backward)))

    @property
    def _backward_levels(self) -> list[int]:
        """Levels as if all layers ended their chunk, with the gradient that the schedule keeps."""
        return self.backward_level_bytes or self.kept_level_bytes

    def at(self, percentile: float) -> tuple[int, int, int]:
        """Held bytes without the input, and both levels, at a percentile."""
        held, forward, backward = (
            _nearest_rank(values, percentile)
            for values in (self.held_bytes, self.forward_level_bytes, self._backward_levels)
        )
        return held, forward, backward

    def record(self, choice: LayerPolicy, boundary_bytes: int) -> ChoiceRecord:
        """The maximum of bytes, the lower quartile of times; without times where none was taken.

        If it is not known whether the place keeps its input, it counts as kept.
        """
        input_bytes = max(self.input_bytes, default=boundary_bytes)
        held = max(self.held_bytes) + input_bytes
        backward_level = max(self._backward_levels)
        kept_level = max(self.kept_level_bytes, default=None)
        forward, backward = (Quartile.of(one) if one else Quartile(0.0) for one in self.on_device)
        return ChoiceRecord(
            choice=str(choice),
            held_bytes=held,
            forward_transient_bytes=max(0, max(self.forward_level_bytes) - held),
            backward_transient_bytes=max(0, backward_level - held),
            forward_ms=forward.ms,
            backward_ms=backward.ms,
            spread_ms=forward.spread_ms + backward.spread_ms,
            runs=max(1, min(map(len, self.on_device))),
            turn_spread_ms=forward.turn_spread_ms + backward.turn_spread_ms,
            turns=max(1, len({turn for turn, _ in self.on_device[1]})),
            host=self._host(),
            input_kept=input_bytes > 0 or boundary_bytes == 0,
            kept_gradient_bytes=None
            if kept_level is None
            else min(boundary_bytes, max(0, kept_level - max(held, backward_level))),
        )

    @property
    def on_device(self) -> tuple[Timed, Timed]:
        """Times of the forward and of the backward on the device."""
        return of_device(self.forward), of_device(self.backward)

    def _host(self) -> HostTimes | None:
        """The host's time; the device's where the host waits for the device."""
        if not (of_host(self.forward) and of_host(self.backward)):
            return None
        waits = [not any(one.is_ahead for one in way) for way in (self.forward, self.backward)]
        timed = [
            on_device if waiting else of_host(readings)
            for waiting, on_device, readings in zip(
                waits, self.on_device, (self.forward, self.backward), strict=True
            )
        ]
        forward, backward = map(Quartile.of, timed)
        return HostTimes(
            forward.ms,
            backward.ms,
            forward.spread_ms + backward.spread_ms,
            forward.turn_spread_ms + backward.turn_spread_ms,
            *waits,
        )


SamplesByKey = dict[tuple[str, LayerPolicy], Samples]
"""Keys: (signature of the kind or name of the place, choice)."""


@dataclass(frozen=True, slots=True)
class Evened:
    """One rank's samples as if none of its steps had been slower than the others."""

    seen: SamplesByKey
    device_error: float = 0.0
    """The error that all device times share, as a share of them: one standard deviation."""
    host_error: float = 0.0
    """The error that all host times share, as a share of them: one standard deviation."""


def evened(seen: SamplesByKey) -> Evened:
    """Take out of every time what was slow about its step.

    What slows a host or a device down slows all layers of a step, and choices are shown in
    different steps. So a time is taken to be that of its choice times a factor of its step, both
    found as Tukey's median polish finds them; the lower quartile of all factors is 1.
    """
    on_device = _Factors(seen, lambda one: one.ms if _is_of_device(one) else None)
    on_host = _Factors(seen, lambda one: one.host_ms)

    def of(one: Reading) -> Reading:
        host_ms = None if one.host_ms is None else one.host_ms / on_host.of(one)
        # What waited for launches is as slow as they were.
        by = on_device if _is_of_device(one) else on_host
        return replace(one, ms=one.ms / by.of(one), host_ms=host_ms)

    even = {
        key: replace(found, forward=[*map(of, found.forward)], backward=[*map(of, found.backward)])
        for key, found in seen.items()
    }
    return Evened(even, on_device.error, on_host.error)


def _is_of_device(one: Reading) -> bool:
    return one.is_ahead or one.host_ms is None


class _Factors:
    """How much slower each step was; time_of: the time of a reading, None if it has none."""

    def __init__(self, seen: SamplesByKey, time_of: Callable[[Reading], float | None]) -> None:
        ways = [way for found in seen.values() for way in (found.forward, found.backward)]
        logs = [
            (number, one.step, math.log(ms))
            for number, way in enumerate(ways)
            for one in way
            for ms in (time_of(one),)
            if ms
        ]
        slower = {one.step: 0.0 for way in ways for one in way}
        for _ in range(_POLISHED):
            own = _medians((number, log - slower[step]) for number, step, log in logs)
            slower |= _medians((step, log - own[number]) for number, step, log in logs)
        turns = {one.step: one.turn for way in ways for one in way}
        found = Quartile.of([(turns[step], log) for step, log in slower.items()] or [(0, 0.0)])
        self._by_step = {step: math.exp(log - found.ms) for step, log in slower.items()}
        count = len(set(turns.values()))
        # Of so few turns the spread is itself uncertain, as in `planner.cost.step_interval`.
        self.error = found.turn_spread_ms / math.sqrt(count) * (1 + 4 / count) if count else 0.0

    def of(self, one: Reading) -> float:
        """Of the step of a reading."""
        return self._by_step[one.step]


def _medians(values: Iterable[tuple[int, float]]) -> dict[int, float]:
    groups: dict[int, list[float]] = defaultdict(list)
    for group, value in values:
        groups[group].append(value)
    return {group: statistics.median(own) for group, own in groups.items()}


def _nearest_rank(values: Sequence[int], percentile: float) -> int:
    """The smallest value that `percentile` percent of all values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percentile / 100) - 1)]


def percentiles(record: ChoiceRecord, ranks: Sequence[Samples]) -> tuple[BytesAt, ...]:
    """A record's bytes at percentiles of the microbatches of one rank, the fullest.

    Ranks are not pooled, because popular experts stay on their rank.
    """
    input_bytes = record.held_bytes - max(max(seen.held_bytes) for seen in ranks)
    points = []
    for percentile in PERCENTILES:
        by_rank = zip(*(seen.at(percentile) for seen in ranks), strict=True)
        held, forward, backward = (max(values) for values in by_rank)
        held += input_bytes
        points.append(BytesAt(percentile, held, max(0, forward - held), max(0, backward - held)))
    return tuple(points)


def _half_middle_half(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def of_parts(
    choice: LayerPolicy, records: Mapping[LayerPolicy, ChoiceRecord]
) -> ChoiceRecord | None:
    """A record with the times of a set of modules: those of `none`, and what each module adds to
    them where it alone is rerun. On the H100 and on the stand-in for one they add up
    (docs/no-device.md). None where the record of a part is missing."""
    alone = {(c.modules, c.keep, c.rerun_all): r for c, r in records.items() if not c.offload}
    parts = [
        alone.get(((module,), choice.keep, choice.rerun_all), alone.get(((module,), (), False)))
        for module in choice.modules
    ]
    none, found = records.get(NONE), [part for part in parts if part is not None]
    if none is None or not found or len(found) < len(parts):
        return None
    hosts = [part.host for part in found if part.host is not None]
    host = (
        none.host
        and len(hosts) == len(found)
        and replace(
            none.host,
            **_added(none.host, hosts),
            forward_waits=any(each.forward_waits for each in hosts),
            backward_waits=any(each.backward_waits for each in hosts),
        )
    )
    runs, turns = min(part.runs for part in found), min(part.turns for part in found)
    return replace(none, **_added(none, found), runs=runs, turns=turns, host=host or None)


def _added(
    none: ChoiceRecord | HostTimes, parts: Sequence[ChoiceRecord | HostTimes]
) -> dict[str, Any]:
    more = len(parts) - 1
    times = {
        name: max(0.0, sum(getattr(part, name) for part in parts) - more * getattr(none, name))
        for name in ("forward_ms", "backward_ms")
    }
    spreads = {
        name: math.hypot(more * getattr(none, name), *(getattr(part, name) for part in parts))
        for name in ("spread_ms", "turn_spread_ms")
    }
    return times | spreads
