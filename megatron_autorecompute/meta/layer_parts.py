"""Bytes of the parts that EP overlap runs a layer in, by Megatron's own schedule on meta tensors.

Every part has an autograd graph of its own and keeps its output until its backward has run; some
parts free their input when they have run (megatron-core `should_free_input`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megatron_autorecompute.meta.graph_layers import without_refused
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.meta_step import run_step
from megatron_autorecompute.meta.model import (
    LEFT_OUT,
    JobStep,
    choices_by_kind,
    counted,
    overlap_fields,
    shard,
    step_shape,
)
from megatron_autorecompute.patched import patched
from megatron_autorecompute.policy import NONE, RecomputePolicy
from megatron_autorecompute.profile import LayerKind, PartBytes
from megatron_autorecompute.runtime.live_bytes import LiveBytes

FIRST = "pre_dispatch_computation"
NAMES = ("moe_dispatch", "mlp", "moe_combine")
"""The names of a layer's other parts; a dense layer has only the second."""
OUTSIDE = ("pre_process", "post_process")


def with_parts(job: Job, kinds: Sequence[LayerKind], boundary_bytes: int) -> tuple[LayerKind, ...]:
    """Decoder layers' kinds with the bytes that each choice has under EP overlap, without choices
    that Megatron refuses there. Kinds of MTP depths are unchanged.

    Args:
        job: with `overlap_moe_expert_parallel_comm`, a GPTModel without MTP depths.
        kinds: the kinds of the whole model.
        boundary_bytes: the bytes of a hidden state between two layers.
    """
    left_out = {name: v for name, v in LEFT_OUT.items() if name not in overlap_fields(job)}
    kinds, _ = without_refused(job, kinds, left_out)
    ran, copies = choices_by_kind(job, kinds)
    last = max(at for at, count in enumerate(copies) if count)
    copies[last] += 1  # the final norm is in the last layer's last part
    policy = RecomputePolicy((*(choice for _, choice in ran), NONE))
    runs = _runs(job, copies, left_out, policy)
    found = {
        key: _figures(run, boundary_bytes, above.input_stays)
        for key, (run, above) in zip(ran, itertools.pairwise(runs), strict=True)
    }
    return tuple(
        replace(
            kind,
            choices=tuple(
                replace(each, **found.get((kind.name, each.policy), {})) for each in kind.choices
            ),
        )
        for kind in kinds
    )


def _figures(run: _Run, boundary_bytes: int, output_stays: bool) -> dict[str, Any]:
    """Fields of a `ChoiceRecord`; output_stays: as of `_parts`."""
    parts = _parts(run, boundary_bytes, output_stays)
    held = parts[-1].forward_end_bytes - boundary_bytes
    return {
        "held_bytes": held,
        "forward_transient_bytes": max(part.forward_peak_bytes for part in parts) - held,
        "backward_transient_bytes": max(part.backward_peak_bytes for part in parts) - held,
        "also_static_bytes": 0,
        "parts": parts,
        "input_stays": run.input_stays,
        "output_keeps_bytes": run.backward[0].kept_bytes,
    }


@dataclass(slots=True)
class _Note:
    """One part's forward or backward."""

    name: str
    forward: bool
    start_bytes: int
    peak_bytes: int
    inputs: tuple[weakref.ref[torch.Tensor], ...]
    """The inputs of a backward; they end with it unless something has its graph."""
    kept_bytes: int
    """Bytes left after a backward: leaves of its output's graph, and their gradients."""
    end_bytes: int = 0
    """The bytes when the next part begins."""


class _Run(NamedTuple):
    """One layer's parts in order of time."""

    forward: list[_Note]
    backward: list[_Note]
    input_stays: bool


def _runs(
    job: Job, copies: Sequence[int], left_out: Mapping[str, Any], policy: RecomputePolicy
) -> list[_Run]:
    """One microbatch's forward and backward through a shard's layers, by Megatron's schedule."""
    with shard(job, copies, left_out) as built:
        step = JobStep(job)
        with counted(job, built.model, policy, step) as live, _noted(live) as notes:
            run_step([built.model], step_shape(job, 1), step)
            return _by_layer(notes)


