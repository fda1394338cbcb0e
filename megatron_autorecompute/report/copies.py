"""Copies to host memory and back in a step that is drawn: when, and what waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_autorecompute.planner.cost.arrays import Ints
from megatron_autorecompute.planner.cost.copies import Copied, Ran, StageBytes
from megatron_autorecompute.planner.cost.offloaded_step import OffloadedStep
from megatron_autorecompute.planner.cost.p2p_tensors import Moment
from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS, Unit
from megatron_autorecompute.policy import WHOLE_LAYER
from megatron_autorecompute.profile import OffloadGroup


@dataclass(frozen=True, slots=True)
class Copy:
    """What one module of one layer saved, for one microbatch, on its way."""

    name: str
    """`core_attn of layer 7`; a whole layer is `layer 7`."""
    to_host: bool
    chunk: int
    microbatch: int
    begin_ms: float
    """When the copy begins, in ms since the step began."""
    end_ms: float
    bytes: int


@dataclass(frozen=True, slots=True)
class StepCopies:
    """The copies of one stage. Sequences have one entry for each of its events, in order."""

    copies: tuple[Copy, ...]
    """The copies, in the order in which they were asked for."""
    waits: tuple[tuple[tuple[float, float], ...], ...]
    """For each event: ms that it computes before it waits for a copy, and ms that it waits."""
    unit_bytes: tuple[Ints, ...]
    """For each event: the most bytes that copies add to those of records while each unit runs."""
    after_bytes: Ints
    """For each event: the bytes that copies add from its end to the next event."""


def step_copies(step: OffloadedStep, stage: int, moments: Sequence[Moment]) -> StepCopies:
    """The copies of one stage in a replayed step. Its events are `moments`."""
    replayed, chunks = step.stages[stage], step.units[stage]
    groups = [
        [(unit, group) for unit in units for group in unit.offload_groups] for units in chunks
    ]
    beside, ran = step.bytes_of(stage), replayed.ran
    return StepCopies(
        tuple(_copy(one, *groups[one.chunk][one.group]) for one in replayed.copied),
        tuple(tuple((at / PS_PER_MS, wait / PS_PER_MS) for at, wait in own.waits) for own in ran),
        tuple(_unit_bytes(beside, number, moment) for number, moment in enumerate(moments)),
        _after_bytes(beside, ran),
    )


def _copy(one: Copied, unit: Unit, group: OffloadGroup) -> Copy:
    whole = group.name == WHOLE_LAYER
    return Copy(
        unit.name if whole else f"{group.name} of {unit.name}",
        one.to_host,
        one.chunk,
        one.microbatch,
        one.begin_ps / PS_PER_MS,
        one.end_ps / PS_PER_MS,
        group.host_bytes,
    )


def _unit_bytes(beside: StageBytes, number: int, moment: Moment) -> Ints:
    if moment.beside is not None:
        return np.full(len(beside.chunks[moment.chunk]), beside.during(number))
    return beside.by_unit(number, moment.chunk, backward=moment.direction == "backward")


def _after_bytes(beside: StageBytes, ran: Sequence[Ran]) -> Ints:
    ends = [own.end_ps for own in ran]
    begins = [own.begin_ps for own in ran[1:]] + ends[-1:]
    found = [beside.most(end, begin) for end, begin in zip(ends, begins, strict=True)]
    return np.array(found, np.int64)
