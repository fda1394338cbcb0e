"""Reads the memory history that torch recorded: a file of `torch.cuda.memory._dump_snapshot`.

torch pickles plain lists, dictionaries, numbers and texts. A file that asks for anything else is
refused before any of it is made, so reading runs no code from the file. torch is not imported.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.errors import ProfileError

ROUNDING_BYTES = 512
"""torch's allocator gives whole blocks of this size; a history has the bytes asked for."""
RECORD = "torch.cuda.memory._record_memory_history() before the step"


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on the stack of an allocation."""

    name: str
    """The function."""
    filename: str
    """The function's file, as torch recorded it."""
    line: int
    """The line that was running."""


Frames = tuple[Frame, ...]
"""The calls of a stack, innermost first. It is empty if torch recorded none."""


@dataclass(frozen=True, slots=True)
class History:
    """What a device allocated and freed. Arrays have one entry for each such event, in order."""

    source: str
    """The file that was read."""
    device: int
    """The device's number in its process."""
    time_us: NDArray[np.int64]
    """The time of each event, in microseconds of the machine's clock."""
    change_bytes: NDArray[np.int64]
    """Bytes that each event adds, rounded as torch rounds; negative where bytes are freed."""
    start_bytes: int
    """Bytes allocated before the first event."""
    freed_at: NDArray[np.intp]
    """The event that frees an allocation, or the number of events if it is alive at the end. A free
    has its own number."""
    frames: tuple[Frames, ...]
    """The stack of an allocation, equal calls as one object. A free has none."""

    @property
    def level_bytes(self) -> NDArray[np.int64]:
        """Allocated bytes after each event."""
        return self.start_bytes + np.cumsum(self.change_bytes)


def read_history(path: str | Path) -> History:
    """The history of the device that was used most in the process that wrote the file.

    Raises: ProfileError if the file cannot be read, is no snapshot, has no history, or contradicts
        itself.
    """
    source = str(path)
    snapshot = _unpickled(source)
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        _refuse(source, "is no memory snapshot of torch: it has no lists of device_traces")
    device = max(range(len(traces)), key=lambda number: len(traces[number]), default=0)
    if not traces or not traces[device]:
        _refuse(source, f"has no history of allocations; call {RECORD}")
    return _replayed(traces[device], _end_blocks(snapshot, device, source), device, source)


def _refuse(source: str, why: str) -> NoReturn:
    raise ProfileError(f"{source} {why}.")


class _PlainUnpickler(pickle.Unpickler):
    """Makes numbers, texts, lists, tuples, sets and dictionaries, and refuses all other classes."""

    def __init__(self, file: BinaryIO, source: str) -> None:
        super().__init__(file)
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        _refuse(
            self._source,
            f"is no memory snapshot of torch: it asks for {module}.{name}, and torch pickles only "
            "lists, dictionaries, numbers and texts. Nothing of it was run",
        )

    def persistent_load(self, pid: Any) -> Any:
        _refuse(self._source, "is no memory snapshot of torch: it refers to data outside of it")


def _unpickled(source: str) -> Any:
    try:
        with open(source, "rb") as file:
            return _PlainUnpickler(file, source).load()
    except ProfileError:
        raise
    except OSError as error:
        raise ProfileError(f"{source} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # damaged pickles raise errors of every class
        why = str(error).splitlines()[:1] or [type(error).__name__]
        raise ProfileError(
            f"{source} is no whole pickle, as torch.cuda.memory._dump_snapshot writes: {why[0]}."
        ) from error


def _number(entry: Any, name: str, where: str, source: str) -> int:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, int):
        _refuse(source, f"is damaged: {where} has no whole number {name}")
    return value


def _end_blocks(snapshot: dict[str, Any], device: int, source: str) -> dict[int, int] | None:
    """Bytes of the blocks in use when the snapshot was taken, by address; None without segments."""
    segments = snapshot.get("segments")
    if not isinstance(segments, list):
        return None
    found = {}
    for number, segment in enumerate(segments):
        where = f"segments[{number}]"
        if not isinstance(segment, dict) or not isinstance(segment.get("blocks"), list):
            _refuse(source, f"is damaged: {where} has no list of blocks")
        if segment.get("device", device) != device:
            continue
        address = segment.get("address", 0)
        for index, block in enumerate(segment["blocks"]):
            place = f"{where}.blocks[{index}]"
            size_bytes = _number(block, "size", place, source)
            if block.get("state") == "active_allocated":
                asked = block.get("requested_size") or size_bytes
                found[block.get("address", address)] = _rounded(asked)
            address += size_bytes
    return found


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES


