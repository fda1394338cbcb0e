"""Names in pictures stand beside their points, and cover neither each other nor a line."""

import itertools
import random

import pytest

from megatron_autorecompute.compare.comparison import Comparison, Shape, StrategyResult
from megatron_autorecompute.compare.rendering import chart_of
from megatron_autorecompute.planner.plan import ManualResult
from megatron_autorecompute.planner.search.curve import CurvePoint
from megatron_autorecompute.report.chart import curve_chart
from megatron_autorecompute.report.data import Curve
from megatron_autorecompute.report.figures import save_picture, svg
from megatron_autorecompute.units import GIB, MIB

GROUPS = ("none", "selective", "full", "skips", "manual", "ours")


def extents(figure):
    """Of every text in the pixels of matplotlib."""
    return {text.get_text(): text.get_window_extent() for text in figure.axes[0].texts}


def apart(found):
    return not any(a.overlaps(b) for a, b in itertools.combinations(found.values(), 2))


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
def test_no_name_of_a_comparison_is_on_another_or_on_the_budgets_line(seed):
    record = comparison(seed)
    figure = chart_of(record)
    found = extents(figure)
    budget = f"budget {record.budget_bytes / MIB:.1f} MiB"
    names = {s.name for s in record.strategies} | {budget}
    assert found.keys() > names
    assert apart(found)
    axes = figure.axes[0]
    at = axes.transData.transform((record.budget_bytes / MIB, 0))[0]
    for box in (found[name] for name in names):
        assert not box.x0 <= at <= box.x1
        assert axes.bbox.contains(*box.min)
        assert axes.bbox.contains(*box.max)


def test_a_comparison_in_which_nothing_ran_has_a_picture(tmp_path):
    for budget in (None, 1 << 30):
        path = tmp_path / f"{budget}.png"
        save_picture(chart_of(Comparison(budget, (), job=Shape())), path)
        assert path.read_bytes()[:4] == b"\x89PNG"


def curve(*more):
    points = [CurvePoint(i * GIB, 5000 - 90 * i, i * GIB, "full") for i in range(40, 10, -1)]
    strategies = [
        ManualResult("megatron:none", 1400.0, 40 * GIB, True),
        ManualResult("megatron:uniform/2", 4200.0, 10 * GIB, True),
        ManualResult("megatron:selective[core_attn]", 3000.0, 25 * GIB, True),
        *more,
    ]
    return Curve("a model", tuple(points), tuple(strategies))


def test_a_curves_picture_has_every_point_and_names_that_do_not_touch():
    figure = curve_chart(curve())
    found = extents(figure)
    assert found.keys() > {"none", "uniform/2", "selective[core_attn]"}
    assert apart(found)
    drawn = svg(figure, "curve", "")
    assert drawn.count("<title>Budget") == 30
    assert drawn.count("<title>megatron:") == 3


def test_every_setting_of_megatrons_is_named_where_there_is_room():
    more = [ManualResult(f"megatron:block/{i}", 4300 + 20 * i, i * GIB, False) for i in (15, 25)]
    found = extents(curve_chart(curve(*more)))
    assert found.keys() > {"block/15", "block/25", "none"}
    crowd = [ManualResult(f"megatron:block/{i}", 2000.0, 30 * GIB, True) for i in range(99)]
    found = extents(curve_chart(curve(*crowd)))
    assert apart(found)
    assert found.keys() > {"none", "uniform/2", "selective[core_attn]", "block/0"}


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_equal_curves_are_equal_files(name, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        save_picture(curve_chart(curve(), "a model"), tmp_path / folder / name)
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
