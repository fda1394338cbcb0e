"""The best policies' step time over memory as SVG: for the report's page, and for a file."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_autorecompute.planner.plan import ManualResult
from megatron_autorecompute.planner.search.curve import CurvePoint
from megatron_autorecompute.report.chart import FRAME, INK, Box, Chart, Name, circle, path, text
from megatron_autorecompute.report.data import Curve
from megatron_autorecompute.report.terminal import unbeaten
from megatron_autorecompute.report.words import duration, size

_OWN, _OVER = 'fill="#9aa4ad"', 'fill="none" stroke="#9aa4ad"'


def named(curve: Curve) -> list[ManualResult]:
    """The strategies, those first whose names matter most: the best that fits, both ends, and those
    that no other beats."""
    if not curve.strategies:
        return []
    fitting = [s for s in curve.strategies if s.fits]
    ends = (
        min(fitting, key=lambda s: s.step_ms, default=None),
        min(curve.strategies, key=lambda s: s.step_ms),
        min(curve.strategies, key=lambda s: s.peak_high_bytes),
        next((s for s in curve.strategies if s.name == "megatron:selective[core_attn]"), None),
    )
    first = [s for s in ends if s is not None]
    return list(dict.fromkeys([*first, *unbeaten(curve.strategies), *curve.strategies]))


def curve_svg(curve: Curve, title: str = "") -> str:
    """The curve; a page may style its classes otherwise, and show `data-tip` on hover."""
    ours = [curve.plan] if curve.plan else []
    peaks: list[ManualResult | CurvePoint] = [*curve.strategies, *ours]
    chart = Chart.around(
        [*(p.budget_bytes for p in curve.points), *(p.peak_high_bytes for p in peaks)],
        [p.step_ms for p in (*curve.points, *peaks)],
        curve.budget_bytes,
    )
    points = sorted(curve.points, key=lambda p: p.budget_bytes)
    own = [(chart.x(s.peak_high_bytes), chart.y(s.step_ms)) for s in named(curve)]
    line = [(chart.x(p.budget_bytes), chart.y(p.step_ms)) for p in points]
    names = [Name(chart.x(p.peak_high_bytes), chart.y(p.step_ms), *_THIS) for p in ours]
    texts = (s.name.removeprefix("megatron:") for s in named(curve))
    names += [Name(*place, name) for place, name in zip(own, texts, strict=True)]
    ends = [*(x for x, _ in line), FRAME.x + FRAME.width][1:]
    occupied = [Box(x - 4, y - 4, 8, 8) for x, y in [*line, *own]]
    levels = [Box(x, y - 2, end - x, 4) for (x, y), end in zip(line, ends, strict=True)]
    return chart.svg(
        [*_line(points, line), *_strategies(curve, chart)], names, [*occupied, *levels], title
    )


_THIS = ("this plan", INK, True)


def _line(points: list[CurvePoint], places: list[tuple[float, float]]) -> Iterator[str]:
    """The line as steps: a plan is best for all budgets up to the next faster plan's."""
    if not points:
        return
    (left, top), bottom = places[0], FRAME.y + FRAME.height
    yield (
        f'<rect class="no-fit" x="{FRAME.x}" y="{FRAME.y}" width="{left - FRAME.x:.1f}" '
        f'height="{FRAME.height}" fill="#e6e9ec"/>'
    )
    if left - FRAME.x > 70:
        yield text(FRAME.x + 6, bottom - 8, "no policy fits")
    steps = f"M{left} {top}" + "".join(f"H{x}V{y}" for x, y in places[1:])
    yield path("line", f"{steps}H{FRAME.x + FRAME.width}", "#0072b2", ' stroke-width="2"')
    for point, (x, y) in zip(points, places, strict=True):
        tip = (
            f"Budget {size(point.budget_bytes)}: {duration(point.step_ms)}\n"
            f"{_shortened(point.recompute_policy)}"
        )
        yield circle("step", x, y, 3, 'fill="#0072b2"', tip)


def _strategies(curve: Curve, chart: Chart) -> Iterator[str]:
    for strategy in named(curve)[::-1]:
        over = "" if strategy.fits else ": does not fit"
        tip = (
            f"{strategy.name}{over}\n{duration(strategy.step_ms)}, {size(strategy.peak_high_bytes)}"
        )
        x, y = chart.x(strategy.peak_high_bytes), chart.y(strategy.step_ms)
        kind, looks = ("manual", _OWN) if strategy.fits else ("over", _OVER)
        yield circle(kind, x, y, 4, looks, tip)
    if curve.plan:
        tip = f"This plan: {duration(curve.plan.step_ms)}, {size(curve.plan.peak_high_bytes)}"
        x, y = chart.x(curve.plan.peak_high_bytes), chart.y(curve.plan.step_ms)
        yield circle("ours", x, y, 7, 'fill="#b84a00"', tip)


def _shortened(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[:most] + " …"
