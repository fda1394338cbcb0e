"""Bytes while EP overlap runs a chunk's forward beside another microbatch's backward.

Layer i of the forward runs with layer n - 1 - i of the backward, part by part; the embedding's
forward and the head's backward come first, the head's forward and the embedding's backward last.
Source: `TransformerModelChunkSchedulePlan.run` and `TransformerLayerSchedulePlan.run` of
megatron-core, without `ep_overlap_early_attn_memory_release`, which frees a little earlier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
_BEFORE, _AFTER = -1, 1 << 30
"""Places before and after all layers."""


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


def points(
    forward: ChunkColumns | None,
    backward: ChunkColumns,
    boundary_bytes: int,
    *,
    last: bool = True,
    idle_bytes: Mapping[int, int] | None = None,
) -> Iterator[Point]:
    """Every point of a forward of one chunk (None: nothing) beside a backward of one, the same or
    another.

    Args:
        last: whether the backward's chunk has no other microbatch in flight. What a layer keeps
            until its next forward then remains after its backward; otherwise a later forward has
            replaced it.
        idle_bytes: what units of the chunk that runs forward have kept since their last backward.
    """
    ahead = _Parts.of(forward, boundary_bytes) if forward else _Parts((), (), (), 0)
    behind = _Parts.of(backward, boundary_bytes)
    gradient_bytes = 0 if backward.chunk.head else boundary_bytes + _kept(backward)
    level = {"forward": 0, "backward": behind.total}
    """Alive of each between two parts."""
    left, idle = dict[int, int](), dict(idle_bytes or {})
    """What layers keep until their next forward, by unit of the backward, and of the forward."""
    above: _Layer | None = None
    """The layer that ran backward before."""
    steps = [*_forward(ahead, boundary_bytes), *_backward(behind, gradient_bytes, boundary_bytes)]
    for step in sorted(steps, key=lambda step: step.at):
        if step.peak_bytes is not None:
            other = level["backward" if step.direction == "forward" else "forward"]
            other += sum(left.values()) + sum(idle.values())
            late = step.at[0] == _AFTER
            yield Point(step.direction, step.unit, step.peak_bytes, other, late)
        level[step.direction] = step.end_bytes
        if step.direction == "forward":
            idle.pop(step.unit, None)
            if forward is backward:
                left.pop(step.unit, None)
        elif above and above.input_stays and above.unit in left and step.part in (0, _LAST):
            # A layer is done with its gradient, or its output: the one above keeps it.
            left[above.unit] += boundary_bytes
        if step.direction == "backward" and step.part == 0:
            above = behind.layers[-1 - step.at[0]]
            beside = ahead.layers[step.at[0] :][:1]
            is_replaced = forward is backward and beside and beside[0].unit >= above.unit
            if last and not is_replaced:
                left[above.unit] = above.parts[0].backward_end_bytes - 2 * boundary_bytes


def idle_bytes(columns: ChunkColumns, boundary_bytes: int, apart: int) -> dict[int, int]:
    """What units of an idle chunk keep: the dispatcher's `probs` have a graph, and that of a layer
    has its input as a leaf, with a gradient. Of the first layer's two tensors nothing else counts
    so many as `apart` says."""
    layers = [(number, unit) for number, unit in enumerate(columns.units) if unit.layers]
    return {
        number: boundary_bytes * (apart if at == 0 else 2)
        for at, (number, unit) in enumerate(layers)
        if unit.input_stays
    }


class _Step(NamedTuple):
    """What one unit runs of one microbatch, or one part of a layer."""

    at: tuple[int, int]
    """The pair of layers, and the place in it."""
    direction: Direction
    unit: int
    peak_bytes: int | None
    """The bytes of the microbatch while it runs; None: nothing runs."""
    end_bytes: int
    """The bytes of the microbatch from then on."""
    part: int | None = None


def _forward(chunk: _Parts, boundary_bytes: int) -> Iterator[_Step]:
    # The hidden state that the forward passes on, if there is one.
    passed = boundary_bytes if chunk.layers or chunk.total else 0
    low = 0
    for unit, costs in chunk.before:
        low += costs.held_bytes
        yield _Step((_BEFORE, 0), "forward", unit, low + costs.forward_transient_bytes, low)
    yield _Step((_BEFORE, 1), "forward", -1, None, low + passed)
    for number, layer in enumerate(chunk.layers):
        for place, (direction, part) in enumerate(_ORDER):
            if direction == "forward":
                now, at = layer.parts[part], (number, place)
                peak, end = low + now.forward_peak_bytes, low + now.forward_end_bytes
                yield _Step(at, "forward", layer.unit, peak, end, part)
        low += layer.held
    yield _Step((_AFTER, 0), "forward", -1, None, low + passed)
    for unit, costs in chunk.after:
        low += costs.held_bytes
        yield _Step((_AFTER, 0), "forward", unit, low + costs.forward_transient_bytes, low)


def _backward(chunk: _Parts, gradient_bytes: int, boundary_bytes: int) -> Iterator[_Step]:
    """gradient_bytes: of the chunk's output, which the schedule holds, and of what that keeps."""
    low = chunk.total
    for unit, costs in reversed(chunk.after):
        peak = low + costs.backward_transient_bytes
        low -= costs.held_bytes
        yield _Step((_BEFORE, 2), "backward", unit, peak, low)
    yield _Step((_BEFORE, 2), "backward", -1, None, low + boundary_bytes)
    for number, layer in enumerate(reversed(chunk.layers)):
        low -= layer.held
        for place, (direction, part) in enumerate(_ORDER):
            if direction == "backward":
                now, at = layer.parts[part], (number, place)
                peak, end = low + now.backward_peak_bytes, low + now.backward_end_bytes
                if part == 0:
                    low += 0 if number else gradient_bytes  # the last layer's own until now
                    end = low + 2 * boundary_bytes
                yield _Step(at, "backward", layer.unit, peak, end, part)
    for unit, costs in reversed(chunk.before):
        peak = low + boundary_bytes + costs.backward_transient_bytes  # with its output
        low -= costs.held_bytes
        yield _Step((_AFTER, 1), "backward", unit, peak, low)


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
                layers[-1] = _with_norm(layers[-1], unit)
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
    more = last.each(lambda size: size + boundary_bytes)
    more = replace(more, backward_end_bytes=last.backward_end_bytes)
    return replace(layer, parts=(*parts, more))


def _with_norm(layer: _Layer, norm: Unit) -> _Layer:
    held = layer.held + norm.held_bytes
    *parts, last = layer.parts
    forward, backward = norm.forward_transient_bytes, norm.backward_transient_bytes
    last = replace(
        last,
        forward_peak_bytes=max(last.forward_peak_bytes, held + forward),
        forward_end_bytes=last.forward_end_bytes + norm.held_bytes,
        backward_peak_bytes=max(last.backward_peak_bytes, held + backward),
    )
    return replace(layer, held=held, parts=(*parts, last))
