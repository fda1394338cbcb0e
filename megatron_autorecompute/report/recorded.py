"""One recorded training step beside the planned one: the curve, and the largest differences.

A history can have any number of steps. The stacks of its allocations show which part is a step, and
which forward or backward each piece of it is: Megatron's `forward_step` and `backward_step`, and
the optimizer's files. torch runs most of a backward in a thread of its own that has no Python
stack, so allocations without a stack belong to a backward.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.errors import OptionError, ProfileError
from megatron_autorecompute.planner.cost.layout import Chunk
from megatron_autorecompute.planner.cost.unit_costs import CostTable, Unit
from megatron_autorecompute.planner.plan import Plan
from megatron_autorecompute.report.snapshot import RECORD, Frames, History, read_history
from megatron_autorecompute.report.timeline import StageTimeline, timeline

MOST_POINTS = 4000
"""The most points of the curve. Of more, the highest in each of so many equal times is kept."""
OPTIMIZER_SHARE = 0.012
"""Width of the optimizer step in the page's chart, as a share of the step."""
BACKWARD_CALLS = {"backward", "backward_step", "_engine_run_backward"}
LAYER_FILE = "transformer_layer.py"
OPTIMIZERS = {"optim", "optimizer", "optimizers"}
"""Folders of torch's, Megatron's, Apex's and Transformer Engine's optimizers."""


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
    layers: tuple[Difference, ...]
    """Bytes that a layer allocates in its forward and that outlive it, by unit."""
    no_layers: str
    """A sentence that says why `layers` is empty; an empty text if there are layers."""


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
    history, step = read_history(path), timeline(plan)
    own, (kinds, places) = step.stages[number], _said(history)
    pieces, optimizer = _pieces(_runs(history, kinds), own, history.source)
    marks = _marks(history, own, pieces)
    end = pieces[-1].end
    if optimizer is not None:
        end = optimizer.end
        times = history.time_us[[optimizer.begin, end - 1]]
        marks += zip(times, (step.step_ms, step.step_ms * (1 + OPTIMIZER_SHARE)), strict=True)
    layers, why = _layers(plan, history, places, own, pieces)
    return RecordedStep(
        number,
        history.source,
        *_curve(history, pieces[0].begin, end, marks),
        tuple(_moments(history, own, pieces, optimizer)),
        layers,
        why,
    )


# --- which stage ----------------------------------------------------------------------------------


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


# --- the step in the history ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """Allocations of one kind in a row, and the frees between them: a piece of a step."""

    kind: str
    """`forward`, `backward` or `optimizer`."""
    begin: int
    """The history's first event."""
    end: int
    """The event after the last."""
    first: int = 0
    """The first of the planned events that it is."""
    last: int = 0
    """The last of them."""


Places = Sequence[tuple[int, ...]]
"""Of each event: the lines of Megatron's layer on its stack, outermost first; empty outside."""


def _said(history: History) -> tuple[list[str], Places]:
    """What the stacks say of each event: what it belongs to (meaningless for frees), and its place
    in a layer. Every stack is looked at once."""
    said = {
        id(frames): (
            _kind(frames),
            tuple(f.line for f in frames[::-1] if f.filename.endswith(LAYER_FILE)),
        )
        for frames in {id(frames): frames for frames in history.frames}.values()
    }
    kinds, places = zip(*(said[id(frames)] for frames in history.frames), strict=True)
    return list(kinds), places


def _kind(frames: Frames) -> str:
    """What an allocation belongs to; an empty text if its stack does not tell."""
    if not any(frame.filename.endswith(".py") for frame in frames):
        return "backward"
    names = {frame.name for frame in frames}
    if names & BACKWARD_CALLS:
        return "backward"
    if "forward_step" in names:
        return "forward"
    folders = {folder for frame in frames for folder in frame.filename.split("/")[-2:-1]}
    return "" if folders.isdisjoint(OPTIMIZERS) else "optimizer"


