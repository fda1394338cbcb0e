"""What leaves a layer under offload, counted in Megatron's own code as it runs.

Megatron's manager must be in its warm-up, in which all groups leave. A group comes back when
Megatron asks for it, but not before its layer's backward begins: what an earlier layer's backward
prefetches is for the planner to place.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_autorecompute.compat import model_layers, offload_modules
from megatron_autorecompute.compat.offload_modules import Method
from megatron_autorecompute.compat.untyped import Layer
from megatron_autorecompute.policy import LayerPolicy
from megatron_autorecompute.profile import ChoiceRecord, OffloadGroup
from megatron_autorecompute.runtime.probe import Clock, is_recomputing


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
class _Pass:
    """A layer's forward or backward in one microbatch."""

    began: Any
    copying: list[tuple[Any, Any]] = field(default_factory=list)
    """Moments between which Megatron copied, or waited for copies."""

    def at(self, now: Any) -> _Moment:
        """A moment of this pass."""
        return self, now, len(self.copying)


_Moment = tuple[_Pass, Any, int]
"""A pass, a time of the clock, and how many copies the pass had made by then."""


def _worked_ms(moment: _Moment | None, clock: Clock) -> float:
    """Milliseconds of work since a pass began, without copies."""
    if moment is None:
        return math.inf
    one, now, copies = moment
    copied = sum(clock.ms_between(*pair) for pair in one.copying[:copies])
    return clock.ms_between(one.began, now) - copied


@dataclass(slots=True)
class _Group:
    name: str
    copies: list[_Copy]
    committed: _Moment
    """When the group's forward had run."""
    back: _Moment | None = None
    """When the group's backward began."""
    done: _Moment | None = None
    """When the group's backward had run."""
    device_bytes: int = 0

    def seen(self, clock: Clock) -> SeenGroup:
        """The group, once its backward has run."""
        times = (_worked_ms(moment, clock) for moment in (self.committed, self.back, self.done))
        host_bytes = sum(copy.host_bytes for copy in self.copies)
        return SeenGroup(self.name, self.device_bytes, host_bytes, *times)


@dataclass(slots=True)
class _LayerRun:
    """One layer in one microbatch."""

    index: int
    forward: _Pass
    backward: _Pass | None = None
    groups: list[_Group] = field(default_factory=list)
    """The groups, in the order of their commits."""


@dataclass(frozen=True, slots=True)
class SeenGroup:
    """A group that left a layer."""

    name: str
    device_bytes: int
    host_bytes: int
    committed_ms: float
    """Time of the layer's forward, without copies, until the group's forward had run."""
    back_ms: float
    """Time of the layer's backward, without copies, until the group's backward began."""
    done_ms: float
    """Time of the layer's backward, without copies, until the group's backward had run."""

    def of(self, record: ChoiceRecord) -> OffloadGroup:
        """The group in a record of the layer."""
        begin, end = (_share(at, record.backward_ms) for at in (self.back_ms, self.done_ms))
        return OffloadGroup(
            self.name,
            device_bytes=self.device_bytes,
            host_bytes=self.host_bytes,
            forward_end=_share(self.committed_ms, record.forward_ms),
            backward_begin=begin,
            backward_end=max(begin, end),
        )


def _share(at_ms: float, whole_ms: float) -> float:
    return 1.0 if whole_ms <= 0 else min(1.0, max(0.0, at_ms / whole_ms))


Groups = dict[tuple[int, LayerPolicy], tuple[SeenGroup, ...]]
"""The groups of the microbatch in which most bytes left, by layer and choice."""


def most(*found: Groups) -> Groups:
    """The groups with the most bytes of each layer and choice."""
    result: Groups = {}
    for key, groups in itertools.chain.from_iterable(one.items() for one in found):
        if _host_bytes(groups) > _host_bytes(result.get(key, ())):
            result[key] = groups
    return result


