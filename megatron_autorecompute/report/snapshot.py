"""Reads the memory history that torch recorded: a file of `torch.cuda.memory._dump_snapshot`.

torch pickles plain lists, dictionaries, numbers and texts. A file that asks for anything else is
refused before any of it is made, so reading runs no code from the file. torch is not imported.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.errors import ProfileError

ROUNDING_BYTES = 512
"""torch's allocator gives whole blocks of this size; a history has the bytes asked for."""
RECORD = "torch.cuda.memory._record_memory_history() before the step"


BACKWARD_CALLS = {"backward", "backward_step", "_engine_run_backward"}
OPTIMIZERS = {"optim", "optimizer", "optimizers"}
"""Folders of torch's, Megatron's, Apex's and Transformer Engine's optimizers."""


@dataclass(frozen=True, slots=True)
class History:
    """What a device allocated and freed, an entry for each such event, in order."""

    source: str
    """The file that was read."""
    time_us: NDArray[np.int64]
    """The time of each event, in microseconds of the machine's clock."""
    level_bytes: NDArray[np.int64]
    """Allocated bytes after each event, rounded as torch rounds."""
    kinds: tuple[str, ...]
    """What an allocation belongs to: `forward`, `backward` or `optimizer`. The text is empty if its
    stack does not tell, and for a free."""


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
    times, changes, kinds = list[int](), list[int](), list[str]()
    alive = dict[int, int]()  # bytes by address
    for entry in trace:
        if entry["action"] not in ("alloc", "free_requested"):
            continue
        address, size_bytes = entry["addr"], _rounded(entry["size"])
        if entry["action"] == "free_requested":
            changes.append(-alive.pop(address, size_bytes))
            kinds.append("")
        elif address in alive:
            raise ValueError(
                f"it has no frees: address {address:#x} is allocated twice. Record without "
                "skip_actions"
            )
        else:
            alive[address] = size_bytes
            changes.append(size_bytes)
            kinds.append(_kind(entry.get("frames", ())))
        times.append(entry["time_us"])
    if not times:
        raise ValueError("it has no allocation in its history")
    start_bytes = sum((end_blocks | alive).values()) - sum(changes)
    if start_bytes < 0:
        raise ValueError("it frees more than was allocated")
    time_us = np.maximum.accumulate(np.array(times, np.int64))
    return History(source, time_us, start_bytes + np.cumsum(changes), tuple(kinds))


def _kind(calls: Sequence[dict[str, Any]]) -> str:
    """What an allocation belongs to; an empty text if its stack does not tell."""
    files, names = {call["filename"] for call in calls}, {call["name"] for call in calls}
    if names & BACKWARD_CALLS or not any(file.endswith(".py") for file in files):
        return "backward"
    if "forward_step" in names:
        return "forward"
    folders = {folder for file in files for folder in file.split("/")[-2:-1]}
    return "" if folders.isdisjoint(OPTIMIZERS) else "optimizer"
