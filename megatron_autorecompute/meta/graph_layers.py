"""Bytes and times of layers that are CUDA graphs, whole or in part, by Megatron's own code on meta
tensors. Every layer runs twice by itself: as Transformer Engine captures it, which gives what is in
the graphs' memory pool, and as Megatron runs it beside the graph's replay, with a stand-in.

TE pytorch/graph.py `_make_graphed_callables`: saved tensors and outputs are in the pool until the
backward is captured; then others use their memory (TE >= 2.7). Inputs are copied to buffers outside
of it; with attention a mask is one. With the implementation `local` whole layers hand their output
on in the pool, and no mask is an input (megatron-core cuda_graphs.py `_resolve_input_buffer`).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch.utils._pytree import tree_iter

from megatron_autorecompute.compat import graph_fields, model_layers, rules
from megatron_autorecompute.meta import ops
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.job_config import FIELDS
from megatron_autorecompute.meta.model import (
    LEFT_OUT,
    JobStep,
    choices_by_kind,
    counted,
    job_kinds,
    meta_megatron,
    shard,
    shard_config,
)
from megatron_autorecompute.meta.roofline import Reading, Roofline
from megatron_autorecompute.policy import LayerPolicy, RecomputePolicy
from megatron_autorecompute.profile import (
    ChoiceRecord,
    LayerBytes,
    LayerKind,
    in_order,
)
from megatron_autorecompute.runtime.live_bytes import LiveBytes, storage_bytes


def with_graph_fields(job: Job, implementation: str) -> tuple[Job, dict[str, Any]]:
    """The job with its CUDA graphs in fields of the installed Megatron's config, by an
    implementation, and what of LEFT_OUT is left out of it all the same."""
    fields = graph_fields.graph_fields(implementation, job.graphs.modules)
    rest = {name: value for name, value in job.config.items() if name not in FIELDS}
    left_out = {name: value for name, value in LEFT_OUT.items() if name not in fields}
    return replace(job, config={**rest, **fields}), left_out


def without_refused(
    job: Job, kinds: Sequence[LayerKind], left_out: Mapping[str, Any]
) -> tuple[tuple[LayerKind, ...], tuple[str, ...]]:
    """The kinds with those choices alone that Megatron allows beside fields of the job, of which
    `left_out` are left out, and a sentence for each of its reasons against others.

    Raises OptionError if Megatron refuses these fields, whatever is recomputed.
    """
    choices = list(dict.fromkeys(record.policy for kind in kinds for record in kind.choices))
    with meta_megatron(job):
        config, _ = shard_config(job, [1] * len(job_kinds(job)), left_out)
        refused = {one: why for one in choices if (why := rules.why_not(config, one))}
    found = []
    for kind in kinds:
        kept = tuple(record for record in kind.choices if record.policy not in refused)
        known = {record.choice for record in kept}
        inert = {choice: other for choice, other in kind.inert.items() if other in known}
        found.append(replace(kind, choices=kept, inert=inert))
    counts = Counter(refused.values()).items()
    return tuple(found), tuple(f"Choices left out: {number}. {reason}" for reason, number in counts)


def with_graphs(job: Job, kinds: Sequence[LayerKind], clock: Roofline) -> tuple[LayerKind, ...]:
    """Decoder layers' kinds with the bytes that each choice has in graphs and beside them, and the
    time that it takes so. Kinds of MTP depths are unchanged.

    Args:
        job: with `graphs.of_layers`.
        kinds: the kinds of the whole model, with choices that Megatron allows beside the graphs.
        clock: gives the times.
    """
    ran, copies = choices_by_kind(job, kinds)
    runs = _runs(job, copies, [choice for _, choice in ran], clock)
    found = dict(zip(ran, runs, strict=True))
    return tuple(_replaced(kind, found) for kind in kinds)


def _replaced(
    kind: LayerKind, found: Mapping[tuple[str, LayerPolicy], dict[str, Any]]
) -> LayerKind:
    given = [replace(each, **found.get((kind.name, each.policy), {})) for each in kind.choices]
    # An output that is recomputed is not quantised, which may be less than recomputing is more.
    records = [replace(each, spread_ms=0.0) for each in in_order(given, [1.0] * len(given))]
    inert = _inert(records)
    inert |= {choice: inert.get(other, other) for choice, other in kind.inert.items()}
    choices = tuple(record for record in records if record.choice not in inert)
    return replace(kind, choices=choices, inert=inert)


def _inert(records: Sequence[ChoiceRecord]) -> dict[str, str]:
    """Choices that change nothing, and what they equal: since 0.19 Megatron makes no checkpoint
    while it captures (tensor_parallel/random.py `checkpoint`)."""
    found: dict[str, str] = {}
    for larger, smaller in itertools.product(records, repeat=2):
        within = set(smaller.policy.modules) < set(larger.policy.modules)
        alike = LayerBytes.of(larger) == LayerBytes.of(smaller) and larger.graph == smaller.graph
        if larger.graph and within and alike and larger.choice not in found:
            found[larger.choice] = found.get(smaller.choice, smaller.choice)
    return found


def _runs(
    job: Job, copies: Sequence[int], choices: Sequence[LayerPolicy], clock: Roofline
) -> list[dict[str, Any]]:
    """Of each layer of a shard the fields of its choice's `ChoiceRecord` that change."""
    asked, left_out = with_graph_fields(job, "transformer_engine")
    with shard(asked, copies, left_out) as built:
        model, step = built.model, JobStep(asked)
        (site,) = model_layers.block_sites([model])
        layers = list(site.block.layers)
        policy = RecomputePolicy((*choices, *[LayerPolicy()] * job.mtp_num_layers))
        with counted(job, model, policy, step) as live:
            # What dispatchers keep until the next forward is alive from here on.
            kwargs = _called_with(layers, model, step)
            return [
                _run(job, layer, own, live, clock, built.config)
                for layer, own in zip(layers, kwargs, strict=True)
            ]


