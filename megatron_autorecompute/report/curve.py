"""Step time against memory as a picture: SVG for the report's page, PNG or SVG in a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from megatron_autorecompute.planner.plan import CurvePoint, ManualResult
from megatron_autorecompute.report.data import Curve
from megatron_autorecompute.report.labels import Box, placed
from megatron_autorecompute.report.words import duration, size
from megatron_autorecompute.units import GIB, MIB

_WIDTH, _HEIGHT = 1180, 330
_FRAME = Box(62, 14, 1096, 270)


@dataclass(frozen=True, slots=True)
class _Scale:
    low_bytes: float
    high_bytes: float
    low_ms: float
    high_ms: float

    def x(self, size_bytes: float) -> float:
        share = (size_bytes - self.low_bytes) / (self.high_bytes - self.low_bytes)
        return round(_FRAME.x + share * _FRAME.width, 1)

    def y(self, time_ms: float) -> float:
        share = (time_ms - self.low_ms) / (self.high_ms - self.low_ms)
        return round(_FRAME.y + (1 - share) * _FRAME.height, 1)


def named(curve: Curve) -> list[ManualResult]:
    """The strategies that get a name in the picture: the best that fits, and both ends."""
    if not curve.strategies:
        return []
    fitting = [s for s in curve.strategies if s.fits]
    ends = (
        min(fitting, key=lambda s: s.step_ms, default=None),
        min(curve.strategies, key=lambda s: s.step_ms),
        min(curve.strategies, key=lambda s: s.peak_high_bytes),
        next((s for s in curve.strategies if s.name == "megatron:selective[core_attn]"), None),
    )
    return list(dict.fromkeys(s for s in ends if s is not None))


def curve_svg(curve: Curve) -> str:
    """The curve as SVG, for a page that styles it and shows `data-tip` on hover."""
    scale = _scale(curve)
    parts = [*_ground(curve, scale), *_line(curve, scale), *_points(curve, scale)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'role="group" aria-label="Step time against memory">\n' + "\n".join(parts) + "\n</svg>"
    )


def _scale(curve: Curve) -> _Scale:
    strategies: list[ManualResult | CurvePoint] = [*curve.strategies]
    strategies += [curve.plan] if curve.plan else []
    times = [p.step_ms for p in (*curve.points, *strategies)]
    sizes = [p.budget_bytes for p in curve.points]
    sizes += [p.peak_high_bytes for p in strategies]
    sizes += [curve.budget_bytes] if curve.budget_bytes else []
    widths = (max(sizes) - min(sizes) or max(sizes)), (max(times) - min(times) or max(times))
    return _Scale(
        max(0, min(sizes) - 0.06 * widths[0]),
        max(sizes) + 0.06 * widths[0],
        max(0, min(times) - 0.1 * widths[1]),
        max(times) + 0.1 * widths[1],
    )


def ticks(low: float, high: float, about: int) -> list[float]:
    """About `about` round numbers within an interval."""
    least = (high - low) / about
    power = 10 ** math.floor(math.log10(least))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= least)
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step) + 1)]


def _ground(curve: Curve, scale: _Scale) -> Iterator[str]:
    bottom = _FRAME.y + _FRAME.height
    if curve.points:
        left = scale.x(min(p.budget_bytes for p in curve.points))
        width = left - _FRAME.x
        yield f'<rect class="no-fit" x="{_FRAME.x}" y="{_FRAME.y}" width="{width}" height="270"/>'
        if width > 70:
            yield f'<text x="{_FRAME.x + 6}" y="{bottom - 8}">no policy fits</text>'
    unit = GIB if scale.high_bytes > 2 * GIB else MIB
    for at in ticks(scale.low_bytes / unit, scale.high_bytes / unit, 10):
        x = scale.x(at * unit)
        yield f'<path class="axis" d="M{x} {_FRAME.y}V{bottom}"/>'
        yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{at:g}</text>'
    name = "GiB" if unit == GIB else "MiB"
    yield (
        f'<text x="{_FRAME.x + _FRAME.width / 2}" y="{bottom + 36}" text-anchor="middle">'
        f"{name} of the fullest stage</text>"
    )
    seconds = scale.high_ms >= 2000
    for at in ticks(scale.low_ms, scale.high_ms, 6):
        y = scale.y(at)
        text = f"{at / 1000:g} s" if seconds else f"{at:g} ms"
        yield f'<path class="axis" d="M{_FRAME.x} {y}H{_FRAME.x + _FRAME.width}"/>'
        yield f'<text x="{_FRAME.x - 6}" y="{y + 4}" text-anchor="end">{text}</text>'
    if curve.budget_bytes:
        x = scale.x(curve.budget_bytes)
        yield f'<path class="budget" d="M{x} {_FRAME.y}V{bottom}"/>'


def _line(curve: Curve, scale: _Scale) -> Iterator[str]:
    """The line, in steps: a plan is best for all budgets up to the next faster plan's."""
    points = sorted(curve.points, key=lambda p: p.budget_bytes)
    if not points:
        return
    path = f"M{scale.x(points[0].budget_bytes)} {scale.y(points[0].step_ms)}"
    for point in points[1:]:
        path += f"H{scale.x(point.budget_bytes)}V{scale.y(point.step_ms)}"
    yield f'<path class="line" d="{path}H{_FRAME.x + _FRAME.width}"/>'
    for point in points:
        tip = (
            f"Budget {size(point.budget_bytes)}: {duration(point.step_ms)}\n"
            f"{_shortened(point.recompute_policy)}"
        )
        yield _circle("step", scale.x(point.budget_bytes), scale.y(point.step_ms), 3, tip)