@dataclass(slots=True)
class _Replay:
    """Events as they are read, and what is alive after them."""

    time_us: list[int] = field(default_factory=list)
    change_bytes: list[int] = field(default_factory=list)
    freed_at: list[int] = field(default_factory=list)
    frames: list[Frames] = field(default_factory=list)
    alive: dict[int, int] = field(default_factory=dict)
    """The event that allocated an address."""

    def add(self, time_us: int, change_bytes: int, frames: Frames) -> int:
        event = len(self.time_us)
        self.time_us.append(time_us)
        self.change_bytes.append(change_bytes)
        self.freed_at.append(event)
        self.frames.append(frames)
        return event

    def free(self, address: int, time_us: int, size_bytes: int) -> None:
        made = self.alive.pop(address, None)
        size_bytes = size_bytes if made is None else self.change_bytes[made]
        event = self.add(time_us, -size_bytes, ())
        if made is not None:
            self.freed_at[made] = event


def _replayed(
    trace: list[Any], end_blocks: dict[int, int] | None, device: int, source: str
) -> History:
    """Events in order. Bytes count until they are given back (`free_requested`), as in
    `memory_allocated`; a history without these counts until another stream is done with them."""
    replay = _Replay()
    stacks = _Stacks()
    for action, address, time_us, size_bytes, entry in _entries(trace, device, source):
        if action == "alloc":
            if address in replay.alive:
                _refuse(
                    source,
                    f"has no frees: address {address:#x} is allocated twice. Record without "
                    "skip_actions",
                )
            replay.alive[address] = replay.add(time_us, size_bytes, stacks.of(entry))
        else:
            replay.free(address, time_us, size_bytes)
    if not replay.time_us:
        _refuse(source, f"has no allocation in its history; call {RECORD}")
    for event in replay.alive.values():
        replay.freed_at[event] = len(replay.time_us)
    end_bytes = _end_bytes(replay, end_blocks)
    start_bytes = end_bytes - sum(replay.change_bytes)
    if start_bytes < 0:
        _refuse(source, "contradicts itself: it frees more than was allocated")
    return History(
        source,
        device,
        np.maximum.accumulate(np.array(replay.time_us, np.int64)),
        np.array(replay.change_bytes, np.int64),
        start_bytes,
        np.array(replay.freed_at, np.intp),
        tuple(replay.frames),
    )


def _end_bytes(replay: _Replay, end_blocks: dict[int, int] | None) -> int:
    """Bytes allocated at the end. Without segments only those of the history itself are known."""
    made = {address: replay.change_bytes[event] for address, event in replay.alive.items()}
    return sum((made if end_blocks is None else end_blocks | made).values())


def _entries(
    trace: list[Any], device: int, source: str
) -> Iterator[tuple[str, int, int, int, dict[str, Any]]]:
    """Action, address, time, bytes and the entry itself of every allocation and free."""
    has_requests = any(
        isinstance(entry, dict) and entry.get("action") == "free_requested" for entry in trace
    )
    wanted = ("alloc", "free_requested" if has_requests else "free_completed")
    for number, entry in enumerate(trace):
        where = f"device_traces[{device}][{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("action"), str):
            _refuse(source, f"is damaged: {where} has no action")
        if entry["action"] not in wanted:
            continue
        address, time_us, size_bytes = (
            _number(entry, name, where, source) for name in ("addr", "time_us", "size")
        )
        yield entry["action"], address, time_us, _rounded(size_bytes), entry


class _Stacks:
    """Stacks of entries. Their calls are shared between entries, so each is read once."""

    def __init__(self) -> None:
        self._stacks: dict[tuple[int, ...], Frames] = {}
        self._frames: dict[int, Frame] = {}

    def of(self, entry: dict[str, Any]) -> Frames:
        """The entry's stack; calls that cannot be read are left out."""
        frames = entry.get("frames")
        if not isinstance(frames, list):
            return ()
        key = tuple(map(id, frames))
        known = self._stacks.get(key)
        if known is None:
            known = tuple(self._read(frame) for frame in frames if isinstance(frame, dict))
            self._stacks[key] = known
        return known

    def _read(self, frame: dict[str, Any]) -> Frame:
        if id(frame) not in self._frames:
            self._frames[id(frame)] = _frame(frame)
        return self._frames[id(frame)]


def _frame(found: dict[str, Any]) -> Frame:
    line = found.get("line")
    return Frame(
        str(found.get("name", "")),
        str(found.get("filename", "")),
        line if isinstance(line, int) else 0,
    )
