#!/usr/bin/env python3
"""Put the results that README.md and docs/ quote into them, from the files their markers name.

A marker is `<!-- quoted: FILE -->`; the quote ends at `<!-- end of quote -->`. Markdown is quoted
as it is, anything else as code. Within a sentence `<!-- cell: FILE ; ROW ; COLUMN -->`, up to
`<!-- end of cell -->`, is one figure of a table in FILE: of the row that begins with the cells ROW.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
QUOTED = re.compile(r"(<!-- quoted: (\S+) -->\n).*?(<!-- end of quote -->)", re.DOTALL)
CELL = re.compile(r"(<!-- cell: (\S+) ; (.+?) ; (.+?) -->).*?(<!-- end of cell -->)")


def updated(page: str) -> str:
    """The text with every quote as its file has it now."""
    page = QUOTED.sub(lambda m: f"{m[1]}{_quote(ROOT / m[2])}{m[3]}", page)
    return CELL.sub(lambda m: f"{m[1]}{_cell(ROOT / m[2], m[3], m[4])}{m[5]}", page)


def _quote(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return text if path.suffix == ".md" else f"```\n{text.strip()}\n```\n"


def _cell(path: Path, row: str, column: str) -> str:
    """Of the first table that has this row."""
    lines = path.read_text(encoding="utf-8").splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {row} |"))
    top = max(i for i in range(at) if lines[i].startswith("| ---"))
    cells = dict(zip(lines[top - 1].split(" | "), lines[at].split(" | "), strict=True))
    return cells[column]


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
