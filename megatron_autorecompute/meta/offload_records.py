"""Records of offload without a device: Megatron's own code on meta tensors, with counted copies.

Of Megatron's `cpu_offloading` what a layer saves for its backward leaves as a whole. Which tensors
leave is Transformer Engine's rule (transformer_engine/pytorch/cpu_offload.py of August 2026,
`_check_if_offload`): 256 Ki elements or more, contiguous or with the elements of a whole base, no
parameters. What several layers save, such as rotary frequencies, is copied with each and stays.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_autorecompute.compat import model_layers
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.meta.job import Job
from megatron_autorecompute.meta.model import (
    JobStep,
    job_kinds,
    megatron_config,
    meta_megatron,
    shard,
)
from megatron_autorecompute.policy import NONE, WHOLE, WHOLE_LAYER
from megatron_autorecompute.profile import LayerKind, OffloadGroup, Profile


def with_inert_offload(kind: LayerKind, sets: Sequence[Sequence[str]]) -> LayerKind:
    """Add, as inert choices, those whose modules to offload the kind has only in part."""
    has = {module for record in kind.choices for module in record.policy.offload}
    inert = dict(kind.inert)
    for modules, record in itertools.product(sets, kind.choices):
        choice = record.policy
        if choice.offload or choice.granularity not in ("none", "selective"):
            continue
        own = kind.record(replace(choice, offload=tuple(has & {*modules})))
        asked = replace(choice, offload=tuple(modules))
        if own is not None and kind.record(asked) is None:
            inert[str(asked)] = own.choice
    return replace(kind, inert=inert)


LEAST_ELEMENTS = 256 << 10
Saved = dict[tuple[int, int], tuple[torch.UntypedStorage, int]]
"""What one layer saved, as far as it may leave: storages, which keep their addresses so, and bytes
that are copied, by storage and offset."""


def _save(found: Saved, tensor: torch.Tensor) -> torch.Tensor:
    base = tensor if tensor._base is None else tensor._base
    whole = base if base.numel() == tensor.numel() else tensor
    if tensor.numel() >= LEAST_ELEMENTS and whole.is_contiguous():
        storage, offset = whole.untyped_storage(), int(whole.storage_offset())
        found[storage._cdata, offset] = storage, whole.numel() * whole.element_size()
    return tensor


def check_whole_layers(job: Job) -> None:
    """Raise OptionError for a job of which `cpu_offloading` is refused, or not modelled."""
    if job.pattern is not None or job.mtp_num_layers:
        raise OptionError(
            f"{job.name}: {WHOLE_LAYER} moves layers of a TransformerBlock; those of a hybrid "
            "pattern and multi-token-prediction depths stay, and are not modelled beside it."
        )
    with meta_megatron(job):
        megatron_config(job, {"cpu_offloading": True, "cpu_offloading_num_layers": 1})


def with_whole_layers(job: Job, profile: Profile) -> Profile:
    """The job's profile with a record of `none+offload[cpu_offloading]` for every kind of layer;
    `check_whole_layers` accepts the job."""
    saved = _saved(job)
    kinds = tuple(_with(kind, saved[kind.layers[0]]) for kind in profile.kinds)
    return replace(profile, kinds=kinds)


def _saved(job: Job) -> dict[int, tuple[int, int]]:
    """By layer of the whole model: bytes that are free once it has left, and bytes that are copied.

    Two layers of each kind are built, so that what several save shows.
    """
    found: dict[int, Saved] = {}
    with shard(job, [2] * len(job_kinds(job))) as built:
        static = {p.untyped_storage()._cdata for p in built.model.parameters()}
        for layer, index in model_layers.numbered_layers([built.model]):
            _watch(layer, found.setdefault(index, {}))
        output = JobStep(job)(None, built.model)
        del output
    bytes_of: dict[int, tuple[int, int]] = {}
    own = {
        index: {storage._cdata: storage.nbytes() for storage, _ in saved.values()}
        for index, saved in found.items()
    }
    times = Counter(itertools.chain.from_iterable(own.values()))
    for index, kind in built.kind_of.items():
        free = sum(size for at, size in own[index].items() if times[at] == 1 and at not in static)
        copied = sum(size for (at, _), (_, size) in found[index].items() if at not in static)
        bytes_of |= dict.fromkeys(kind.layers, (free, copied))
    return bytes_of


def _watch(layer: Any, saved: Saved) -> None:
    original = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        save = functools.partial(_save, saved)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            return original(*args, **kwargs)

    layer.forward = forward


def _with(kind: LayerKind, saved: tuple[int, int]) -> LayerKind:
    plain = kind.record(NONE)
    if plain is None:
        return kind
    device_bytes, host_bytes = min(saved[0], plain.held_bytes), saved[1]
    record = replace(
        plain,
        choice=str(WHOLE),
        held_bytes=plain.held_bytes - device_bytes,
        also_static_bytes=0,
        forward_transient_bytes=plain.forward_transient_bytes + device_bytes,
        backward_transient_bytes=plain.backward_transient_bytes + device_bytes,
        offload_groups=(OffloadGroup(WHOLE_LAYER, device_bytes, host_bytes, 1.0, 0.0, 1.0),),
    )
    return replace(kind, choices=(*kind.choices, record))
