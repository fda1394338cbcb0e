"""Reads the memory history that torch recorded: a file of `torch.cuda.memory._dump_snapshot`.

torch pickles plain lists, dictionaries, numbers and texts. A file that asks for anything else is
refused before any of it is made, so reading runs no code from the file. torch is not imported.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


class _UnreadableError(Exception):
    """Why a file is not read; the sentence begins with its name."""


def read_history(path: str | Path) -> History:
    """The history of the device that was used most in the process that wrote the file.

    Raises: ProfileError if the file cannot be read, is no snapshot, has no history, or contradicts
        itself.
    """
    try:
        snapshot = _unpickled(path)
        traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
        if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
            raise _UnreadableError(
                "is no memory snapshot of torch: it has no lists of device_traces"
            )
        device = max(range(len(traces)), key=lambda number: len(traces[number]), default=0)
        if not traces or not traces[device]:
            raise _UnreadableError(f"has no history of allocations; call {RECORD}")
        return _replayed(traces[device], _end_blocks(snapshot, device), device, str(path))
    except _UnreadableError as refused:
        raise ProfileError(f"{path} {refused}.") from refused.__cause__


class _PlainUnpickler(pickle.Unpickler):
    """Makes numbers, texts, lists, tuples, sets and dictionaries, and refuses all other classes."""

    def find_class(self, module: str, name: str) -> Any:
        raise _UnreadableError(
            f"is no memory snapshot of torch: it asks for {module}.{name}, and torch pickles only "
            "lists, dictionaries, numbers and texts. Nothing of it was run"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise _UnreadableError("is no memory snapshot of torch: it refers to data outside of it")


def _unpickled(path: str | Path) -> Any:
    try:
        with open(path, "rb") as file:
            return _PlainUnpickler(file).load()
    except _UnreadableError:
        raise
    except OSError as error:
        raise _UnreadableError(f"cannot be read: {error.strerror or error}") from error
    except Exception as error:  # damaged pickles raise errors of every class
        why = str(error).splitlines()[:1] or [type(error).__name__]
        raise _UnreadableError(
            f"is no whole pickle, as torch.cuda.memory._dump_snapshot writes: {why[0]}"
        ) from error


def _number(entry: Any, name: str, where: str) -> int:
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, int):
        raise _UnreadableError(f"is damaged: {where} has no whole number {name}")
    return value


def _end_blocks(snapshot: dict[str, Any], device: int) -> dict[int, int]:
    """Bytes of the blocks in use when the snapshot was taken, by address; none without segments."""
    found = {}
    segments = snapshot.get("segments")
    for number, segment in enumerate(segments if isinstance(segments, list) else ()):
        where = f"segments[{number}]"
        if not isinstance(segment, dict) or not isinstance(segment.get("blocks"), list):
            raise _UnreadableError(f"is damaged: {where} has no list of blocks")
        if segment.get("device", device) != device:
            continue
        address = segment.get("address", 0)
        for index, block in enumerate(segment["blocks"]):
            size_bytes = _number(block, "size", f"{where}.blocks[{index}]")
            if block.get("state") == "active_allocated":
                asked = block.get("requested_size") or size_bytes
                found[block.get("address", address)] = _rounded(asked)
            address += size_bytes
    return found


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES


def _replayed(trace: list[Any], end_blocks: dict[int, int], device: int, source: str) -> History:
    """Events in order. Bytes count until they are given back (`free_requested`), as in
    `memory_allocated`; a history without these counts until another stream is done with them."""
    times, changes, freed_at = list[int](), list[int](), list[int]()
    stacks, known = list[Frames](), dict[tuple[int, ...], Frames]()
    alive = dict[int, int]()  # the event that allocated an address
    for action, address, time_us, size_bytes, entry in _entries(trace, device):
        event = len(times)
        stack: Frames = ()
        if action == "alloc":
            if address in alive:
                raise _UnreadableError(
                    f"has no frees: address {address:#x} is allocated twice. Record without "
                    "skip_actions"
                )
            alive[address], stack = event, _stack(entry, known)
        elif (made := alive.pop(address, None)) is None:
            size_bytes = -size_bytes
        else:
            size_bytes, freed_at[made] = -changes[made], event
        times.append(time_us)
        changes.append(size_bytes)
        freed_at.append(event)
        stacks.append(stack)
    if not times:
        raise _UnreadableError(f"has no allocation in its history; call {RECORD}")
    for event in alive.values():
        freed_at[event] = len(times)
    made_here = {address: changes[event] for address, event in alive.items()}
    start_bytes = sum((end_blocks | made_here).values()) - sum(changes)
    if start_bytes < 0:
        raise _UnreadableError("contradicts itself: it frees more than was allocated")
    return History(
        source,
        np.maximum.accumulate(np.array(times, np.int64)),
        np.array(changes, np.int64),
        start_bytes,
        np.array(freed_at, np.intp),
        tuple(stacks),
    )


def _entries(trace: list[Any], device: int) -> Iterator[tuple[str, int, int, int, dict[str, Any]]]:
    """Action, address, time, bytes and the entry itself of every allocation and free."""
    has_requests = any(
        isinstance(entry, dict) and entry.get("action") == "free_requested" for entry in trace
    )
    wanted = ("alloc", "free_requested" if has_requests else "free_completed")
    for number, entry in enumerate(trace):
        where = f"device_traces[{device}][{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("action"), str):
            raise _UnreadableError(f"is damaged: {where} has no action")
        if entry["action"] in wanted:
            address, time_us, size_bytes = (
                _number(entry, name, where) for name in ("addr", "time_us", "size")
            )
            yield entry["action"], address, time_us, _rounded(size_bytes), entry


def _stack(entry: dict[str, Any], known: dict[tuple[int, ...], Frames]) -> Frames:
    """The stack of an entry, without calls that cannot be read; equal ones are read once."""
    calls = entry.get("frames")
    if not isinstance(calls, list):
        return ()
    key = tuple(map(id, calls))
    if key not in known:
        known[key] = tuple(_frame(call) for call in calls if isinstance(call, dict))
    return known[key]


def _frame(found: dict[str, Any]) -> Frame:
    line = found.get("line")
    return Frame(
        str(found.get("name", "")),
        str(found.get("filename", "")),
        line if isinstance(line, int) else 0,
    )
