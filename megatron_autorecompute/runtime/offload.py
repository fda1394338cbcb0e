"""Offload in `auto`: the choices that offload, what leaves a layer under them, and how fast copies
run. What leaves and the copies are watched in Megatron's own code as it runs.

To count what leaves, Megatron's manager must be in its warm-up, in which all groups leave. A group
comes back when Megatron asks for it, but not before its layer's backward begins: what an earlier
layer's backward prefetches is for the planner to place.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import socket
import statistics
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_autorecompute import megatron_fields
from megatron_autorecompute.compat import model_layers, offload_modules, rules
from megatron_autorecompute.compat.offload_modules import Method
from megatron_autorecompute.compat.untyped import Layer
from megatron_autorecompute.errors import OptionError
from megatron_autorecompute.policy import LayerPolicy
from megatron_autorecompute.profile import ChoiceRecord, HostLink, OffloadGroup
from megatron_autorecompute.runtime.host_memory import free_bytes
from megatron_autorecompute.runtime.model_shard import MAX_CHOICES, Choices, choices
from megatron_autorecompute.runtime.probe import DEVICE_CLOCK, Clock, is_recomputing
from megatron_autorecompute.runtime.ranks import all_gather

ATTENTION = ("core_attn", "attn_proj")
EXPERTS = ("expert_fc1", "moe_act")
MEASURED_SETS = (ATTENTION, EXPERTS, (*ATTENTION, *EXPERTS), tuple(offload_modules.SWITCHES))
"""What `auto` measures, as far as a layer has it: attention, experts, both, all."""


def with_offload(plain: Choices, layer: Layer, sets: Sequence[Sequence[str]]) -> Choices:
    """A layer's choices, and each without full that also offloads one of the sets of modules, as
    far as the layer has them and Megatron allows it."""
    own = [tuple(m for m in modules if offload_modules.switch(layer, m)) for modules in sets]
    found = [
        replace(choice, offload=modules)
        for modules in dict.fromkeys(filter(None, own))
        for choice in plain
        if choice.granularity in ("none", "selective")
    ]
    return (*plain, *(choice for choice in found if rules.is_allowed(layer.config, choice)))


def without_parts(found: Choices) -> Choices:
    """The choices without those that need checkpoints of ours: if any layer offloads, all
    checkpoints are Megatron's own."""
    return tuple(each for each in found if not (each.own or each.rerun_all))


def measured(layer: Layer) -> Choices:
    """What `auto` measures where it may offload: besides a layer's choices at most as many again,
    first those that recompute least."""
    plain = without_parts(choices(layer))
    small = (choice for choice in plain if choice.granularity in ("none", "selective"))
    offloading = (with_offload((choice,), layer, MEASURED_SETS)[1:] for choice in small)
    return (*plain, *itertools.islice(itertools.chain.from_iterable(offloading), MAX_CHOICES))


def refuse(config: TransformerConfig, *, blocks: int, varies: bool) -> None:
    """Raise an error if `auto` cannot offload in this job, though it was allowed to.

    Args:
        config: the model's TransformerConfig.
        blocks: stacks of layers in the model; with an encoder or a tower there are two.
        varies: whether calls differ in lengths and numbers of microbatches.

    Raises:
        OptionError: the config offloads on its own, or offload cannot run in this job.
        MachineError: Transformer Engine is missing, or not told to use its first offload.
    """
    own = megatron_fields.offload_of(config)
    instead = "Leave --recompute-allow-offload out."
    if own is not None:
        raise OptionError(
            f"--recompute-allow-offload was given, and the config offloads on its own ({own}). "
            "Leave one of them out."
        )
    if varies:
        raise OptionError(
            "recompute_allow_offload was given to a loop whose calls differ: Megatron's offload "
            "learns the microbatches of one call, and pins host memory for every shape. In a loop "
            "whose calls are all alike say so: attach(..., allow_offload=FixedCalls(...)). "
            "Otherwise leave it out."
        )
    if blocks > 1:
        raise OptionError(
            "--recompute-allow-offload was given with a model of two stacks of layers, and "
            f"Megatron's offload knows one. {instead}"
        )
    offload_modules.check_machine()


