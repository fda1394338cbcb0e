"""A published run: its flags, its machine, and the peaks that were measured.

A row that cannot be read is `Unread` with the field and the reason, never left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Measured:
    """One stage's peak."""

    stage: int
    """From the end where negative: -1 is the last."""
    peak_bytes: int
    others: Mapping[str, int] = field(default_factory=dict)
    """What other estimators predict, by their names."""


@dataclass(frozen=True, slots=True)
class Run:
    """One row."""

    name: str
    source: str
    tier: str
    gpu: str
    flags: tuple[str, ...]
    """Of pretrain_gpt.py, those that bear on bytes."""
    worlds: tuple[int, ...]
    """GPUs; several where the source does not say how many."""
    measured: tuple[Measured, ...]
    between_steps_bytes: int | None = None
    """Allocated between steps; chooses among `worlds`."""
    first_step_bytes: int | None = None
    """The last stage's peak in the run's first step; None if unknown or not from scratch."""
    second_step_bytes: int | None = None
    """The last stage's peak at the second step that was logged; None if unknown."""
    reached_at_once: bool = False
    """Whether the run goes on from a checkpoint and none of its steps took more than the first."""
    step_ms: float | None = None
    """Of the settled run; None if the source does not say."""
    other_step_ms: Mapping[str, float] = field(default_factory=dict)
    """What other estimators predict, by their names."""
    checks_itself: bool = False
    """Whether every step compares ranks, on the CPU or waiting for it, which is no training."""
    encoder_decoder: tuple[int, int, int] | None = None
    """Of T5: encoder layers, decoder layers, decoder sequence length."""
    environment: tuple[tuple[str, Any], ...] = ()
    """Fields of `Job` that the flags do not say, and their values; `AROUND_JOB` too."""
    evaluates: bool = False
    """Whether an evaluation precedes its last step."""
    added: bool = False
    """Whether it was added when the model was done, so that it can only judge."""
    date: str = ""
    """When its source was written, year first."""
    peaks_since: str = ""
    """When the source first had these peaks, year first; "" if not known."""
    scatters: bool = False
    """Whether its Megatron adds up experts' outputs by `scatter_add_` in deterministic mode."""
    recorded_with: str = ""
    """The commit of Megatron-LM whose run the step is of; "" if not known."""
    machine: str = ""
    """Whose it was, by `machines`; "" if not known."""
    old_container: bool = False
    """Whether it ran in Megatron's container of long support."""
    flags_without_quantising: tuple[str, ...] = ()
    """The same flags in bf16, where a file that is not public says which layers are quantised."""
    family: str = ""
    uncovered: str = ""
    """Why the run is not predicted."""


AROUND_JOB = frozenset({"expandable_segments", "keeps_microbatches"})
"""Of a run's environment, and no fields of `Job`: whether PYTORCH_CUDA_ALLOC_CONF has
expandable_segments:True, and whether microbatches stay (`kept_microbatches`)."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A row that is none."""

    name: str
    tier: str
    reason: str
