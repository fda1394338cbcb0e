"""The CSV files of published runs, of every kind that is known."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measured import megatron_tests, simumax
from benchmarks.measured.flags import FieldError
from benchmarks.measured.runs import Run, Unread


def read(path: Path) -> Iterator[Run | Unread]:
    """Every row of a CSV of one of the known kinds; raises FieldError for another file."""
    try:
        yield from _rows(path)
    except (UnicodeDecodeError, csv.Error) as error:
        raise FieldError(f"{path}: no CSV in UTF-8: {error}") from error


def _rows(path: Path) -> Iterator[Run | Unread]:
    with open(path, newline="", encoding="utf-8-sig") as file:
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
                _check_cells(row)
                yield kind.run(row)
            except FieldError as error:
                yield Unread(name, row.get("tier") or "", str(error))


def _check_cells(row: dict[Any, Any]) -> None:
    if None in row:
        raise FieldError(f"{len(row[None])} more cells than columns")
    if lacking := [name for name, value in row.items() if value is None]:
        raise FieldError(f"{lacking[0]}: the row ends before it")
