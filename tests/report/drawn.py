"""A second reader of our SVG, by matplotlib: texts have its extents."""

import re
from xml.etree import ElementTree

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Rectangle

ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def drawn(svg):
    """Rectangles, circles, lines and texts by their attributes; a pixel of the SVG is a point."""
    root = ElementTree.fromstring(svg)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    figure = Figure(figsize=(width / 72, height / 72), dpi=110)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    for element in root.iter():
        draw(axes, element.tag.rpartition("}")[2], element.attrib, element.text or "")
    return figure


def draw(axes, name, own, text):
    if name == "rect":
        place, size = (own["x"], own["y"]), (own["width"], own["height"])
        axes.add_patch(Rectangle([*map(float, place)], *map(float, size)))
    elif name == "circle":
        axes.add_patch(Circle((float(own["cx"]), float(own["cy"])), float(own["r"])))
    elif name == "path":
        axes.add_line(Line2D(*points(own["d"])))
    elif name == "text":
        shown = axes.text(float(own["x"]), float(own["y"]), text)
        shown.set(ha=ANCHORS[own.get("text-anchor", "start")], va="baseline")
        shown.set(size=float(own["font-size"]), weight=own.get("font-weight", "normal"))


def points(path):
    """x and y of a path of M, L, H, V and h."""
    xs, ys = [0.0], [0.0]
    for command, numbers in re.findall(r"([MLHVh])([^MLHVh]*)", path):
        first, *second = map(float, numbers.split())
        x = {"V": xs[-1], "h": xs[-1] + first}.get(command, first)
        xs.append(x)
        ys.append(first if command == "V" else second[0] if second else ys[-1])
    return xs[1:], ys[1:]
