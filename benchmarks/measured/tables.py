"""The CSV files of published runs, of every kind that is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.measured import cells, megatron_tests, simumax
from benchmarks.measured.flags import FieldError
from benchmarks.measured.runs import Run, Unread


def read(path: Path) -> Iterator[Run | Unread]:
    """Every row of a CSV of one of the known kinds; raises FieldError for another file."""
    with cells.opened(path) as table:
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
                cells.check(row)
                yield kind.run(row)
            except FieldError as error:
                yield Unread(name, row.get("tier") or "", str(error))
