#!/usr/bin/env python3
"""Put the results that README.md and docs/ quote into them, from the files their markers name.

A marker is `<!-- quoted: FILE -->`; the quote ends at `<!-- end of quote -->`. Markdown is quoted
as it is, anything else as code.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
QUOTED = re.compile(r"(<!-- quoted: (\S+) -->\n).*?(<!-- end of quote -->)", re.DOTALL)


def updated(page: str) -> str:
    """The text with every quote as its file has it now."""
    return QUOTED.sub(lambda m: f"{m[1]}{_quote(ROOT / m[2])}{m[3]}", page)


def _quote(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return text if path.suffix == ".md" else f"```\n{text.strip()}\n```\n"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
