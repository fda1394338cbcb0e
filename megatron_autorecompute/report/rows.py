"""Tables of a terminal: columns where they fit, else one block of lines per row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class Rows:
    """A table of texts."""

    columns: Sequence[Column]
    cells: Sequence[Sequence[str]]
    """One text per column and row."""
    gap: int = 2
    """Blanks between two columns."""

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        shown = [
            number
            for number, column in enumerate(self.columns)
            if not column.optional or any(row[number] for row in self.cells)
        ]
        cells = [[row[number] for number in shown] for row in self.cells]
        own = replace(self, columns=[self.columns[number] for number in shown], cells=cells)
        if own.least_width() <= options.max_width:
            yield own._table()
        else:
            yield from own._blocks()

    def least_width(self) -> int:
        """Columns of a terminal that the table needs."""
        widths = [self._width(number) for number in range(len(self.columns))]
        return sum(widths) + self.gap * (len(widths) - 1)

    def _width(self, number: int) -> int:
        column = self.columns[number]
        texts = [column.header, *(row[number] for row in self.cells)]
        longest = max(len(line) for text in texts for line in text.split("\n"))
        return min(longest, LEAST_FOLDED) if column.folded else longest

    def _table(self) -> Table:
        left = self.gap // 2
        table = Table(box=None, pad_edge=False, padding=(0, self.gap - left, 0, left))
        for column in self.columns:
            table.add_column(
                column.header,
                justify="left" if column.left or column.folded else "right",
                no_wrap=not column.folded,
                overflow="fold",
            )
        for row in self.cells:
            table.add_row(*map(Text, row))  # brackets are no markup
        return table

    def _blocks(self) -> Iterator[RenderableType]:
        first, *others = self.columns
        for row in self.cells:
            yield Text(f"{first.spoken} {row[0]}")
            folded = [text for column, text in zip(others, row[1:], strict=True) if column.folded]
            yield from (Padding(Text(text, overflow="fold"), (0, 0, 0, 2)) for text in folded)
            said = [
                f"{column.spoken} {' '.join(text.split())}"
                for column, text in zip(others, row[1:], strict=True)
                if not column.folded and text
            ]
            yield Padding(Text(", ".join(part.strip() for part in said)), (0, 0, 0, 2))
