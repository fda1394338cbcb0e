"""Bytes while EP overlap runs a chunk's forward beside another microbatch's backward.

Layer i of the forward runs with layer n - 1 - i of the backward, part by part; the embedding's
forward and the head's backward come first, the head's forward and the embedding's backward last.
So one grows as the other shrinks, and layers that hold much at a chunk's begin make both large at
once. Source: `TransformerModelChunkSchedulePlan.run` and `TransformerLayerSchedulePlan.run` of
megatron-core. `ep_overlap_early_attn_memory_release`, which frees a little earlier, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from megatron_autorecompute.planner.cost.chunk_columns import ChunkColumns
from megatron_autorecompute.planner.cost.schedule import Direction
from megatron_autorecompute.planner.cost.unit_costs import Unit
from megatron_autorecompute.profile import PartBytes

_ORDER: tuple[tuple[Direction, int], ...] = (
    ("backward", 3),
    ("forward", 0),
    ("backward", 2),
    ("forward", 1),
    ("backward", 1),
    ("forward", 2),
    ("forward", 3),
    ("backward", 0),
)
"""The order of the parts of two layers: attention, dispatch, experts, combine."""
_LAST = 3


@dataclass(frozen=True, slots=True)
class Point:
    """The highest bytes while something runs."""

    direction: Direction
    unit: int
    """The unit of its chunk that runs."""
    own_bytes: int
    """The bytes of the microbatch of that direction."""
    other_bytes: int
    """The bytes of the other microbatch."""
    late: bool = False
    """Whether all layers have run, and outputs are sent."""

    @property
    def bytes(self) -> int:
        """The bytes of the forward and the backward together."""
        return self.own_bytes + self.other_bytes


def points(
    forward: ChunkColumns | None,
    backward: ChunkColumns,
    boundary_bytes: int,
    *,
    last: bool = True,
    idle_bytes: Mapping[int, int] | None = None,
) -> Iterator[Point]:
    """Every point of a forward of one chunk beside a backward of one, the same or another.

    Args:
        forward: the chunk that runs forward; None: the backward is alone.
        backward: the chunk that runs backward.
        boundary_bytes: the bytes of a hidden state between two layers, or of its gradient.
        last: whether the backward's chunk has no other microbatch in flight. What a layer keeps
            until its next forward then remains after its backward; otherwise a later forward has
            replaced it.
        idle_bytes: what units of the chunk that runs forward have kept since their last backward.
    """
    yield from _Run(
        _Parts.of(forward, boundary_bytes) if forward else _Parts((), (), (), 0),
        _Parts.of(backward, boundary_bytes),
        0 if backward.chunk.head else boundary_bytes + _kept(backward),
        boundary_bytes,
        leaves=last,
        same=forward is backward,
        idle=idle_bytes or {},
    ).points()


def idle_bytes(columns: ChunkColumns, boundary_bytes: int, apart: int) -> dict[int, int]:
    """What units of an idle chunk keep: the dispatcher's `probs` have a graph, and that of a layer
    has its input as a leaf, with a gradient.

    Args:
        columns: the chunk.
        boundary_bytes: the bytes of a hidden state.
        apart: how many of the first layer's two tensors nothing else counts.
    """
    layers = [(number, unit) for number, unit in enumerate(columns.units) if unit.layers]
    return {
        number: boundary_bytes * (apart if at == 0 else 2)
        for at, (number, unit) in enumerate(layers)
        if unit.input_stays
    }


class _Run:
    """Both microbatches' bytes as they change.

    Args:
        forward: the chunk that runs forward.
        backward: the chunk that runs backward.
        gradient_bytes: of the chunk's output, which the schedule holds, and of what that keeps.
        boundary_bytes: the bytes of a hidden state.
        leaves: whether layers keep something after their backward.
        same: whether both are one chunk.
        idle: what units of the forward have kept since their last backward.
    """

    def __init__(
        self,
        forward: _Parts,
        backward: _Parts,
        gradient_bytes: int,
        boundary_bytes: int,
        *,
        leaves: bool,
        same: bool,
        idle: Mapping[int, int],
    ) -> None:
        self.forward, self.backward, self.gradient = forward, backward, gradient_bytes
        self.boundary, self.leaves, self.same = boundary_bytes, leaves, same
        self.passed = boundary_bytes if forward.layers or forward.total else 0
        """The hidden state that the forward passes on, if there is one."""
        self.low_own, self.low_other = 0, backward.total
        """Bytes held before what runs: by the forward's microbatch, and by the backward's."""
        self.own, self.other = 0, backward.total
        """Alive of each between two parts."""
        self.left: dict[int, int] = {}
        """What layers keep until their next forward, by unit of the backward."""
        self.idle = dict(idle)
        """What layers keep until their next forward, by unit of the forward."""
        self.above: _Layer | None = None
        """The units that ran backward before."""

    def points(self) -> Iterator[Point]:
        """The points in order of time."""
        yield from self._begin()
        pairs = zip_longest(self.forward.layers, reversed(self.backward.layers))
        for one, last in pairs:
            yield from self._pair(one, last)
        yield from self._finish()

    def _begin(self) -> Iterator[Point]:
        """Embedding forward, head backward."""
        for unit, costs in self.forward.before:
            self.low_own += costs.held_bytes
            yield self._forward(unit, self.low_own + costs.forward_transient_bytes)
        self.own = self.low_own + self.passed
        for unit, costs in reversed(self.backward.after):
            yield self._backward(unit, self.low_other + costs.backward_transient_bytes)
            self.low_other -= costs.held_bytes
            self.other = self.low_other
        self.other = self.low_other + self.boundary

    def _pair(self, one: _Layer | None, last: _Layer | None) -> Iterator[Point]:
        """A layer forward, a layer backward, or both."""
        self.low_other -= last.held if last else 0
        for direction, part in _ORDER:
            if direction == "forward" and one:
                now = one.parts[part]
                yield self._forward(one.unit, self.low_own + now.forward_peak_bytes)
                self.own = self.low_own + now.forward_end_bytes
                self.idle.pop(one.unit, None)
                if self.same:
                    self.left.pop(one.unit, None)
            elif direction == "backward" and last:
                now = last.parts[part]
                yield self._backward(last.unit, self.low_other + now.backward_peak_bytes)
                self.other = self.low_other + now.backward_end_bytes
                if part == _LAST:
                    self._stays()  # this layer's output
        if last:
            self._stays()  # and the gradient of it
            replaced = self.same and one is not None and one.unit >= last.unit
            if self.leaves and not replaced:
                self.left[last.unit] = last.parts[0].backward_end_bytes - 2 * self.boundary
            self.above = last
            self.low_other += self.gradient  # the first incoming one is the last layer's own
            self.gradient = 0
            self.other = self.low_other + 2 * self.boundary
        self.low_own += one.held if one else 0

    def _stays(self) -> None:
        """A layer is done with its output, or its gradient: the one above may keep it."""
        if self.above and self.above.input_stays and self.above.unit in self.left:
            self.left[self.above.unit] += self.boundary

    def _finish(self) -> Iterator[Point]:
        """Head forward, embedding backward."""
        self.own = self.low_own + self.passed
        for unit, costs in self.forward.after:
            self.low_own += costs.held_bytes
            yield self._late(self._forward(unit, self.low_own + costs.forward_transient_bytes))
            self.own = self.low_own
        for unit, costs in reversed(self.backward.before):
            alive = self.low_other + self.boundary  # its output
            yield self._late(self._backward(unit, alive + costs.backward_transient_bytes))
            self.low_other -= costs.held_bytes

    def _forward(self, unit: int, own_bytes: int) -> Point:
        return Point("forward", unit, own_bytes, self.other + self._waiting())

    def _backward(self, unit: int, own_bytes: int) -> Point:
        return Point("backward", unit, own_bytes, self.own + self._waiting())

    def _waiting(self) -> int:
        return sum(self.left.values()) + sum(self.idle.values())

    def _late(self, point: Point) -> Point:
        return replace(point, late=True)


def _kept(columns: ChunkColumns) -> int:
    """The bytes that the graph of a chunk's output keeps."""
    return next((u.output_keeps_bytes for u in reversed(columns.units) if u.layers), 0)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer, and the final norm behind it."""

    unit: int
    held: int
    parts: Sequence[PartBytes]
    input_stays: bool


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a chunk runs, by when."""

    before: tuple[tuple[int, Unit], ...]
    """Numbers of units, and the units."""
    layers: tuple[_Layer, ...]
    after: tuple[tuple[int, Unit], ...]
    total: int

    @classmethod
    def of(cls, columns: ChunkColumns, boundary_bytes: int) -> _Parts:
        before, after = list[tuple[int, Unit]](), list[tuple[int, Unit]]()
        layers = list[_Layer]()
        for number, unit in enumerate(columns.units):
            if unit.layers:
                parts = _parts(unit, boundary_bytes)
                layers.append(_Layer(number, unit.held_bytes, parts, unit.input_stays))
            elif unit.name == "head" or after:
                after.append((number, unit))
            elif layers:
                layers[-1] = _with_norm(layers[-1], unit, boundary_bytes)
            else:
                before.append((number, unit))
        if columns.chunk.head and layers and not any(u.name == "final norm" for u in columns.units):
            layers[-1] = _before_head(layers[-1], boundary_bytes)
        total = int(columns.held_bytes.sum())
        return cls(tuple(before), tuple(layers), tuple(after), total)


