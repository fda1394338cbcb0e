"""Prices of bytes: a Lagrangian bound that keeps the labels few.

The prices are multipliers lambda[k] >= 0 of a linear relaxation. A label is dropped if its time
plus priced bytes cannot get below the best known solution. Any multipliers give a valid bound, so
rounding in them costs speed, never exactness: bytes and times are compared as integers.

Which prices come out decides what a search that is cut short has seen. So they come from a simplex
of our own whose floats are added in one order: a solver's may change with its version, and sums of
vectors with the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_autorecompute.planner.arrays import Floats, Ints
from megatron_autorecompute.planner.stage_search.problem import StageProblem

_NOTHING = 1e-9
"""Of figures scaled to 1."""
_PIVOTS_OF_A_ROW = 8
"""After so many the prices are taken as they are."""


def multipliers(problem: StageProblem, limit: Ints) -> Floats:
    """Price of a byte at every moment, in picoseconds: duals of a linear relaxation.

    Variables: x[o] >= 0, layers of a class that take option o, together all of the class. Bytes
    held must fit at every moment; the time is the least.
    """
    columns, classes = _relaxed_columns(problem)
    if not columns:
        return np.zeros(len(limit))
    time = np.array([column[0] for column in columns], np.float64)
    held = np.array([column[1] for column in columns], np.float64)
    chunk = np.array([column[2] for column in columns])
    owner = np.array([column[3] for column in columns])
    room = limit - problem.counts @ _fixed_held(problem) - _fixed_reach(problem)
    scale_bytes, scale_time = max(float(held.max()), 1.0), max(float(time.max()), 1.0)
    weight = problem.counts[:, chunk] + (problem.running[:, None] == chunk)
    loads = weight * held / scale_bytes
    prices = duals(time / scale_time, owner, classes, loads, room / scale_bytes)
    return prices * scale_time / scale_bytes


def duals(
    time: Floats, owner: NDArray[Any], classes: Sequence[int], loads: Floats, room: Floats
) -> Floats:
    """Prices of `room` by the dual simplex: it begins with the fastest options, which may not fit.

    Args:
        time: of one layer, `[option]`.
        owner: class of each option.
        classes: layers in each class.
        loads: `[moment, option]` of one layer.
        room: `[moment]`.
    """
    moments, options, count = len(room), len(time), len(classes)
    fastest = np.array(
        [np.flatnonzero(owner == c)[time[owner == c].argmin()] for c in range(count)]
    )
    # Rows: classes, moments, and what an option costs more than the one it replaces.
    # Columns: options, slacks of moments, and the right hand side.
    table = np.zeros((count + moments + 1, options + moments + 1))
    table[owner, np.arange(options)] = 1
    table[:count, -1] = classes
    table[count:-1, :options] = loads - loads[:, fastest[owner]]
    table[count:-1, options:-1] = np.eye(moments)
    table[count:-1, -1] = room
    for number, option in zip(classes, fastest, strict=True):
        table[count:-1, -1] -= number * loads[:, option]
    table[-1, :options] = time - time[fastest[owner]]
    for _ in range(_PIVOTS_OF_A_ROW * (count + moments)):
        row = int(table[:-1, -1].argmin())
        useful = table[row, :-1] < -_NOTHING
        if table[row, -1] >= -_NOTHING or not useful.any():
            break
        ratio = np.full(len(useful), np.inf)
        np.divide(table[-1, :-1], -table[row, :-1], out=ratio, where=useful)
        column = int(ratio.argmin())
        table[row] /= table[row, column]
        others = table[:, column].copy()
        others[row] = 0
        table -= others[:, None] * table[row]
    return np.maximum(table[-1, options:-1], 0.0)


def _fixed_held(problem: StageProblem) -> Ints:
    return np.array(
        [sum(u.held_bytes for u in (*c.before, *c.after)) for c in problem.chunks], np.int64
    )


def _fixed_reach(problem: StageProblem) -> Ints:
    """The least bytes that the running chunk needs besides its layers' held bytes."""
    held, reach = _fixed_held(problem), []
    for c, forward in zip(problem.running, problem.is_forward, strict=True):
        chunk = problem.chunks[c]
        if chunk.after:
            unit = chunk.after[-1]
            tail = unit.forward_transient_bytes if forward else unit.backward_transient_bytes
        elif chunk.singles:
            last = chunk.singles[-1]
            tail = int((last.forward if forward else last.backward).min())
        else:
            tail = 0
        reach.append(int(held[c]) + tail)
    return np.array(reach, np.int64)


def _relaxed_columns(
    problem: StageProblem,
) -> tuple[list[tuple[int, float, int, int]], list[int]]:
    """(time, held, chunk, class) of every option per layer, and the layers in every class."""
    columns: list[tuple[int, float, int, int]] = []
    classes: list[int] = []
    for c, chunk in enumerate(problem.chunks):
        seen: dict[Any, int] = {}
        for position, key in enumerate(chunk.signature):
            if key in seen:
                classes[seen[key]] += 1
                continue
            seen[key] = len(classes)
            single = chunk.singles[position]
            pairs = zip(chunk.single_ps[position].tolist(), single.held.tolist(), strict=True)
            columns += [(time, held, c, len(classes)) for time, held in pairs]
            group = chunk.groups[position]
            if (size := len(group.held_bytes)) > 1:
                time = int(chunk.group_ps[position][0])
                columns.append((time, group.held_bytes[-1] / size, c, len(classes)))
            classes.append(1)
    return columns, classes
