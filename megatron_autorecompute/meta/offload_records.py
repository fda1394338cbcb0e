"""What leaves a layer under offload: Megatron's own code on meta tensors, with counted copies.

Megatron's manager stays in its warm-up, in which all groups leave. Copies are counted, not made. A
group comes back when Megatron asks for it, but not before its layer's backward begins: what an
earlier layer's backward prefetches is for the planner to place.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

from megatron_autorecompute.compat import model_layers, offload_modules, rules
from megatron_autorecompute.compat.untyped import Layer
from megatron_autorecompute.errors import PolicyError
from megatron_autorecompute.meta import offloading
from megatron_autorecompute.patched import patched
from megatron_autorecompute.policy import WHOLE_LAYER, LayerPolicy
from megatron_autorecompute.profile import ChoiceRecord, LayerKind, OffloadGroup
from megatron_autorecompute.runtime.model_shard import Choices
from megatron_autorecompute.runtime.probe import Clock, is_recomputing


def with_offload(choices: Choices, layer: Layer, sets: Sequence[Sequence[str]]) -> Choices:
    """A layer's choices, and each without full that also offloads one of the sets of modules, as
    far as the layer has them and Megatron allows it."""
    own = [tuple(m for m in modules if offload_modules.switch(layer, m)) for modules in sets]
    found = [
        replace(choice, offload=modules)
        for modules in dict.fromkeys(filter(None, own))
        for choice in choices
        if choice.granularity in ("none", "selective")
    ]
    return (*choices, *(choice for choice in found if rules.is_allowed(layer.config, choice)))


def checked(sets: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Sets of modules to offload, if records can be made of them.

    Raises PolicyError for names that the installed Megatron does not know, and for whole layers.
    """
    choices = [LayerPolicy(offload=tuple(modules)) for modules in sets]
    for choice in choices:
        rules.check_known(choice)
        if WHOLE_LAYER in choice.offload:
            raise PolicyError(f"There are no records of {choice} yet: name Megatron's modules.")
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


@dataclass(slots=True)
class _Copy:
    """One tensor that leaves."""

    storage: weakref.ref[torch.UntypedStorage]
    storage_bytes: int
    host_bytes: int
    freed: bool = False
    """Whether Megatron empties the storage at once."""

    def leaves(self) -> bool:
        """Whether its memory is free before the backward. What a checkpoint has emptied later it
        would also have emptied without offload."""
        return self.freed or self.storage() is None


@dataclass(slots=True)
class _Group:
    name: str
    copies: list[_Copy]
    committed: Any
    """When its forward had run."""
    back: Any = None
    """When its backward began."""
    done: Any = None
    """When that had run."""
    device_bytes: int = 0


@dataclass(slots=True)
class _LayerRun:
    """One layer in one microbatch."""

    began: Any = None
    backward_began: Any = None
    groups: list[_Group] = field(default_factory=list)
    """In the order of their commits."""


