"""Splits of recompute over a stage's chunks: what exchanging them keeps, and what it gains."""

import itertools

import pytest

from benchmarks import solve_speed
from megatron_autorecompute.planner.chunk_splits import put_together, with_exchanges
from megatron_autorecompute.planner.planner import Planner
from megatron_autorecompute.policy import RecomputePolicy
from tests.planner.definitions import simulate
from tests.planner.random_profiles import problem

INTERLEAVED = [
    seed for seed in range(300) if problem(seed)[2].num_chunks > 1 and problem(seed)[1].num_layers
]


def before_and_after(planner, budget):
    """Each stage's optimum as it was found, and rearranged; None where nothing fits."""
    choices = [planner.choose(stage, budget) for stage in range(planner.layout.num_stages)]
    if None in choices:
        return None
    found = put_together(planner.layout, [choice.policies for choice in choices])
    problem = planner.table, planner.layout, planner.schedule
    exchanged = with_exchanges(*problem, found, planner.budgets(budget))
    return planner.evaluate(found), planner.evaluate(exchanged)


def mixed(layers, num_layers, num_chunks=4, num_stages=4):
    case = solve_speed.Case(num_layers, num_stages, num_chunks)
    planner = solve_speed.planner(case)
    low, high = (
        max(choice.peak_bytes for choice in choices)
        for choices in (planner.leanest, planner.fastest)
    )
    return planner, low + (high - low) * layers // 8


def test_no_stage_is_busier_and_none_exceeds_its_budget_and_the_step_is_never_longer():
    compared = 0
    for seed in INTERLEAVED:
        profile, layout, schedule, budget = problem(seed)
        pair = before_and_after(Planner(profile, layout, schedule), budget)
        if pair is None:
            continue
        before, after = pair
        for old, new in zip(before.stages, after.stages, strict=True):
            assert new.busy_ms == pytest.approx(old.busy_ms), seed
            assert new.peak_high_bytes <= budget, seed
        assert after.step_ms <= before.step_ms * (1 + 1e-12), seed
        compared += 1
    assert compared > 20


def test_the_peak_of_a_rearranged_stage_is_that_of_the_definitions():
    for seed in INTERLEAVED[:40]:
        profile, layout, schedule, budget = problem(seed)
        solution = Planner(profile, layout, schedule).try_solve(budget)
        for stage in range(layout.num_stages if solution else 0):
            policies = [
                tuple(solution.policy.layers[layer] for layer in chunk.layers)
                for chunk in layout.stages[stage]
            ]
            peak, _ = simulate(profile, layout, schedule, stage, policies)
            assert peak == solution.cost.stages[stage].peak_high_bytes <= budget


@pytest.mark.parametrize("eighths", [2, 4, 6])
def test_no_exchange_of_two_chunks_is_left_that_fits_and_shortens_the_step(eighths):
    planner, budget = mixed(eighths, 64)
    solution = planner.solve(budget)
    for stage, chunks in enumerate(planner.layout.stages):
        for one, other in itertools.combinations(chunks, 2):
            layers = list(solution.policy.layers)
            for a, b in zip(one.layers, other.layers, strict=True):
                layers[a], layers[b] = layers[b], layers[a]
            cost = planner.evaluate(RecomputePolicy(tuple(layers)))
            if cost.stages[stage].peak_high_bytes <= budget:
                assert cost.step_ms >= solution.cost.step_ms * (1 - 1e-9)


def test_it_gains_where_stages_recompute_in_chunks_that_do_not_meet():
    gains = [
        1 - after.step_ms / before.step_ms
        for eighths in (3, 5)
        for before, after in [before_and_after(*mixed(eighths, 128, 8, 8))]
    ]
    assert max(gains) > 0.01
