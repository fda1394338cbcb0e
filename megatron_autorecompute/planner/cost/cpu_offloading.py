"""Megatron's `cpu_offloading`: the first layers of a model leave as a whole.

As Transformer Engine's `DefaultOffloadSynchronizer` orders it (transformer_engine/pytorch/
cpu_offload.py of August 2026), with N of L layers, one microbatch after the other:

- A layer's copy out begins when its forward has run, on one stream for both directions.
- Before the forward of layer L - N + i the device waits until layer i has left, and frees it.
- When the backward of layer L - 1 - N + i begins, so does the copy back of layer i, for which
  layer i's backward waits.

So at most L - N layers are there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.planner.cost.copies import Changes, Copied, Ran, add, copy_ps, levels
from megatron_autorecompute.planner.cost.unit_costs import Unit
from megatron_autorecompute.policy import WHOLE_LAYER
from megatron_autorecompute.profile import HostLink, OffloadGroup


def moves_whole_layers(units: Sequence[Unit]) -> bool:
    """Whether layers of a chunk leave as a whole."""
    return any(group.name == WHOLE_LAYER for unit in units for group in unit.offload_groups)


class WholeLayerCopies:
    """A model's events and copies, event after event; as `copies.StageCopies`.

    Args:
        units: the units of the only chunk of the only stage.
        events: (is backward, chunk, microbatch), in the order of the schedule.
        link: to host memory.
        forward_ps: the time of a forward besides its units, at the end.
        backward_ps: the time of a backward besides its units, at the end.

    Raises PolicyError if other layers leave than the first ones.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        events: Sequence[tuple[bool, int, int]],
        link: HostLink,
        forward_ps: int,
        backward_ps: int,
    ) -> None:
        self._events, self._link = iter(events), link
        self._layers = [unit for unit in units if unit.layers]
        first = next(at for at, unit in enumerate(units) if unit.layers)
        ahead = [0, *accumulate(unit.forward_ps for unit in units)]
        behind = [0, *accumulate(unit.backward_ps for unit in reversed(units))][::-1]
        last = first + len(self._layers)
        self._forward_at, self._backward_at = ahead[first:last], behind[first + 1 : last + 1]
        self._forward_ps, self._backward_ps = ahead[-1] + forward_ps, behind[0] + backward_ps
        self._moved = [unit.offload_groups for unit in self._layers]
        self._number = sum(map(bool, self._moved))
        if not all(self._moved[: self._number]) or self._number == len(self._layers):
            raise PolicyError(
                f"Megatron's {WHOLE_LAYER} moves the first layers of a model and not all: write "
                "megatron:cpu_offloading/N."
            )
        self._out: dict[int, int] = {}  # when a layer has left
        self._back: dict[int, int] = {}  # when it is back
        self._stream = 0
        self.ran: list[Ran] = []
        """The run of every event so far."""
        self.device: Changes = {}
        """Bytes on the device that no record counts."""
        self.host: Changes = {}
        """Bytes in host memory."""
        self.copied: list[Copied] = []
        """The copies so far, in order; a layer is a group."""

    @property
    def stall_ps(self) -> int:
        """Time for which forwards and backwards waited for copies."""
        return sum(wait for ran in self.ran for _, wait in ran.waits)

    @property
    def host_bytes(self) -> int:
        """The most in host memory."""
        return max((level for _, level in levels(self.host)), default=0)

    def run(self, begin_ps: int) -> int:
        """Run the next event from a time on; returns when it ends."""
        is_backward, _, microbatch = next(self._events)
        waits = (self._backward if is_backward else self._forward)(begin_ps, microbatch)
        length = self._backward_ps if is_backward else self._forward_ps
        end = begin_ps + length + sum(wait for _, wait in waits)
        self.ran.append(Ran(begin_ps, end, tuple(waits)))
        return end

    def _forward(self, begin_ps: int, microbatch: int) -> list[tuple[int, int]]:
        waits, waited, kept = list[tuple[int, int]](), 0, len(self._layers) - self._number
        for layer, at in enumerate(self._forward_at):
            now = begin_ps + at + waited
            if 0 < layer <= self._number:
                self._leave(layer - 1, microbatch, now)
            leaving = layer - kept
            if leaving >= 0:
                wait = max(0, self._out[leaving] - now)
                waits += [(at, wait)] * bool(wait)
                waited += wait
                add(self.device, now + wait, -self._group(leaving).device_bytes)
        return waits

    def _leave(self, layer: int, microbatch: int, now: int) -> None:
        group = self._group(layer)
        self._out[layer] = self._copied(True, layer, microbatch, now)
        add(self.device, now, group.device_bytes)
        add(self.host, now, group.host_bytes)

    def _backward(self, begin_ps: int, microbatch: int) -> list[tuple[int, int]]:
        waits, waited, kept = list[tuple[int, int]](), 0, len(self._layers) - self._number
        for layer in reversed(range(len(self._layers))):
            at = self._backward_at[layer]
            now = begin_ps + at + waited
            returning = layer - (kept - 1)
            if 0 <= returning < self._number:
                self._return(returning, microbatch, now)
            if layer < self._number:
                wait = max(0, self._back[layer] - now)
                waits += [(at, wait)] * bool(wait)
                waited += wait
                add(self.device, now + wait, -self._group(layer).device_bytes)
                add(self.host, now + wait, -self._group(layer).host_bytes)
        return waits

    def _return(self, layer: int, microbatch: int, now: int) -> None:
        self._back[layer] = self._copied(False, layer, microbatch, now)
        add(self.device, now, self._group(layer).device_bytes)

    def _copied(self, to_host: bool, layer: int, microbatch: int, now: int) -> int:
        """Begin a copy as soon as the stream is free; returns when it ends."""
        begin, link = max(self._stream, now), self._link
        rate = link.to_host_gb_per_s if to_host else link.to_device_gb_per_s
        self._stream = begin + copy_ps(self._group(layer).host_bytes, rate)
        self.copied.append(Copied(to_host, 0, microbatch, layer, begin, self._stream))
        return self._stream

    def _group(self, layer: int) -> OffloadGroup:
        (group,) = self._moved[layer]
        return group
