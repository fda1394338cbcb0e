"""Bytes of the tensors that are alive, at every moment, on any device and on meta tensors.

Counts storages, each once however many views it has, from the operation that first returns it until
its last reference ends. The count is exact for what the program keeps. It does not contain
temporaries inside one operation's kernel (the CPU profiler's allocator peak is 0.7 - 1.5% higher
for a GPT layer), the allocator's rounding and fragmentation, and storages that no operation
returned. Tensors made before it starts count from the first operation that returns a view of them,
unless they are in `static`.
"""

import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

_running: list["LiveBytes"] = []
_storage_class: Any = torch.UntypedStorage  # mypy does not allow setting a method of a class


@dataclass(frozen=True, slots=True)
class Span:
    """The time under one label: bytes alive when it began, and the most during it."""

    label: Hashable
    start_bytes: int
    peak_bytes: int


@dataclass(slots=True)
class Entry:
    """A storage that is alive, and how many of its bytes are counted."""

    storage: "weakref.ref[torch.UntypedStorage]"
    size_bytes: int
    counted_bytes: int  # 0 while the same memory is counted for another storage
    heir: "Entry | None" = None  # the entry that counts 0 because of this one


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors, each storage once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({_key(storage): storage.nbytes() for storage in storages}.values())


class LiveBytes(TorchDispatchMode):
    """Tracker to run code under: ``with LiveBytes(static=parameters) as live: step()``.

    static: tensors whose storages are never counted (parameters, gradients, buffers).
    ``mark(label)`` ends the running span and begins one with that label; see ``spans()``.
    """

    def __init__(self, static: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.current_bytes = 0
        self.peak_bytes = 0
        self._excluded: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._live: dict[int, Entry] = {}
        self._spans: list[Span] = []
        self._open: tuple[Hashable, int] = (None, 0)
        self._span_peak_bytes = 0
        for tensor in static:
            self.exclude(tensor)

    def reset_peak(self, leaving_bytes: int = 0) -> None:
        """Restart the peak from the bytes alive now, without those that are being freed."""
        self.peak_bytes = self.current_bytes - leaving_bytes

    def counted_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """The live bytes in these tensors' storages."""
        keys = {_key(tensor.untyped_storage()) for tensor in tensors}
        return sum(self._live[key].counted_bytes for key in keys if key in self._live)

    def mark(self, label: Hashable) -> None:
        """End the running span and begin the one called label."""
        name, start_bytes = self._open
        self._spans.append(Span(name, start_bytes, self._span_peak_bytes))
        self._open = (label, self.current_bytes)
        self._span_peak_bytes = self.current_bytes

    def spans(self) -> tuple[Span, ...]:
        """All spans in order, the running one last; before the first mark the label is None."""
        name, start_bytes = self._open
        return (*self._spans, Span(name, start_bytes, self._span_peak_bytes))

    def exclude(self, tensor: torch.Tensor) -> None:
        """Treat the tensor's storage as static from now on."""
        storage = tensor.untyped_storage()
        key = _key(storage)
        if key in self._live:
            self._drop(key)
        # An address may be used again once its storage is gone.
        self._excluded[key] = weakref.ref(storage, lambda _: self._excluded.pop(key))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        run = _exchange if func is torch.ops.c10d.alltoall_base_.default else func
        result = run(*args, **(kwargs or {}))
        for leaf in [result] if isinstance(result, torch.Tensor) else tree_iter(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return result

    def __enter__(self) -> "LiveBytes":
        if not _running:
            _storage_class.resize_ = _resize
        _running.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _running.remove(self)
        if not _running:
            _storage_class.resize_ = _original_resize

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = _key(storage)
        if key in self._excluded:
            return
        size_bytes = storage.nbytes()
        entry = self._live.get(key)
        if entry is None:
            # Weakly: a strong reference would keep storages alive.
            reference = weakref.ref(storage, lambda _: self._drop(key))
            entry = self._live[key] = Entry(reference, size_bytes, 0)
            self._count(entry, size_bytes)
        elif entry.size_bytes != size_bytes:
            self._resized(entry, size_bytes)

    def _resized(self, entry: Entry, size_bytes: int) -> None:
        # Memory counted elsewhere stays there until it is dropped or this storage is emptied.
        if entry.counted_bytes == entry.size_bytes:
            self._count(entry, size_bytes)
        entry.size_bytes = size_bytes

    def _count(self, entry: Entry, size_bytes: int) -> None:
        """Count so many bytes for an entry from now on."""
        self.current_bytes += size_bytes - entry.counted_bytes
        entry.counted_bytes = size_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        self._span_peak_bytes = max(self._span_peak_bytes, self.current_bytes)

    def _drop(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry is None:  # excluded meanwhile
            return
        self._count(entry, 0)
        heir = entry.heir
        if heir is not None and heir.storage() is not None:
            self._count(heir, heir.size_bytes)

    def _share(self, target: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
        self._see(source)
        self._see(target)
        heir, entry = self._live.get(_key(target)), self._live.get(_key(source))
        if heir is not None and entry is not None:
            self._count(heir, 0)
            heir.size_bytes = source.nbytes()
            entry.heir = heir


def count_once(target: torch.UntypedStorage, source: torch.UntypedStorage) -> None:
    """Count target and source as one memory, as on a device; call it before source is copied.

    Every running LiveBytes then counts the bytes for source, and for target once source is gone.
    """
    for tracker in _running:
        tracker._share(target, source)


def _exchange(output: torch.Tensor, source: torch.Tensor, *how: Any) -> Any:
    """gloo's `all_to_all_single`, on copies that nobody counts. A thread of gloo has references to
    what it exchanges until some moment after the exchange, later where the machine is busy."""
    run = torch.ops.c10d.alltoall_base_
    if output.device.type != "cpu":
        return run(output, source, *how)
    with _disable_current_modes():
        copied = torch.empty_like(output)
        work = run(copied, source.clone(), *how)
        work.wait()
        output.copy_(copied)
    return work


_original_resize = torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, size_bytes: int) -> Any:
    # resize_ is no operation of the dispatcher; Megatron frees checkpointed outputs with it.
    result = _original_resize(storage, size_bytes)
    for tracker in _running:
        if _key(storage) in tracker._live:
            tracker._see(storage)
    return result


def _key(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata)