def _called_with(
    layers: Sequence[Any], model: torch.nn.Module, step: JobStep
) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
    """The keyword arguments of each layer in a step, and the shape of its hidden states."""
    found: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        found.append((tuple(hidden.shape), kwargs))

    for layer in layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    step(None, model)[0].float().mean().backward()
    return found


def _run(
    job: Job,
    layer: Any,
    called: tuple[tuple[int, ...], dict[str, Any]],
    live: LiveBytes,
    clock: Roofline,
    config: Any,
) -> dict[str, Any]:
    if not graph_fields.is_graphable(layer, config):
        return {}
    shape, kwargs = called
    for tensor in tree_iter(kwargs):
        if isinstance(tensor, torch.Tensor):
            live.exclude(tensor)
    like = torch.empty(shape, dtype=config.params_dtype, device="meta")
    live.exclude(like)
    of_attention = not job.graphs.modules or "attn" in job.graphs.modules
    captured, outputs, inside = _captured(layer, like, kwargs if of_attention else {}, live, clock)
    # Transformer Engine's graphs of attention have a mask as an input, whether a job has one or not
    # (megatron-core transformer_layer.py `get_layer_static_inputs`).
    masked = job.graphs.implementation == "transformer_engine" and of_attention
    length = job.seq_length * masked
    mask = job.micro_batch_size * length * length // job.size("context")
    static_gradient = torch.empty_like(like)
    live.exclude(static_gradient)

    def graph(hidden: torch.Tensor, _: torch.Tensor) -> Any:
        return _Graph.apply(outputs, like, static_gradient, hidden)

    hands_on = False

    def replay(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal hands_on
        output = graph_fields.replay(layer, graph, hidden, dict(kwargs), mask)
        output = output[0] if isinstance(output, tuple) else output
        hands_on = storage_bytes([output, *outputs]) == storage_bytes(outputs)
        return output

    rest, keeps_input, outside = _alone(replay, like, live, clock)
    held = captured.held_bytes + storage_bytes([like]) + mask
    if job.graphs.implementation == "local" and of_attention and hands_on:
        held -= storage_bytes(outputs)  # the next layer's input
    pool = replace(captured, held_bytes=held)
    forward_ms, backward_ms = _together(inside, outside, clock)
    return {
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "held_bytes": rest.held_bytes + pool.held_bytes,
        "forward_transient_bytes": rest.forward_transient_bytes + pool.forward_transient_bytes,
        "backward_transient_bytes": rest.backward_transient_bytes + pool.backward_transient_bytes,
        "input_kept": keeps_input,
        "also_static_bytes": 0,
        "graph": pool,
    }


Readings = tuple[Reading, Reading]
"""The readings of a forward and of its backward."""


def _together(inside: Readings, outside: Readings, clock: Roofline) -> tuple[float, float]:
    """Milliseconds of forward and backward; the host starts what is inside as one module."""
    launch = np.array([np.inf, 1e-6 * clock.efficiency.module_us, np.inf])
    forward, backward = (
        clock.ms_between(np.zeros(3), np.minimum(graph, launch) + rest)
        for graph, rest in zip(inside, outside, strict=True)
    )
    return forward, backward


def _captured(
    layer: Any, like: torch.Tensor, kwargs: dict[str, Any], live: LiveBytes, clock: Roofline
) -> tuple[LayerBytes, tuple[torch.Tensor, ...], Readings]:
    """Bytes in the pool, outputs included, tensors like the outputs, which are not counted, and the
    time inside."""
    hidden = _leaf(like, live)
    before = live.current_bytes
    live.reset_peak()
    begin = clock.settled()
    with clock:
        outputs = graph_fields.capture(layer, hidden, dict(kwargs))
    middle = clock.now()
    held, highest = live.current_bytes - before, live.peak_bytes - before
    found = tuple(out for out in outputs if isinstance(out, torch.Tensor))
    trained = [out for out in found if out.requires_grad]
    live.reset_peak()
    gradients = [torch.empty_like(out) for out in trained]
    with clock:
        torch.autograd.backward(trained, gradients)
    inside = middle - begin, clock.settled() - middle
    del gradients
    sizes = LayerBytes(held, highest - held, max(0, live.peak_bytes - before - held))
    alike = tuple(out.detach().clone().requires_grad_(out.requires_grad) for out in found)
    for tensor in alike:
        live.exclude(tensor)
    return sizes, alike, inside


def _alone(
    run: Callable[[torch.Tensor], torch.Tensor],
    like: torch.Tensor,
    live: LiveBytes,
    clock: Roofline,
) -> tuple[LayerBytes, bool, Readings]:
    """Bytes of a layer, whose forward is `run`, as its record counts them; whether it keeps its
    input; and its time."""
    leaf, before = _leaf(like, live), live.current_bytes
    live.reset_peak()
    received = [leaf.clone()]
    storage = weakref.ref(received[0].untyped_storage())
    begin = clock.settled()
    with clock:
        output = run(received.pop())
    middle = clock.now()
    end = _end(output)
    one = torch.ones_like(end)
    for tensor in (end, one):
        live.exclude(tensor)
    highest = live.peak_bytes - before
    del output
    held, keeps_input = live.current_bytes - before, storage() is not None
    live.reset_peak()
    with clock:
        torch.autograd.backward(end, one)
    sizes = LayerBytes(held, highest - held, max(0, live.peak_bytes - before - held))
    return sizes, keeps_input, (middle - begin, clock.settled() - middle)


def _leaf(like: torch.Tensor, live: LiveBytes) -> torch.Tensor:
    leaf = torch.empty_like(like).requires_grad_()
    live.exclude(leaf)
    return leaf


def _end(output: torch.Tensor) -> torch.Tensor:
    """What follows a layer: keeps nothing, and gives a gradient of its output."""
    gradient = functools.partial(torch.empty, output.shape, dtype=output.dtype, device="meta")
    return cast(
        torch.Tensor,
        ops.kernel_with_backward(lambda x: (x.new_empty(()), (), lambda *_: [gradient()]), output),
    )


class _Graph(torch.autograd.Function):
    """TE's `Graphed`: outputs and the gradient of the input are in the pool; what comes in from
    before and behind is copied to where the graphs read it."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Any, static: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor
    ) -> Any:
        static.copy_(hidden)
        ctx.gradient = gradient
        found = tuple(out.detach() for out in outputs)
        pairs = zip(found, outputs, strict=True)
        ctx.mark_non_differentiable(*(one for one, like in pairs if not like.requires_grad))
        return found

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, None, ctx.gradient.detach()
