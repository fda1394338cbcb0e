"""The cells of a CSV of published runs, as far as they are the same for every kind of it."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measured.flags import FieldError


@contextlib.contextmanager
def opened(path: Path) -> Iterator[csv.DictReader[str]]:
    """A CSV by its columns. Raises FieldError for another file, when it is read, too."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            yield csv.DictReader(file)
    except (UnicodeDecodeError, csv.Error) as error:
        raise FieldError(f"{path}: no CSV in UTF-8: {error}") from error


def check(row: dict[Any, Any]) -> None:
    """Raises FieldError for a row that has more or fewer cells than there are columns."""
    if None in row:
        raise FieldError(f"{len(row[None])} more cells than columns")
    if lacking := [name for name, value in row.items() if value is None]:
        raise FieldError(f"{lacking[0]}: the row ends before it")
