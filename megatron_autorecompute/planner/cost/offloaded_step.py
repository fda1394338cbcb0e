"""The time of a step whose layers copy activations to host memory, with its waits for copies.

All stages are replayed event by event, because a wait delays every event that needs the output. A
step of more than `MOST_EVENTS` is replayed for fewer microbatches. Each microbatch left out is
assumed to take as long as the last ones replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_autorecompute.errors import PolicyError, ProfileError
from megatron_autorecompute.planner.cost.copies import ChunkWork, Kept, StageBytes, StageCopies
from megatron_autorecompute.planner.cost.cpu_offloading import WholeLayerCopies, moves_whole_layers
from megatron_autorecompute.planner.cost.schedule import Schedule
from megatron_autorecompute.planner.cost.slots import block, num_slots
from megatron_autorecompute.planner.cost.stage_times import Times
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, Unit
from megatron_autorecompute.policy import WHOLE_LAYER
from megatron_autorecompute.profile import HostLink, Profile

Copies = StageCopies | WholeLayerCopies
MOST_EVENTS = 1 << 12
"""The most events of all stages together in a replay."""
_FEW = 3
"""Microbatches that show all there is where each is like the one before."""
StageUnits = Sequence[Sequence[tuple[Unit, ...]]]
"""`[stage][chunk]`"""


def offloads(units: StageUnits) -> bool:
    """Whether any unit copies anything."""
    return any(unit.offload_groups for stage in units for chunk in stage for unit in chunk)


def host_link(profile: Profile) -> HostLink:
    """The profile's; raises ProfileError where it has none."""
    if profile.host_link is None:
        raise ProfileError(
            "The policy offloads activations, and the profile has no host_link, so that nobody "
            "knows how long copies take. Add host_link (docs/files.md), or leave offload out."
        )
    return profile.host_link


@dataclass(frozen=True)
class OffloadedStep:
    """A step replayed with its copies."""

    schedule: Schedule
    """The replayed schedule; a long step has fewer microbatches in it."""
    step_ms: float
    stages: tuple[Copies, ...]
    units: StageUnits

    def bytes_of(self, stage: int) -> StageBytes:
        """Bytes beside those of records on one stage."""
        copies = self.stages[stage]
        return StageBytes.of(self.units[stage], copies.ran, copies.device)


def offloaded_step(
    schedule: Schedule,
    units: StageUnits,
    residual: Times,
    link: HostLink,
    kept: Kept | None = None,
) -> OffloadedStep:
    """Replay a step with its copies.

    Args:
        schedule: the order of events.
        units: the units of every stage and chunk.
        residual: time of every forward and backward besides its units, `[stage, chunk]`.
        link: to host memory.
        kept: which groups stay; by default as Megatron keeps them.
    """
    rest = residual.forward.tolist(), residual.backward.tolist()
    short = _short(schedule)
    if any(moves_whole_layers(chunk) for stage in units for chunk in stage):
        make = _of_whole_layers(units, rest, link)
        # No copy outlives its microbatch, so that each takes as long as the one before.
        short = replace(schedule, num_microbatches=min(schedule.num_microbatches, _FEW))
    else:
        works = [
            [ChunkWork.of(*own) for own in zip(of_stage, *each, strict=True)]
            for of_stage, *each in zip(units, *rest, strict=True)
        ]
        make = _of_groups(works, link, kept or Kept())
    stages, finish_ps = _replay(short, make)
    more = schedule.num_microbatches - short.num_microbatches
    if more:
        fewer = _period(schedule)
        shorter = replace(short, num_microbatches=short.num_microbatches - fewer)
        before_ps = _replay(shorter, make)[1]
        return OffloadedStep(
            short,
            (finish_ps + (finish_ps - before_ps) * more / fewer) / PS_PER_MS,
            stages,
            units,
        )
    return OffloadedStep(short, finish_ps / PS_PER_MS, stages, units)


def _period(schedule: Schedule) -> int:
    """Microbatches after which a long schedule repeats."""
    return schedule.group_size if schedule.num_chunks > 1 else schedule.num_stages


def _short(schedule: Schedule) -> Schedule:
    """The schedule, or one of fewer microbatches with the same begin and end."""
    each = 2 * schedule.num_chunks * schedule.num_stages
    period, m = _period(schedule), schedule.num_microbatches
    most = max(MOST_EVENTS // each, schedule.shortened().num_microbatches + 2 * period)
    if m <= most:
        return schedule
    return replace(schedule, num_microbatches=most - (most - m) % period)


Events = Sequence[tuple[bool, int, int]]
Make = Callable[[int, Events], Copies]
"""Makes the copies of a stage, from its number and its events."""


def _of_groups(works: Sequence[Sequence[ChunkWork]], link: HostLink, kept: Kept) -> Make:
    return lambda stage, events: StageCopies(stage, works[stage], events, link, kept)


def _of_whole_layers(units: StageUnits, rest: Sequence[Any], link: HostLink) -> Make:
    if len(units) > 1 or len(units[0]) > 1:
        raise PolicyError(f"Megatron refuses {WHOLE_LAYER} with several pipeline stages.")
    (forward_ps,), (backward_ps,) = (each[0] for each in rest)
    return lambda _, events: WholeLayerCopies(
        units[0][0], events, link, int(forward_ps), int(backward_ps)
    )


def _replay(schedule: Schedule, make: Make) -> tuple[tuple[Copies, ...], int]:
    """Every stage with all its events, and when the last one ends."""
    stages = []
    for stage in range(schedule.num_stages):
        order = zip(*(part.tolist() for part in schedule.order(stage)), strict=True)
        stages.append(make(stage, list(order)))
    slots = block(schedule, 0, num_slots(schedule))
    finish = [[0] * len(stages) for _ in range(slots.lookback + slots.shape[0])]
    for number in range(slots.shape[0]):
        row = slots.lookback + number
        for stage, copies in enumerate(stages):
            finish[row][stage] = finish[row - 1][stage]
            event = slots.input(number, stage)
            if event is not None:
                arrived = 0 if event.row is None else finish[event.row][event.stage]
                taken = 0 if event.receiver is None else finish[row - 2][event.receiver]
                finish[row][stage] = copies.run(max(finish[row - 1][stage], arrived, taken))
    return tuple(stages), max(finish[-1])
