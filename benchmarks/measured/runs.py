"""A published run: its flags, its machine, and the peaks that were measured.

A row that cannot be read is `Unread` with the field and the reason, never left out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measured.flags import FieldError


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
    step_ms: float | None = None
    """Of the settled run; None if the source does not say."""
    other_step_ms: Mapping[str, float] = field(default_factory=dict)
    """What other estimators predict, by their names."""
    encoder_decoder: tuple[int, int, int] | None = None
    """Of T5: encoder layers, decoder layers, decoder sequence length."""
    environment: tuple[tuple[str, Any], ...] = ()
    """Fields of `Job` that the flags do not say, and their values."""
    date: str = ""
    """When its source was written, year first."""
    recorded_with: str = ""
    """The commit of Megatron-LM whose run the step is of; "" if not known."""
    old_container: bool = False
    """Whether it ran in Megatron's container of long support."""
    family: str = ""
    uncovered: str = ""
    """Why the run is not predicted."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A row that is none."""

    name: str
    tier: str
    reason: str


def read(path: Path) -> Iterator[Run | Unread]:
    """Every row of a CSV of one of the known kinds; raises FieldError for another file."""
    from benchmarks.measured import megatron_tests, simumax

    with open(path, newline="", encoding="utf-8") as file:
        table = csv.DictReader(file)
        columns = set(table.fieldnames or ())
        for kind in (megatron_tests, simumax):
            if columns >= kind.COLUMNS:
                break
        else:
            lacking = sorted(megatron_tests.COLUMNS - columns)
            raise FieldError(
                f"{path}: columns of no known kind. As a table of Megatron's tests it lacks "
                f"{', '.join(lacking)}; as one of SimuMax's runs "
                f"{', '.join(sorted(simumax.COLUMNS - columns))}."
            )
        for number, row in enumerate(table, start=2):
            name = row.get("case") or f"line {number}"
            try:
                yield kind.run(row)
            except FieldError as error:
                yield Unread(name, row.get("tier") or "", str(error))