# --- what leaves ----------------------------------------------------------------------------------


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


class _Pass:
    """A layer's forward or backward in one microbatch; made when it begins."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._began = clock, clock.now()
        self._copied: list[tuple[Any, Any]] = []
        """Moments between which Megatron copied, or waited for copies."""

    def worked(self) -> Callable[[], float]:
        """What tells, after the step, the milliseconds of work until now, without copies."""
        return functools.partial(self._worked_ms, self._clock.now(), len(self._copied))

    def _worked_ms(self, now: Any, copies: int) -> float:
        copied_ms = sum(self._clock.ms_between(*pair) for pair in self._copied[:copies])
        return self._clock.ms_between(self._began, now) - copied_ms

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """What runs inside is no work of the pass."""
        before = self._clock.now()
        yield
        self._copied.append((before, self._clock.now()))


@dataclass(slots=True)
class _Group:
    name: str
    copies: list[_Copy]
    committed: Callable[[], float]
    """Work until the group's forward had run."""
    back: Callable[[], float] | None = None
    """Work until the group's backward began; None: it has not."""
    done: Callable[[], float] = lambda: math.inf
    """Work until the group's backward had run."""
    device_bytes: int = 0

    def seen(self) -> SeenGroup:
        """The group, once its backward has run."""
        back_ms = math.inf if self.back is None else self.back()
        host_bytes = sum(copy.host_bytes for copy in self.copies)
        times_ms = self.committed(), back_ms, self.done()
        return SeenGroup(self.name, self.device_bytes, host_bytes, *times_ms)


@dataclass(slots=True)
class _LayerRun:
    """One layer in one microbatch."""

    index: int
    forward: _Pass
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
        self._reset()

    def _reset(self) -> None:
        self._runs: dict[int, _LayerRun] = {}  # of the running forward, by layer
        self._run_of: dict[int, _LayerRun] = {}  # by id of Megatron's group
        self._forward: _LayerRun | None = None
        self._backward: tuple[_LayerRun, _Pass] | None = None
        self._open: list[_Group] = []
        self._copies: list[_Copy] = []
        self._seen: list[_LayerRun] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[OffloadCounter]:
        """Count in this block, in Megatron's unchanged code except for prefetches and the table
        that ends its warm-up."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(offload_modules.without_table())
            if not self._pairs:
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
        self._reset()

    def keep(self, policy: Sequence[LayerPolicy]) -> None:
        """Keep what was seen since `begin`; policy: the choices that ran, by layer."""
        for run in self._seen:
            groups = tuple(group.seen() for group in run.groups)
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
                self._forward = self._runs[index] = _LayerRun(index, _Pass(self._clock))

        def ends(_: Any, __: Any, output: Any) -> None:
            hidden_states = output[0] if isinstance(output, tuple) else output
            # A checkpoint returns what the layer returned in it; a hook there would hide others.
            if not is_recomputing() and torch.is_grad_enabled() and hidden_states.requires_grad:
                run = self._runs[index]
                hidden_states.register_hook(functools.partial(self._backward_begins, run))

        yield layer.register_forward_pre_hook(begins)
        yield layer.register_forward_hook(ends)

    def _backward_begins(self, run: _LayerRun, _: torch.Tensor) -> None:
        self._backward = run, _Pass(self._clock)

    # --------------------------------------------------------------- in place of Megatron's methods

    def _methods(self) -> dict[str, Method]:
        """What runs for each of Megatron's methods, by name."""
        return {
            "offload": self._copy_out,
            "on_group_commit_forward": self._commit_forward,
            "on_group_commit_backward": self._commit_backward,
            "on_group_start_backward": self._start_backward,
            "bulk_reload": self._reload,
        }

    def _reload(self, _: Method, chunk: Any) -> None:
        if self._is_here(chunk):
            chunk.bulk_reload_group()

    def _copy_out(
        self, usual: Method, chunk: Any, source: torch.Tensor, *args: Any, **named: Any
    ) -> Any:
        storage = source.untyped_storage()
        size_bytes = source.numel() * source.element_size()
        self._copies.append(_Copy(weakref.ref(storage), storage.nbytes(), size_bytes))
        return usual(chunk, source, *args, **named)

    def _commit_forward(self, usual: Method, chunk: Any, *args: Any) -> None:
        group, name = offload_modules.leaving(chunk)
        run, self._copies = self._forward, []
        assert run is not None
        committed = run.forward.worked()
        with run.forward.copying():
            usual(chunk, *args)
        for copy in self._copies:
            storage = copy.storage()
            copy.freed = storage is not None and storage.nbytes() == 0
        run.groups.append(_Group(name, self._copies, committed))
        self._run_of[id(group)] = run

    def _commit_backward(self, usual: Method, chunk: Any, name: str) -> None:
        assert self._backward is not None
        run, backward = self._backward
        is_first = all(group.back is None for group in run.groups)
        group = next(group for group in run.groups if group.name == name)
        group.back = backward.worked()
        self._open.append(group)
        with backward.copying():
            if is_first and self._is_here(chunk):
                chunk.bulk_reload_group()
            usual(chunk, name)

    def _start_backward(self, usual: Method, chunk: Any) -> None:
        assert self._backward is not None
        _, backward = self._backward
        self._open.pop().done = backward.worked()
        with backward.copying():
            usual(chunk)

    def _is_here(self, chunk: Any) -> bool:
        """Whether the group that would come back next belongs to the layer whose backward runs."""
        group = offload_modules.coming_back(chunk)
        here = None if self._backward is None else self._backward[0]
        return group is not None and self._run_of.get(id(group)) is here


