"""Which stage holds which layers, and the order of forwards and backwards on every stage.

`Layout` places layers, embedding and head on stages and chunks as Megatron's layout flags do.
`Schedule` replays the order in which megatron-core runs forwards and backwards, `replay_ms` how
long that takes. The order is the same in megatron-core 0.16.1 and 0.19.2, so no version is asked.

Words: a *stage* is a pipeline rank, a *chunk* a virtual stage on it; layer indices are 0-based and
global. *Model order* is the order in which a microbatch passes the chunks: chunk 0 of every stage,
then chunk 1 of every stage, and so on.

This module knows neither bytes nor policies, and does not read hybrid layer patterns. Their
segments are dealt round the stages as here (`select_pipeline_segment` in
`hybrid_layer_allocation.py`), so a layout text with one t per layer of each segment says the same.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.errors import PipelineError

Kind = Literal["forward", "backward"]

_MAX_LAYOUT_LENGTH = 10_000  # a slip such as t*9999999999 must not fill the memory
_SYMBOL_OF_NAME = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one virtual stage holds."""

    layers: tuple[int, ...]
    """Global layer indices in the order they run; MTP depth d is `num_layers + d`. May be empty."""

    embedding: bool = False
    """Whether the model starts here. A chunk with MTP layers has its own copy of the embedding
    weights besides; that is not marked."""

    head: bool = False
    """Whether the model ends here: final norm, output layer, loss."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Chunks of every stage, indexed `[stage][chunk]`.

    Raises PipelineError where stages differ in their number of chunks, or where the layers in
    model order are not 0, 1, 2, …
    """

    stages: tuple[tuple[Chunk, ...], ...]
    mtp_num_layers: int = 0
    """How many of the layers, the last ones, are MTP depths."""

    def __post_init__(self) -> None:
        if not self.stages or not self.stages[0] or len(set(map(len, self.stages))) != 1:
            raise PipelineError(
                "A layout needs at least one stage, and the same number of chunks on each; "
                f"found {[len(chunks) for chunks in self.stages]} chunks."
            )
        layers = [layer for chunk in self.chunk_layers() for layer in chunk]
        if layers != list(range(len(layers))) or not 0 <= self.mtp_num_layers <= len(layers):
            raise PipelineError(
                "The layers of a layout must be 0, 1, 2, … in model order, the MTP depths last; "
                f"found {layers} with {self.mtp_num_layers} MTP depths."
            )

    @property
    def num_stages(self) -> int:
        """Pipeline-parallel size p."""
        return len(self.stages)

    @property
    def num_chunks(self) -> int:
        """Virtual stages on each stage, v."""
        return len(self.stages[0])

    @property
    def num_layers(self) -> int:
        """Decoder layers of the whole model, MTP depths not counted."""
        layers = sum(len(chunk.layers) for chunks in self.stages for chunk in chunks)
        return layers - self.mtp_num_layers

    def chunk_layers(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers of every chunk, in model order."""
        return tuple(chunk.layers for chunks in zip(*self.stages, strict=True) for chunk in chunks)

    @classmethod
    def even(
        cls,
        num_layers: int,
        pp: int,
        vp: int | None = None,
        *,
        mtp_num_layers: int = 0,
        num_layers_in_first_pipeline_stage: int | None = None,
        num_layers_in_last_pipeline_stage: int | None = None,
        account_for_embedding_in_pipeline_split: bool = False,
        account_for_loss_in_pipeline_split: bool = False,
        pipeline_model_parallel_layout: str | Sequence[Sequence[str]] | None = None,
    ) -> Layout:
        """Place layers as Megatron does for the flags of the same names.

        Args:
            num_layers: decoder layers of the whole model.
            pp: number of stages.
            vp: chunks per stage; None is what `pipeline_model_parallel_layout` says, else one.

        Raises PipelineError for what Megatron refuses, and for the two cases where it silently
        builds fewer layers: a first and a last number on one stage, or both together more than
        all. Source: `get_num_layers_to_build` in `transformer_block.py`,
        `get_transformer_layer_offset` in `transformer_layer.py`, `get_mtp_num_layers_to_build` in
        `multi_token_prediction.py`, and the checks of `TransformerConfig.__post_init__`.
        """
        _check_at_least(1, num_layers=num_layers, pp=pp, vp=1 if vp is None else vp)
        _check_at_least(0, mtp_num_layers=mtp_num_layers)
        uneven = (num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage)
        extra = (account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split)
        layout = pipeline_model_parallel_layout
        if (layout is not None) + (uneven != (None, None)) + any(extra) > 1:
            raise PipelineError(
                "Asked for more than one of: pipeline_model_parallel_layout, num_layers_in_first/"
                "last_pipeline_stage, account_for_embedding/loss_in_pipeline_split. Megatron takes "
                "one of the three; keep one."
            )
        if layout is not None:
            rows = _layout_rows(layout)
            _check_rows(rows, pp, vp)
            _check_counts(rows, num_layers, mtp_num_layers)
        else:
            vp = 1 if vp is None else vp
            _check_chunks(pp, vp)
            if pp == 2 and vp > 1 and None not in uneven:
                raise PipelineError(
                    "Asked for the number of layers of both of 2 stages, with several chunks: "
                    "Megatron divides by the number of stages between them, zero. Give neither, or "
                    "a pipeline_model_parallel_layout."
                )
            layers = _layers_per_stage(num_layers, pp, *uneven, *extra)
            rows = _rows_of_stages(layers, vp, mtp_num_layers, *extra)
        return cls._from_rows(rows, pp)

    @classmethod
    def parse(cls, text: str, pp: int, vp: int | None = None) -> Layout:
        """Read a layout such as `Et*3|(tt|)*6mL` (E embedding, t layer, m MTP depth, L loss).

        `|` separates chunks in model order, `*n` repeats a symbol or a parenthesis, commas are
        ignored. Raises PipelineError for a text that Megatron refuses. Source: the class
        `PipelineParallelLayerLayout` in `pipeline_parallel_layer_layout.py`.
        """
        _check_at_least(1, pp=pp, vp=1 if vp is None else vp)
        rows = _layout_rows(text)
        _check_rows(rows, pp, vp)
        return cls._from_rows(rows, pp)

    @classmethod
    def _from_rows(cls, rows: Sequence[str], pp: int) -> Layout:
        """Build from one string of symbols per chunk, in model order."""
        chunks, start = [], 0
        for position, row in enumerate(rows):
            stop = start + row.count("t") + row.count("m")
            # Megatron builds embedding and head on the first and last chunk, whatever E and L say:
            # they can stand elsewhere only when nothing stands before E or after L.
            first, last = position == 0, position == len(rows) - 1
            chunks.append(Chunk(tuple(range(start, stop)), embedding=first, head=last))
            start = stop
        stages = tuple(tuple(chunks[stage::pp]) for stage in range(pp))
        return cls(stages, mtp_num_layers="".join(rows).count("m"))


def _check_at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise PipelineError(f"{name} is {value}; it must be at least {least}.")


def _check_chunks(pp: int, vp: int) -> None:
    if vp > 1 and pp == 1:
        raise PipelineError(
            f"Asked for {vp} chunks on a single stage: Megatron interleaves only between two or "
            "more stages. Use one chunk or more stages."
        )


def _share(count: int, parts: int, what: str, whom: str) -> int:
    if count % parts:
        raise PipelineError(
            f"{count} {what} cannot be divided evenly among {parts} {whom}. (With account_for_"
            "embedding/loss_in_pipeline_split each counts as a layer.) Change the number of "
            "layers, stages or chunks, or give a pipeline_model_parallel_layout."
        )
    return count // parts


def _without_one(row: str, what: str) -> str:
    if not row:
        raise PipelineError(
            f"account_for_{what}_in_pipeline_split leaves no place for the {what}: its chunk has "
            "no layer to give up. Use fewer stages or chunks."
        )
    return row[1:]


def _layers_per_stage(
    num_layers: int, pp: int, first: int | None, last: int | None, embedding: bool, loss: bool
) -> list[int]:
    """Return the places for layers on each stage, those that embedding and loss take included."""
    if (first, last) == (None, None):
        return [_share(num_layers + embedding + loss, pp, "layers", "stages")] * pp
    _check_at_least(
        1,
        num_layers_in_first_pipeline_stage=1 if first is None else first,
        num_layers_in_last_pipeline_stage=1 if last is None else last,
    )
    stages = pp - (first is not None) - (last is not None)
    layers = num_layers - (first or 0) - (last or 0)
    if stages < 0 or layers < 0 or bool(stages) != bool(layers):
        raise PipelineError(
            f"After num_layers_in_first_pipeline_stage={first} and num_layers_in_last_pipeline_"
            f"stage={last}, {layers} of {num_layers} layers are left for {stages} of {pp} stages. "
            "Change these two so that every stage has a layer and every layer a stage."
        )
    middle = [_share(layers, stages, "middle layers", "middle stages")] * stages if stages else []
    return [n for n in (first, *middle, last) if n is not None]


def _rows_of_stages(
    layers: Sequence[int], vp: int, mtp_num_layers: int, embedding: bool, loss: bool
) -> list[str]:
    """Return the symbols of every chunk, in model order, for so many places on each stage."""
    rows = ["t" * _share(n, vp, "layers of a stage", "chunks") for n in layers] * vp
    if embedding:
        rows[0] = _without_one(rows[0], "embedding")
    if loss:
        rows[-1] = _without_one(rows[-1], "loss")
    rows[0] = "E" + rows[0]
    rows[-1] += "m" * mtp_num_layers + "L"
    return rows


def _layout_rows(layout: str | Sequence[Sequence[str]]) -> list[str]:
    """Return the symbols of every chunk, in model order."""
    if isinstance(layout, str):
        return _unroll(layout).split("|")
    return ["".join(_symbol(name) for name in row) for row in layout]


def _symbol(name: str) -> str:
    try:
        return _SYMBOL_OF_NAME[name.strip().lower()]
    except KeyError:
        raise PipelineError(
            f"Unknown layer {name!r} in a layout list. Known: {', '.join(_SYMBOL_OF_NAME)}."
        ) from None


def _unroll(text: str) -> str:
    """Write out `*n`: first of parentheses, then of single symbols."""

    def repeat(match: re.Match[str]) -> str:
        part, count = match[1], int(match[2])
        if len(part) * count > _MAX_LAYOUT_LENGTH:
            raise PipelineError(
                f"{match[0]!r} in layout {text!r} is more than {_MAX_LAYOUT_LENGTH} symbols."
            )
        return part * count

    flat = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,9})", r"(.)\*(\d{1,9})"):
        flat = re.sub(pattern, repeat, flat)
    if unknown := sorted(set(flat) - set("EtmL|")):
        raise PipelineError(
            f"Layout {text!r} has {' '.join(unknown)!r} where only E (embedding), t (layer), "
            "m (MTP depth), L (loss), | (next chunk), *n, (…)*n and commas may stand."
        )
    return flat


def _check_rows(rows: Sequence[str], pp: int, vp: int | None) -> None:
    """Refuse what Megatron's `validate_layer_layout` refuses."""
    flat = "".join(rows)
    shown = f"Layout {'|'.join(rows)!r}"
    if len(rows) % pp or (vp is not None and len(rows) != pp * vp):
        asked = f"{pp} stages" + ("" if vp is None else f" of {vp} chunks")
        raise PipelineError(f"{shown} has {len(rows)} chunks, which do not make {asked}.")
    _check_chunks(pp, len(rows) // pp)
    if not re.fullmatch("Et+m*L", flat):
        raise PipelineError(
            f"{shown} must have one E first, then t (at least one), then m, then one L last."
        )
    with_mtp = [position for position, row in enumerate(rows) if "m" in row]
    if len(with_mtp) > 1 or (with_mtp and with_mtp[0] < len(rows) - pp):
        raise PipelineError(
            f"{shown} must have all MTP depths (m) in one chunk, the last chunk of its stage."
        )


def _check_counts(rows: Sequence[str], num_layers: int, mtp_num_layers: int) -> None:
    flat = "".join(rows)
    if (flat.count("t"), flat.count("m")) != (num_layers, mtp_num_layers):
        raise PipelineError(
            f"Layout {'|'.join(rows)!r} has {flat.count('t')} layers and {flat.count('m')} MTP "
            f"depths; the model has {num_layers} and {mtp_num_layers}."
        )


@dataclass(frozen=True, slots=True)
class Event:
    """One thing a stage does: the forward or backward of one chunk for one microbatch."""

    kind: Kind
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Moment:
    """A state of a stage's memory that occurs while one event runs."""

    kind: Kind
    chunk: int
    in_flight: tuple[int, ...]
    """Per chunk, microbatches whose forward is done and whose backward has not begun."""
    event: int
    """Position of the first event in `Schedule.events(stage)` where this occurs."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What fixes the order of events on every stage.

    One chunk per stage is 1F1B (or no pipelining, on one stage), several are interleaved 1F1B.
    Source: `forward_backward_*`, `get_pp_rank_microbatches`, `get_schedule_table` in `schedules.py`
    and `combined_1f1b.py` of megatron-core. Raises PipelineError for what Megatron refuses.
    """

    num_stages: int
    num_chunks: int
    num_microbatches: int
    microbatch_group_size: int | None = None
    """Megatron's `microbatch_group_size_per_vp_stage`: microbatches that pass one chunk before the
    next chunk has its turn. None is `num_stages`. Without effect when there is one chunk."""
    overlap_moe_expert_parallel_comm: bool = False
    """One more warm-up forward, so that a forward and a backward can run side by side. Their events
    are listed forward first; each counts the other as in flight."""

    def __post_init__(self) -> None:
        _check_at_least(
            1,
            num_stages=self.num_stages,
            num_chunks=self.num_chunks,
            num_microbatches=self.num_microbatches,
        )
        _check_chunks(self.num_stages, self.num_chunks)
        if self.num_chunks > 1:
            self._check_groups()
        elif self.overlap_moe_expert_parallel_comm and self.num_stages > 1:
            raise PipelineError(
                f"overlap_moe_expert_parallel_comm on {self.num_stages} stages needs interleaving: "
                "found one chunk per stage. Ask for two or more, or turn the overlap off."
            )

    def _check_groups(self) -> None:
        p, m, group = self.num_stages, self.num_microbatches, self.group_size
        if not p <= group <= m:
            raise PipelineError(
                f"The microbatch group size is {group}; interleaved, it must lie between the "
                f"number of stages {p} and of microbatches {m}. Change either."
            )
        if 0 < m % group < p:
            raise PipelineError(
                f"{m} microbatches in groups of {group} leave a last group of {m % group}, fewer "
                f"than the {p} stages. Choose a group size that leaves none, or at least {p}."
            )

    @property
    def group_size(self) -> int:
        """Microbatches that pass one chunk in a row."""
        return self.num_stages if self.microbatch_group_size is None else self.microbatch_group_size

    def warmup(self, stage: int) -> int:
        """Return how many forwards the stage runs before the first forward that a backward follows.

        Source: `get_pp_rank_microbatches`; on one stage with EP overlap,
        `combined_1f1b_schedule_for_no_pipelining`.
        """
        self._check_stage(stage)
        wanted = self._stride * (self.num_stages - 1 - stage) + self._warmup_of_last_stage
        return min(wanted, self.num_microbatches * self.num_chunks)

    @property
    def _stride(self) -> int:
        """By how many forwards a stage's warm-up exceeds that of the next stage."""
        return 1 if self.num_chunks == 1 else 2

    @property
    def _warmup_of_last_stage(self) -> int:
        return (self.num_chunks - 1) * self.group_size + self.overlap_moe_expert_parallel_comm

    def events(self, stage: int) -> tuple[Event, ...]:
        """Return everything the stage does in a step, in order."""
        backward, chunk, microbatch = self._order(stage)
        return tuple(
            Event("backward" if is_backward else "forward", c, b)
            for is_backward, c, b in zip(
                backward.tolist(), chunk.tolist(), microbatch.tolist(), strict=True
            )
        )

    def in_flight(self, stage: int) -> NDArray[np.int32]:
        """Return, `[event, chunk]`, the microbatches in flight while the event runs.

        In flight: the forward is done and the backward has not begun. So the microbatch that the
        event itself runs is not counted, neither in its forward nor in its backward.
        """
        backward, chunk, _ = self._order(stage)
        position = np.arange(len(chunk))
        change = np.zeros((len(chunk), self.num_chunks), np.int32)
        change[position, chunk] = np.where(backward, -1, 1)
        counts = np.cumsum(change, axis=0, dtype=np.int32)
        counts[position[~backward], chunk[~backward]] -= 1
        return counts

    def distinct_moments(self, stage: int) -> tuple[Moment, ...]:
        """Return the different (kind, chunk, in flight), each with the first event that has it."""
        backward, chunk, _ = self._order(stage)
        rows = np.column_stack((backward, chunk, self.in_flight(stage))).astype(np.int32)
        first: dict[bytes, int] = {}
        for event, row in enumerate(rows):
            first.setdefault(row.tobytes(), event)
        return tuple(_moment(rows[event].tolist(), event) for event in first.values())

    def binding_moments(self, stage: int) -> tuple[Moment, ...]:
        """Return the distinct moments that no other of the same kind and chunk exceeds.

        Bytes held are never negative, so a peak that fits at these moments fits at all; there are
        far fewer of them, since those of warm-up and cool-down drop out.
        """
        groups: dict[tuple[Kind, int], list[Moment]] = {}
        for moment in self.distinct_moments(stage):
            groups.setdefault((moment.kind, moment.chunk), []).append(moment)
        kept = [moment for group in groups.values() for moment in _maximal(group)]
        return tuple(sorted(kept, key=lambda moment: moment.event))

    def _check_stage(self, stage: int) -> None:
        if not 0 <= stage < self.num_stages:
            raise PipelineError(
                f"Stage {stage} does not exist: stages are 0 to {self.num_stages - 1}."
            )

    def _order(self, stage: int) -> tuple[NDArray[np.bool_], NDArray[np.intp], NDArray[np.intp]]:
        """Return for each event whether it is a backward, its chunk and its microbatch."""
        total, warmup = self.num_microbatches * self.num_chunks, self.warmup(stage)
        backward = np.zeros(2 * total, np.bool_)
        cooldown = 2 * total - warmup
        backward[warmup + 1 : cooldown : 2] = True
        backward[cooldown:] = True
        microbatch, chunk, _ = self._table()
        order = np.empty(2 * total, np.intp)
        order[~backward] = order[backward] = np.arange(total)
        chunks = chunk[order]
        chunks[backward] = self.num_chunks - 1 - chunks[backward]
        return backward, chunks, microbatch[order]

    def _table(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Return microbatch, chunk and size of its group for each forward of a stage, in order.

        The n-th backward has the same microbatch and the chunk counted from the end. Source:
        `get_schedule_table`.
        """
        v, m = self.num_chunks, self.num_microbatches
        size = self.group_size if v > 1 else m
        groups = [np.arange(start, min(start + size, m)) for start in range(0, m, size)]
        return (
            np.concatenate([np.tile(group, v) for group in groups]),
            np.concatenate([np.repeat(np.arange(v), len(group)) for group in groups]),
            np.concatenate([np.full(v * len(group), len(group)) for group in groups]),
        )


def _moment(row: Sequence[int], event: int) -> Moment:
    backward, chunk, *in_flight = row
    return Moment("backward" if backward else "forward", chunk, tuple(in_flight), event)


def _maximal(moments: Sequence[Moment]) -> list[Moment]:
    """Return the moments whose in-flight counts no other moment's reach in every chunk."""
    # By descending total: what comes first exceeds, and is not exceeded by, what comes after it.
    rest = sorted(moments, key=lambda moment: -sum(moment.in_flight))
    counts = np.array([moment.in_flight for moment in rest])
    kept = []
    left = np.arange(len(rest))
    while len(left):
        kept.append(rest[left[0]])
        left = left[~np.all(counts[left] <= counts[left[0]], axis=1)]
    return kept


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step's forwards and backwards take, and what each stage does meanwhile."""

    total_ms: float
    """When the last stage finishes its last event."""
    busy_ms: tuple[float, ...]
    """Per stage, the sum of its events."""
    finish_ms: tuple[float, ...]
    """Per stage, when its last event ends."""

    @property
    def idle_ms(self) -> tuple[float, ...]:
        """Per stage, the bubble: total minus busy."""
        return tuple(self.total_ms - busy for busy in self.busy_ms)


def one_forward_one_backward_ms(stage_ms: Sequence[float], num_microbatches: int) -> float:
    """Return `sum(stage_ms) + (num_microbatches - 1) * max(stage_ms)`: the time of a 1F1B step.

    `stage_ms` is a stage's forward plus backward for one microbatch; messages are free. Exact when
    the last stage is slowest in forward and in backward, so also for equal stages, where it is the
    `(m + p - 1) * (t_f + t_b)` of Narayanan et al. 2021. An upper bound when all stages have the
    same ratio of backward to forward: a slow stage s runs up to `p - 1 - s` forwards while it waits
    for the first gradient. Neither otherwise, as the fixed order can stall stages for each other:
    over 1,500 random sets of times the replay took 0.77 to 1.03 of it.
    """
    _check_at_least(1, num_microbatches=num_microbatches, num_stages=len(stage_ms))
    return sum(stage_ms) + (num_microbatches - 1) * max(stage_ms)


def replay_ms(
    schedule: Schedule,
    forward_ms: Sequence[Sequence[float]],
    backward_ms: Sequence[Sequence[float]],
    p2p_ms: float = 0.0,
) -> StepTime:
    """Replay a step: every event starts when its stage is free and its input has arrived.

    `finished_ms` is the same for many sets of times at once.

    Args:
        schedule: the order of events.
        forward_ms: time of one forward, `[stage][chunk]`.
        backward_ms: time of one backward, recompute included, `[stage][chunk]`.
        p2p_ms: how long after an event's end its output is with the next stage.

    Assumes that messages take nobody's time (as with Megatron's `overlap_p2p_comm`) and that what
    EP overlap runs side by side runs one after the other; optimizer and gradient reduction are not
    part of it. Raises PipelineError for wrong shapes and for times that are negative or not finite.
    """
    forward = _times(schedule, forward_ms, "forward_ms")
    backward = _times(schedule, backward_ms, "backward_ms")
    if not (math.isfinite(p2p_ms) and p2p_ms >= 0):
        raise PipelineError(f"p2p_ms is {p2p_ms}; it must be finite and not negative.")
    finish = _finish_of_last_event_ms(schedule, forward, backward, p2p_ms)
    busy = schedule.num_microbatches * (forward + backward).sum(axis=1)
    return StepTime(float(finish.max()), tuple(busy.tolist()), tuple(finish.tolist()))


def finished_ms(
    schedule: Schedule, forward_ms: NDArray[np.float64], backward_ms: NDArray[np.float64]
) -> NDArray[np.float64]:
    """When the step ends, `[candidate]`, for times of `[stage, chunk, candidate]` in ms."""
    finish = _finish_of_last_event_ms(schedule, forward_ms, backward_ms, 0.0)
    return np.asarray(finish.max(axis=0), np.float64)


def _times(schedule: Schedule, times: Sequence[Sequence[float]], name: str) -> NDArray[np.float64]:
    shape = (schedule.num_stages, schedule.num_chunks)
    found = [len(row) for row in times]
    if found != [shape[1]] * shape[0]:
        raise PipelineError(
            f"{name} must have {shape[0]} stages of {shape[1]} chunks; found chunks {found}."
        )
    values = np.array(times, np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise PipelineError(f"{name} must be finite and not negative; found {values.tolist()}.")
    return values


def _finish_of_last_event_ms(
    schedule: Schedule,
    forward_ms: NDArray[np.float64],
    backward_ms: NDArray[np.float64],
    p2p_ms: float,
) -> NDArray[np.float64]:
    """Return when each stage is done, working through *slots* that all stages share.

    Times are `[stage, chunk]`, or with any further axes of candidates, which the result has, too.

    Forward k of stage s stands in slot `stride * s + 2 * k`, and its backward j in the slot after
    forward `uncapped warm-up + j`. A stage then has at most one event per slot, in the right order,
    and every event's input stands in an earlier slot (`stride` slots earlier, or, where a
    microbatch goes from the last stage round to the first, more, since groups have at least p
    microbatches). So one row of stages at a time can be computed; p=64 makes rows of 64.
    Seen from the last stage, backwards are as forwards are from the first: hence the two views.
    """
    p, stride = schedule.num_stages, schedule._stride
    _, chunk, group = schedule._table()
    total = len(chunk)
    first_backward = stride * (p - 1) + 2 * schedule._warmup_of_last_stage + 1
    slots = first_backward + stride * (p - 1) + 2 * total
    candidates = forward_ms.shape[2:]
    duration = np.zeros((slots, p, *candidates))
    _fill(duration, 0, stride, forward_ms[:, chunk])
    _fill(duration[:, ::-1], first_backward, stride, backward_ms[::-1, ::-1][:, chunk])
    # Where a microbatch comes round from the other end: which forward (backward) it was there.
    source = np.where(chunk > 0, np.arange(total) - group, -1).tolist()
    # Row `slot + stride`, column `stage + 1`: when the stage has finished what it has to do up to
    # the slot. Columns 0 and p + 1 are what arrives at the first stage and, backward, at the last.
    finish = np.zeros((slots + stride, p + 2, *candidates))
    finish[:, 0] = finish[:, -1] = -math.inf
    starts = ((0, finish), (first_backward, finish[:, ::-1]))
    active = _all_active(stride, p, total)
    for slot in range(slots):
        now = slot + stride
        finish[now, 1:-1] = finish[now - 1, 1:-1]
        for start, view in starts:
            since = slot - start
            slices = active[since] if 0 <= since < len(active) else None
            if slices is None:
                continue
            before, after = slices
            if before.start == 0 and source[since // 2] >= 0:
                view[slot, 0] = view[start + stride * p + 2 * source[since // 2], p]
            here = view[now, after]
            np.maximum(here, view[slot, before] + p2p_ms, out=here)
        finish[now, 1:-1] += duration[slot]
    return finish[-1, 1:-1]


def _fill(
    duration: NDArray[np.float64], start: int, stride: int, times: NDArray[np.float64]
) -> None:
    """Put `times[stage, number]` into `duration[slot, stage]`."""
    for stage, row in enumerate(times):
        first = start + stride * stage
        duration[first : first + 2 * len(row) : 2, stage] = row


@functools.lru_cache(maxsize=16)
def _all_active(stride: int, num_stages: int, total: int) -> list[tuple[slice, slice] | None]:
    """`_active` of every slot since the first one as slices, and the same one column on; None where
    there is none."""
    ranges = [
        _active(since, stride, num_stages, total)
        for since in range(stride * (num_stages - 1) + 2 * total - 1)
    ]
    return [
        (slice(r.start, r.stop, r.step), slice(r.start + 1, r.stop + 1, r.step)) if r else None
        for r in ranges
    ]


def _active(since: int, stride: int, num_stages: int, total: int) -> range:
    """Return the stages that have a forward (backward) so many slots after the first one."""
    low = max(0, -((2 * (total - 1) - since) // stride))
    high = min(num_stages - 1, since // stride)
    if stride == 2:
        return range(low, high + 1) if since % 2 == 0 else range(0)
    return range(low + (since - low) % 2, high + 1, 2)
