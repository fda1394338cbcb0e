"""matplotlib's figures as SVG and as files, without pyplot. A unit of an SVG is a point of
matplotlib."""

from __future__ import annotations

import io
import re
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from megatron_autorecompute.json_records import write_atomically

POINTS = 72
"""Points of an inch."""
DPI = 110
_MARKED = re.compile(r'<g id="@([\w-]+) ?(\d*)(?:: ([^"]*))?">')
"""An artist whose `gid` is @CLASS, @CLASS: TITLE or @CLASS LAYER: TITLE."""


def svg(figure: Figure, kind: str, about: str, style: str = "") -> str:
    """The picture as an SVG element; a `gid` that begins with @ gives its class and its title.

    Args:
        figure: what is drawn.
        kind: the element's class.
        about: what a screen reader says of it.
        style: a style sheet for pictures that stand alone.
    """
    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": kind}):
        figure.savefig(text, format="svg", facecolor="none", metadata={"Date": None})
    left_out = r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>"
    found = re.sub(left_out, "", text.getvalue(), flags=re.DOTALL)
    found = _MARKED.sub(_marked, found[found.index("<svg") :])
    head = f'<svg class="{kind}" role="group" aria-label="{about}" '
    head += re.sub(r'"([\d.]+)pt"', r'"\1"', found[len("<svg ") : found.index(">") + 1])
    return f"{head}{style and f'<style>{style}</style>'}{found[found.index('>') + 1 :]}"


def _marked(match: re.Match[str]) -> str:
    kind, layer, title = match.groups()
    of_layer = f' data-layer="{layer}"' if layer else ""
    return f'<g class="{kind}"{of_layer}>' + (f"<title>{title}</title>" if title else "")


def save_picture(figure: Figure, path: Path) -> None:
    """Write a picture, PNG or SVG by the file's name, whole or not at all. Raises: ProfileError if
    the file cannot be written."""
    if path.suffix == ".svg":
        text = svg(figure, "curve", "Step time against memory")
        write_atomically(f'<?xml version="1.0" encoding="UTF-8"?>\n{text}', path)
        return
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=DPI)
    write_atomically(image.getvalue(), path)
