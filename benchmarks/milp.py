"""A stage's problem as HiGHS' mixed-integer solver takes it: a yardstick for the search.

One binary per layer and choice; of each layer one is 1. For every binding moment, and every unit of
the chunk that runs in it, what is alive must be within the budget. Checkpoints around several
layers are left out, so its optimum may be slower than the planner's; and HiGHS takes constraints as
met within 1e-6 of their scale, which is tens of kilobytes here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.stage_problem import (
    BACKWARD,
    COLUMNS,
    FORWARD,
    HELD,
    StageProblem,
)

MIB = 1 << 20


@dataclass(frozen=True)
class Answer:
    seconds: float
    """Of the processor, the model's construction included."""
    status: str
    """HiGHS' own words, in short."""
    objective_ms: float | None
    """Forward plus backward of one microbatch; None where it found no choices."""
    gap: float | None
    """HiGHS' relative gap."""
    variables: int
    constraints: int


def solved(problem: StageProblem, budget_bytes: int, limit_s: float) -> Answer:
    """HiGHS' answer for a stage, within so many seconds of the clock."""
    start = time.process_time()
    model = _Model(problem)
    rows, room = model.rows(budget_bytes)
    kinds = [
        LinearConstraint(model.one_of_each(), 1, 1),
        LinearConstraint(csr_array(rows), -np.inf, room),
    ]
    found = milp(
        model.times_ms(),
        constraints=kinds,
        integrality=np.ones(model.size),
        bounds=Bounds(0, 1),
        options={"time_limit": limit_s, "mip_rel_gap": 0.0},
    )
    fixed_ms = model.fixed[:, :HELD].sum() / PS_PER_MS
    status = {0: "optimal", 1: "time limit", 2: "infeasible"}.get(found.status, "other")
    return Answer(
        time.process_time() - start,
        status,
        None if found.x is None else float(found.fun) + fixed_ms,
        None if found.x is None else float(found.mip_gap),
        model.size,
        len(rows),
    )


class _Model:
    """Columns: the choices of every layer of every chunk, in order."""

    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        self.layers = [
            (place, rows)
            for chunk in problem.chunks
            for place, rows in enumerate(chunk.alone)
            if chunk.policies[place]
        ]
        self.size = sum(len(rows) for _, rows in self.layers)
        outside = [
            rows[0]
            for chunk in problem.chunks
            for place, rows in enumerate(chunk.alone)
            if not chunk.policies[place]
        ]
        self.fixed = np.array(outside, np.int64).reshape(-1, len(COLUMNS))

    def times_ms(self):
        return np.concatenate([rows[:, :HELD].sum(axis=1) for _, rows in self.layers]) / PS_PER_MS

    def one_of_each(self):
        counts = [len(rows) for _, rows in self.layers]
        rows = np.repeat(np.arange(len(counts)), counts)
        return csr_array((np.ones(self.size), (rows, np.arange(self.size))))

    def rows(self, budget_bytes: int):
        """MiB of every unit that runs in every moment, and the room for its choices."""
        problem, rows, rooms = self.problem, [], []
        ends = [self._walk(c)[-1] for c in range(len(problem.chunks))]
        for k, (c, counts) in enumerate(zip(problem.running.tolist(), problem.counts, strict=True)):
            pairs = list(zip(counts.tolist(), ends, strict=True))
            waiting = sum((n * row for n, (row, _, _) in pairs), np.zeros(self.size))
            alive = int(problem.constant[k]) + sum(n * held for n, (_, held, _) in pairs)
            column = FORWARD if problem.is_forward[k] else BACKWARD
            for row, held, needs in self._walk(c)[:-1]:
                own, fixed = needs[column]
                rows.append((waiting + row + own) / MIB)
                rooms.append((budget_bytes - alive - held - fixed) / MIB)
        return np.array(rows), np.array(rooms)

    def _walk(self, c: int):
        """Of each unit of a chunk, and behind the last, the bytes that choices hold up to it, those
        held besides, and by direction what choices need then, and what is needed besides."""
        chunk = self.problem.chunks[c]
        start = sum(
            len(rows)
            for before in self.problem.chunks[:c]
            for place, rows in enumerate(before.alone)
            if before.policies[place]
        )
        row, held, found = np.zeros(self.size), 0, []
        for place, rows in enumerate(chunk.alone):
            needs = {}
            own = slice(start, start + len(rows))
            for column in (FORWARD, BACKWARD):
                now = np.zeros(self.size)
                if chunk.policies[place]:
                    now[own] = rows[:, column]
                needs[column] = now, 0 if chunk.policies[place] else int(rows[0, column])
            if chunk.policies[place]:
                row[own], start = rows[:, HELD], start + len(rows)
            else:
                held += int(rows[0, HELD])
            found.append((row.copy(), held, needs))
        return [*found, (row, held, {})]
