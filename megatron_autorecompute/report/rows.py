"""Tables of a terminal; where it is narrow, the widest cells are folded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Column, Table
from rich.text import Text


def right(header: str) -> Column:
    """A column of numbers."""
    return Column(header, justify="right", overflow="fold")


def left(header: str) -> Column:
    """A column of texts."""
    return Column(header, overflow="fold")


def table(columns: Iterable[Column], cells: Iterable[Sequence[str]], gap: int = 2) -> Table:
    """Columns with one text per row, `gap` blanks between them."""
    own = [column.copy() for column in columns]  # a Table keeps its cells in its columns
    shown = Table(*own, box=None, pad_edge=False, padding=(0, gap - gap // 2, 0, gap // 2))
    for row in cells:
        shown.add_row(*map(Text, row))  # brackets are no markup
    return shown
