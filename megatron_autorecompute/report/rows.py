"""Tables of a terminal: columns where they fit, else one block of lines per row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

LEAST_FOLDED = 16
"""Columns below which a text that is folded over lines cannot be read."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    header: str
    """The header's text, which may have several lines."""
    text: Callable[[Any], str]
    """The text of a row's item."""
    name: str = ""
    """The header in one line, for blocks; default: the header's lines, joined by blanks."""
    left: bool = False
    """Texts begin at the left; numbers end at the right."""
    folded: bool = False
    """Texts that are too long for the terminal go on in the next line. At most one column."""
    optional: bool = False
    """The column is left out if none of its rows has a text."""

    @property
    def spoken(self) -> str:
        """`name`, or the header in one line."""
        return self.name or " ".join(self.header.split())


Shown = tuple[Column, Sequence[str]]
"""A column and its texts."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A table with a row for each item."""

    columns: Sequence[Column]
    items: Iterable[Any]
    gap: int = 2
    """Blanks between two columns."""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        items = list(self.items)
        texts = [(column, [column.text(item) for item in items]) for column in self.columns]
        shown = [(column, own) for column, own in texts if not column.optional or any(own)]
        widths = [_width(*pair) for pair in shown]
        if sum(widths) + self.gap * (len(widths) - 1) <= options.max_width:
            yield self._table(shown)
        else:
            yield from _blocks(shown)

    def _table(self, shown: Sequence[Shown]) -> Table:
        left = self.gap // 2
        table = Table(box=None, pad_edge=False, padding=(0, self.gap - left, 0, left))
        for column, _ in shown:
            table.add_column(
                column.header,
                justify="left" if column.left or column.folded else "right",
                no_wrap=not column.folded,
                overflow="fold",
            )
        for row in zip(*(texts for _, texts in shown), strict=True):
            table.add_row(*map(Text, row))  # brackets are no markup
        return table


def _width(column: Column, texts: Sequence[str]) -> int:
    longest = max(len(line) for text in (column.header, *texts) for line in text.split("\n"))
    return min(longest, LEAST_FOLDED) if column.folded else longest


def _blocks(shown: Sequence[Shown]) -> Iterator[RenderableType]:
    first, *others = (column for column, _ in shown)
    for row in zip(*(texts for _, texts in shown), strict=True):
        yield Text(f"{first.spoken} {row[0]}")
        folded = [text for column, text in zip(others, row[1:], strict=True) if column.folded]
        yield from (Padding(Text(text, overflow="fold"), (0, 0, 0, 2)) for text in folded)
        said = [
            f"{column.spoken} {' '.join(text.split())}"
            for column, text in zip(others, row[1:], strict=True)
            if not column.folded and text
        ]
        yield Padding(Text(", ".join(part.strip() for part in said)), (0, 0, 0, 2))