def _parts(unit: Unit, boundary_bytes: int) -> tuple[PartBytes, ...]:
    """A unit's own; where it has none, those of one that is whole all the time."""
    if unit.parts:
        return unit.parts
    forward = unit.held_bytes + unit.forward_transient_bytes
    backward = unit.held_bytes + unit.backward_transient_bytes
    end = unit.held_bytes + boundary_bytes
    whole = PartBytes(forward, forward, backward, backward)
    first = PartBytes(forward, forward, backward, 2 * boundary_bytes)
    return first, whole, whole, PartBytes(forward, end, backward, backward)


def _before_head(layer: _Layer, boundary_bytes: int) -> _Layer:
    """The last layer's last part has the final norm, whose output the head's bytes contain."""
    *parts, last = layer.parts
    last = PartBytes(
        last.forward_peak_bytes + boundary_bytes,
        last.forward_end_bytes + boundary_bytes,
        last.backward_peak_bytes + boundary_bytes,
        last.backward_end_bytes,
    )
    return replace(layer, parts=(*parts, last))


def _with_norm(layer: _Layer, norm: Unit, boundary_bytes: int) -> _Layer:
    held = layer.held + norm.held_bytes
    *parts, last = layer.parts
    last = PartBytes(
        max(last.forward_peak_bytes, held + norm.forward_transient_bytes),
        last.forward_end_bytes + norm.held_bytes,
        max(last.backward_peak_bytes, held + norm.backward_transient_bytes),
        last.backward_end_bytes,
    )
    return replace(layer, held=held, parts=(*parts, last))
