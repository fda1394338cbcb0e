"""The linear program that grows and shrinks, against one that scipy solves from the beginning."""

import random

import numpy as np
import pytest
from highspy import Highs
from scipy.optimize import linprog

from megatron_autorecompute.planner.cost.stage_times import residual_times
from megatron_autorecompute.planner.cost.step_time import critical_paths
from megatron_autorecompute.planner.search.stage_plans import Program
from megatron_autorecompute.planner.search.stage_problem import HELD
from tests.planner.search.random_steps import SEVERAL_CHUNKS, random_step


def shortest(stages, mixed, paths, residual):
    """The least length of the longest path, of mixtures of plans that fit every moment; ps."""
    columns = [
        (s, c, row) for s, own in enumerate(mixed) for c, rows in enumerate(own) for row in rows
    ]
    lengths, loads, chunks = [], [], []
    for s, c, row in columns:
        plan, parts = stages[s].plans[c].rows[[row]], [np.zeros(len(own.room)) for own in stages]
        parts[s] = stages[s].loads(c, plan)[0] / stages[s].budget
        lengths.append([path[:, s, c] @ plan[0, :HELD] for path in paths])
        loads.append(np.concatenate(parts))
        chunks.append((s, c))
    scale = max(map(max, lengths)) or 1.0
    fixed = np.array([(path * residual).sum() for path in paths]) / scale
    longest = np.column_stack([np.array(lengths).T / scale, -np.ones(len(paths))])
    bytes_ = np.column_stack([np.array(loads).T, np.zeros(len(loads[0]))])
    rooms = np.concatenate([own.room / own.budget for own in stages])
    one_each = [[float(own == each) for own in chunks] + [0.0] for each in sorted(set(chunks))]
    found = linprog(
        np.append(np.zeros(len(columns)), 1.0),
        A_ub=np.vstack([longest, bytes_]),
        b_ub=np.concatenate([-fixed, rooms]),
        A_eq=one_each,
        b_eq=np.ones(len(one_each)),
    )
    assert found.status == 0
    return found.fun * scale


@pytest.fixture(params=["goes on", "goes in a circle"])
def simplex(request, monkeypatch):
    """HiGHS as it is, or so that it never gets from its last answer to the next one."""
    run = Highs.run

    def in_a_circle(self):
        self.setOptionValue("simplex_iteration_limit", 0 if self.getBasis().valid else 10**6)
        return run(self)

    if request.param == "goes in a circle":
        monkeypatch.setattr(Highs, "run", in_a_circle)


@pytest.mark.parametrize("seed", range(12))
def test_a_program_that_grew_and_shrank_has_the_step_of_one_from_the_beginning(simplex, seed):
    problem, budgets = random_step(seed, SEVERAL_CHUNKS)
    stages = [own.plans(budget) for own, budget in zip(problem.stages.all, budgets, strict=True)]
    residual, rng = residual_times(problem.table, problem.layout).both, random.Random(seed)
    program = Program(stages, residual, 1e9)
    mixed = [[{row} for row in own.lean] for own in stages]
    for s, own in enumerate(mixed):
        for c, rows in enumerate(own):
            assert all(program.put(s, c, row) for row in rows)
    for _ in range(6):
        for s, own in enumerate(mixed):
            for c, rows in enumerate(own):
                row = rng.choice(stages[s].fits[c].tolist())
                assert program.put(s, c, row) == (row not in rows)
                rows.add(row)
        chosen = [[rng.choice(sorted(rows)) for rows in own] for own in mixed]
        own = [
            stage.times(np.array([rows]))[..., 0]
            for stage, rows in zip(stages, chosen, strict=True)
        ]
        times = np.maximum(np.stack(own, 1) + residual, 0)
        program.know(critical_paths(problem.schedule, *times))
        if len(program.paths) > 2 and rng.random() < 0.5:
            program.forget([rng.randrange(len(program.paths))])
        step = program.mixture().step
        assert step == pytest.approx(
            shortest(stages, mixed, program.paths, residual), rel=1e-6, abs=1
        )