def _host_bytes(groups: Sequence[SeenGroup]) -> int:
    return sum(group.host_bytes for group in groups)


def with_groups(record: ChoiceRecord, layers: Sequence[int], found: Groups) -> ChoiceRecord:
    """A record with the groups of its choice, of the layer from which most bytes left."""
    own = (found.get((layer, record.policy), ()) for layer in layers)
    groups = max(own, key=_host_bytes, default=())
    return replace(record, offload_groups=tuple(group.of(record) for group in groups))


class OffloadCounter:
    """Counts the groups of every layer in the steps inside `watching`.

    Args:
        chunks: the shard's; their layers offload as the policy in force says.
        clock: the clock of the layers' work.
        layers: indices of those that may offload; without any, no layer is watched.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        clock: Clock,
        layers: Collection[int],
    ) -> None:
        self._clock = clock
        self._chunks = chunks
        self._pairs = [
            (layer, index)
            for layer, index in model_layers.numbered_layers(chunks)
            if index in layers
        ]
        self.found: Groups = {}
        """What was kept."""
        self._runs: dict[int, _LayerRun] = {}  # of the running forward, by layer
        self._run_of: dict[int, _LayerRun] = {}  # by id of Megatron's group
        self._forward: _LayerRun | None = None
        self._backward: _LayerRun | None = None
        self._open: list[_Group] = []
        self._copies: list[_Copy] = []
        self._seen: list[_LayerRun] = []

    @property
    def is_needed(self) -> bool:
        """Whether any layer may offload."""
        return bool(self._pairs)

    @contextlib.contextmanager
    def watching(self) -> Iterator[OffloadCounter]:
        """Count in this block, in Megatron's unchanged code except for prefetches and the table
        that ends its warm-up."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(offload_modules.without_table())
            if not self.is_needed:
                yield self
                return
            undo.enter_context(offload_modules.watched(self._methods()))
            for layer, index in self._pairs:
                for hook in self._hooks(layer, index):
                    undo.callback(hook.remove)
            for chunk in self._chunks:
                model = model_layers.unwrapped(chunk)
                undo.callback(model.register_forward_pre_hook(self._model_begins).remove)
                undo.callback(model.register_forward_hook(self._model_ends).remove)
            yield self

    def begin(self) -> None:
        """Forget what was seen since `keep`, and let Megatron begin with a warm-up."""
        offload_modules.forget()
        self._runs.clear()
        self._run_of.clear()
        self._seen.clear()
        self._open.clear()
        self._forward = self._backward = None

    def keep(self, policy: Sequence[LayerPolicy]) -> None:
        """Keep what was seen since `begin`.

        Args:
            policy: the choices that ran, by layer.
        """
        for run in self._seen:
            groups = tuple(group.seen(self._clock) for group in run.groups)
            self.found = most(self.found, {(run.index, policy[run.index]): groups})
        self._seen.clear()

    # ------------------------------------------------------------------------------ where we are

    def _model_begins(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not is_recomputing():
            self._runs.clear()

    def _model_ends(self, *_: Any) -> None:
        """Note which memory is free now."""
        for run in self._runs.values():
            owners: dict[int, tuple[_Group, int]] = {}  # the last group frees what several copy
            for group in run.groups:
                for copy in filter(_Copy.leaves, group.copies):
                    owners[id(copy.storage)] = group, copy.storage_bytes
            for group, size_bytes in owners.values():
                group.device_bytes += size_bytes
            if run.groups:
                self._seen.append(run)
        self._runs.clear()

    def _hooks(self, layer: Layer, index: int) -> Iterator[Any]:
        def begins(*_: Any) -> None:
            if torch.is_grad_enabled() and not is_recomputing():
                forward = _Pass(self._clock.now())
                self._forward = self._runs[index] = _LayerRun(index, forward)

        def ends(_: Any, __: Any, output: Any) -> None:
            hidden_states = output[0] if isinstance(output, tuple) else output
            # A checkpoint returns what the layer returned in it; a hook there would hide others.
            if not is_recomputing() and torch.is_grad_enabled() and hidden_states.requires_grad:
                run = self._runs[index]
                hidden_states.register_hook(lambda _: self._backward_begins(run))

        yield layer.register_forward_pre_hook(begins)
        yield layer.register_forward_hook(ends)

    def _backward_begins(self, run: _LayerRun) -> None:
        self._backward, run.backward = run, _Pass(self._clock.now())

    @contextlib.contextmanager
    def _copying(self, moment: _Moment | None) -> Iterator[None]:
        """What runs inside is no work of the moment's pass."""
        before = self._clock.now()
        yield
        if moment is not None:
            moment[0].copying.append((before, self._clock.now()))

    # --------------------------------------------------------------- in place of Megatron's methods

    def _methods(self) -> dict[str, Callable[[Method], Method]]:
        """For each of Megatron's methods, by name, a function that makes its replacement."""
        return {
            "offload": self._copy_out,
            "on_group_start_forward": self._start_forward,
            "on_group_commit_forward": self._commit_forward,
            "on_group_commit_backward": self._commit_backward,
            "on_group_start_backward": self._start_backward,
            "bulk_reload": self._reload,
        }

    def _reload(self, _: Method) -> Method:
        return lambda chunk: chunk.bulk_reload_group() if self._is_here(chunk) else None

    def _copy_out(self, usual: Method) -> Method:
        def offload(chunk: Any, source: torch.Tensor, *args: Any, **named: Any) -> Any:
            storage = source.untyped_storage()
            size_bytes = source.numel() * source.element_size()
            self._copies.append(_Copy(weakref.ref(storage), storage.nbytes(), size_bytes))
            return usual(chunk, source, *args, **named)

        return offload

    def _start_forward(self, usual: Method) -> Method:
        def on_group_start_forward(chunk: Any, name: str) -> None:
            usual(chunk, name)
            if self._forward is not None:
                self._run_of[id(chunk.offload_groups[-1])] = self._forward

        return on_group_start_forward

    def _commit_forward(self, usual: Method) -> Method:
        def on_group_commit_forward(chunk: Any, *args: Any) -> None:
            group, name = offload_modules.leaving(chunk)
            run = self._run_of.get(id(group))
            self._copies, now = [], self._clock.now()
            committed = None if run is None else run.forward.at(now)
            with self._copying(committed):
                usual(chunk, *args)
            for copy in self._copies:
                storage = copy.storage()
                copy.freed = storage is not None and storage.nbytes() == 0
            if run is not None and committed is not None:
                run.groups.append(_Group(name, self._copies, committed))

        return on_group_commit_forward

    def _commit_backward(self, usual: Method) -> Method:
        def on_group_commit_backward(chunk: Any, name: str) -> None:
            run = self._backward
            assert run is not None
            is_first = all(group.back is None for group in run.groups)
            group = next(group for group in run.groups if group.name == name)
            group.back = self._in_backward()
            self._open.append(group)
            with self._copying(group.back):
                if is_first and self._is_here(chunk):
                    chunk.bulk_reload_group()
                usual(chunk, name)

        return on_group_commit_backward

    def _start_backward(self, usual: Method) -> Method:
        def on_group_start_backward(chunk: Any) -> None:
            group = self._open.pop()
            group.done = self._in_backward()
            with self._copying(group.done):
                usual(chunk)

        return on_group_start_backward

    def _in_backward(self) -> _Moment | None:
        run = self._backward
        return None if run is None or run.backward is None else run.backward.at(self._clock.now())

    def _is_here(self, chunk: Any) -> bool:
        """Whether the group that would come back next belongs to the layer whose backward runs."""
        group = offload_modules.coming_back(chunk)
        return group is not None and self._run_of.get(id(group)) is self._backward
