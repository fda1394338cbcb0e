#!/usr/bin/env python3
"""Put the tables that README.md quotes into it, from the files its markers name."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUOTED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def updated(readme: str) -> str:
    """The text with every quoted table as its file has it now."""
    return QUOTED.sub(lambda m: f"{m[1]}{(ROOT / m[2]).read_text()}{m[3]}", readme)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(updated(path.read_text()))
