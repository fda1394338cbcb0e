"""One step that torch recorded (`torch.cuda.memory._dump_snapshot`) beside the planned one.

A history can have any number of steps. The stacks of its allocations show which part is a step, and
which forward or backward each piece of it is. torch runs most of a backward in a thread of its own
that has no Python stack, so allocations without a stack belong to a backward.

torch pickles plain lists, dictionaries, numbers and texts. A file that asks for anything else is
refused before any of it is made, so reading runs no code from the file. torch is not imported.
"""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.errors import OptionError, ProfileError
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.timeline import StageTimeline, timeline

ROUNDING_BYTES = 512
"""torch's allocator gives whole blocks of this size; a history has the bytes asked for."""
RECORD = "torch.cuda.memory._record_memory_history() before the step"
BACKWARD_CALLS = {"backward", "backward_step", "_engine_run_backward"}
OPTIMIZERS = {"optim", "optimizer", "optimizers"}
"""Folders of torch's, Megatron's, Apex's and Transformer Engine's optimizers."""
OPTIMIZER_SHARE = 0.012
"""Width of the optimizer step in the page's chart, as a share of the step."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Planned and recorded bytes of one part of the step."""

    what: str
    """The name of the part."""
    predicted_bytes: int
    """Planned bytes."""
    recorded_bytes: int
    """Bytes that torch recorded."""

    @property
    def more_bytes(self) -> int:
        """Recorded minus planned."""
        return self.recorded_bytes - self.predicted_bytes


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded step on the time axis of the planned one."""

    stage: int
    """The stage that the step is compared with."""
    source: str
    """The file with the history."""
    at_ms: NDArray[np.float64]
    """Times of the curve's points, in ms since the planned step began."""
    level_bytes: NDArray[np.int64]
    """Bytes allocated from each point's time on."""
    moments: tuple[Difference, ...]
    """Peaks of the step's parts, in order."""


def recorded_step(plan: Plan, path: str | Path, stage: int | None = None) -> RecordedStep:
    """The recorded step of one stage of a plan.

    Args:
        plan: what was planned.
        path: a file of `torch.cuda.memory._dump_snapshot`.
        stage: the stage of the process that wrote it; None: the only one.

    Raises:
        ProfileError: the file is no snapshot with a history, is damaged, or its stacks do not show
            the stage's forwards and backwards as planned.
        OptionError: there is no such stage, or there are several and none is given.
    """
    number = _stage(plan, stage)
    history, step = read_history(path), timeline(plan)
    own = step.stages[number]
    pieces = list(_pieces(history, own))
    curve = _curve(history, own, pieces, step.step_ms)
    moments = tuple(_moment(history, own, piece) for piece in pieces)
    return RecordedStep(number, history.source, *curve, moments)


def _stage(plan: Plan, asked: int | None) -> int:
    stages = plan.layout.num_stages
    number = 0 if asked is None and stages == 1 else asked
    if number is None or number >= stages:
        raise OptionError(
            f"--stage {number}: give the pipeline stage of the process that wrote the snapshot; "
            f"the plan has stages 0 to {stages - 1}."
        )
    return number


@dataclass(frozen=True, slots=True)
class _Piece:
    """Allocations of one kind in a row, and the frees between them: a piece of a step."""

    kind: str
    """`forward`, `backward` or `optimizer`."""
    recorded: slice
    """The history's events."""
    planned: Sequence[int]
    """The planned events that they are; none of the optimizer step."""


def _runs(kinds: Sequence[str]) -> Iterator[tuple[str, slice]]:
    """Each kind of allocations in a row, with the events up to those of the next."""
    begins: list[tuple[str, int]] = []
    for event, kind in enumerate(kinds):
        if kind and (not begins or begins[-1][0] != kind):
            begins.append((kind, event))
    begins.append(("", len(kinds)))
    for (kind, begin), (_, end) in itertools.pairwise(begins):
        yield kind, slice(begin, end)


def _pieces(history: History, stage: StageTimeline) -> Iterator[_Piece]:
    """The last whole step: its forwards and backwards as planned, and its optimizer if recorded."""
    backward = stage.backward.tolist()
    by_kind = itertools.groupby(range(len(backward)), backward.__getitem__)
    planned = [list(events) for _, events in by_kind]
    wanted = "".join("fb"[backward[own[0]]] for own in planned)
    runs = list(_runs(history.kinds))
    found = re.finditer(rf"(?<![fb])(?={wanted}(o|$))", "".join(kind[0] for kind, _ in runs))
    whole = max(((len(one[1]), one.start()) for one in found), default=None)
    if whole is None:
        raise ProfileError(
            f"{history.source}: the stacks of allocations show no whole step as stage "
            f"{stage.stage} has it in the plan. Call {RECORD}, with its default stacks, and give "
            "the stage's snapshot."
        )
    optimizers, at = whole
    for (kind, recorded), own in zip(runs[at:], [*planned, *[[]] * optimizers], strict=False):
        yield _Piece(kind, recorded, own)


def _curve(
    history: History, stage: StageTimeline, pieces: Sequence[_Piece], step_ms: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Points of the curve: times in ms, and bytes from then on. Every piece is drawn where the plan
    has it, whatever time it took."""
    recorded, planned = list[int](), list[float]()
    for piece in pieces:
        recorded += history.time_us[[piece.recorded.start, piece.recorded.stop - 1]].tolist()
        if piece.planned:
            planned += [stage.start_ms[piece.planned[0]], stage.end_ms[piece.planned[-1]]]
        else:
            planned += [step_ms, step_ms * (1 + OPTIMIZER_SHARE)]
    whole = slice(pieces[0].recorded.start, pieces[-1].recorded.stop)
    at_ms = np.interp(history.time_us[whole], recorded, np.maximum.accumulate(planned))
    return at_ms, history.level_bytes[whole]


def _moment(history: History, stage: StageTimeline, piece: _Piece) -> Difference:
    recorded = int(history.level_bytes[piece.recorded].max())
    if not piece.planned:
        predicted = stage.static_bytes + stage.optimizer_step_peak_bytes
        return Difference("optimizer step", predicted, recorded)
    chunks = " of chunk {}" if len(stage.units) > 1 else ""
    of = [f"{stage.microbatch[e]}{chunks.format(stage.chunk[e])}" for e in piece.planned]
    what = f"microbatch {of[0]}" if len(of) == 1 else f"microbatches {of[0]} to {of[-1]}"
    predicted = int(stage.peak_bytes[piece.planned].max())
    return Difference(f"{piece.kind} of {what}", predicted, recorded)


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
    return {
        block["address"]: _rounded(block["requested_size"])
        for segment in snapshot.get("segments", ())
        for block in segment["blocks"]
        if segment["device"] == device and block["state"] == "active_allocated"
    }


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
