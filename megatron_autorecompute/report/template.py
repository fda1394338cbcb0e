"""The templates of pages and pictures."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from megatron_autorecompute.report.words import duration, percent, size

TEMPLATES = Path(__file__).parent / "templates"


def template(name: str) -> Template:
    """A template by its file's name; it escapes what it is given."""
    files = Environment(
        loader=FileSystemLoader(str(TEMPLATES)),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    files.filters |= {"size": size, "duration": duration, "percent": percent}
    return files.get_template(name)