def _runs(history: History, kinds: Sequence[str]) -> list[_Run]:
    begins: list[tuple[str, int]] = []
    for event in np.flatnonzero(history.change_bytes > 0).tolist():
        kind = kinds[event]
        if kind and (not begins or begins[-1][0] != kind):
            begins.append((kind, event))
    ends = [begin for _, begin in begins[1:]] + [len(history.frames)]
    return [_Run(kind, begin, end) for (kind, begin), end in zip(begins, ends, strict=True)]


def _planned_runs(stage: StageTimeline) -> list[tuple[str, int, int]]:
    """The planned events in runs: kind, first and last event."""
    found = []
    for backward, events in itertools.groupby(range(len(stage.backward)), stage.backward.item):
        own = list(events)
        found.append(("backward" if backward else "forward", own[0], own[-1]))
    return found


def _pieces(
    runs: Sequence[_Run], stage: StageTimeline, source: str
) -> tuple[list[_Run], _Run | None]:
    """The last whole step: its forwards and backwards as planned, and its optimizer if recorded."""
    planned = _planned_runs(stage)
    kinds = "".join(run.kind[0] for run in runs)  # f, b and o
    wanted = "".join(kind[0] for kind, _, _ in planned)
    found = re.finditer(rf"(?<![fb])(?={wanted}(o|$))", kinds)
    whole = max(((bool(one[1]), one.start()) for one in found), default=None)
    if whole is None:
        raise ProfileError(
            f"{source}: the stacks of allocations show no whole step as stage {stage.stage} has it "
            f"in the plan. Call {RECORD}, with its default stacks, and give the stage's snapshot."
        )
    has_optimizer, at = whole
    after = at + len(planned)
    pairs = zip(runs[at:after], planned, strict=True)
    pieces = [replace(run, first=first, last=last) for run, (_, first, last) in pairs]
    return pieces, runs[after] if has_optimizer else None


# --- beside the plan ------------------------------------------------------------------------------


def _marks(
    history: History, stage: StageTimeline, pieces: Sequence[_Run]
) -> list[tuple[int, float]]:
    """Recorded times (µs) and the planned ones (ms) that they are drawn at."""
    marks = []
    for piece in pieces:
        marks.append((history.time_us[piece.begin], stage.start_ms[piece.first]))
        marks.append((history.time_us[piece.end - 1], stage.end_ms[piece.last]))
    return marks


