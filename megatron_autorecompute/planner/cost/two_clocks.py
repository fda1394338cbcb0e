"""A step under two clocks: the host launches kernels, and the device runs them in a queue.

A matrix over maxima (as sums) and sums (as products) takes the moments of host and device before a
layer to those after it (docs/decisions/measuring.md). In a pipeline a stage's host waits at each
exchange with its neighbours (Megatron's `batch_p2p_sync`), so the clocks meet at every forward and
backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from megatron_autorecompute.planner.cost import Floats
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.stage_times import Times, times_of
from megatron_autorecompute.planner.cost.step_time import replay_ms
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, StageUnits, Unit
from megatron_autorecompute.policy import FULL, RecomputePolicy
from megatron_autorecompute.profile import ChoiceRecord, Profile

_NEVER = -np.inf


def knows_host(profile: Profile) -> bool:
    """Whether any record says what the host takes."""
    return any(record.host for record in profile.all_records)


def of_clock(profile: Profile, host: bool) -> Profile:
    """The profile of the host's or the device's clock alone. No step takes less than either."""

    def of(record: ChoiceRecord) -> ChoiceRecord:
        own = record.host if host else None
        names = ("forward_ms", "backward_ms", "spread_ms", "turn_spread_ms") if own else ()
        return replace(record, host=None, **{name: getattr(own, name) for name in names})

    error = profile.host_times_error if host else profile.times_error
    return replace(profile.each_record(of), times_error=error)


def records_of(
    profile: Profile, policy: RecomputePolicy, unit: Unit
) -> Iterator[tuple[tuple[object, ...], ChoiceRecord]]:
    """The records that a unit's time is made of, each with its name."""
    if not unit.layers:
        outside = {"embedding": profile.embedding, "head": profile.head}
        found = outside.get(unit.name, profile.final_norm if unit.name == "final norm" else None)
        if found is not None:
            yield (unit.name,), found
        return
    kinds = [profile.kind_of(layer) for layer in unit.layers]
    whole = kinds[0].record(policy.layers[unit.layers[0]])
    if whole is not None and all(kind is kinds[0] for kind in kinds):
        yield (kinds[0].name, whole.choice), whole
        return
    for kind in kinds:  # a checkpoint that is worked out from its layers' own
        record = kind.record(FULL)
        if record is not None:
            yield (kind.name, record.choice), record


def step_ms(
    profile: Profile,
    schedule: Schedule,
    policy: RecomputePolicy,
    units: tuple[StageUnits, StageUnits],
    residual: Times,
    *,
    begins_early: bool = True,
) -> float:
    """Milliseconds of a step; of what begins early it counts what is less of the two clocks.

    Args:
        units: with the device's times, and with the host's.
        residual: what every pass takes besides, on both clocks.
        begins_early: whether marked recompute begins before the gradient is there.
    """
    forward, backward = _passes(profile, policy, units, residual)
    if schedule.num_stages == schedule.num_chunks == 1:
        microbatch = _then(forward[0][0], backward[0][0])
        return float(_repeated(microbatch, schedule.num_microbatches).max())
    both = [times_of(own).ahead for own in units] if begins_early else [None]
    known = [own / PS_PER_MS for own in both if own is not None]
    ahead = np.minimum(*known) if len(known) == len(units) else None
    return replay_ms(schedule, _met(forward), _met(backward), ahead)


def met_ms(
    profile: Profile, policy: RecomputePolicy, units: tuple[StageUnits, StageUnits], residual: Times
) -> tuple[float, ...]:
    """Forward plus backward of one microbatch on each stage, if host and device meet before and
    after each; arguments as of `step_ms`."""
    ways = map(_met, _passes(profile, policy, units, residual))
    return tuple(sum(map(sum, both)) for both in zip(*ways, strict=True))


def _met(matrices: Sequence[Sequence[Floats]]) -> list[list[float]]:
    return [[float(each.max()) for each in chunks] for chunks in matrices]


def _passes(
    profile: Profile, policy: RecomputePolicy, units: tuple[StageUnits, StageUnits], residual: Times
) -> list[list[list[Floats]]]:
    """The matrix of the forward and of the backward of every `[stage][chunk]`."""
    return [
        [
            [
                _pass(profile, policy, (device, host), direction, extra)
                for device, host, extra in zip(*stage, strict=True)
            ]
            for stage in zip(*units, (rest / PS_PER_MS).tolist(), strict=True)
        ]
        for direction, rest in enumerate((residual.forward, residual.backward))
    ]


def _pass(
    profile: Profile,
    policy: RecomputePolicy,
    units: tuple[Sequence[Unit], Sequence[Unit]],
    direction: int,
    extra_ms: float,
) -> Floats:
    """The matrix of one forward (direction 0) or backward (1) of a chunk."""
    found = [_launched(extra_ms, extra_ms)]
    for pair in zip(*units, strict=True):
        device_ms, host_ms = (
            (unit.forward_ps, unit.backward_ps)[direction] / PS_PER_MS for unit in pair
        )
        hosts = (record.host for _, record in records_of(profile, policy, pair[0]))
        waits = any((host.forward_waits, host.backward_waits)[direction] for host in hosts if host)
        found.append(np.full((2, 2), device_ms) if waits else _launched(host_ms, device_ms))
    return reduce(_then, found if direction == 0 else reversed(found))


def _launched(host_ms: float, device_ms: float) -> Floats:
    """Rows: the host and the device after it; columns: the same before it."""
    return np.array([[host_ms, _NEVER], [max(host_ms, device_ms), device_ms]])


def _then(first: Floats, second: Floats) -> Floats:
    """What happens first, and then the second."""
    found: Floats = (second[:, :, None] + first[None, :, :]).max(axis=1)
    return found


def _repeated(once: Floats, times: int) -> Floats:
    """The power of a matrix, by squaring: a step may have thousands of microbatches."""
    if times == 1:
        return once
    half = _repeated(once, times // 2)
    twice = _then(half, half)
    return _then(twice, once) if times % 2 else twice