# --- how fast -------------------------------------------------------------------------------------

USABLE = 0.5
"""The usable share of free host memory: torch rounds what it pins up to powers of two."""
COPY_BYTES, COPIES = 64 << 20, 8
"""Size and number of the copies each way that time a link."""
_MS_PER_GB = 1e6
"""Bytes in a millisecond at 1 GB/s."""


def host_link() -> HostLink:
    """What the slowest rank reaches where all ranks copy both ways at once, from pinned memory, as
    the median of several copies; the same on every rank."""
    cuda = torch.cuda.is_available()
    on_host = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
    on_device = [torch.empty_like(each, device="cuda" if cuda else "cpu") for each in on_host]
    ways = [(on_host[0], on_device[0]), (on_device[1], on_host[1])]
    streams = [torch.cuda.Stream() if cuda else None for _ in ways]
    moments: list[list[Any]] = [[], []]
    free_host_bytes = host_bytes()  # ranks meet, and begin together
    for _ in range(COPIES):
        for (target, source), stream, own in zip(ways, streams, moments, strict=True):
            with torch.cuda.stream(stream):
                begin = DEVICE_CLOCK.now()
                target.copy_(source, non_blocking=True)
                own.append((begin, DEVICE_CLOCK.now()))
    took_ms = [statistics.median(DEVICE_CLOCK.ms_between(*one) for one in own) for own in moments]
    rates = [COPY_BYTES / (max(ms, 1e-3) * _MS_PER_GB) for ms in took_ms]
    to_host, to_device, sizes = map(min, zip(*all_gather((*rates, free_host_bytes)), strict=True))
    return HostLink(to_host, to_device, sizes)


def host_bytes() -> int:
    """Host memory for this rank's copies: its share of half of what its node or container has
    free. All ranks ask together."""
    ranks = all_gather(socket.gethostname()).count(socket.gethostname())
    return int(free_bytes() * USABLE) // ranks
