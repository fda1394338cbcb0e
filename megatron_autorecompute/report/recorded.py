"""One recorded training step beside the planned one: the curve, and the differences of its parts.

A history can have any number of steps. The stacks of its allocations show which part is a step, and
which forward or backward each piece of it is: Megatron's `forward_step` and `backward_step`, and
the optimizer's files. torch runs most of a backward in a thread of its own that has no Python
stack, so allocations without a stack belong to a backward.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.errors import OptionError, ProfileError
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.snapshot import RECORD, History, read_history
from megatron_autorecompute.report.timeline import StageTimeline, timeline

MOST_POINTS = 4000
"""The most points of the curve. Of more, the highest in each of so many equal times is kept."""
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
        stage: the stage of the process that wrote it; None: by the rank in the file's name.

    Raises:
        ProfileError: the file is no snapshot with a history, is damaged, or its stacks do not show
            the stage's forwards and backwards as planned.
        OptionError: there is no such stage, or the file's name does not tell which one it is.
    """
    number = _stage(plan, Path(path).name, stage)
    history, own = read_history(path), timeline(plan).stages[number]
    pieces = list(_pieces(history, own))
    moments = tuple(_moment(history, own, piece) for piece in pieces)
    return RecordedStep(number, history.source, *_curve(history, own, pieces), moments)


def _stage(plan: Plan, name: str, asked: int | None) -> int:
    stages = plan.layout.num_stages
    if asked is not None:
        if asked >= stages:
            raise OptionError(f"--stage {asked}: the plan has stages 0 to {stages - 1}.")
        return asked
    rank = re.search(r"rank[-_]?(\d+)", name)
    # Ranks of one tensor-parallel group follow each other: the first are of the first stage.
    if stages == 1 or (rank and int(rank[1]) < plan.profile.parallelism.tensor_parallel):
        return 0
    said = f"rank {rank[1]}" if rank else "no rank"
    raise OptionError(
        f"{name} names {said}, which does not tell the pipeline stage: give --stage 0 to "
        f"{stages - 1}."
    )


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
    history: History, stage: StageTimeline, pieces: Sequence[_Piece]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Points of the curve: times in ms, and bytes from then on. Every piece is drawn where the plan
    has it, whatever time it took."""
    recorded, planned, step_ms = list[int](), list[float](), 0.0
    for piece in pieces:
        recorded += [history.time_us[at] for at in (piece.recorded.start, piece.recorded.stop - 1)]
        if piece.planned:
            step_ms = stage.end_ms[piece.planned[-1]]
            planned += [stage.start_ms[piece.planned[0]], step_ms]
        else:
            planned += [step_ms, step_ms * (1 + OPTIMIZER_SHARE)]
    whole = slice(pieces[0].recorded.start, pieces[-1].recorded.stop)
    at_ms = np.interp(history.time_us[whole], recorded, np.maximum.accumulate(planned))
    level = history.level_bytes[whole]
    if len(level) <= MOST_POINTS:
        return at_ms, level
    width = (at_ms[-1] - at_ms[0]) / MOST_POINTS or 1.0
    columns = np.minimum(((at_ms - at_ms[0]) / width).astype(np.intp), MOST_POINTS - 1)
    firsts = np.flatnonzero(np.diff(columns, prepend=-1))
    return at_ms[firsts], np.maximum.reduceat(level, firsts)


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
