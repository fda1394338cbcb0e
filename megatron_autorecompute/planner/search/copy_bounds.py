"""Lower bounds on a step from the copies back from host memory.

A stage takes at least the time that it computes for all microbatches, and at least the time of its
copies back, which run one after the other. So it takes at least any mixture of the two: share *
computing + (1 - share) * copies. Both are sums over layers, so the exact search of a stage finds
the least mixture within a budget.

For each microbatch and chunk, one group of each name may be missing from the copies back: the last
group stays on the device where the backward follows the forward at once, and the backward itself
makes a copy that was not begun in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_autorecompute.planner.cost.offloaded_step import host_link
from megatron_autorecompute.planner.cost.stage_times import least_times, residual_times
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.problem import Problem
from megatron_autorecompute.profile import ChoiceRecord, HostLink, LayerKind, Profile
from megatron_autorecompute.work_order import contains

_ROUNDED_PS = 2
"""The time by which a unit's mixed time may be rounded up."""


def mixed(profile: Profile, link: HostLink, share: float) -> Profile:
    """The profile without copies; times are the share of what is computed, and the rest of what is
    copied back. Where more recompute would then take less, its time is that of less, too."""

    def scaled(record: ChoiceRecord, least: float = 1.0) -> ChoiceRecord:
        copied_ms = (1 - share) * least * _back_ms(record.host_bytes, link)
        return replace(
            record,
            forward_ms=share * record.forward_ms,
            backward_ms=share * record.backward_ms + copied_ms,
            offload_groups=(),
        )

    def of_kind(kind: LayerKind) -> LayerKind:
        least = min([1.0, *(point.factor for point in kind.imbalance)])
        records = [scaled(record, least) for record in kind.choices]
        return replace(kind, choices=tuple(records if share == 1 else _lowered(records)))

    norm = profile.final_norm
    return replace(
        profile,
        kinds=tuple(map(of_kind, profile.kinds)),
        embedding=scaled(profile.embedding),
        head=scaled(profile.head),
        final_norm=None if norm is None else scaled(norm),
    )


def _lowered(records: Sequence[ChoiceRecord]) -> Iterator[ChoiceRecord]:
    """Times that are lowered until no choice takes longer than those that contain its work."""
    for record in records:
        above = [one for one in records if contains(one.policy, record.policy)]
        time_ms = record.forward_ms + record.backward_ms
        least_ms = min((one.forward_ms + one.backward_ms for one in above), default=time_ms)
        share = min(1.0, least_ms / time_ms) if time_ms else 1.0
        forward_ms, backward_ms = share * record.forward_ms, share * record.backward_ms
        yield replace(record, forward_ms=forward_ms, backward_ms=backward_ms)


def copy_bounds_ms(problem: Problem, share: float, least_ps: Sequence[int]) -> list[float]:
    """Milliseconds that a step takes at least, by every stage.

    Args:
        problem: with its copies.
        share: the share of computing in the mixture.
        least_ps: of every stage, what no choices that fit go below in the mixture, for one
            microbatch.
    """
    table, layout, m = problem.table, problem.layout, problem.schedule.num_microbatches
    residual = residual_times(table, layout).busy.tolist()
    ahead_ps, found = 0, list[float]()
    for stage, chunks in enumerate(layout.stages):
        rounded = _ROUNDED_PS * sum(len(chunk.layers) + 4 for chunk in chunks)
        each_ps = least_ps[stage] - rounded + share * min(0, residual[stage])
        skipped = (1 - share) * _skipped_ms(problem, stage)
        found.append((ahead_ps + m * each_ps) / PS_PER_MS - skipped)
        ahead_ps += sum(least_times(table, chunks[0]))
    return found


def _skipped_ms(problem: Problem, stage: int) -> float:
    """The most that all microbatches' copies may be less than their sum."""
    schedule = problem.schedule
    m, last = schedule.num_microbatches, stage == schedule.num_stages - 1
    times = m if last or schedule.num_chunks > 1 else 1
    chunks = [_longest_ms(problem, chunk.layers) for chunk in problem.layout.stages[stage]]
    return (times + 1) * sum(chunks)


def _longest_ms(problem: Problem, layers: Sequence[int]) -> float:
    """The longest copy of each name in a chunk, together."""
    longest: dict[str, float] = {}
    for layer in layers:
        for choice in problem.table.choices(layer):
            record = problem.table.record(layer, choice)
            for group in () if record is None else record.offload_groups:
                time_ms = _back_ms(group.host_bytes, host_link(problem.profile))
                longest[group.name] = max(time_ms, longest.get(group.name, 0.0))
    return sum(longest.values())


def _back_ms(host_bytes: int, link: HostLink) -> float:
    return host_bytes / (link.to_device_gb_per_s * 1e6)