def _curve(
    history: History, begin: int, end: int, marks: Sequence[tuple[int, float]]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Points of the curve between two events: times in ms, and bytes from then on."""
    recorded, planned = (np.array(side, np.float64) for side in zip(*marks, strict=True))
    at_ms = np.interp(history.time_us[begin:end], recorded, np.maximum.accumulate(planned))
    level = history.level_bytes[begin:end]
    if len(level) <= MOST_POINTS:
        return at_ms, level
    width = (at_ms[-1] - at_ms[0]) / MOST_POINTS or 1.0
    columns = np.minimum(((at_ms - at_ms[0]) / width).astype(np.intp), MOST_POINTS - 1)
    firsts = np.flatnonzero(np.diff(columns, prepend=-1))
    return at_ms[firsts], np.maximum.reduceat(level, firsts)


def _moments(
    history: History, stage: StageTimeline, pieces: Sequence[_Run], optimizer: _Run | None
) -> Iterator[Difference]:
    level, peaks = history.level_bytes, stage.peak_bytes
    for piece in pieces:
        recorded = int(level[piece.begin : piece.end].max())
        predicted = int(peaks[piece.first : piece.last + 1].max())
        yield Difference(_piece_name(stage, piece), predicted, recorded)
    if optimizer is not None:
        predicted = stage.static_bytes + stage.optimizer_step_peak_bytes
        recorded = int(level[optimizer.begin : optimizer.end].max())
        yield Difference("optimizer step", predicted, recorded)


def _piece_name(stage: StageTimeline, piece: _Run) -> str:
    events = range(piece.first, piece.last + 1)
    of = [str(stage.microbatch[e]) for e in events]
    if len(stage.units) > 1:
        of = [f"{name} of chunk {stage.chunk[e]}" for name, e in zip(of, events, strict=True)]
    what = f"microbatch {of[0]}" if len(of) == 1 else f"microbatches {of[0]} to {of[-1]}"
    return f"{piece.kind} of {what}"


# --- by layer -------------------------------------------------------------------------------------


def _layers(
    plan: Plan,
    history: History,
    places: Places,
    stage: StageTimeline,
    pieces: Sequence[_Run],
) -> tuple[tuple[Difference, ...], str]:
    """Differences by unit, or why there are none.

    Stacks do not number the layers. A layer begins where the lines of Megatron's layer begin again;
    if that gives other numbers of layers than the plan has, nothing is said by layer.
    """
    chunks = plan.layout.stages[stage.stage]
    kept: dict[tuple[int, int], int] = {}
    for piece in pieces:
        if piece.kind == "backward":
            continue
        starts = _layer_starts(places, piece)
        events = range(piece.first, piece.last + 1)
        expected = [(e, layer) for e in events for layer in chunks[stage.chunk[e]].layers]
        if len(starts) != len(expected):
            return (), (
                f"The stacks of the {_piece_name(stage, piece)} show {len(starts)} layers where "
                f"the plan has {len(expected)}, so bytes are not shown by layer."
            )
        kept |= dict(_kept(history, places, piece, starts, expected))
    return tuple(_by_unit(plan, stage, kept)), ""


def _layer_starts(places: Places, run: _Run) -> list[int]:
    """The events that begin a layer's forward."""
    starts: list[int] = []
    before: tuple[int, ...] = ()
    for event in range(run.begin, run.end):
        place = places[event]
        if place:
            if not before or place < before:
                starts.append(event)
            before = place
    return starts


def _kept(
    history: History,
    places: Places,
    run: _Run,
    starts: Sequence[int],
    expected: Sequence[tuple[int, int]],
) -> Iterator[tuple[tuple[int, int], int]]:
    """Bytes allocated in each layer's forward that outlive the forward of the microbatch."""
    for place, (event, layer) in enumerate(expected):
        begin = starts[place]
        end = starts[place + 1] if place + 1 < len(starts) else run.end
        later = (starts[i] for i in range(place + 1, len(starts)) if expected[i][0] != event)
        over = next(later, run.end)
        own = [e for e in range(begin, end) if history.freed_at[e] >= over and places[e]]
        yield (event, layer), int(history.change_bytes[own].sum())


def _by_unit(
    plan: Plan, stage: StageTimeline, kept: dict[tuple[int, int], int]
) -> Iterator[Difference]:
    """The median over microbatches of every unit with layers, beside what is planned."""
    for number, chunk in enumerate(plan.layout.stages[stage.stage]):
        events = np.flatnonzero(~stage.backward & (stage.chunk == number)).tolist()
        units = [unit for unit in stage.units[number] if unit.layers]
        predicted = _made_and_kept(plan, chunk, units)
        for unit, planned_bytes in zip(units, predicted, strict=True):
            sums = [sum(kept[e, layer] for layer in unit.layers) for e in events]
            yield Difference(unit.name, planned_bytes, int(statistics.median(sums)))


def _made_and_kept(plan: Plan, chunk: Chunk, units: Sequence[Unit]) -> list[int]:
    """What each unit holds, with its output where that is held instead of its input.

    A unit allocates its output and not its input; held bytes count the input.
    """
    table, policy = CostTable(plan.profile, plan.imbalance_percentile), plan.policy
    keeps = []
    for unit in units:
        record = table.record(unit.layers[0], policy.layers[unit.layers[0]])
        keeps.append(record is None or record.input_kept)
    after = [*keeps[1:], chunk.head and plan.profile.head.input_kept][: len(units)]
    if keeps and not chunk.embedding:
        keeps[0] = True  # what another stage sent is held whether or not the layer needs it
    return [
        unit.held_bytes + plan.profile.boundary_bytes * (behind - own)
        for unit, own, behind in zip(units, keeps, after, strict=True)
    ]
