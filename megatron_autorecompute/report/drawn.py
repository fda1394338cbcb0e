"""Pixels of this package's SVG, by matplotlib without pyplot: a program's own figures stay as they
are."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Rectangle
from numpy.typing import NDArray

from megatron_autorecompute.json_records import write_atomically

Image = NDArray[np.uint8]
"""Height, width, and red, green and blue."""
Attributes = dict[str, str]
DPI = 110
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def drawn(svg: str) -> Figure:
    """Rectangles, circles, lines and texts by their attributes, without style sheets, on white; a
    pixel of the SVG is a point."""
    root = ElementTree.fromstring(svg)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    figure = Figure(figsize=(width / 72, height / 72), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for at, element in enumerate(root.iter()):
        _draw(axes, element.tag.rpartition("}")[2], element.attrib, element.text or "", at)
    return figure


def _draw(axes: Axes, name: str, own: Attributes, text: str, at: int) -> None:
    def length(of: str) -> float:
        return float(own[of])

    filled: dict[str, Any] = {"fc": own.get("fill"), "ec": own.get("stroke", "none"), "zorder": at}
    if name == "rect":
        place = length("x"), length("y")
        axes.add_patch(Rectangle(place, length("width"), length("height"), **filled))
    elif name == "circle":
        axes.add_patch(Circle((length("cx"), length("cy")), length("r"), **filled))
    elif name == "path":
        dashes = "--" if "stroke-dasharray" in own else "-"
        wide, colour = float(own.get("stroke-width", 1)), own["stroke"]
        axes.add_line(Line2D(*_points(own["d"]), lw=wide, color=colour, ls=dashes, zorder=at))
    elif name == "text":
        shown = axes.text(length("x"), length("y"), text, color=own["fill"], zorder=at)
        shown.set(ha=_ANCHORS[own.get("text-anchor", "start")], va="baseline")
        shown.set(size=length("font-size"), weight=own.get("font-weight", "normal"))


def _points(path: str) -> tuple[list[float], list[float]]:
    """x and y of a path of M, L, H, V and h."""
    xs, ys = [0.0], [0.0]
    for command, numbers in re.findall(r"([MLHVh])([^MLHVh]*)", path):
        first, *second = map(float, numbers.split())
        x = {"V": xs[-1], "h": xs[-1] + first}.get(command, first)
        xs.append(x)
        ys.append(first if command == "V" else second[0] if second else ys[-1])
    return xs[1:], ys[1:]


def save_picture(svg: str, path: Path) -> None:
    """Write a picture, PNG or SVG by the file's name, whole or not at all. Raises: ProfileError if
    the file cannot be written."""
    if path.suffix == ".svg":
        write_atomically(f'<?xml version="1.0" encoding="UTF-8"?>\n{svg}\n', path)
        return
    image = io.BytesIO()
    drawn(svg).savefig(image, format="png")
    write_atomically(image.getvalue(), path)


def pixels(figure: Figure) -> Image:
    """A figure as pixels."""
    canvas: Any = FigureCanvasAgg(figure)  # its methods have no types
    canvas.draw()
    return np.array(canvas.buffer_rgba(), np.uint8)[:, :, :3].copy()
