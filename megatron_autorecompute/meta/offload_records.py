"""Records of offload without a device: Megatron's own code on meta tensors, with counted copies."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_autorecompute.compat import rules
from megatron_autorecompute.meta import offloading
from megatron_autorecompute.policy import LayerPolicy
from megatron_autorecompute.profile import LayerKind
from megatron_autorecompute.runtime.offload_counter import OffloadCounter


def checked(sets: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Sets of modules to offload; raises PolicyError for names that the installed Megatron does not
    know."""
    choices = [LayerPolicy(offload=tuple(modules)) for modules in sets]
    for choice in choices:
        rules.check_known(choice)
    return [choice.offload for choice in choices]


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


class MetaOffloadCounter(OffloadCounter):
    """An `OffloadCounter` for which nothing is copied."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[OffloadCounter]:
        """Count in this block, with stand-ins for what offload needs of a device."""
        stand_ins = offloading.without_cuda() if self.is_needed else contextlib.nullcontext()
        with stand_ins, super().watching():
            yield self

    def methods(self) -> dict[str, Callable[..., Any]]:
        """What runs in place of `ChunkOffloadHandler`'s methods."""
        reload = {"reload": lambda _, state: offloading.back(state)}
        return {**super().methods(), "offload": self._counted, **reload}

    def _counted(self, source: torch.Tensor, **_: Any) -> offloading.State:
        self.note(source)
        return offloading.left(source)
