"""Bytes and times of a layer as lines in the tokens of a microbatch, fitted to what was seen.

Everything that a layer keeps or computes has a size per token, with two exceptions. Unfused
attention has tensors of length x length for each sample. A layer with experts gets the tokens that
are routed to its rank, and these come from other ranks too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

Coefficient = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
BENT = 0.003
"""Relative residual of a line above which a quadratic term is tried."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The lengths of one microbatch on one rank."""

    tokens: int
    """Tokens that the model gets on this rank, padding included."""
    squares: int
    """Sum over its samples of their squared lengths; tokens ** 2 for one sample, or if unknown."""
    routed_tokens: float = 0
    """Rows that the experts of this rank get in a layer: a token counts once for each of its
    experts here, whichever rank it is from. 0 in layers without experts."""

    @classmethod
    def longest(cls, tokens: int) -> Microbatch:
        """A single sample: no microbatch of at most so many tokens needs more bytes."""
        return cls(tokens, tokens * tokens)

    @classmethod
    def packed(cls, lengths: Sequence[int]) -> Microbatch:
        """A microbatch of several samples, which do not attend to each other."""
        return cls(sum(lengths), sum(length * length for length in lengths))


@dataclass(frozen=True, slots=True)
class Line:
    """A figure that never falls with the lengths of a microbatch: no coefficient is negative."""

    constant: Coefficient = 0.0
    """What does not depend on lengths."""
    per_token: Coefficient = 0.0
    """Bytes or time for each token of the microbatch on this rank."""
    per_square: Coefficient = 0.0
    """Bytes or time for each unit of the sum of squared lengths of samples."""
    per_routed_token: Coefficient = 0.0
    """Bytes or time for each token that the experts of this rank get in a layer."""
    residual: Coefficient = 0.0
    """The largest distance of a point from the line before the line was lifted, as a share of the
    largest point."""
    most_tokens: Annotated[int, Field(ge=0, le=1 << 44)] = 0
    """The longest microbatch that the line was fitted to. Above it the line is extrapolated."""

    def at(self, one: Microbatch) -> float:
        """The figure of a microbatch."""
        return (
            self.constant
            + self.per_token * one.tokens
            + self.per_square * one.squares
            + self.per_routed_token * one.routed_tokens
        )

    def plus(self, other: Line) -> Line:
        """The sum of both lines."""
        return Line(
            self.constant + other.constant,
            self.per_token + other.per_token,
            self.per_square + other.per_square,
            self.per_routed_token + other.per_routed_token,
            max(self.residual, other.residual),
            min(self.most_tokens, other.most_tokens),
        )

    def bytes_at(self, one: Microbatch) -> int:
        """The figure in whole bytes, rounded up except for what floating point adds."""
        value = self.at(one)
        return math.ceil(value - 1e-9 * value - 1e-6)


@dataclass(frozen=True, slots=True)
class RecordLines:
    """The figures of one choice on layers of a kind, as lines."""

    held_bytes: Line
    """Held bytes, input included."""
    forward_level_bytes: Line
    """Held bytes and forward transient together."""
    backward_level_bytes: Line
    """Held bytes and backward transient together."""
    forward_ms: Line
    """Time of the forward."""
    backward_ms: Line
    """Time of the backward."""
    kept_level_bytes: Line | None = None
    """backward_level_bytes where the gradient of the layer's output stays alive to the backward's
    end. None: not known."""


Point = tuple[Microbatch, float]


def envelope(points: Sequence[Point], *, experts: bool = False) -> Line:
    """The line nearest to at least one point (a microbatch, and bytes) by least squares, lifted so
    that no point lies above it; with `experts` routed tokens matter too.

    Points of a single length give a line through zero, which scales up safely. A quadratic term is
    used only if the points do not lie on a line."""
    lengths = {one.tokens for one, _ in points}
    first = _fitted(points, squares=False, routed=experts)
    if first.residual <= BENT or len(lengths) < 3:
        return first
    bent = _fitted(points, squares=True, routed=experts)
    return bent if bent.residual < first.residual / 2 else first


def _fitted(points: Sequence[Point], *, squares: bool, routed: bool) -> Line:
    from scipy.optimize import nnls  # 0.2 s to import

    terms = [
        (1.0, float(one.tokens), float(one.squares) * squares, float(one.routed_tokens) * routed)
        for one, _ in points
    ]
    columns, values = np.array(terms), np.array([value for _, value in points], float)
    # A line through one length could have any slope: the steepest.
    columns[:, 0] *= len({one.tokens for one, _ in points}) > 1
    scale = np.where(columns.max(axis=0) > 0, columns.max(axis=0), 1.0)
    top = max(1.0, float(values.max()))
    found, _ = nnls(columns / scale, values / top)
    coefficients = found * top / scale
    coefficients[np.abs(found) < 1e-12] = 0.0
    left = values - columns @ coefficients
    coefficients[0] += max(0.0, left.max())
    constant, token, square, routed_token = coefficients.tolist()
    residual, longest = float(np.abs(left).max() / top), max(one.tokens for one, _ in points)
    return Line(constant, token, square, routed_token, residual, longest)


def middle_line(points: Sequence[Point]) -> Line:
    """A line through the middle of noisy times: between the medians of short and of long ones."""
    ordered = sorted(points, key=lambda point: point[0].tokens)
    third = max(1, len(ordered) // 3)
    (low, low_ms), (high, high_ms) = map(_median, (ordered[:third], ordered[-third:]))
    middle, middle_ms = _median(ordered)
    steepest = middle_ms / middle if middle else 0.0
    slope = (high_ms - low_ms) / (high - low) if high > low else steepest
    slope = min(max(slope, 0.0), steepest)
    return Line(
        constant=max(0.0, middle_ms - slope * middle),
        per_token=slope,
        most_tokens=ordered[-1][0].tokens,
    )


def _median(points: Sequence[Point]) -> tuple[float, float]:
    tokens = statistics.median(one.tokens for one, _ in points)
    return tokens, statistics.median(value for _, value in points)
