"""Prices of bytes: a Lagrangian bound that keeps the labels few.

Multipliers lambda[k] >= 0 of a linear relaxation (`scipy.optimize.linprog`, HiGHS) are the prices
of bytes. A label is dropped if its time plus priced bytes cannot get below the best known solution.
Any multipliers give a valid bound, so rounding in them costs speed, never exactness: bytes and
times are compared as integers. A MILP solver alone is not enough: its tolerance of 1e-6 is 80 kB at
80 GB.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_autorecompute.planner.arrays import Floats, Ints
from megatron_autorecompute.planner.stage_search.problem import StageProblem


def multipliers(problem: StageProblem, limit: Ints) -> Floats:
    """Price of a byte at every moment, in picoseconds: duals of a linear relaxation.

    Variables: x[c, i, o], the share of layer class i of chunk c that takes option o, and s[k], the
    bytes missing at moment k. The objective is the time; a missing byte costs more than any choice.
    """
    from scipy.optimize import linprog  # 0.3 s to import, and needed for a search alone

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
    # [Constraint] every layer of a class takes some option
    shares = (owner == np.arange(len(classes))[:, None]).astype(np.float64)
    # [Constraint] at every moment the bytes held fit, or are missing
    moments = np.hstack([weight * held / scale_bytes, -np.eye(len(limit))])
    found = linprog(
        np.concatenate([time / scale_time, np.full(len(limit), 1e3)]),
        A_ub=moments,
        b_ub=room / scale_bytes,
        A_eq=np.hstack([shares, np.zeros((len(classes), len(limit)))]),
        b_eq=np.array(classes, np.float64),
        method="highs",
    )
    if found.status != 0:  # without prices the bound is still valid
        return np.zeros(len(limit))
    prices: Floats = np.maximum(-found.ineqlin.marginals, 0.0) * scale_time / scale_bytes
    return prices


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
            pairs = zip(single.time.tolist(), single.held.tolist(), strict=True)
            columns += [(time, held, c, len(classes)) for time, held in pairs]
            group = chunk.groups[position]
            if (size := len(group.held_bytes)) > 1:
                time = int(group.forward_ps[0] + group.backward_ps[0])
                columns.append((time, group.held_bytes[-1] / size, c, len(classes)))
            classes.append(1)
    return columns, classes
