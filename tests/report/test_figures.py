"""Names in pictures stand beside their points, and cover neither each other nor a line."""

import itertools
import random

import pytest
from matplotlib import pyplot
from matplotlib.text import Text

from megatron_autorecompute.compare.comparison import Comparison, Shape, StrategyResult
from megatron_autorecompute.compare.rendering import picture
from megatron_autorecompute.planner.plan import CurvePoint, ManualResult
from megatron_autorecompute.report.data import Curve
from megatron_autorecompute.report.figures import curve_picture
from megatron_autorecompute.units import GIB, MIB

GROUPS = ("none", "selective", "full", "manual", "ours")


@pytest.fixture
def drawn(monkeypatch):
    """The axes of the next picture, left open."""
    found = []
    monkeypatch.setattr(pyplot, "close", lambda figure: found.append(figure.axes[0]))
    yield found
    monkeypatch.undo()
    pyplot.close("all")


def extents(axes):
    """Of every name in pixels, without the line that leads to it."""
    axes.figure.canvas.draw()
    renderer = axes.figure.canvas.get_renderer()
    return {text.get_text(): Text.get_window_extent(text, renderer) for text in axes.texts}


def comparison(seed):
    rng = random.Random(seed)
    results = [
        StrategyResult(
            name,
            name if name in GROUPS else "tried",
            "full",
            (round(rng.uniform(100, 300) * MIB),),
            tuple(rng.uniform(900, 2000) + rng.uniform(0, 60) for _ in range(3)),
        )
        for name in (*GROUPS, *(f"block/{i}" for i in range(1, 7)), "selective[core_attn+mlp]")
    ]
    budget = max(results[4].peak_bytes)  # ours stands on the line
    return Comparison(budget, tuple(results), job=Shape())


@pytest.mark.parametrize("seed", range(6))
def test_no_name_of_a_comparison_is_on_another_or_on_the_budgets_line(seed, drawn, tmp_path):
    record = comparison(seed)
    picture(record, tmp_path / "a.png")
    (axes,) = drawn
    found = extents(axes)
    assert found.keys() == {s.name for s in record.strategies} | {"budget"}
    for one, other in itertools.combinations(found.values(), 2):
        assert not one.overlaps(other)
    line = axes.transData.transform((record.budget_bytes / MIB, 0))[0]
    frame = axes.get_window_extent()
    for box in found.values():
        assert not box.x0 <= line <= box.x1
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1


def curve():
    points = [CurvePoint(i * GIB, 5000 - 90 * i, i * GIB, "full") for i in range(40, 10, -1)]
    strategies = [
        ManualResult("megatron:none", 1400.0, 40 * GIB, True),
        ManualResult("megatron:uniform/2", 4200.0, 10 * GIB, True),
        ManualResult("megatron:selective[core_attn]", 3000.0, 25 * GIB, True),
    ]
    return Curve("a model", tuple(points), tuple(strategies))


def test_a_curves_picture_has_every_point_and_names_that_do_not_touch(drawn, tmp_path):
    curve_picture(curve(), tmp_path / "a.png")
    (axes,) = drawn
    found = extents(axes)
    assert found.keys() == {"none", "uniform/2", "selective[core_attn]"}
    assert not any(a.overlaps(b) for a, b in itertools.combinations(found.values(), 2))
    _, points, own = axes.lines
    assert len(points.get_xdata()) == 30
    assert sorted(own.get_ydata()) == [1400.0, 3000.0, 4200.0]


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_equal_curves_are_equal_files(name, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        curve_picture(curve(), tmp_path / folder / name)
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
