"""Bytes of the parts that EP overlap runs a layer in, by Megatron's own schedule on meta tensors.

Every part has an autograd graph of its own, and some parts free their input when they have run. So
a layer holds less than in one piece (megatron-core `models/common/utils.py`, `should_free_input`).
Every part keeps its output until its backward has run. The caller of the layer's backward keeps the
gradient of the layer's output until then, too. If the dispatcher's `probs` have a graph, its leaf
(the layer's input) stays with its gradient until the layer's next forward. A chunk's
output keeps its graph's leaves and their gradients until the chunk's backward ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from megatron_autorecompute.meta.graph_layers import without_refused
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.model import (
    LEFT_OUT,
    JobStep,
    counted,
    overlap_fields,
    own_kinds,
    shard,
)
from megatron_autorecompute.patched import patched
from megatron_autorecompute.policy import NONE, LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import LayerKind, PartBytes
from megatron_autorecompute.runtime.live_bytes import LiveBytes

FIRST = ("attn", "pre_dispatch_computation")
"""The name of a layer's first part, in 0.16 and since."""
NAMES = ("moe_dispatch", "mlp", "moe_combine")
"""The names of the other parts; a dense layer has only the second."""
OUTSIDE = ("pre_process", "post_process")


def with_parts(job: Job, kinds: Sequence[LayerKind], boundary_bytes: int) -> tuple[LayerKind, ...]:
    """Decoder layers' kinds with the bytes that each choice has under EP overlap.

    Choices that Megatron refuses there are left out. Else kinds of MTP depths are unchanged.

    Args:
        job: with `overlap_moe_expert_parallel_comm`, a GPTModel without MTP depths.
        kinds: the kinds of the whole model.
        boundary_bytes: the bytes of a hidden state between two layers.
    """
    kinds, _ = without_refused(job, kinds, _left_out(job))
    own = own_kinds(job, kinds)
    copies = [len(kind.choices) if kind else 0 for kind in own]
    last = max(at for at, count in enumerate(copies) if count)
    copies[last] += 1  # the final norm is in the last layer's last part
    ran = [(kind.name, record.policy) for kind in own if kind for record in kind.choices]
    runs = _runs(job, copies, RecomputePolicy((*(choice for _, choice in ran), NONE)))
    found = {
        key: _figures(run, boundary_bytes, above.input_stays)
        for key, (run, above) in zip(ran, itertools.pairwise(runs), strict=True)
    }
    return tuple(_replaced(kind, found) for kind in kinds)


def _replaced(
    kind: LayerKind, found: Mapping[tuple[str, LayerPolicy], dict[str, Any]]
) -> LayerKind:
    choices = (replace(each, **found.get((kind.name, each.policy), {})) for each in kind.choices)
    return replace(kind, choices=tuple(choices))


def _figures(run: _Run, boundary_bytes: int, output_stays: bool) -> dict[str, Any]:
    """Fields of a `ChoiceRecord`; output_stays: as of `_parts`."""
    parts = _parts(run, boundary_bytes, output_stays)
    held = parts[-1].forward_end_bytes - boundary_bytes
    return {
        "held_bytes": held,
        "forward_transient_bytes": max(part.forward_peak_bytes for part in parts) - held,
        "backward_transient_bytes": max(part.backward_peak_bytes for part in parts) - held,
        "parts": parts,
        "input_stays": run.input_stays,
        "output_keeps_bytes": run.backward[0].kept_bytes,
    }


def _left_out(job: Job) -> dict[str, Any]:
    """Fields that a shard under EP overlap is built without."""
    return {name: value for name, value in LEFT_OUT.items() if name not in overlap_fields(job)}


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


def _runs(job: Job, copies: Sequence[int], policy: RecomputePolicy) -> list[_Run]:
    """One microbatch's forward and backward through a shard's layers, by Megatron's schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with shard(job, copies, _left_out(job)) as built:
        step = JobStep(job)
        with counted(job, built.model, policy, step) as live, _noted(live) as notes:
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=None,
                model=built.model,
                num_microbatches=1,
                seq_length=job.seq_length,
                micro_batch_size=job.micro_batch_size,
                forward_only=False,
            )
            return _by_layer(notes)


@contextlib.contextmanager
def _noted(live: LiveBytes) -> Iterator[list[_Note]]:
    """In this block a list that fills with every part that runs."""
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    notes: list[_Note] = []

    def noting(original: Callable[..., Any], forward: bool) -> Any:
        @functools.wraps(original)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_part = self.name in (*FIRST, *NAMES, *OUTSIDE)
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
                notes.append(_Note(self.name, forward, start, live.peak_bytes, inputs, kept))
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
    """Forwards begin with a layer's first part, backwards end with it."""
    forwards: list[list[_Note]] = []
    backwards: list[list[_Note]] = [[]]
    for note in notes:
        if note.name in OUTSIDE:
            continue
        if note.forward:
            if note.name in FIRST:
                forwards.append([])
            forwards[-1].append(note)
        else:
            backwards[-1].append(note)
            if note.name in FIRST:
                backwards.append([])
    pairs = zip(forwards, reversed(backwards[:-1]), strict=True)
    return [_Run(*pair, any(one() is not None for one in pair[1][-1].inputs)) for pair in pairs]


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
    level, found = forward[FIRST[-1]][1], list[PartBytes]()
    before = run.backward[0].start_bytes - low
    ends = {}
    for name in (*reversed(NAMES), FIRST[-1]):
        before = ends[name] = backward.get(name, (0, before))[1]
    for name in (FIRST[-1], *NAMES):
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
        FIRST[-1] if note.name in FIRST else note.name: (
            max(0, note.peak_bytes - low),
            max(0, note.end_bytes - low),
        )
        for note in notes
    }