def _points(curve: Curve, scale: _Scale) -> Iterator[str]:
    shown = named(curve)
    for strategy in sorted(curve.strategies, key=lambda s: s in shown):
        over = "" if strategy.fits else ": does not fit"
        tip = (
            f"{strategy.name}{over}\n{duration(strategy.step_ms)}, {size(strategy.peak_high_bytes)}"
        )
        radius = 5 if strategy in shown else 3.5
        x, y = scale.x(strategy.peak_high_bytes), scale.y(strategy.step_ms)
        yield _circle("manual" if strategy.fits else "over", x, y, radius, tip)
    places = [(scale.x(s.peak_high_bytes), scale.y(s.step_ms)) for s in shown]
    texts = [s.name.removeprefix("megatron:") for s in shown]
    if curve.plan:
        x, y = scale.x(curve.plan.peak_high_bytes), scale.y(curve.plan.step_ms)
        tip = f"This plan: {duration(curve.plan.step_ms)}, {size(curve.plan.peak_high_bytes)}"
        yield _circle("ours", x, y, 7, tip)
        places, texts = [(x, y), *places], ["this plan", *texts]
    if curve.budget_bytes:
        places = [*places, (scale.x(curve.budget_bytes), _FRAME.y + 10)]
        texts = [*texts, f"budget {size(curve.budget_bytes)}"]
    yield from _names(curve, scale, places, texts)


def _names(
    curve: Curve, scale: _Scale, places: Sequence[tuple[float, float]], texts: Sequence[str]
) -> Iterator[str]:
    sizes = [(6.4 * len(text), 13.0) for text in texts]
    occupied = [
        Box(scale.x(p.budget_bytes) - 4, scale.y(p.step_ms) - 4, 8, 8) for p in curve.points
    ]
    occupied += _steps(curve, scale)
    occupied += [
        Box(scale.x(s.peak_high_bytes) - 4, scale.y(s.step_ms) - 4, 8, 8) for s in curve.strategies
    ]
    if curve.budget_bytes:
        occupied.append(Box(scale.x(curve.budget_bytes) - 1, _FRAME.y, 2, _FRAME.height))
    for box, text in zip(placed(places, sizes, _FRAME, occupied), texts, strict=True):
        strong = ' class="strong"' if text == "this plan" else ""
        yield f'<text{strong} x="{box.x:.1f}" y="{box.y + 10:.1f}">{escape(text)}</text>'


def _steps(curve: Curve, scale: _Scale) -> Iterator[Box]:
    """Boxes around the level parts of the line."""
    points = sorted(curve.points, key=lambda p: p.budget_bytes)
    ends = [scale.x(p.budget_bytes) for p in points[1:]] + [_FRAME.x + _FRAME.width]
    for point, end in zip(points, ends, strict=True):
        start = scale.x(point.budget_bytes)
        yield Box(start, scale.y(point.step_ms) - 2, end - start, 4)


def _circle(kind: str, x: float, y: float, radius: float, tip: str) -> str:
    return (
        f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}" tabindex="0" '
        f'data-tip="{escape(tip)}" aria-label="{escape(tip)}"/>'
    )


def _shortened(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[:most] + " …"
