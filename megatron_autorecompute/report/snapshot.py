"""Reads the memory history that torch recorded: a file of `torch.cuda.memory._dump_snapshot`.

torch pickles plain lists, dictionaries, numbers and texts. A file that asks for anything else is
refused before any of it is made, so reading runs no code from the file. torch is not imported.
"""

from __future__ import annotations

import pickle
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


def read_history(path: str | Path) -> History:
    """The history of the device that was used most in the process that wrote the file.

    Raises: ProfileError if the file cannot be read, is no snapshot, has no history, or contradicts
        itself.
    """
    try:
        with open(path, "rb") as file:
            snapshot = _PlainUnpickler(file).load()
        traces = snapshot["device_traces"]
        device = max(range(len(traces)), key=lambda number: len(traces[number]))
        return _replayed(traces[device], _end_blocks(snapshot, device), str(path))
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # damaged pickles raise errors of every class
        why = f"it lacks {error}" if isinstance(error, LookupError) else str(error)
        raise ProfileError(
            f"{path} is no whole snapshot of torch's memory, as {RECORD}, and "
            f"torch.cuda.memory._dump_snapshot after it, write: {why.partition(chr(10))[0]}."
        ) from error


class _PlainUnpickler(pickle.Unpickler):
    """Makes numbers, texts, lists, tuples, sets and dictionaries, and refuses all other classes."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(
            f"it asks for {module}.{name}, and torch pickles only lists, dictionaries, numbers and "
            "texts. Nothing of it was run"
        )


def _end_blocks(snapshot: dict[str, Any], device: int) -> dict[int, int]:
    """Bytes of the blocks in use when the snapshot was taken, by address; none without segments."""
    found = {}
    for segment in snapshot.get("segments", ()):
        if segment.get("device", device) != device:
            continue
        address = segment.get("address", 0)
        for block in segment["blocks"]:
            if block.get("state") == "active_allocated":
                asked = block.get("requested_size") or block["size"]
                found[block.get("address", address)] = _rounded(asked)
            address += block["size"]
    return found


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // ROUNDING_BYTES) * ROUNDING_BYTES


def _replayed(trace: list[dict[str, Any]], end_blocks: dict[int, int], source: str) -> History:
    """Events in order. Bytes count until they are given back (`free_requested`), as in
    `memory_allocated`."""
    times, changes, freed_at = list[int](), list[int](), list[int]()
    stacks, known = list[Frames](), dict[tuple[int, ...], Frames]()
    alive = dict[int, int]()  # the event that allocated an address
    for entry in trace:
        if entry["action"] not in ("alloc", "free_requested"):
            continue
        event, address, size_bytes = len(times), entry["addr"], _rounded(entry["size"])
        stack: Frames = ()
        if entry["action"] == "alloc":
            if address in alive:
                raise ValueError(
                    f"it has no frees: address {address:#x} is allocated twice. Record without "
                    "skip_actions"
                )
            alive[address], stack = event, _stack(entry.get("frames", ()), known)
        elif (made := alive.pop(address, None)) is None:
            size_bytes = -size_bytes
        else:
            size_bytes, freed_at[made] = -changes[made], event
        times.append(entry["time_us"])
        changes.append(size_bytes)
        freed_at.append(event)
        stacks.append(stack)
    if not times:
        raise ValueError("it has no allocation in its history")
    for event in alive.values():
        freed_at[event] = len(times)
    made_here = {address: changes[event] for address, event in alive.items()}
    start_bytes = sum((end_blocks | made_here).values()) - sum(changes)
    if start_bytes < 0:
        raise ValueError("it frees more than was allocated")
    return History(
        source,
        np.maximum.accumulate(np.array(times, np.int64)),
        np.array(changes, np.int64),
        start_bytes,
        np.array(freed_at, np.intp),
        tuple(stacks),
    )


def _stack(calls: list[dict[str, Any]], known: dict[tuple[int, ...], Frames]) -> Frames:
    """The calls of a stack; equal stacks are read once."""
    key = tuple(map(id, calls))
    if key not in known:
        known[key] = tuple(Frame(call["name"], call["filename"], call["line"]) for call in calls)
    return known[key]
