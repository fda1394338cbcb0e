"""A stage's problem as HiGHS' mixed-integer solver takes it: a yardstick for the search.

One binary per layer and choice; of each layer one is 1. For every binding moment, and every unit of
the chunk that runs in it, what is alive must be within the budget. Checkpoints around several
layers are left out, so its optimum may be slower than the planner's; and HiGHS takes constraints as
met within 1e-6 of their scale, which is tens of kilobytes here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from megatron_autorecompute.planner.cost.unit_costs import PS_PER_MS
from megatron_autorecompute.planner.search.stage_problem import ChunkProblem, StageProblem

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
    fixed_ms = sum(u.time_ps for c in problem.chunks for u in (*c.before, *c.after)) / PS_PER_MS
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
        self.problem, self.starts, self.size = problem, [], 0
        for chunk in problem.chunks:
            own = []
            for single in chunk.singles:
                own.append(self.size)
                self.size += len(single.policies)
            self.starts.append(own)

    def times_ms(self):
        return (
            np.concatenate(
                [own.forward_ps + own.backward_ps for c in self.problem.chunks for own in c.singles]
            )
            / PS_PER_MS
        )

    def one_of_each(self):
        counts = [len(s.policies) for chunk in self.problem.chunks for s in chunk.singles]
        rows = np.repeat(np.arange(len(counts)), counts)
        return csr_array((np.ones(self.size), (rows, np.arange(self.size))))

    def rows(self, budget_bytes: int):
        """MiB of every unit that runs in every moment, and the room for its choices."""
        problem, rows, rooms = self.problem, [], []
        fixed = [sum(u.held_bytes for u in (*c.before, *c.after)) for c in problem.chunks]
        held = [self._held(c) for c in range(len(problem.chunks))]
        for k, (c, counts) in enumerate(zip(problem.running.tolist(), problem.counts, strict=True)):
            waiting = sum((n * own for n, own in zip(counts.tolist(), held, strict=True)), 0.0)
            alive = int(problem.constant[k]) + int(counts @ np.array(fixed))
            for row, bytes_ in self._units(c, bool(problem.is_forward[k])):
                rows.append((waiting + row) / MIB)
                rooms.append((budget_bytes - alive - bytes_) / MIB)
        return np.array(rows), np.array(rooms)

    def _held(self, c: int):
        row = np.zeros(self.size)
        for start, single in zip(self.starts[c], self.problem.chunks[c].singles, strict=True):
            row[start : start + len(single.held)] = single.held
        return row

    def _units(self, c: int, forward: bool) -> Iterator[tuple[np.ndarray, int]]:
        """Of each unit the bytes that its chunk's choices need while it runs, and those besides."""
        chunk: ChunkProblem = self.problem.chunks[c]
        gradient = 0 if forward else chunk.output_gradient_bytes
        row, held = np.zeros(self.size), 0
        for unit in chunk.before:
            held += unit.held_bytes
            own = unit.forward_transient_bytes if forward else unit.backward_transient_bytes
            yield row.copy(), held + own + gradient
        for i, (start, single) in enumerate(zip(self.starts[c], chunk.singles, strict=True)):
            own = slice(start, start + len(single.held))
            row[own] = single.held
            now, last = row.copy(), i + 1 == len(chunk.singles) and not chunk.after
            now[own] += single.forward if forward else single.backward
            now[own] += single.kept_gradient if last and not forward else gradient
            yield now, held
        for unit in chunk.after:
            held += unit.held_bytes
            own = unit.forward_transient_bytes if forward else unit.backward_transient_bytes
            yield row.copy(), held + own + gradient
