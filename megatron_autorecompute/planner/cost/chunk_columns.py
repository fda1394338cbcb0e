"""What the units of one chunk hold and need, as arrays."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import cached_property

import numpy as np

from megatron_autorecompute.planner.cost import Ints
from megatron_autorecompute.planner.cost.layout import Chunk
from megatron_autorecompute.planner.cost.schedule import Direction
from megatron_autorecompute.planner.cost.unit_costs import OUTSIDE, Unit
from megatron_autorecompute.profile import LayerBytes


@dataclass(frozen=True)
class ChunkColumns:
    """One chunk's units as arrays of shape [unit]."""

    chunk: Chunk
    units: tuple[Unit, ...]

    def in_graphs(self) -> ChunkColumns:
        """The bytes of every unit in the memory pool of CUDA graphs."""
        return ChunkColumns(self.chunk, tuple(map(_in_graph, self.units)))

    def outside_graphs(self, boundary_bytes: int) -> ChunkColumns:
        """Every unit's other bytes; a graph's copy of an output's gradient is left out."""
        units = (_outside_graph(unit, boundary_bytes) for unit in self.units)
        return ChunkColumns(self.chunk, tuple(units))

    @cached_property
    def held_bytes(self) -> Ints:
        """Held by each unit."""
        return np.array([unit.held_bytes for unit in self.units], np.int64)

    @cached_property
    def outside_bytes(self) -> Ints:
        """Held by each unit that is the embedding or the head; 0 for layers."""
        outside = np.array([unit.name in OUTSIDE for unit in self.units])
        return np.where(outside, self.held_bytes, 0)

    def transient_bytes(self, direction: Direction, boundary_bytes: int) -> Ints:
        """Transient of each unit, plus what the gradient of the chunk's output adds to it.

        The schedule holds that gradient until the chunk's backward ends. It is the incoming
        gradient of the last unit, whose transient counts it until the unit would free it.
        """
        if direction == "forward":
            return np.array([unit.forward_transient_bytes for unit in self.units], np.int64)
        own = np.array([unit.backward_transient_bytes for unit in self.units], np.int64)
        gradient_bytes = 0 if self.chunk.head else boundary_bytes
        own[:-1] += gradient_bytes
        own[-1:] += 0 if self.chunk.head else self.units[-1].kept_gradient_bytes
        return own if not self.early_bytes else np.maximum(own + self._early, self._waiting)

    @cached_property
    def early_bytes(self) -> int:
        """What all units hold whose recompute has begun before the gradient is there."""
        return sum(unit.ahead.held_bytes for unit in self.units if unit.ahead)

    @cached_property
    def _early(self) -> Ints:
        """What units before each one hold in its backward, because they are recomputed already."""
        own = [unit.ahead.held_bytes if unit.ahead else 0 for unit in self.units]
        return np.cumsum([0, *own[:-1]], dtype=np.int64)

    @cached_property
    def _waiting(self) -> Ints:
        """For each unit that is recomputed while the stage waits, after those behind it, what is
        there besides the units up to it; 0 for others."""
        found, behind = np.zeros(len(self.units), np.int64), 0
        for number in reversed(range(len(self.units))):
            ahead = self.units[number].ahead
            if ahead:
                found[number] = behind + ahead.transient_bytes
                behind += ahead.held_bytes
            behind += self.units[number].held_bytes
        return found

    def reach_bytes(self, direction: Direction, boundary_bytes: int) -> Ints:
        """For each unit while it runs: held bytes of all units up to it, plus its transient."""
        return self.held_bytes.cumsum() + self.transient_bytes(direction, boundary_bytes)


_NOTHING = LayerBytes(0, 0, 0)


def _in_graph(unit: Unit) -> Unit:
    return replace((unit.graph or _NOTHING).into(unit), kept_gradient_bytes=0, parts=())


def _outside_graph(unit: Unit, boundary_bytes: int) -> Unit:
    if unit.graph is None:
        return unit
    pairs = zip(astuple(LayerBytes.of(unit)), astuple(unit.graph), strict=True)
    rest = LayerBytes(*(whole - own for whole, own in pairs))
    return replace(rest.into(unit), kept_gradient_bytes=boundary_bytes, parts=())