@contextlib.contextmanager
def _noted(live: LiveBytes) -> Iterator[list[_Note]]:
    """In this block a list that fills with every part that runs."""
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    notes: list[_Note] = []

    def noting(original: Callable[..., Any], forward: bool) -> Any:
        @functools.wraps(original)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            name = FIRST if self.name == "attn" else self.name  # of 0.16
            is_part = name in (FIRST, *NAMES, *OUTSIDE)
            start = live.current_bytes
            if is_part and notes:
                notes[-1].end_bytes = start
            inputs = tuple(weakref.ref(x) for x in self.inputs or () if x is not None)
            live.reset_peak()
            leaves = [] if forward else list(_leaves(self.output))
            result = original(self, *args, **kwargs)
            grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
            kept = live.counted_bytes([*leaves, *grads])
            if is_part:
                notes.append(_Note(name, forward, start, live.peak_bytes, inputs, kept))
            return result

        return run

    with (
        patched(ScheduleNode, "forward", noting(ScheduleNode.forward, True)),
        patched(ScheduleNode, "backward", noting(ScheduleNode.backward, False)),
    ):
        yield notes


def _leaves(outputs: Any) -> Iterator[torch.Tensor]:
    """The leaves of the graphs of some tensors, parameters included."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    left = [output.grad_fn for output in outputs if output is not None]
    seen = set(left)
    while left:
        node = left.pop()
        if hasattr(node, "variable"):
            yield node.variable
        found = {n for n, _ in getattr(node, "next_functions", ()) if n is not None} - seen
        seen |= found
        left += found


def _by_layer(notes: Sequence[_Note]) -> list[_Run]:
    inside = [note for note in notes if note.name not in OUTSIDE]
    forwards = _begun(note for note in inside if note.forward)
    backwards = _begun(note for note in reversed(inside) if not note.forward)
    return [
        _Run(forward, backward[::-1], any(one() is not None for one in backward[0].inputs))
        for forward, backward in zip(forwards, backwards, strict=True)
    ]


def _begun(notes: Iterable[_Note]) -> list[list[_Note]]:
    """The notes by layer: each begins with its first part."""
    found: list[list[_Note]] = []
    for note in notes:
        if note.name == FIRST:
            found.append([])
        found[-1].append(note)
    return found


def _parts(run: _Run, boundary_bytes: int, output_stays: bool) -> tuple[PartBytes, ...]:
    """output_stays: as the input of the layer above, with its gradient, when this one is done."""
    low = run.forward[0].start_bytes - boundary_bytes  # its input is the layer's own
    forward = _levels(run.forward, low)
    held = run.forward[-1].end_bytes - run.forward[0].start_bytes
    # When the backward begins, so are its output and the gradient of it.
    low = run.backward[0].start_bytes - 2 * boundary_bytes - held
    backward = _levels(run.backward, low)
    if output_stays:
        backward = _without_output(backward, boundary_bytes)
    level, found = forward[FIRST][1], list[PartBytes]()
    before = run.backward[0].start_bytes - low
    ends = {}
    for name in (*reversed(NAMES), FIRST):
        before = ends[name] = backward.get(name, (0, before))[1]
    for name in (FIRST, *NAMES):
        peak, level = forward.get(name, (level, level))
        found.append(PartBytes(peak, level, backward.get(name, (ends[name],))[0], ends[name]))
    return tuple(found)


def _without_output(
    levels: Mapping[str, tuple[int, int]], boundary_bytes: int
) -> dict[str, tuple[int, int]]:
    """A backward's bytes without the output that its first part has anyway, and without the
    gradient of it that its last part has."""
    names, found = list(levels), {}
    for name, (peak, end) in levels.items():
        less = boundary_bytes * (1 + (name == names[-1]))
        found[name] = peak - boundary_bytes * (name != names[0]), end - less
    return found


def _levels(notes: Sequence[_Note], low: int) -> dict[str, tuple[int, int]]:
    """Highest bytes and bytes at the end of every part, above the layer's base."""
    return {
        note.name: (max(0, note.peak_bytes - low), max(0, note.end_bytes - low)) for note in notes
    }
