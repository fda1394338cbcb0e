"""Predicted against measured peaks: one dot for each stage."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from benchmarks.measured.page import by_family, judged
from benchmarks.measured.results import Data

MOST_SHOWN = 0.25
"""Errors beyond are drawn at the edge."""
MARKERS = "o^s"


def write(data: Data, path: Path) -> None:
    """As SVG, the same bytes for the same results."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for number, (name, points) in enumerate(by_family(judged(data)).items()):
        errors = [max(-MOST_SHOWN, min(MOST_SHOWN, point["error"])) for point in points]
        sizes = [point["measured_bytes"] / 1e9 for point in points]
        marker = MARKERS[number // 10 % len(MARKERS)]  # of ten colours
        axes.scatter(sizes, errors, s=14, alpha=0.6, label=name, marker=marker)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("measured peak, GB")
    axes.set_ylabel("predicted over measured")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylim(-MOST_SHOWN * 1.05, MOST_SHOWN * 1.05)
    axes.legend(fontsize=7, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "measured"}):  # ids are random without
        figure.savefig(path, format="svg", metadata={"Date": None})