class OffloadCounter:
    """Counts the groups of every layer in the last forward and backward after `begin`.

    Args:
        model: the shard's; its layers offload as the policy in force says.
        clock: of the layers' work.
        choices_of: of a layer; without any that offloads, nothing is watched.
    """

    def __init__(
        self, model: torch.nn.Module, clock: Clock, choices_of: Callable[[Layer], Choices]
    ) -> None:
        self._clock = clock
        self._pairs = [
            (layer, index)
            for layer, index in model_layers.numbered_layers([model])
            if any(choice.offload for choice in choices_of(layer))
        ]
        self._runs: dict[int, _LayerRun] = {}
        self._forward: int | None = None
        self._backward: int | None = None
        self._layer_of: dict[int, int] = {}  # by id of Megatron's group
        self._open: list[_Group] = []
        self._copies: list[_Copy] = []
        self._found: dict[tuple[int, LayerPolicy], _LayerRun] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[OffloadCounter]:
        """Count in this block, in Megatron's code as it is but for copies and prefetches."""
        with contextlib.ExitStack() as undo:
            if not self._pairs:
                yield self
                return
            undo.enter_context(offloading.without_cuda())
            for name, method in self._methods().items():
                undo.enter_context(patched(ChunkOffloadHandler, name, method))
            for layer, index in self._pairs:
                for hook in self._hooks(layer, index):
                    undo.callback(hook.remove)
            yield self

    def begin(self) -> None:
        """Before a forward: what earlier forwards offloaded no longer counts."""
        offload_modules.forget()
        self._runs.clear()
        self._layer_of.clear()

    def forward_ended(self, policy: Sequence[LayerPolicy]) -> None:
        """After the forward: note which memory is free now.

        Args:
            policy: the choices that ran, by layer.
        """
        for index, run in self._runs.items():
            owners: dict[int, tuple[_Group, int]] = {}  # the last group frees what several copy
            for group in run.groups:
                for copy in filter(_Copy.leaves, group.copies):
                    owners[id(copy.storage)] = group, copy.storage_bytes
            for group, size_bytes in owners.values():
                group.device_bytes += size_bytes
            if run.groups:
                self._found.setdefault((index, policy[index]), run)

    def records(self, kind: LayerKind) -> LayerKind:
        """A kind of the shard's profile, with the groups of its choices."""
        choices = tuple(self._with(record, kind.layers) for record in kind.choices)
        return replace(kind, choices=choices)

    def _with(self, record: ChoiceRecord, layers: Sequence[int]) -> ChoiceRecord:
        choice = record.policy
        run = next((run for i in layers if (run := self._found.get((i, choice)))), None)
        if run is None:
            return record
        groups = []
        for group in run.groups:
            begin = self._share(run.backward_began, group.back, record.backward_ms)
            end = self._share(run.backward_began, group.done, record.backward_ms)
            groups.append(
                OffloadGroup(
                    group.name,
                    device_bytes=group.device_bytes,
                    host_bytes=sum(copy.host_bytes for copy in group.copies),
                    forward_end=self._share(run.began, group.committed, record.forward_ms),
                    backward_begin=begin,
                    backward_end=max(begin, end),
                )
            )
        return replace(record, offload_groups=tuple(groups))

    def _share(self, begin: Any, at: Any, whole_ms: float) -> float:
        if begin is None or at is None or whole_ms <= 0:
            return 1.0
        return min(1.0, self._clock.ms_between(begin, at) / whole_ms)

    # ------------------------------------------------------------------------------ where we are

    def _hooks(self, layer: Layer, index: int) -> Iterator[Any]:
        def begins(*_: Any) -> None:
            if torch.is_grad_enabled() and not is_recomputing():
                self._forward = index
                self._runs[index] = _LayerRun(self._clock.now())

        def ends(_: Any, __: Any, output: Any) -> None:
            hidden_states = output[0] if isinstance(output, tuple) else output
            # A checkpoint returns what the layer returned in it; a hook there would hide others.
            if not is_recomputing() and torch.is_grad_enabled() and hidden_states.requires_grad:
                hidden_states.register_hook(backward_begins)

        def backward_begins(_: torch.Tensor) -> None:
            self._backward = index
            self._runs[index].backward_began = self._clock.now()

        yield layer.register_forward_pre_hook(begins)
        yield layer.register_forward_hook(ends)

    # --------------------------------------------------------------- in place of Megatron's methods

    def _methods(self) -> dict[str, Callable[..., Any]]:
        """What runs in place of `ChunkOffloadHandler`'s methods."""
        usual: Any = ChunkOffloadHandler
        return {
            "offload": self._counted_copy(),
            "reload": lambda _, state: torch.empty(state[0], dtype=state[1], device=state[2]),
            "on_group_start_forward": self._start_forward(usual.on_group_start_forward),
            "on_group_commit_forward": self._commit_forward(usual.on_group_commit_forward),
            "on_group_commit_backward": self._commit_backward(usual.on_group_commit_backward),
            "on_group_start_backward": self._start_backward(usual.on_group_start_backward),
            "bulk_reload": lambda chunk: (
                chunk.bulk_reload_group() if self._is_here(chunk) else None
            ),
        }

    def _counted_copy(self) -> Callable[..., Any]:
        def offload(_: Any, source: torch.Tensor, **__: Any) -> tuple[Any, ...]:
            if not source.is_contiguous():
                torch.empty_like(source, memory_format=torch.contiguous_format)
            storage = source.untyped_storage()
            size_bytes = source.numel() * source.element_size()
            self._copies.append(_Copy(weakref.ref(storage), storage.nbytes(), size_bytes))
            return source.shape, source.dtype, source.device

        return offload

    def _start_forward(self, usual: Callable[..., None]) -> Callable[..., None]:
        def on_group_start_forward(chunk: Any, name: str) -> None:
            usual(chunk, name)
            if self._forward is not None:
                self._layer_of[id(chunk.offload_groups[-1])] = self._forward

        return on_group_start_forward

    def _commit_forward(self, usual: Callable[..., None]) -> Callable[..., None]:
        def on_group_commit_forward(chunk: Any, *args: Any) -> None:
            group = chunk._groups_to_offload[-1]
            self._copies = []
            usual(chunk, *args)
            for copy in self._copies:
                storage = copy.storage()
                copy.freed = storage is not None and storage.nbytes() == 0
            run = self._runs.get(self._layer_of.get(id(group), -1))
            if run is not None:
                run.groups.append(_Group(group._name, self._copies, self._clock.now()))

        return on_group_commit_forward

    def _commit_backward(self, usual: Callable[..., None]) -> Callable[..., None]:
        def on_group_commit_backward(chunk: Any, name: str) -> None:
            run = self._runs[-1 if self._backward is None else self._backward]
            if all(group.back is None for group in run.groups) and self._is_here(chunk):
                chunk.bulk_reload_group()
            group = next(group for group in run.groups if group.name == name)
            group.back = self._clock.now()
            self._open.append(group)
            usual(chunk, name)

        return on_group_commit_backward

    def _start_backward(self, usual: Callable[..., None]) -> Callable[..., None]:
        def on_group_start_backward(chunk: Any) -> None:
            self._open.pop().done = self._clock.now()
            usual(chunk)

        return on_group_start_backward

    def _is_here(self, chunk: Any) -> bool:
        """Whether the group that would come back next is of the layer whose backward runs."""
        waiting = chunk._groups_to_reload
        return bool(waiting) and self._layer_of.get(id(waiting[-1])) == self._backward
